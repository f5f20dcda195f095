"""What a rule computes with: laws gathered on the draft's supports, on the device where the target's rows lie.

A rule is written once. On a CPU its arrays are numpy (tens of small operations per step: the cheaper dispatch counts),
elsewhere torch; both understand the operations used. Nothing here or in a rule waits for the device.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import numpy as np
import torch

from stand.trees import DraftBatch
from stand.verifiers.schedule import Schedule, packed_parents, token_columns, token_laws
from stand.verifiers.target import TargetRows

Array = Any  # numpy.ndarray on a CPU, torch.Tensor elsewhere
HOST = torch.device("cpu")
TINY = {np.dtype(np.float64): 1e-12, np.dtype(np.float32): 1e-6}


@dataclass(frozen=True, slots=True)
class Operands:
    """M packed nodes, S support columns; p is the target's law, q the law that a child was drawn from.

    What is said of a node's own token means nothing at roots: no step of a schedule holds one.
    """

    module: ModuleType  # numpy or torch
    target: Array  # [M, S] p of node i's children on node i's support, 0 on padding
    tail: Array  # [M] p outside the support
    law: Array  # [M, S] q of node i over its parent's support
    token_law: Array  # [M] q of node i's own token
    token_cells: Array  # [M] where node i's own token lies in a flattened [M, S] array of its parent's
    parents: Array  # [M] packed parent, -1 at roots
    roots: Array  # [B] packed roots
    leaves: Array  # [M] bool: nodes without children
    order: Array  # [M] the schedule's order
    schedule: Schedule
    tiny: float  # a denominator below this is rounding

    @classmethod
    def gather(
        cls,
        batch: DraftBatch,
        target: TargetRows,
        *,
        dtype: np.dtype | type,
        schedule: Schedule,
        device: torch.device | None = None,
    ) -> Operands:
        """Bring a step's laws together, in `dtype` (float32 or float64), on `device` (default: where the rows lie)."""
        dtype, device = np.dtype(dtype), device or target.device
        if dtype not in TINY:
            raise ValueError(f"dtype must be float64 or float32, got {dtype}; half precision is not lossless")
        target.check(batch)
        parents = packed_parents(batch)
        columns, found = token_columns(batch, parents)
        leaves = np.ones(batch.num_nodes, dtype=bool)
        leaves[parents[parents >= 0]] = False
        arrays = {
            "law": batch.law.astype(dtype),
            "token_law": token_laws(batch.law, columns, found).astype(dtype),
            "token_cells": parents * batch.support_ids.shape[1] + columns,
            "parents": parents,
            "roots": batch.offsets[:-1].astype(np.int64),
            "leaves": leaves,
            "order": schedule.order,
        }
        probs = target.probs_at(batch.support_ids).to(device, getattr(torch, dtype.name))
        module: ModuleType = torch
        if device == HOST:
            module, probs = np, probs.numpy()
        else:
            lasts = {"non_blocking": device.type == "cuda"}  # XPU would read an array that may be gone by then
            arrays = {name: torch.from_numpy(array).to(device, **lasts) for name, array in arrays.items()}
        tail = (1.0 - probs.sum(axis=1)).clip(min=0.0)
        return cls(module=module, target=probs, tail=tail, schedule=schedule, tiny=TINY[dtype], **arrays)

    def steps(self, depth: int) -> Iterator[tuple[Array, Array]]:
        """(children, parents), rank by rank, below the schedule's level `depth`."""
        for step in self.schedule.steps[depth]:
            children = self.order[step]
            yield children, self.parents[children]

    def ones(self) -> Array:
        """[M] ones."""
        return self.module.ones_like(self.tail)

    def fresh_mass(self) -> Array:
        """[M, S]: a copy of `target`, to be written to."""
        return self.target * 1.0

    def token_mass(self, mass: Array, children: Array) -> Array:
        """[n]: what `mass` [M, S] holds at the children's own tokens."""
        return mass.reshape(-1)[self.token_cells[children]]

    def ratio(self, numerator: Array, denominator: Array) -> Array:
        """min(1, numerator / denominator); 0 where the denominator is 0: its law cannot have drawn that."""
        possible = denominator > 0
        divisor = self.module.where(possible, denominator, 1.0)
        return self.module.where(possible, (numerator / divisor).clip(max=1.0), 0.0)
