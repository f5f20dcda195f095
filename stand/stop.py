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

    def reason(self, row: Row) -> str | None:
        """Why the row ends with its newest token: "eos", "stop", "length", or None."""
        if int(row.history[-1]) in self._end_ids:
            return "eos"
        if self._stop_strings and self._holds_stop_string(row):
            return "stop"
        return "length" if row.num_remaining <= 0 else None

    def _holds_stop_string(self, row: Row) -> bool:
        recent = self._tokenizer.decode(row.new_token_ids[-self._window :].tolist())
        return any(text in recent for text in self._stop_strings)
