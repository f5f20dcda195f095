"""Verification inside a captured step: tensors in, tensors out, every shape fixed, no wait for the device.

The same rules, noise and draws as in `stand.verifiers`; there a step's schedule shapes the arrays, here the shapes are
those of the step size and padding does nothing. Each rule says which arrays it needs from the host and fills them.
"""

from __future__ import annotations

import importlib
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch

from stand.gpu.kernels.verification.draw import draw_nodes, draw_residuals
from stand.gpu.kernels.verification.follow import follow
from stand.gpu.kernels.verification.race import race
from stand.gpu.kernels.verification.traverse import traverse
from stand.gpu.packets.packet import Field
from stand.gpu.packets.step_size import SUPPORT_SIZES, StepSize
from stand.step_compiled import fill_laws
from stand.trees import DraftBatch
from stand.verifiers import Verifier, VerifierNoise

Tensors = Mapping[str, torch.Tensor]


@dataclass(frozen=True, slots=True)
class DeviceVerdict:
    """What a rule decides, at fixed addresses; a row without nodes keeps nothing."""

    stops: torch.Tensor  # [B] int64, packed node where the row stops
    next_tokens: torch.Tensor  # [B] int64
    is_broken: torch.Tensor  # [B] int32, whether a law of the row is not finite
    path: torch.Tensor  # [B, P] int64, row-local nodes kept at depths 1, 2, ..., then -1

    def of_width(self, width: int) -> DeviceVerdict:
        """The same with paths of at most `width` nodes, views."""
        return DeviceVerdict(self.stops, self.next_tokens, self.is_broken, self.path[:, :width])


class DeviceRule(ABC):
    """One verification rule over a packed step (see `StepPacket` for the common arrays)."""

    def support_size(self, num_candidates: int) -> int:
        """Candidates per node that a step makes room for where laws have so many. Raises ValueError for too many."""
        return SUPPORT_SIZES[0]

    @abstractmethod
    def fields(self, size: StepSize) -> dict[str, Field]:
        """Arrays of this rule that the host fills each step."""

    @abstractmethod
    def fill(self, host: Mapping[str, np.ndarray], batch: DraftBatch, noise: VerifierNoise) -> None:
        """Fill them for one step. Raises ValueError where the draft does not fit."""

    @abstractmethod
    def decide(self, logits: torch.Tensor, laws: torch.Tensor, step: Tensors, verdict: DeviceVerdict) -> None:
        """Write the verdict, from logits [M, V] and the laws [M, V] float32 made of them."""


class MatchRule(DeviceRule):
    """`match`: every node's token by inverse CDF, then the path of agreements."""

    def fields(self, size: StepSize) -> dict[str, Field]:
        return {"target_uniforms": (np.float64, (size.num_tokens,))}

    def fill(self, host: Mapping[str, np.ndarray], batch: DraftBatch, noise: VerifierNoise) -> None:
        noise.target_at_nodes(batch, out=host["target_uniforms"])

    def decide(self, logits: torch.Tensor, laws: torch.Tensor, step: Tensors, verdict: DeviceVerdict) -> None:
        follow_drawn(draw_nodes(laws, step["target_uniforms"]), laws, step, verdict)


class CoupledRule(DeviceRule):
    """`coupled`: every node's token by the exponential race with the position's shared noise."""

    def fields(self, size: StepSize) -> dict[str, Field]:
        return {"keys": (np.int64, (size.num_tokens,))}

    def fill(self, host: Mapping[str, np.ndarray], batch: DraftBatch, noise: VerifierNoise) -> None:
        host["keys"][: batch.num_nodes] = noise.keys_at_nodes(batch)

    def decide(self, logits: torch.Tensor, laws: torch.Tensor, step: Tensors, verdict: DeviceVerdict) -> None:
        follow_drawn(race(laws, step["keys"]), laws, step, verdict)


class TraversalRule(DeviceRule):
    """`traversal`: thresholds of all nodes by one program per row, turn by turn, then one residual draw per row."""

    def support_size(self, num_candidates: int) -> int:
        return StepSize.covering_support(num_candidates)

    def fields(self, size: StepSize) -> dict[str, Field]:
        return {
            "accept": (np.float64, (size.num_tokens,)),
            "resample": (np.float64, (size.num_rows,)),
            "support_ids": (np.int32, (size.num_tokens, size.support_size)),
            "law": (np.float32, (size.num_tokens, size.support_size)),
            "local_parents": (np.int32, (size.num_tokens,)),
        }

    def fill(self, host: Mapping[str, np.ndarray], batch: DraftBatch, noise: VerifierNoise) -> None:
        if batch.support_ids.shape[1] > host["support_ids"].shape[1]:
            raise ValueError(
                f"laws over {batch.support_ids.shape[1]} candidates must fit the packet, got one for "
                f"{host['support_ids'].shape[1]}; take a larger step size"
            )
        noise.fill_tests(batch, host["accept"], host["resample"])
        host["local_parents"][: batch.num_nodes] = batch.parents
        law = np.asarray(batch.law, dtype=np.float32)
        fill_laws(batch.support_ids, law, host["support_ids"], host["law"])

    def decide(self, logits: torch.Tensor, laws: torch.Tensor, step: Tensors, verdict: DeviceVerdict) -> None:
        support_ids = step["support_ids"]
        stops, mass, scale, _ = traverse(
            laws, step["token_ids"], step["local_parents"], step["offsets"], support_ids, step["law"], step["accept"],
            step["turns"], step["ancestors"],
        )  # fmt: skip
        draw_residuals(
            laws, stops, support_ids, mass, scale, step["resample"], step["parents"], step["depths"], step["offsets"],
            verdict.stops, verdict.next_tokens, verdict.is_broken, verdict.path,
        )  # fmt: skip


class GreedyRule(DeviceRule):
    """Temperature 0: every lossless rule keeps the path of best tokens (lowest id on ties)."""

    def fields(self, size: StepSize) -> dict[str, Field]:
        return {}

    def fill(self, host: Mapping[str, np.ndarray], batch: DraftBatch, noise: VerifierNoise) -> None:
        pass

    def decide(self, logits: torch.Tensor, laws: torch.Tensor, step: Tensors, verdict: DeviceVerdict) -> None:
        follow_drawn(logits.argmax(dim=1), laws, step, verdict)


def rule_like(verifier: Verifier) -> DeviceRule | None:
    """The rule of a captured step that decides as `verifier` does, or None where its class names none: a subclass may
    decide otherwise than its parent."""
    named = vars(type(verifier)).get("device_rule")
    if named is None:
        return None
    module, _, name = named.partition(":")
    return getattr(importlib.import_module(module), name)()


def follow_drawn(drawn: torch.Tensor, laws: torch.Tensor, step: Tensors, verdict: DeviceVerdict) -> None:
    """The verdict of a rule that drew tokens `drawn` [M] int64 at all nodes: rows follow them from their roots down."""
    follow(
        drawn, laws, step["token_ids"], step["parents"], step["follows"], step["offsets"],
        verdict.stops, verdict.next_tokens, verdict.is_broken, verdict.path,
    )  # fmt: skip
