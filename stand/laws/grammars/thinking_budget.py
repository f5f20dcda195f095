"""Thoughts of at most so many tokens."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from stand.argument_checks import check_flags, whole_number
from stand.laws.engine_processor import EngineProcessor
from stand.laws.grammars.marks import as_mark, check_known, last_place
from stand.laws.grammars.matchers import Matcher, forbidden
from stand.row import Row


class ThinkingBudget(EngineProcessor):
    """Once a row has thought for `max_tokens` new tokens, the tokens `forced` are the only ones that may come, one
    after the other; before and behind them the model's own law holds.

    The budget is that of a row's first thoughts: behind their end nothing is forced any more.

    For `logits_processors=` of this engine, `custom_generate` included; transformers by itself cannot call it.
    """

    def __init__(
        self,
        max_tokens: int,
        *,
        begin: int | Sequence[int] | None,
        end: int | Sequence[int],
        forced: Sequence[int] | None = None,
        is_thinking: bool | None = None,
    ):
        """begin, end: a token id each, or several one after the other, as `tokenizer.encode("</think>",
        add_special_tokens=False)` gives them; begin None: a row thinks from its first new token on.
        forced: what ends thoughts whose budget is used up, `end` at its own end; None: `end` alone.
        is_thinking: whether rows think behind their prompts; None: the last `begin` or `end` in a prompt tells.

        Raises ValueError for what does not fit.
        """
        self.max_tokens = whole_number("max_tokens", max_tokens, "thousands are usual", least=0)
        self.begin = None if begin is None else as_mark(begin, "begin", "<think>")
        self.end = as_mark(end, "end", "</think>")
        self.forced = self.end if forced is None else as_mark(forced, "forced", "\n</think>\n\n")
        if is_thinking is not None:
            check_flags(is_thinking=is_thinking)
        self.is_thinking = is_thinking
        self._check_marks()

    def new_matcher(self, row: Row, num_tokens: int) -> Matcher:
        """As `matcher_for`. Raises ValueError for tokens that the model does not have."""
        check_known((self.begin or ()) + self.end + self.forced, "begin, end and forced", num_tokens)
        return BudgetMatcher(self, row.prompt, num_tokens)

    def thinks_behind(self, prompt: np.ndarray) -> bool:
        """prompt: [L] int32."""
        if self.is_thinking is not None:
            return self.is_thinking
        return self.begin is None or last_place(self.begin, prompt) > last_place(self.end, prompt)

    def _check_marks(self) -> None:
        *before, _ = forced = np.array(self.forced)
        if last_place(self.end, forced) != len(forced) or last_place(self.end, np.array(before)) > 0:
            raise ValueError(
                f"forced must end with the tokens of end, {list(self.end)}, and have them nowhere else, got "
                f"{list(self.forced)}; encode both texts apart and join them"
            )
        if self.begin is not None:
            size = min(len(self.begin), len(self.end))
            if self.begin[-size:] == self.end[-size:]:
                raise ValueError(
                    f"begin and end must tell thoughts from answers, got {list(self.begin)} and {list(self.end)}, of "
                    "which one ends with the other; look at what the model writes"
                )


class _State(NamedTuple):
    """Of a row behind some token."""

    is_thinking: bool
    num_thought: int  # new tokens, those of `end` among them
    is_over: bool  # the first thoughts have ended


class BudgetMatcher(Matcher):
    """Follows one row."""

    def __init__(self, budget: ThinkingBudget, prompt: np.ndarray, num_tokens: int):
        """prompt: [L] int32; num_tokens: of the model's vocabulary."""
        self.num_words = -(-num_tokens // 32)
        self._budget = budget
        self._longest = max(map(len, (budget.end, budget.begin or ())))
        self._tail = prompt[max(0, len(prompt) - self._longest) :].tolist()  # of the text
        self._states = [_State(budget.thinks_behind(prompt), 0, False)]  # settled, and behind each token taken since
        self._num_settled = 0

    @property
    def num_taken(self) -> int:
        return self._num_settled + len(self._states) - 1

    @property
    def is_free(self) -> bool:
        return self._only() is None

    @property
    def num_free(self) -> int:
        (state,) = self._states  # asked where nothing has been taken that it may go back
        return sys.maxsize if state.is_over else max(self._budget.max_tokens - state.num_thought, 0)

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
        state, budget = self._states[-1], self._budget
        num_forced = state.num_thought - budget.max_tokens
        return budget.forced[num_forced] if state.is_thinking and num_forced >= 0 else None

    def _behind(self, state: _State) -> _State:
        """Of the text as it is now; state: before its last token."""
        budget = self._budget
        if state.is_thinking:
            has_ended = self._ends_with(budget.end)
            return _State(not has_ended, state.num_thought + 1, has_ended)
        begins = not state.is_over and budget.begin is not None and self._ends_with(budget.begin)
        return state._replace(is_thinking=begins)

    def _ends_with(self, mark: tuple[int, ...]) -> bool:
        return tuple(self._tail[-len(mark) :]) == mark
