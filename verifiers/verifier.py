"""The interface of all rules: what a draft must meet, what a rule answers.

A rule that tests nodes one by one splits in two: `thresholds` is a pure function of the draft and the target's laws (so
the code that runs in production can be enumerated exactly), `verify` compares them with uniforms, walks, and draws one
token.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch

from stand.trees import DraftBatch, compiled
from stand.verifiers.draw import draw_residuals
from stand.verifiers.noise import VerifierNoise
from stand.verifiers.operands import Array
from stand.verifiers.requirements import Requirements, check_requirements
from stand.verifiers.schedule import packed_parents
from stand.verifiers.target import RowDebts, TargetRows
from stand.verifiers.walk import path_to


@dataclass(frozen=True, slots=True, eq=False)
class Verdicts:
    """What stays of each row's draft, and the token that follows it."""

    accepted: list[np.ndarray]  # B arrays int32: row-local nodes of the kept path in order, root excluded
    next_tokens: np.ndarray  # [B] int64
    debts: list[RowDebts] | None = None  # per row, for the next step's TargetRows; rules that carry debts only

    @classmethod
    def stopping_at(cls, stops: np.ndarray, next_tokens: np.ndarray, batch: DraftBatch) -> Verdicts:
        """Rows that stop at packed nodes `stops` [B] and go on with `next_tokens` [B]."""
        parents = packed_parents(batch)
        accepted = [
            np.array(path_to(stop, parents), dtype=np.int32) - batch.offsets[row]
            for row, stop in enumerate(stops.tolist())
        ]
        return cls(accepted=accepted, next_tokens=next_tokens)

    @property
    def num_accepted(self) -> np.ndarray:
        """[B] int32: drafted tokens kept; the row gains one more, the next token."""
        return np.array([len(path) for path in self.accepted], dtype=np.int32)

    def gained(self, batch: DraftBatch) -> list[list[int]]:
        """B lists: the tokens each row gains, the next token last. Raises ValueError for nodes that no row has."""
        tokens = compiled.gained(self.accepted, batch.token_ids, batch.offsets, self.next_tokens)
        if tokens is None:
            raise ValueError(
                f"a rule must keep nodes of each of {len(batch)} rows' own drafts, got "
                f"{[list(map(int, path)) for path in self.accepted]} of drafts of {batch.sizes.tolist()} nodes; number "
                "them from each row's root on"
            )
        return tokens


class Verifier(ABC):
    """A rule. Instances hold settings only and may be shared."""

    name: ClassVar[str]
    lossless: ClassVar[bool] = True
    requires: ClassVar[Requirements]
    device_rule: ClassVar[str | None] = None  # "module:Class" of its `stand.gpu.device_rule.DeviceRule`, if it has one

    @abstractmethod
    def verify(self, batch: DraftBatch, target: TargetRows, noise: VerifierNoise) -> Verdicts:
        """Decide which drafted tokens stay and draw the token after them, for all rows.

        Raises ValueError where the draft does not meet `requires` or the rows do not belong to it.
        """

    def check_draft(self, batch: DraftBatch) -> None:
        """Raise ValueError, naming a rule that fits, where the draft does not meet `requires`."""
        check_requirements(self.name, self.requires, batch)

    def __repr__(self) -> str:
        return f"{type(self).__name__}()"


class ThresholdVerifier(Verifier):
    """A rule of the form: test nodes one by one, stop at v, draw from {m[v] on v's support, s[v] p elsewhere}."""

    walk: ClassVar[Callable[..., np.ndarray]]  # verifiers.walk: which node the tests lead to

    @abstractmethod
    def thresholds(self, batch: DraftBatch, target: TargetRows, dtype: type = np.float64) -> tuple[Array, Array, Array]:
        """(h [M], m [M, S], s [M]): node v passes when its uniform lies below h[v].

        The token after stopping at v has weights m[v] on support_ids[v] and s[v] p elsewhere (not normalised). Pure
        and deterministic; numpy arrays when the target lies on the CPU, else tensors on its device, with no wait for
        the device.
        """

    def test_order(self, batch: DraftBatch, target: TargetRows) -> np.ndarray:
        """[M] packed nodes, parents first, siblings in the order in which they are tested: as they were revealed."""
        return np.arange(batch.num_nodes)

    def verify(self, batch: DraftBatch, target: TargetRows, noise: VerifierNoise) -> Verdicts:
        """See `Verifier.verify`; strict `u < h`, since u = 0 must not pass a threshold of 0."""
        self.check_draft(batch)
        threshold, mass, scale = self.thresholds(batch, target)
        stops = type(self).walk(
            noise.accept(batch) < _to_host(threshold),
            parents=packed_parents(batch),
            roots=batch.offsets[:-1],
            order=self.test_order(batch, target),
        )
        next_tokens = _draw(target, batch.support_ids, stops, mass=mass, scale=scale, uniforms=noise.resample())
        return Verdicts.stopping_at(stops, next_tokens, batch)


def _draw(
    target: TargetRows, support_ids: np.ndarray, stops: np.ndarray, *, mass: Array, scale: Array, uniforms: np.ndarray
) -> np.ndarray:
    """[B] int64: the token after stopping at packed nodes `stops`, on the host or where the rows lie."""
    probs = target.on_host()
    if probs is not None and mass.dtype == np.float64:
        return compiled.draw_residuals(probs, stops, support_ids, mass, scale, uniforms)
    return draw_residuals(
        target.rows(stops),
        support_ids=support_ids[stops],
        mass=torch.as_tensor(mass[stops]).to(target.device),
        scale=torch.as_tensor(scale[stops]).to(target.device),
        uniforms=uniforms,
    )


def _to_host(array: Array) -> np.ndarray:
    return array if isinstance(array, np.ndarray) else array.cpu().numpy()
