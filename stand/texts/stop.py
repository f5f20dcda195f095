"""When a row ends: end tokens, stop strings, criteria of the caller's own, length, time."""

from __future__ import annotations

import math
from collections.abc import Iterable

import numpy as np
import torch
from transformers import PreTrainedTokenizerBase, StoppingCriteria

from stand.laws.logprobs import TokenLogprobs
from stand.own_copy import own_copy
from stand.row import Row
from stand.texts.pieces import UNFINISHED


class StopRule:
    """Checks a row token by token, so that an end inside an accepted run cuts the run there."""

    def __init__(
        self,
        end_ids: Iterable[int],
        *,
        stop_strings: tuple[str, ...] = (),
        tokenizer: PreTrainedTokenizerBase | None = None,
        criteria: object = (),
        device: torch.device | str = "cpu",
        max_time: float | None = None,
    ):
        """criteria: one of transformers' `StoppingCriteria` or any iterable of them; every row asks copies of its own.
        max_time: seconds of the call's own time after which rows end with the step that is running."""
        if stop_strings and tokenizer is None:
            raise ValueError(f"stop strings need a tokenizer, got {list(stop_strings)}; pass tokenizer= to stand.wrap")
        if any(not isinstance(text, str) or not text for text in stop_strings):
            raise ValueError(f"a stop string must be text and must not be empty, got {list(stop_strings)}; drop it")
        if any("\ud800" <= sign <= "\udfff" for text in stop_strings for sign in text):
            raise ValueError(
                f"a stop string must be whole characters, got {list(stop_strings)} with half of one, which no text "
                "has; drop it"
            )
        self._end_ids = frozenset(end_ids)
        self._stop_strings = stop_strings
        self._tokenizer = tokenizer
        # A byte-level token is at least one byte: this many reach back over any stop string, three fewer do too.
        self._window = max((len(text.encode()) for text in stop_strings), default=0) + 4
        self._criteria = _checked_criteria(criteria)
        _copies(self._criteria)
        self._wanting = [bool(getattr(one, "wants_logprobs", False)) for one in self._criteria]
        self._reading = [bool(getattr(one, "reads_input_ids", True)) for one in self._criteria]
        self.wants_logprobs = True in self._wanting  # whether any of the criteria asks for them
        self._criteria_of: dict[int, list[StoppingCriteria]] = {}  # by row index
        self._device = device
        self._max_time = math.inf if max_time is None else max_time

    def with_ends(self, end_ids: Iterable[int], stop_strings: tuple[str, ...]) -> StopRule:
        """The same rule, same time, with other end tokens and stop strings; see `__init__`."""
        other = StopRule(end_ids, stop_strings=stop_strings, tokenizer=self._tokenizer, device=self._device)
        other._criteria, other._wanting, other._reading = self._criteria, self._wanting, self._reading
        other._max_time, other.wants_logprobs = self._max_time, self.wants_logprobs
        return other

    @property
    def least_logprobs(self) -> int:
        """How many likeliest tokens the criteria ask for."""
        return max((getattr(one, "least_logprobs", 0) for one in self._criteria), default=0)

    def forget(self, row: Row) -> None:
        """The row has ended: its copies of the criteria may go."""
        self._criteria_of.pop(row.index, None)

    def cut(
        self, row: Row, token_ids: list[int], *, elapsed: float = 0.0, logprobs: TokenLogprobs | None = None
    ) -> tuple[int, str | None]:
        """How many of a step's tokens the row gains, and why it ends with the last of them, if it does.

        elapsed: seconds that the call has worked so far. logprobs: of these tokens, where they are noted. The reason is
        "eos", "stop", "criteria", "length" or "time". Checked token by token, for an end may lie inside an accepted
        run; but time only ends a row together with a step, like transformers' `MaxTimeCriteria`.
        """
        if self._stop_strings or self._criteria or not self._end_ids.isdisjoint(token_ids):
            end = self._first_end(row, token_ids, logprobs)
            if end is not None:
                return end
        elif len(token_ids) >= row.num_remaining:
            return row.num_remaining, "length"
        return len(token_ids), "time" if elapsed > self._max_time else None

    def _first_end(self, row: Row, token_ids: list[int], logprobs: TokenLogprobs | None) -> tuple[int, str] | None:
        for count, token in enumerate(token_ids, start=1):
            if token in self._end_ids:
                return count, "eos"
            if self._stop_strings and self._ends_with_stop_string(row, token_ids[:count]):
                return count, "stop"
            newest = None if logprobs is None else logprobs.between(count - 1, count)
            if self._criteria and self._meets_criteria(row, token_ids[:count], newest):
                return count, "criteria"
            if count == row.num_remaining:
                return count, "length"
        return None

    def _ends_with_stop_string(self, row: Row, token_ids: list[int]) -> bool:
        """A stop string that begins in the prompt does not count, but the space that a row's first word begins with
        does: some tokenizers write it only behind another token, here the prompt's last one.

        Tokenizers with tokens of single bytes show no byte of a run in which one belongs to no character. So a run is
        read from each of four tokens on, at one of which a character begins.
        """
        recent = [*row.new_token_ids[-self._window :].tolist(), *token_ids][-self._window :]
        texts = [self._tokenizer.decode(recent)]
        if UNFINISHED in texts[0]:
            texts += [self._tokenizer.decode(recent[first:]) for first in range(1, 4)]
        if len(recent) < self._window:
            before = row.prompt[-1:].tolist()
            texts.append(self._tokenizer.decode([*before, *recent])[len(self._tokenizer.decode(before)) :])
        return any(stop in text for text in texts for stop in self._stop_strings)

    def _meets_criteria(self, row: Row, token_ids: list[int], newest: TokenLogprobs | None) -> bool:
        """All of them are asked about prompt and new tokens [1, L], as plain decoding of this row would ask, but those
        that read none; those that want log-probabilities get the newest token's."""
        if row.index not in self._criteria_of:
            self._criteria_of[row.index] = _copies(self._criteria)
        input_ids, told = None, {"logprobs": newest}
        if True in self._reading:
            tokens = np.concatenate([row.history, np.array(token_ids, dtype=np.int32)]).astype(np.int64)
            input_ids = torch.from_numpy(tokens)[None].to(self._device)
        answers = [
            _checked_answer(criterion(input_ids, None, **(told if wants else {})), criterion)
            for criterion, wants in zip(self._criteria_of[row.index], self._wanting, strict=True)
        ]
        return any(answers)


