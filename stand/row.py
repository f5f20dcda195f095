"""One trajectory while it is being decoded, and what a step asks of all live ones."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from stand.step_compiled import row_columns


class Row:
    """Committed tokens of a trajectory. The last one is *pending*: its keys are not in the cache yet."""

    def __init__(
        self,
        index: int,
        prompt: np.ndarray,
        max_new_tokens: int,
        *,
        problem: int = 0,
        request: int = 0,
        prompt_word: int = 0,
    ):
        self.index = index  # its number in the call
        self.prompt_word = prompt_word  # of `stand.seeds`; together they name its random numbers
        self.problem = problem  # number of its prompt; the samples of a prompt share it
        self.request = request  # number of its request in the call
        self.num_steps = 0  # verifications so far
        self.num_drafted = 0  # nodes drafted for it so far, roots excluded
        self.started = self.ended = 0.0  # seconds of the call's clock (`Stats.elapsed`)
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
    def prompt(self) -> np.ndarray:
        return self._tokens[: self._prompt_length]

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

    @property
    def most_cached(self) -> int:
        """Tokens whose keys the cache may come to hold, drafts aside."""
        return self._prompt_length + self._max_new_tokens - 1

    def extend(self, token_ids: Sequence[int]) -> None:
        """Commit one step's tokens."""
        end = self._length + len(token_ids)
        if end > len(self._tokens):
            self._tokens = np.concatenate([self._tokens, np.empty(end, dtype=np.int32)])
        self._tokens[self._length : end] = token_ids
        self._length = end
        self.num_steps += 1


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

    @classmethod
    def of(cls, rows: Sequence[Row]) -> LiveRows:
        """A snapshot: `rows` itself may change afterwards."""
        return cls(tuple(rows), [row.history for row in rows], *row_columns(rows))
