"""When a row ends: end tokens, stop strings, length."""

from __future__ import annotations

from collections.abc import Iterable

from transformers import PreTrainedTokenizerBase

from stand.row import Row


class StopRule:
    """Checks a row token by token, so that an end inside an accepted run cuts the run there."""

    def __init__(
        self,
        end_ids: Iterable[int],
        *,
        stop_strings: tuple[str, ...] = (),
        tokenizer: PreTrainedTokenizerBase | None = None,
    ):
        if stop_strings and tokenizer is None:
            raise ValueError(f"stop strings need a tokenizer, got {list(stop_strings)}; pass tokenizer= to stand.wrap")
        if any(not text for text in stop_strings):
            raise ValueError(f"a stop string must not be empty, got {list(stop_strings)}; leave it out")
        self._end_ids = frozenset(end_ids)
        self._stop_strings = stop_strings
        self._tokenizer = tokenizer
        # A byte-level token is at least one byte: this many tokens reach back over any stop string.
        self._window = max((len(text.encode()) for text in stop_strings), default=0) + 4

    def cut(self, row: Row, token_ids: list[int]) -> tuple[int, str | None]:
        """How many of a step's tokens the row gains, and why it ends with the last of them, if it does.

        The reason is "eos", "stop" or "length". Checked token by token: an end may lie inside an accepted run.
        """
        for count, token in enumerate(token_ids, start=1):
            if token in self._end_ids:
                return count, "eos"
            if self._stop_strings and self._ends_with_stop_string(row, token_ids[:count]):
                return count, "stop"
            if count == row.num_remaining:
                return count, "length"
        return len(token_ids), None

    def _ends_with_stop_string(self, row: Row, token_ids: list[int]) -> bool:
        recent = [*row.new_token_ids[-self._window :].tolist(), *token_ids][-self._window :]
        text = self._tokenizer.decode(recent)
        return any(stop in text for stop in self._stop_strings)
