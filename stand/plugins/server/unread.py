"""Answers that transformers cannot read, such as a call of a tool that is cut off: they are shown as text."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from types import SimpleNamespace

from transformers.cli.serving.utils import response_events_to_chunks

Event = dict[str, object]

LOG = logging.getLogger(__name__)

NO_TEMPLATE = SimpleNamespace(config=SimpleNamespace(model_type=None))  # in the place of a model: none is known for it


def tell_unread(error: Exception) -> None:
    LOG.warning("an answer is shown as text, for its thoughts and calls of tools cannot be read: %s", error)


def without_template(processor: object) -> object:
    """In the place of a tokenizer or processor: it says how text is made of tokens, and not how answers are read."""
    return SimpleNamespace(decode=processor.decode)


class ForgivingParser:
    """Around transformers' parser of streamed answers. Where that fails, what it has kept back and all that comes is
    text."""

    def __init__(self, parser: object, special: Sequence[str]):
        """special: tokens that are no text."""
        self.initial_events: list[Event] = parser.initial_events
        self._parser, self._special = parser, special
        self._held = ""  # what was fed and not shown

    def feed(self, text: str) -> list[Event]:
        self._held += text
        if self._parser is None:
            return self._as_text()
        try:
            events = self._parser.feed(text)
            shown = response_events_to_chunks(events)
        except Exception as error:  # nobody says which ones a parser raises
            tell_unread(error)
            return self._as_text()
        if shown:
            _, is_found, rest = self._held.rpartition(shown[-1]) if isinstance(shown[-1], str) else ("", "", "")
            self._held = rest if is_found else ""
        return events

    def finalize(self) -> tuple[object, list[Event]]:
        if self._parser is None:
            return None, []
        try:
            message, events = self._parser.finalize()
            response_events_to_chunks(events)
        except Exception as error:
            tell_unread(error)
            return None, self._as_text()
        return message, events

    def _as_text(self) -> list[Event]:
        text, self._held, self._parser = self._held, "", None
        for token in self._special:
            text = text.replace(token, "")
        return [{"type": "region_chunk", "field": "content", "text": text}]
