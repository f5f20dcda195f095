"""Tokens that begin or end thoughts."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from stand.trees.arguments import vector


def as_mark(given: int | Sequence[int], name: str, example: str) -> tuple[int, ...]:
    """A token id or several, one after the other, as a tuple. example: a text that they may stand for.

    Raises ValueError for none, and for what is no token id.
    """
    try:
        tokens = vector([given] if isinstance(given, (int, np.integer)) else given, name).tolist()
    except ValueError:
        tokens = []
    if not tokens or min(tokens) < 0:
        raise ValueError(
            f"{name} must be one token id or several, got {given!r:.80}; write tokenizer.encode({example!r}, "
            "add_special_tokens=False)"
        )
    return tuple(tokens)


def check_known(mark: tuple[int, ...], name: str, num_tokens: int) -> None:
    """Raises ValueError for a token that the model does not have."""
    if max(mark) >= num_tokens:
        raise ValueError(
            f"{name} must be tokens of the model, in [0, {num_tokens}), got {list(mark)}; take them from its own "
            "tokenizer"
        )


def last_place(mark: tuple[int, ...], tokens: np.ndarray) -> int:
    """Where the mark ends for the last time in `tokens` [L]: how many of them there are until then; 0 for nowhere."""
    count = len(tokens) - len(mark) + 1
    found = np.ones(max(count, 0), dtype=bool)
    for offset, token in enumerate(mark):
        found &= tokens[offset : offset + len(found)] == token
    places = np.flatnonzero(found)
    return int(places[-1]) + len(mark) if len(places) else 0
