"""Verification inside a captured step: tensors in, tensors out, every shape fixed, no wait for the device.

The same rules, noise and draws as in `stand.verifiers`; there a step's schedule shapes the arrays, here the shapes are
a bucket's and padding does nothing. Each rule says which arrays it needs from the host and fills them.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping

import numpy as np
import torch

from stand.gpu.kernels.race import race
from stand.gpu.kernels.residual import draw_residuals
from stand.gpu.kernels.traverse import traverse
from stand.gpu.packet import Field
from stand.gpu.step_size import SUPPORT_SIZE, WORD_BITS, StepSize
from stand.trees import NO_TOKEN, DraftBatch
from stand.verifiers import VerifierNoise
from stand.verifiers.draw import tokens_at

Tensors = Mapping[str, torch.Tensor]


class DeviceRule(ABC):
    """One verification rule over a packed step (see `StepPacket` for the common arrays)."""

    @abstractmethod
    def fields(self, size: StepSize) -> dict[str, Field]:
        """Arrays of this rule that the host fills each step."""

    @abstractmethod
    def fill(self, host: Mapping[str, np.ndarray], batch: DraftBatch, noise: VerifierNoise) -> None:
        """Fill them for one step. Raises ValueError where the draft does not fit."""

    @abstractmethod
    def decide(self, probs: torch.Tensor, step: Tensors) -> tuple[torch.Tensor, torch.Tensor]:
        """(stops [B] int64: packed node where each row stops; next_tokens [B] int64) from laws `probs` [M, V]."""


class MatchRule(DeviceRule):
    """`match`: every node's token by inverse CDF, then the path of agreements."""

    def fields(self, size: StepSize) -> dict[str, Field]:
        return {"target_uniforms": (np.float64, (size.num_tokens,))}

    def fill(self, host: Mapping[str, np.ndarray], batch: DraftBatch, noise: VerifierNoise) -> None:
        host["target_uniforms"][: batch.num_nodes] = noise.target_at_nodes(batch)

    def decide(self, probs: torch.Tensor, step: Tensors) -> tuple[torch.Tensor, torch.Tensor]:
        drawn, _ = tokens_at(probs, step["target_uniforms"])
        return follow(drawn, step)


class CoupledRule(DeviceRule):
    """`coupled`: every node's token by the exponential race with the position's shared noise."""

    def fields(self, size: StepSize) -> dict[str, Field]:
        return {"keys": (np.int64, (size.num_tokens,))}

    def fill(self, host: Mapping[str, np.ndarray], batch: DraftBatch, noise: VerifierNoise) -> None:
        host["keys"][: batch.num_nodes] = noise.keys_at_nodes(batch)

    def decide(self, probs: torch.Tensor, step: Tensors) -> tuple[torch.Tensor, torch.Tensor]:
        return follow(race(probs, step["keys"]), step)


class TraversalRule(DeviceRule):
    """`traversal`: thresholds of all nodes by one sequential kernel per row, then one residual draw per row."""

    def fields(self, size: StepSize) -> dict[str, Field]:
        return {
            "accept": (np.float64, (size.num_tokens,)),
            "resample": (np.float64, (size.num_rows,)),
            "support_ids": (np.int32, (size.num_tokens, SUPPORT_SIZE)),
            "law": (np.float32, (size.num_tokens, SUPPORT_SIZE)),
            "local_parents": (np.int32, (size.num_tokens,)),
        }

    def fill(self, host: Mapping[str, np.ndarray], batch: DraftBatch, noise: VerifierNoise) -> None:
        num_nodes, width = batch.support_ids.shape
        if width > SUPPORT_SIZE:
            raise ValueError(
                f"a captured step takes laws over at most {SUPPORT_SIZE} candidates, got {width}; "
                "draft with fewer per node or wrap the model with backend='sdpa'"
            )
        host["accept"][:num_nodes] = noise.accept(batch)
        host["resample"][: len(batch)] = noise.resample()
        host["local_parents"][:num_nodes] = batch.parents
        host["support_ids"][:, :width][:num_nodes] = batch.support_ids
        host["support_ids"][:, width:] = NO_TOKEN
        host["support_ids"][num_nodes:] = NO_TOKEN
        host["law"][:, :width][:num_nodes] = batch.law
        host["law"][:, width:] = 0.0

    def decide(self, probs: torch.Tensor, step: Tensors) -> tuple[torch.Tensor, torch.Tensor]:
        support_ids = step["support_ids"]
        stops, mass, scale, _ = traverse(
            probs, step["token_ids"], step["local_parents"], step["offsets"], support_ids, step["law"], step["accept"]
        )
        return stops, draw_residuals(probs, stops, support_ids, mass, scale, step["resample"])


class GreedyRule(DeviceRule):
    """Temperature 0: every lossless rule keeps the path of best tokens (lowest id on ties)."""

    def fields(self, size: StepSize) -> dict[str, Field]:
        return {}

    def fill(self, host: Mapping[str, np.ndarray], batch: DraftBatch, noise: VerifierNoise) -> None:
        pass

    def decide(self, probs: torch.Tensor, step: Tensors) -> tuple[torch.Tensor, torch.Tensor]:
        return follow(probs.argmax(dim=1), step)


def follow(drawn: torch.Tensor, step: Tensors) -> tuple[torch.Tensor, torch.Tensor]:
    """From every root, step to the first child whose token was drawn at its parent; (stops [B], next_tokens [B]).

    A node lies on the kept path when it and all its ancestors agree with what was drawn above them, and a row's path
    is a chain, so its end is the deepest such node: no walk is needed.
    """
    num_tokens, num_rows = len(drawn), len(step["lengths"])
    packed = torch.arange(num_tokens, device=drawn.device)
    is_root = step["firsts"] == packed
    agrees = (drawn[step["parents"]] == step["token_ids"]) & (step["follows"] > 0) | is_root
    seen = tail_bits(step["ancestors"])  # [M, 64 W]
    locals_ = torch.arange(seen.shape[1], device=drawn.device)
    cells = (step["firsts"][:, None] + locals_).clip(max=num_tokens - 1)
    is_kept = (seen <= agrees[cells]).all(dim=1)  # who is seen agrees
    rank = torch.where(is_kept, step["depths"] * num_tokens + packed, 0)
    deepest = torch.zeros(num_rows + 1, dtype=torch.int64, device=drawn.device)
    deepest = deepest.scatter_reduce(0, step["row_of"], rank, "amax")
    stops = deepest[:num_rows] % num_tokens
    return stops, drawn[stops]


def tail_bits(ancestors: torch.Tensor) -> torch.Tensor:
    """[n, W] int64 words -> [n, 64 W] bool, bit 0 of word 0 first."""
    places = torch.arange(WORD_BITS, device=ancestors.device)
    return ((ancestors[:, :, None] >> places) & 1).bool().flatten(1)
