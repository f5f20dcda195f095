"""Where the places of blocks sit behind their rows, and what they see."""

from __future__ import annotations

import numpy as np
import torch

from stand.forward.packed_plan import StepPlan


class BlockPlan(StepPlan):
    """One block of B places behind each row. Masks are made on the device, from the rows' lengths alone."""

    def __init__(
        self, token_ids: np.ndarray, lengths: np.ndarray, *, is_causal: bool, has_windows: bool, device: torch.device
    ) -> None:
        """token_ids int32 [A, B]; is_causal: a place sees no later ones; has_windows: in some layer it sees the newest
        tokens alone."""
        num_rows, size = token_ids.shape
        seen = np.tri(size, dtype=bool) if is_causal else np.ones((size, size), dtype=bool)
        places = np.tile(np.arange(size), num_rows)
        super().__init__(
            token_ids.ravel(), size * np.arange(num_rows + 1), places, np.tile(seen, (num_rows, 1)), lengths,
            device=device,
        )  # fmt: skip
        self._seen = seen
        self.has_few_tokens &= is_causal or not has_windows  # that attention counts windows by paths

    def _masks_of(self, window: int | None, groups: int, dtype: torch.dtype) -> list[torch.Tensor]:
        """[A, 1, groups * B, L], as in `StepPlan`."""
        key = (window, groups, dtype)
        if key not in self._masks:
            size = len(self._seen)
            lengths = self._to_device(self.lengths)[:, None, None]
            slots, places = (torch.arange(count, device=self.device) for count in (self.kv_length, size))
            own = slots - lengths  # [A, 1, L]: places of the row's block; negative in its text
            allowed = self._to_device(self._seen)[:, own.clamp(0, size - 1)[:, 0]].transpose(0, 1)
            allowed = (own < 0) | (allowed & (own < size))
            if window is not None:
                allowed &= places[:, None] - own < window
            mask = torch.zeros(allowed.shape, dtype=dtype, device=self.device).masked_fill_(~allowed, float("-inf"))
            self._masks[key] = [torch.cat([mask] * groups, dim=1)[:, None]]
        return self._masks[key]
