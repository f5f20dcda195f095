"""One trajectory while it is being decoded."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


class Row:
    """Committed tokens of a trajectory. The last one is *pending*: its keys are not in the cache yet."""

    def __init__(self, index: int, prompt: np.ndarray, max_new_tokens: int, *, problem: int = 0):
        self.index = index  # place in the call; with the seed it names the row's random streams
        self.problem = problem  # number of its prompt; the samples of a prompt share it
        self.num_steps = 0  # verifications so far
        self.finish_reason: str | None = None
        self._prompt_length = len(prompt)
        self._max_new_tokens = max_new_tokens
        self._tokens = np.empty(len(prompt) + min(max_new_tokens, 256), dtype=np.int32)
        self._tokens[: len(prompt)] = prompt
        self._length = len(prompt)

    @property
    def history(self) -> np.ndarray:
        """[prompt + generated] int32 view, the pending token last."""
        return self._tokens[: self._length]

    @property
    def new_token_ids(self) -> np.ndarray:
        return self._tokens[self._prompt_length : self._length]

    @property
    def num_cached(self) -> int:
        """Tokens whose keys the cache holds."""
        return self._length - 1

    @property
    def num_remaining(self) -> int:
        """New tokens that may still come."""
        return self._max_new_tokens - (self._length - self._prompt_length)

    def extend(self, token_ids: Sequence[int]) -> None:
        """Commit one step's tokens."""
        end = self._length + len(token_ids)
        if end > len(self._tokens):
            self._tokens = np.concatenate([self._tokens, np.empty(end, dtype=np.int32)])
        self._tokens[self._length : end] = token_ids
        self._length = end
        self.num_steps += 1
