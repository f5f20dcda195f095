"""A grammar that begins where a model's thoughts end."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from transformers import LogitsProcessor

from stand.laws.engine_processor import EngineProcessor
from stand.laws.grammars.marks import as_mark, check_known
from stand.laws.grammars.matchers import Matcher, allows, forbidden, has_matcher, matcher_for
from stand.row import Row


class AfterThoughts(EngineProcessor):
    """A grammar library's processor that begins behind the first `end` among a row's new tokens. Until then any token
    may come, by the model's own law. Where `begin` is given, a row need not think: its first new tokens are `begin`,
    or those of the grammar.

    For `logits_processors=` of this engine, `custom_generate` included; transformers by itself cannot call it. A row
    that is cut off in its thoughts has no answer of the grammar, so leave enough tokens.
    """

    def __init__(
        self, processor: LogitsProcessor, end: int | Sequence[int], *, begin: int | Sequence[int] | None = None
    ):
        """processor: one of docs/grammars.md. end: the token that ends thoughts, or several that do so one after the
        other: `tokenizer.encode("</think>", add_special_tokens=False)`. begin: those that begin them, where a row
        writes them itself and may leave them out; None: every row thinks, from its first token on.

        Raises ValueError for a processor that is no grammar library's, for one that has begun a text, and for no token.
        """
        if isinstance(processor, EngineProcessor) or not has_matcher(processor):
            raise ValueError(
                f"AfterThoughts needs a grammar library's processor, got {type(processor).__name__}; docs/grammars.md "
                "has a list"
            )
        self.processor = processor
        self.end = as_mark(end, "end", "</think>")
        self.begin = None if begin is None else as_mark(begin, "begin", "<think>")

    def new_matcher(self, row: Row, num_tokens: int) -> Matcher:
        """As `matcher_for`. Raises ValueError where thoughts end in a token that the model does not have."""
        check_known(self.end + (self.begin or ()), "end and begin", num_tokens)
        answer = matcher_for(self.processor, row, num_tokens)
        if self.begin is not None and self.begin[0] >= 32 * answer.num_words and not answer.allows_beyond:
            raise ValueError(
                f"begin must be tokens that the grammar's tokenizer has, got {list(self.begin)}; make the grammar for "
                "the model's whole vocabulary (vocab_size=)"
            )
        return ThinkingMatcher(answer, self.end, begin=self.begin or ())


class ThinkingMatcher(Matcher):
    """Hands on to a grammar's matcher what comes behind the thoughts."""

    def __init__(self, answer: Matcher, end: tuple[int, ...], *, begin: tuple[int, ...] = ()):
        """answer: behind no token; begin, end: of the thoughts; no `begin`: they have begun."""
        self.num_words, self.allows_beyond = answer.num_words, answer.allows_beyond
        self.goes_back_quickly = answer.goes_back_quickly
        self._answer, self._begin, self._end = answer, begin, end
        self._thoughts: list[int] = []  # with their marks
        words = np.empty(self.num_words, dtype=np.int32)
        if begin:
            answer.write_mask(words)
        self._is_marked = bool(begin) and not allows(words, begin[0])  # no answer begins like thoughts

    @property
    def num_taken(self) -> int:
        return len(self._thoughts) + self._answer.num_taken

    @property
    def is_free(self) -> bool:
        has_begun = len(self._thoughts) >= len(self._begin) and self._answer.num_taken == 0
        return has_begun and not self._has_ended()

    def take(self, token: int) -> None:
        if self._is_thought(token):
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
        while count < len(tokens) and self._is_thought(tokens[count]):
            self._thoughts.append(tokens[count])
            count += 1
        self._answer.num_before = len(self._thoughts)
        self._answer.follow(tokens[count:])

    def write_mask(self, words: np.ndarray) -> None:
        if self.is_free:
            words[:] = -1
        elif self._is_opening():
            words[:] = 0
            _allow(words, self._begin[len(self._thoughts)])
        else:
            self._answer.write_mask(words)
            if self._may_begin():
                _allow(words, self._begin[0])

    def takes_any(self, token: int) -> bool:
        return self.is_free or not self._is_thought(token) and self._answer.takes_any(token)

    def _is_thought(self, token: int) -> bool:
        """Whether it belongs to thoughts here. Raises RuntimeError where they must begin otherwise."""
        if self._is_opening() and token != self._begin[len(self._thoughts)]:
            raise RuntimeError(forbidden(token, self.num_taken))
        if not self._may_begin():
            return self.is_free or self._is_opening()
        return self._is_marked and token == self._begin[0]

    def _may_begin(self) -> bool:
        return bool(self._begin) and self.num_taken == 0

    def _is_opening(self) -> bool:
        """Within `begin`."""
        return 0 < len(self._thoughts) < len(self._begin)

    def _has_ended(self) -> bool:
        return tuple(self._thoughts[len(self._begin) :][-len(self._end) :]) == self._end


def _allow(words: np.ndarray, token: int) -> None:
    """Nothing where the mask has no bit for it, which is where tokens beyond it may come anyway."""
    if token < 32 * len(words):
        words.view(np.uint32)[token // 32] |= np.uint32(1 << token % 32)
