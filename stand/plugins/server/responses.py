"""The endpoint of responses (/v1/responses), which agents ask, over transformers' handler of it."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing
from types import MappingProxyType

from fastapi import HTTPException
from transformers.cli.serving import response as library

from stand.plugins.server.asked import OF_RESPONSES, Asked, check_chat, check_fields
from stand.plugins.server.handlers import Body, Checked, numbers_of, worth_of_drafts
from stand.plugins.server.streams import Begun, before_stop, is_cut_off
from stand.scheduling.request import Trajectory

ITEMS = ("reasoning", "function_call", "function_call_output")
IN_CHATS = MappingProxyType({"input_text": "text", "output_text": "text", "input_image": "image_url"})  # parts' types
CUT_OFF = MappingProxyType({"status": "incomplete", "incomplete_details": {"reason": "max_output_tokens"}})


class ResponseHandler(Checked, library.ResponseHandler):
    """/v1/responses, of which nothing is stored. An answer that has met its limit is told as incomplete."""

    async def handle_request(self, body: Body, request_id: str) -> object:
        check_fields(body, OF_RESPONSES)
        given = {"parallel_tool_calls": True, **body}
        given["stream"] = bool(body.get("stream"))  # transformers streams unless it is told not to
        given["response_format"] = _form(given.pop("text", None))
        given["max_tokens"] = given.pop("max_output_tokens", None)
        if isinstance(body.get("input"), list):
            given["input"] = [_as_in_chats(item) for item in body["input"]]
        return await super().handle_request(given, request_id)

    def _validate_request(self, body: Body) -> None:
        """Fields were checked by the names that the client has for them."""
        Asked.of(body)
        try:
            messages = self._normalize_input(body)
            others = [tool["type"] for tool in body.get("tools") or [] if tool["type"] != "function"]
        except (AttributeError, KeyError, TypeError, HTTPException):
            raise ValueError(
                "input must be a text, or messages, calls of functions and what they gave, and tools functions, got "
                f"{body.get('input')!r:.80} and {body.get('tools')!r:.80}; see OpenAI's reference"
            ) from None
        check_chat({**body, "messages": messages})
        if others:
            raise ValueError(
                f"tools must be functions, got {', '.join(map(str, others))}; this server runs none by itself"
            )
        self._check_shown(body, messages, self._normalize_tools(body.get("tools")))

    @staticmethod
    def _cut(made: Body, answer: Trajectory, stops: list[str]) -> Body:
        for part in [part for item in made["output"] if item["type"] == "message" for part in item["content"]]:
            part["text"] = before_stop(part["text"], stops)
        return made

    def _joined(self, made: list[Body], answers: list[Trajectory], asked: Asked, text_of: Callable[[int], str]) -> Body:
        (body,), (answer,) = made, answers
        body["output"] = _shown(body["output"])
        details = body["usage"]["output_tokens_details"] | worth_of_drafts(answers)
        usage = {**body["usage"], "output_tokens_details": details}
        told = {"tool_choice": asked.tool_choice, **(CUT_OFF if is_cut_off(answer) else {})}
        return {**body, **told, "usage": usage, "system_fingerprint": numbers_of(answers)}

    @staticmethod
    def _normalize_input(body: Body) -> list[Body]:
        """Also where the first item is no message, which transformers takes for a part of one."""
        given = body["input"]
        if not isinstance(given, list) or not given or given[0].get("type") not in ITEMS:
            return library.ResponseHandler._normalize_input(body)
        opened = {**body, "input": [{"role": "system", "content": ""}, *given]}
        messages = library.ResponseHandler._normalize_input(opened)
        return messages if body.get("instructions") else messages[1:]

    async def _events(
        self, begun: list[Begun], events: AsyncIterator[tuple[Begun, Body]], asked: Asked, *beside: object
    ) -> AsyncIterator[str]:
        mended = _MendedEvents()
        async with aclosing(events):
            async for one, event in events:
                for told in mended.next(event):
                    if "response" in told:
                        told["response"]["tool_choice"] = asked.tool_choice
                    if told.get("response", {}).get("status") == "completed":
                        told["response"] |= CUT_OFF if is_cut_off(one.answer) else {}
                        told["type"] = f"response.{told['response']['status']}"
                    yield f"data: {json.dumps(told)}\n\n"


class _MendedEvents:
    """Of one stream. Transformers gives items that follow calls of functions the places of others, and behind them
    opens a message that is empty, or over; text behind such a call is in the whole response alone."""

    def __init__(self) -> None:
        self._places: dict[str, int] = {}  # by item
        self._held: list[Body] = []  # of a message behind a call, until it has text
        self._over: set[str] = set()
        self._has_called = False
        self._count = 0

    def next(self, event: Body) -> list[Body]:
        """Those that are to be told now."""
        kind, item = event["type"], event.get("item", {})
        name = event.get("item_id") or item.get("id")
        if name in self._over:
            return []
        if kind == "response.output_item.done":
            self._over.add(name)
        self._has_called |= item.get("type") == "function_call"
        is_late = item.get("type") == "message" and kind == "response.output_item.added" and self._has_called
        if is_late or self._held and not kind.endswith("delta") and name is not None:
            self._held = [] if kind == "response.output_item.done" else [*self._held, event]
            return []
        told, self._held = [*self._held, event], []
        return [self._numbered(one) for one in told]

    def _numbered(self, event: Body) -> Body:
        name = event.get("item_id") or event.get("item", {}).get("id")
        if name is not None:
            event["output_index"] = self._places.setdefault(name, len(self._places))
        if "response" in event:
            output = _shown(event["response"]["output"])
            event["response"]["output"] = sorted(output, key=lambda item: self._places[item["id"]])
        event["sequence_number"], self._count = self._count, self._count + 1
        return event


def _shown(output: list[Body]) -> list[Body]:
    """The items of a response without an empty message beside calls."""
    calls = [item for item in output if item["type"] == "function_call"]
    return [item for item in output if not calls or item["type"] != "message" or item["content"][0]["text"]]


def _form(text: object) -> object:
    """The form of an answer, as chats ask for it."""
    if text is None:
        return None
    if not isinstance(text, dict) or {name for name, value in text.items() if value is not None} - {"format"}:
        raise ValueError(f"text must hold a format alone, got {text!r:.80}; leave the rest out")
    form = text.get("format")
    is_schema = isinstance(form, dict) and form.get("type") == "json_schema"
    return {"type": "json_schema", "json_schema": form} if is_schema else form


def _as_in_chats(item: object) -> object:
    """An item of the input, its parts by the names that they have in chats."""
    if not isinstance(item, dict) or item.get("type") == "reasoning":
        return item
    kind = item.get("type")
    if isinstance(kind, str) and kind in IN_CHATS:
        return {**item, "type": IN_CHATS[kind]}
    lists = {name: item[name] for name in ("content", "output") if isinstance(item.get(name), list)}
    return {**item, **{name: list(map(_as_in_chats, parts)) for name, parts in lists.items()}}
