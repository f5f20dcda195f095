"""What a step asks of all live rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from stand.step_compiled import Row, gathered


@dataclass(frozen=True, slots=True, eq=False)
class LiveRows:
    """The live rows of one step with what the step needs of them, gathered once."""

    rows: Sequence[Row]
    histories: list[np.ndarray]  # per row: int32 committed tokens, the pending one last
    indices: np.ndarray  # [B] int64: the rows' numbers in the call
    prompt_words: np.ndarray  # [B] int64: `prompt_word` of each
    steps: np.ndarray  # [B] int64: verifications so far
    problems: np.ndarray  # [B] int64
    lengths: np.ndarray  # [B] int64: tokens whose keys the cache holds
    max_depths: np.ndarray  # [B] int64: how deep a draft may be of use
    rotary_offsets: np.ndarray  # [B] int64: what rotary positions are beyond places in the text, 0 without images

    @classmethod
    def of(cls, rows: Sequence[Row]) -> LiveRows:
        """A snapshot: `rows` itself may change afterwards."""
        histories, columns = gathered(rows)
        return cls(tuple(rows), histories, *columns)

    def depths_within(self, border: int) -> np.ndarray:
        """[B] int64: as `max_depths`, and no node of a row of at most `border` tokens is behind more than these."""
        left = border - self.lengths - 1
        return np.where(left < 0, self.max_depths, np.minimum(self.max_depths, left))
