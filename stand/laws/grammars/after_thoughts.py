"""A grammar that begins where a model's thoughts end."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from transformers import LogitsProcessor

from stand.laws.engine_processor import EngineProcessor
from stand.laws.grammars.marks import as_mark, check_known
from stand.laws.grammars.matchers import Matcher, has_matcher, matcher_for
from stand.row import Row


class AfterThoughts(EngineProcessor):
    """A grammar library's processor that begins behind the first `end` among a row's new tokens. Until then any token
    may come, by the model's own law.

    For `logits_processors=` of this engine, `custom_generate` included; transformers by itself cannot call it. A row
    that is cut off in its thoughts has no answer of the grammar, so leave enough tokens.
    """

    def __init__(self, processor: LogitsProcessor, end: int | Sequence[int]):
        """processor: one of docs/grammars.md. end: the token that ends thoughts, or several that do so one after the
        other: `tokenizer.encode("</think>", add_special_tokens=False)`.

        Raises ValueError for a processor that is no grammar library's, for one that has begun a text, and for no token.
        """
        if isinstance(processor, AfterThoughts) or not has_matcher(processor):
            raise ValueError(
                f"AfterThoughts needs a grammar library's processor, got {type(processor).__name__}; docs/grammars.md "
                "has a list"
            )
        self.processor = processor
        self.end = as_mark(end, "end", "</think>")

    def new_matcher(self, row: Row, num_tokens: int) -> Matcher:
        """As `matcher_for`. Raises ValueError where thoughts end in a token that the model does not have."""
        check_known(self.end, "end", num_tokens)
        return ThinkingMatcher(matcher_for(self.processor, row, num_tokens), self.end)


class ThinkingMatcher(Matcher):
    """Hands on to a grammar's matcher what comes behind the thoughts."""

    def __init__(self, answer: Matcher, end: tuple[int, ...]):
        """answer: behind no token; end: of the thoughts."""
        self.num_words, self.allows_beyond = answer.num_words, answer.allows_beyond
        self.goes_back_quickly = answer.goes_back_quickly
        self._answer, self._end = answer, end
        self._thoughts: list[int] = []  # with their end

    @property
    def num_taken(self) -> int:
        return len(self._thoughts) + self._answer.num_taken

    @property
    def is_free(self) -> bool:
        return tuple(self._thoughts[-len(self._end) :]) != self._end

    def take(self, token: int) -> None:
        if self.is_free:
            self._thoughts.append(token)
        else:
            self._answer.num_before = len(self._thoughts)
            self._answer.take(token)

    def go_back(self, count: int) -> None:
        answered = min(count, self._answer.num_taken)
        self._answer.go_back(answered)
        if count > answered:
            del self._thoughts[answered - count :]

    def follow(self, tokens: Sequence[int]) -> None:
        count = 0
        while count < len(tokens) and self.is_free:
            self._thoughts.append(tokens[count])
            count += 1
        self._answer.num_before = len(self._thoughts)
        self._answer.follow(tokens[count:])

    def write_mask(self, words: np.ndarray) -> None:
        if self.is_free:
            words[:] = -1
        else:
            self._answer.write_mask(words)

    def takes_any(self, token: int) -> bool:
        return self.is_free or self._answer.takes_any(token)
