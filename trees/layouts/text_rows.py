"""Texts as serving engines hold them: in rows of one array."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from stand.trees import compiled


class TextRows:
    """B texts that lie at the left of rows of one array: a sequence of their token ids, and so histories for `draft`
    and `learn_batch`. Lookups read them from the array; a list would cost an object per text and step.

    tokens: int32[R, L], C-contiguous; it is not copied. lengths: int64[B], tokens of each text. rows: int64[B], the
    texts' rows of the array; None for the first B.

    Raises ValueError on another kind of array. What lies outside the array is refused where it is read.
    """

    __slots__ = ("lengths", "rows", "tokens")

    def __init__(self, tokens: np.ndarray, lengths: np.ndarray, rows: np.ndarray | None = None):
        if rows is None:
            rows = np.arange(len(lengths))
        for name, array, dtype, num_axes in (("tokens", tokens, np.int32, 2), ("lengths", lengths, np.int64, 1),
                                             ("rows", rows, np.int64, 1)):  # fmt: skip
            if not isinstance(array, np.ndarray) or array.dtype != dtype or array.ndim != num_axes:
                got = getattr(array, "dtype", type(array).__name__)
                raise ValueError(
                    f"{name} must be an array of {np.dtype(dtype)} with {num_axes} axes, got {got}; give other "
                    "texts to TextRows.from_lists"
                )
            if not array.flags.c_contiguous:
                raise ValueError(f"{name} must be C-contiguous, got strides of another order; pass the whole array")
        if len(rows) != len(lengths):
            raise ValueError(
                f"rows must hold one row per text ({len(lengths)}), got {len(rows)}; leave them out for the first ones"
            )
        self.tokens, self.lengths, self.rows = tokens, lengths, rows

    @classmethod
    def from_lists(cls, texts: Sequence[Sequence[int]]) -> TextRows:
        """Texts of any lengths, copied into one array. Raises ValueError where a token is no int32."""
        return cls(*compiled.left_aligned(texts))

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, text: int) -> np.ndarray:
        return self.tokens[self.rows[text], : self.lengths[text]]
