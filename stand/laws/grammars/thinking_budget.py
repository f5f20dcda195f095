"""Thoughts of at most so many tokens."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from stand.argument_checks import whole_number
from stand.laws.engine_processor import EngineProcessor
from stand.laws.grammars.marks import as_mark, check_known, last_place
from stand.laws.grammars.matchers import Matcher, forbidden
from stand.row import Row


class ThinkingBudget(EngineProcessor):
    """Once a row has thought for `max_tokens` new tokens, the tokens `forced` are the only ones that may come, one
    after the other; before and behind them the model's own law holds.

    Whether a row thinks, its whole text tells: behind `begin` it does, behind `end` it does not. The budget is one for
    all thoughts of a row; if it begins to think once more when nothing is left, `forced` comes at once.

    For `logits_processors=` of this engine, `custom_generate` included; transformers by itself cannot call it.
    """

    def __init__(
        self,
        max_tokens: int,
        *,
        begin: int | Sequence[int] | None,
        end: int | Sequence[int],
        forced: Sequence[int] | None = None,
    ):
        """begin, end: a token id each, or several one after the other, as `tokenizer.encode("</think>",
        add_special_tokens=False)` gives them; begin None: a row thinks from its first new token on, and never again.
        forced: what ends thoughts whose budget is used up, `end` at its own end; None: `end` alone.

        Raises ValueError for what does not fit.
        """
        self.max_tokens = whole_number("max_tokens", max_tokens, "thousands are usual", least=0)
        self.begin = None if begin is None else as_mark(begin, "begin", "<think>")
        self.end = as_mark(end, "end", "</think>")
        self.forced = self.end if forced is None else as_mark(forced, "forced", "\n</think>\n\n")
        if self.forced[-len(self.end) :] != self.end:
            raise ValueError(
                f"forced must end with the tokens of end, {list(self.end)}, got {list(self.forced)}; encode both texts "
                "apart and join them"
            )

    def new_matcher(self, row: Row, num_tokens: int) -> Matcher:
        """As `matcher_for`. Raises ValueError for tokens that the model does not have."""
        check_known((self.begin or ()) + self.end + self.forced, "begin, end and forced", num_tokens)
        return BudgetMatcher(self, row.prompt, num_tokens)


class _State(NamedTuple):
    """Of a row behind some token."""

    is_thinking: bool
    num_thought: int  # new tokens, those of `end` among them
    num_forced: int  # of these thoughts


class BudgetMatcher(Matcher):
    """Follows one row."""

    def __init__(self, budget: ThinkingBudget, prompt: np.ndarray, num_tokens: int):
        """prompt: [L] int32; num_tokens: of the model's vocabulary."""
        self.num_words = -(-num_tokens // 32)
        self._budget = budget
        self._longest = max(map(len, (budget.end, budget.begin or ())))
        self._tail = prompt[max(0, len(prompt) - self._longest) :].tolist()  # of the text
        is_thinking = budget.begin is None or last_place(budget.begin, prompt) > last_place(budget.end, prompt)
        self._states = [_State(is_thinking, 0, 0)]  # behind what it followed, and behind each token taken since
        self._num_settled = 0

    @property
    def num_taken(self) -> int:
        return self._num_settled + len(self._states) - 1

    @property
    def is_free(self) -> bool:
        return self._only() is None

    @property
    def num_free(self) -> int:
        state = self._states[-1]
        if self._budget.begin is None and not state.is_thinking:
            return sys.maxsize  # it never thinks again
        return max(self._budget.max_tokens - state.num_thought, 0)

    def take(self, token: int) -> None:
        only = self._only()
        if only is not None and token != only:
            raise RuntimeError(forbidden(token, self.num_taken))
        self._tail.append(token)
        self._states.append(self._behind(self._states[-1]))

    def go_back(self, count: int) -> None:
        if count:
            del self._states[-count:], self._tail[-count:]

    def follow(self, tokens: Sequence[int]) -> None:
        for token in tokens:
            self.take(token)
        self._num_settled = self.num_taken
        self._states, self._tail = self._states[-1:], self._tail[-self._longest :]

    def write_mask(self, words: np.ndarray) -> None:
        only = self._only()
        words[:] = -1 if only is None else 0
        if only is not None:
            words.view(np.uint32)[only // 32] = 1 << only % 32

    def takes_any(self, token: int) -> bool:
        return self.is_free

    def _only(self) -> int | None:
        """The token that must come now."""
        state = self._states[-1]
        is_used_up = state.is_thinking and state.num_thought >= self._budget.max_tokens
        return self._budget.forced[state.num_forced] if is_used_up else None

    def _behind(self, state: _State) -> _State:
        """Of the text as it is now; state: before its last token."""
        budget, is_thinking = self._budget, state.is_thinking
        if not is_thinking:
            return state._replace(is_thinking=budget.begin is not None and self._ends_with(budget.begin))
        num_forced = state.num_forced + 1 if state.num_thought >= budget.max_tokens else 0
        if self._ends_with(budget.end):
            return _State(False, state.num_thought + 1, 0)
        return _State(True, state.num_thought + 1, num_forced)

    def _ends_with(self, mark: tuple[int, ...]) -> bool:
        return tuple(self._tail[-len(mark) :]) == mark