def as_strings(given: object) -> tuple[str, ...]:
    """One stop string, several, or None, as a tuple."""
    if given is None:
        return ()
    return (given,) if isinstance(given, str) or not isinstance(given, Iterable) else tuple(given)


def _checked_criteria(criteria: object) -> list[StoppingCriteria]:
    given = [] if criteria is None else list(criteria) if isinstance(criteria, Iterable) else [criteria]
    found = [one for each in given for one in (_checked_criteria(each) if isinstance(each, (list, tuple)) else [each])]
    for criterion in found:
        if not callable(criterion) or isinstance(criterion, type):
            raise ValueError(
                f"a stopping criterion must be callable with (input_ids, scores), got {criterion!r}; pass an object "
                "whose class derives from transformers' StoppingCriteria"
            )
    return found


def _copies(criteria: list[StoppingCriteria]) -> list[StoppingCriteria]:
    return own_copy(criteria, "a stopping criterion must be copyable, for every row asks a copy of its own")


def _checked_answer(answer: object, criterion: StoppingCriteria) -> bool:
    if isinstance(answer, torch.Tensor) and answer.numel() == 1 and not answer.is_floating_point():
        return bool(answer)
    is_array = isinstance(answer, np.ndarray) and (answer.dtype, answer.size) == (bool, 1)
    if is_array or isinstance(answer, (bool, np.bool_)):
        return bool(answer)
    got = f"{answer.dtype} {list(answer.shape)}" if isinstance(answer, torch.Tensor) else repr(answer)
    raise ValueError(
        f"a stopping criterion must answer with one truth value for its one row, got {got} from "
        f"{type(criterion).__name__}; return a tensor of truth values of shape [1]"
    )
