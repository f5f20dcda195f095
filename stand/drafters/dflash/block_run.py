"""One block of places behind each row, as a run of a head."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from stand.drafters.dflash.block_plan import BlockPlan
from stand.drafters.heads.packed_run import PackedRun


@dataclass(frozen=True, slots=True, eq=False)
class BlockRun(PackedRun):
    """Made by `of`."""

    is_causal: bool = False
    has_windows: bool = False

    @classmethod
    def of(cls, token_ids: np.ndarray, lengths: np.ndarray, *, is_causal: bool, has_windows: bool) -> BlockRun:
        """token_ids int32 [A, B]; is_causal, has_windows: as in `BlockPlan`."""
        num_rows, size = token_ids.shape
        seen = np.tri(size, dtype=bool) if is_causal else np.ones((size, size), dtype=bool)
        return cls(
            token_ids.ravel(), size * np.arange(num_rows + 1), np.tile(np.arange(size), num_rows),
            np.tile(seen, (num_rows, 1)), lengths, is_causal=is_causal, has_windows=has_windows,
        )  # fmt: skip

    @property
    def block_size(self) -> int:
        return self.seen.shape[1]

    def plan(self, device: torch.device) -> BlockPlan:
        """Its masks are made on the device."""
        blocks = self.token_ids.reshape(self.num_rows, self.block_size)
        return BlockPlan(blocks, self.lengths, is_causal=self.is_causal, has_windows=self.has_windows, device=device)
