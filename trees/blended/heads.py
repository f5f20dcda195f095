"""Laws of heads that guess one place each, as the small trees that `OutsideLaws` are."""

from __future__ import annotations

import numpy as np


def laws_of_heads(cls: type, top_ids: np.ndarray, top_probs: np.ndarray, *, source: int = 0) -> object:
    """Of heads that guess one place each, whatever the tokens before it are (Medusa, arXiv 2401.10774).

    top_ids int32[B, H, K], top_probs float32[B, H, K]: head h's law of the token h + 1 places after the pending
    one. cls: `OutsideLaws`.
    """
    ids, probs = np.asarray(top_ids), np.asarray(top_probs)
    if ids.ndim != 3 or ids.shape != probs.shape:
        raise ValueError(
            f"top_ids and top_probs must be two [B, H, K] arrays, got {ids.shape} and {probs.shape}; "
            "H is the number of heads, K that of tokens per law"
        )
    num_rows, num_heads, width = ids.shape
    return cls(
        num_heads * np.arange(num_rows + 1, dtype=np.int32),
        np.tile(np.arange(-1, num_heads - 1, dtype=np.int32), num_rows),
        np.full(num_rows * num_heads, cls.ANY_TOKEN, dtype=np.int32),
        ids.reshape(-1, width),
        probs.reshape(-1, width),
        source=source,
    )
