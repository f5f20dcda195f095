"""Texts that are learned a part per step, so that no step waits for a whole prompt."""

from __future__ import annotations

from collections import deque

import numpy as np

from stand.trees import BlendedLookup


class Backlog:
    """What is learned, and when, follows from the calls alone: the ranks of one model draft alike.

    tokens_per_step: learned by each `work`. With 0 nothing is taken.
    """

    def __init__(self, lookup: BlendedLookup, *, tokens_per_step: int):
        self._lookup = lookup
        self._tokens_per_step = tokens_per_step
        self._texts: deque[tuple[np.ndarray, int]] = deque()
        self._num_done = 0  # of the first text

    def __len__(self) -> int:
        """Tokens that wait."""
        return sum(len(text) for text, _ in self._texts) - self._num_done

    def add(self, token_ids: np.ndarray, scope: int) -> None:
        """int32 [L]; a copy is kept until it is learned."""
        if self._tokens_per_step > 0 and len(token_ids) > 0:
            self._texts.append((np.array(token_ids, dtype=np.int32), scope))

    def work(self) -> None:
        """Learn the next part, first come first."""
        room = self._tokens_per_step
        while room > 0 and self._texts:
            text, scope = self._texts[0]
            start, end = self._num_done, min(len(text), self._num_done + room)
            self._lookup.learn(text[:start], text[start:end], scope=scope)
            room -= end - start
            self._num_done = end
            if end == len(text):
                self._texts.popleft()
                self._num_done = 0
