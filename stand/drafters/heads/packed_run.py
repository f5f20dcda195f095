"""What a head runs on: tokens packed row by row behind what its cache holds, and who computes it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import numpy as np
import torch
from torch import nn

from stand.forward.packed_plan import StepPlan

if TYPE_CHECKING:
    from stand.forward.attention_shape import AttentionShape
    from stand.forward.cache.tree_cache import TreeCache


@dataclass(frozen=True, slots=True, eq=False)
class PackedRun:
    """Tokens of A rows; a row's token i lies in slot lengths + starts + i of the head's cache."""

    token_ids: np.ndarray  # [M] int32
    offsets: np.ndarray  # [A + 1]
    depths: np.ndarray  # [M]: places in the text behind `lengths`
    seen: np.ndarray  # [M, T] bool: which tokens behind `lengths` a token sees; T = 0: none attends
    lengths: np.ndarray  # [A] int64: tokens of the text in the cache
    starts: np.ndarray | None = None  # [A] int64: tokens behind them that earlier runs wrote; None: none

    @property
    def num_rows(self) -> int:
        """A."""
        return len(self.offsets) - 1

    @property
    def num_tokens(self) -> int:
        """M."""
        return len(self.token_ids)

    @property
    def ends(self) -> np.ndarray:
        """[A] int64: slots of each row behind the run."""
        firsts = self.lengths if self.starts is None else self.lengths + self.starts
        return (firsts + np.diff(self.offsets)).astype(np.int64)

    @property
    def block_size(self) -> int:
        """Tokens of every row, where all have as many by the head's nature; else 0."""
        return 0

    def plan(self, device: torch.device) -> StepPlan:
        """For a run operation by operation."""
        return StepPlan(
            self.token_ids, self.offsets, self.depths, self.seen, self.lengths, starts=self.starts, device=device
        )


Body = Callable[[Sequence[object], torch.Tensor, torch.Tensor | None], Mapping[str, torch.Tensor]]
# (a plan per part, features [F, D], ends) -> results by name; it begins each plan in the cache before it runs on it


class RunRecorder(Protocol):
    """Runs bodies of a head as an engine's steps run: recorded, with kernels."""

    def rooms(self, num_rows: int, room: int) -> TreeCache:
        """An empty cache for runs, of rows with so many slots each; what an earlier one held is gone."""

    def look_at(self, modules: Sequence[nn.Module]) -> None:
        """These are what the bodies run. What was recorded of others, or of these before they changed, is forgotten."""

    def knows_shapes(self) -> bool:
        """Whether `note_shapes` has come, before which nothing is recorded."""

    def note_shapes(self, shapes: Sequence[AttentionShape]) -> None:
        """What the head's layers attended in."""

    def run(
        self,
        body: Body,
        parts: Sequence[PackedRun],
        features: Sequence[torch.Tensor],
        *,
        cache: TreeCache,
        ends: np.ndarray | None,
        count: int,
        stays: Sequence[str] = (),
    ) -> dict[str, torch.Tensor] | None:
        """The results of `body`, the first `count` of each: on the CPU, but for those named in `stays`.

        cache: that the body writes to. features: of the first part's tokens, to be packed one behind the other. ends
        [E] int64: packed tokens of the last part. None where this run cannot be recorded.
        """
