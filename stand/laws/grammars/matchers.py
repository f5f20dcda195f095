"""Where a text stands in a grammar of xgrammar, llguidance or outlines_core, or in its thoughts: one interface.

The libraries' logits processors take the matcher of a row one token on per call. Drafts branch, so here a matcher also
goes back. Processors are known by the names of their classes: whoever gives one has imported its library.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from functools import partial
from importlib import import_module

import numpy as np
import torch

from stand.own_copy import full_name
from stand.row import Row

XGRAMMAR = "xgrammar.contrib.hf.LogitsProcessor"
AFTER_THOUGHTS = "stand.laws.grammars.after_thoughts.AfterThoughts"
THINKING_BUDGET = "stand.laws.grammars.thinking_budget.ThinkingBudget"
MOST_BACK = 2**16  # tokens that an outlines_core guide can go back: a draft has no more


def forbidden(token: int, count: int) -> str:
    """What is wrong where a row has drawn a token behind `count` others that its grammar forbids there."""
    return (
        f"a grammar must allow each token of its row, got token {token} after {count} others, which it forbids; put no "
        "processor behind it that brings forbidden tokens back, and make it for the model's whole vocabulary "
        "(vocab_size=)"
    )


def allows(words: np.ndarray, token: int) -> bool:
    """Whether a mask has the token's bit."""
    return token < 32 * len(words) and bool(int(words[token // 32]) >> token % 32 & 1)


class Matcher(ABC):
    """Of one row."""

    num_words: int  # of a mask
    num_before = 0  # tokens of the row before its own
    allows_beyond = False  # whether tokens may be drawn whose numbers are beyond those of the mask
    goes_back_quickly = True  # in microseconds
    is_free = False  # whether any token may come now, and any behind it for a while
    num_free = 0  # so many tokens may be any, the next one among them; there may be more

    @property
    @abstractmethod
    def num_taken(self) -> int:
        """Tokens that lie behind it."""

    @abstractmethod
    def take(self, token: int) -> None:
        """The text goes on. Raises RuntimeError where the grammar does not allow the token."""

    @abstractmethod
    def go_back(self, count: int) -> None:
        """By so many tokens, taken since it last followed."""

    @abstractmethod
    def follow(self, tokens: Sequence[int]) -> None:
        """Take these for good: it will not go back before where it is then."""

    @abstractmethod
    def write_mask(self, words: np.ndarray) -> None:
        """words: [num_words] int32, contiguous; bit t % 32 of word t // 32 tells whether token t is allowed next."""

    @abstractmethod
    def takes_any(self, token: int) -> bool:
        """Whether any token may come, whatever the mask says; token: the one that does."""


class LibraryMatcher(Matcher):
    """Around a matcher of a library. Beyond its end a grammar takes no tokens, and its mask stays."""

    def __init__(self, num_tokens: int):
        """num_tokens: those that its mask tells of."""
        self.num_words = -(-num_tokens // 32)
        self._num_settled = 0
        self._has_moved: list[bool] = []  # by token taken since

    @property
    def num_taken(self) -> int:
        return self._num_settled + len(self._has_moved)

    def take(self, token: int) -> None:
        moves = not self.takes_any(token)
        if moves and not self._take(token):
            raise RuntimeError(forbidden(token, self.num_before + self.num_taken) + self._error())
        self._has_moved.append(moves)

    def go_back(self, count: int) -> None:
        if count:
            moves = sum(self._has_moved[-count:])
            del self._has_moved[-count:]
            if moves:
                self._go_back(moves)

    def follow(self, tokens: Sequence[int]) -> None:
        for token in tokens:
            self.take(token)
        self._num_settled, self._has_moved = self.num_taken, []

    def _error(self) -> str:
        """What its library has to say of a token that it did not take."""
        return ""

    @abstractmethod
    def _take(self, token: int) -> bool: ...

    @abstractmethod
    def _go_back(self, count: int) -> None: ...


class XGrammarMatcher(LibraryMatcher):
    """Of xgrammar. Its processors leave tokens beyond the mask as they are."""

    allows_beyond = True

    def __init__(self, grammar: object, num_tokens: int):
        """grammar: an xgrammar.CompiledGrammar."""
        super().__init__(num_tokens)
        self._matcher = import_module("xgrammar").GrammarMatcher(grammar)
        self._last = 0  # token taken

    def write_mask(self, words: np.ndarray) -> None:
        if not self._matcher.is_terminated():
            self._matcher.fill_next_token_bitmask(torch.from_numpy(words[None]))
            return
        self._matcher.rollback(1)  # after the end there is none, and its processors keep the one before
        self._matcher.fill_next_token_bitmask(torch.from_numpy(words[None]))
        self._matcher.accept_token(self._last)

    def takes_any(self, token: int) -> bool:
        return self._matcher.is_terminated()

    def _take(self, token: int) -> bool:
        self._last = token
        return self._matcher.accept_token(token)

    def _go_back(self, count: int) -> None:
        self._matcher.rollback(count)


class GuidanceMatcher(LibraryMatcher):
    """Of llguidance. Its own way back leaves wrong masks (1.9.1), so what may be gone back is taken by copies. Those of
    grammars with `stop=` share what they know: there, and with `max_tokens=`, going back is taking all tokens anew."""

    def __init__(self, tokenizer: object, grammar: object):
        """tokenizer: an llguidance.LLTokenizer; grammar: what its LLMatcher takes."""
        super().__init__(tokenizer.vocab_size)
        self._new = partial(import_module("llguidance").LLMatcher, tokenizer, grammar)
        self._line = [self._new()]  # behind each token that may be gone back; behind all where there are no copies
        self._check()
        self._has_copies = self._can_be_copied()
        self._copies = self._has_copies  # now
        self.goes_back_quickly = self._has_copies
        self._tokens: list[int] = []  # all of them, where there are no copies

    def follow(self, tokens: Sequence[int]) -> None:
        self._copies = False
        super().follow(tokens)
        self._copies = self._has_copies

    def write_mask(self, words: np.ndarray) -> None:
        self._line[-1].unsafe_compute_mask_ptr(words.ctypes.data, words.nbytes)
        self._check()

    def takes_any(self, token: int) -> bool:
        return self._line[-1].is_stopped()

    def _check(self) -> None:
        if self._line[-1].is_error():
            raise ValueError(f"a grammar must be one that llguidance can follow, got{self._error()}; mend the grammar")

    def _can_be_copied(self) -> bool:
        """By what llguidance says of going back, tried with the first token that is allowed; an end token always is."""
        words, trial = np.zeros(self.num_words, dtype=np.int32), self._new()
        trial.unsafe_compute_mask_ptr(words.ctypes.data, words.nbytes)
        allowed = np.flatnonzero(np.unpackbits(words.view(np.uint8), bitorder="little"))
        return trial.consume_token(int(allowed[0])) and trial.rollback(1)

    def _take(self, token: int) -> bool:
        matcher = self._line[-1].deep_copy() if self._copies else self._line[-1]
        is_taken = matcher.consume_token(token)
        if is_taken and self._copies:
            self._line.append(matcher)
        elif not self._has_copies:
            self._tokens.append(token)
            if not is_taken:
                self._go_back(1)
        return is_taken

    def _go_back(self, count: int) -> None:
        if self._has_copies:
            del self._line[-count:]
            return
        del self._tokens[-count:]
        self._line = [self._new()]
        for token in self._tokens:
            self._line[0].consume_token(token)

    def _error(self) -> str:
        return f" ({self._line[-1].get_error().splitlines()[0]})" if self._line[-1].is_error() else ""


class OutlinesMatcher(LibraryMatcher):
    """Of outlines_core: an automaton of a regular expression."""

    def __init__(self, index: object, num_tokens: int):
        """index: an outlines_core.Index."""
        super().__init__(num_tokens)
        self._guide = import_module("outlines_core").Guide(index, MOST_BACK)

    def write_mask(self, words: np.ndarray) -> None:
        self._guide.write_mask_into(words.ctypes.data, words.size, words.itemsize)

    def takes_any(self, token: int) -> bool:
        return self._guide.is_finished() and not self._guide.accepts_tokens([token])

    def _take(self, token: int) -> bool:
        if not self._guide.accepts_tokens([token]):
            return False
        self._guide.advance(token, False)
        return True

    def _go_back(self, count: int) -> None:
        self._guide.rollback_state(count)


def check_rows(processor: object, num_rows: int) -> None:
    """Raises ValueError where a processor of several grammars has not one for each row of a call."""
    if full_name(processor) == AFTER_THOUGHTS:
        processor = processor.processor
    count = len(processor.compiled_grammars) if full_name(processor) == XGRAMMAR else 1
    if count not in (1, num_rows):
        raise ValueError(
            f"a processor of several grammars must have one for each row, got {count} for {num_rows} rows; give it one "
            "for all rows, or as many as prompts times num_return_sequences"
        )


def _xgrammar(processor: object, row: int, num_tokens: int) -> Matcher:
    grammars = processor.compiled_grammars
    if len(grammars) > 1 and row >= len(grammars):
        raise ValueError(
            f"a processor of several grammars must have one for each row, got {len(grammars)} and row {row}; give it "
            "one for all rows"
        )
    return XGrammarMatcher(grammars[row if len(grammars) > 1 else 0], processor.full_vocab_size)


# By the full name of a processor's class: whether one is new; a matcher for a row and the vocabulary's size.
KNOWN: dict[str, tuple[Callable[[object], bool], Callable[[object, Row, int], Matcher]]] = {
    AFTER_THOUGHTS: (
        lambda one: has_matcher(one.processor),
        lambda one, row, num_tokens: one.new_matcher(row, num_tokens),
    ),
    THINKING_BUDGET: (lambda one: True, lambda one, row, num_tokens: one.new_matcher(row, num_tokens)),
    XGRAMMAR: (lambda one: not one.matchers, lambda one, row, num_tokens: _xgrammar(one, row.index, num_tokens)),
    "outlines.backends.xgrammar.XGrammarLogitsProcessor": (
        lambda one: one.is_first_token,
        lambda one, row, num_tokens: XGrammarMatcher(one.compiled_grammar, num_tokens),
    ),
    "outlines.backends.llguidance.LLGuidanceLogitsProcessor": (
        lambda one: one.is_first_token,
        lambda one, row, num_tokens: GuidanceMatcher(one.llg_tokenizer, one.grammar),
    ),
    "outlines.backends.outlines_core.OutlinesCoreLogitsProcessor": (
        lambda one: one.is_first_token,
        lambda one, row, num_tokens: OutlinesMatcher(one.index, num_tokens),
    ),
}


def has_matcher(processor: object) -> bool:
    """Whether it is a grammar library's. Raises ValueError where another call has begun with it."""
    name = full_name(processor)
    if name in KNOWN and not KNOWN[name][0](processor):
        raise ValueError(
            f"a grammar's processor must be new, got one of {name} that has begun a text; make one for this call"
        )
    return name in KNOWN


def matcher_for(processor: object, row: Row, num_tokens: int) -> Matcher:
    """Of a row, behind its prompt. num_tokens: of the model's vocabulary."""
    return KNOWN[full_name(processor)][1](processor, row, num_tokens)
