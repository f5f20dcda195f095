"""Answers that must call a tool: the grammar of calls as the model's own templates write and read them."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence

from transformers import PreTrainedModel
from transformers.cli.serving.utils import get_response_template
from transformers.utils.chat_parsing import ResponseParser
from transformers.utils.chat_parsing.response_templates import load_response_template

from stand.plugins.request_processors import MOST_WHITESPACE

Body = Mapping[str, object]

NAME, ARGUMENTS = "probe_name", {"probe_key": "probe_value"}
WRITTEN = re.compile(r'\{\s*"probe_key"\s*:\s*"probe_value"\s*\}')
MAY_BE_A_NAME = re.compile(r"[\w.-]+")
BEFORE = {"type": "regex", "pattern": r"\n{0,2}"}  # as behind thoughts and other calls


def must_call(body: Body) -> list[Body]:
    """The functions of which an answer must call one; none where it is free. Raises ValueError for what names none."""
    choice = body.get("tool_choice")
    if choice in (None, "auto", "none"):
        return []
    tools = [tool for tool in body.get("tools") or [] if isinstance(tool, dict)]
    functions = [one for one in (tool.get("function", tool) for tool in tools) if isinstance(one, dict)]
    if isinstance(choice, dict) and choice.get("type") == "function":
        named = choice.get("function", choice)
        name = named.get("name") if isinstance(named, dict) else None
        functions = [one for one in functions if one.get("name") == name]
    elif choice != "required":
        functions = []
    if not functions or not all(MAY_BE_A_NAME.fullmatch(str(one.get("name", ""))) for one in functions):
        raise ValueError(
            "tool_choice must be auto, none, required, or a function that is among the tools, with names of letters, "
            f"digits, _, . and -, got {choice!r:.80}; see OpenAI's reference"
        )
    return functions


def form_of_calls(processor: object, model: PreTrainedModel, functions: Sequence[Body], *, is_one: bool) -> str:
    """JSON of xgrammar's structural tag: a call of one of these. is_one: else further ones may follow, where the
    model's answers may hold several.

    Raises ValueError where the form of calls is not known: it is what the chat template writes for a call, if that has
    its arguments as JSON, and transformers reads it back.
    """
    template = get_response_template(processor, model)
    try:
        found = None if template is None else _marks(processor, template)
    except Exception:  # nobody says which ones a template raises
        found = None
    if found is None:
        raise ValueError(
            "tool_choice must be auto or none for this model, got another one; its templates do not tell how it writes "
            "calls as JSON"
        )
    begin, end, repeats = found
    tags = [
        {
            "type": "tag",
            "begin": begin.replace(NAME, one["name"]),
            "content": {
                "type": "json_schema",
                "json_schema": one.get("parameters") or {"type": "object"},
                "max_whitespace_cnt": MOST_WHITESPACE,
            },
            "end": end.replace(NAME, one["name"]),
        }
        for one in functions
    ]
    call = {"type": "sequence", "elements": [BEFORE, {"type": "or", "elements": tags}]}
    form = call if is_one or not repeats else {"type": "plus", "content": call}
    return json.dumps({"type": "structural_tag", "format": form})


def _marks(processor: object, template: dict) -> tuple[str, str, bool] | None:
    """What a call has before its arguments and behind them, with `NAME`; whether an answer may hold several."""
    call = {"type": "function", "function": {"name": NAME, "arguments": ARGUMENTS}}
    asked = {"role": "user", "content": "A"}
    messages = [asked, {"role": "assistant", "content": "", "tool_calls": [call]}, asked]
    text = processor.apply_chat_template(messages, tokenize=False)
    field, found = load_response_template(template).fields["tool_calls"], WRITTEN.search(text)
    *_, opened = field.open_re.finditer(text, 0, found.start())
    begin = text[opened.start() : found.start()].lstrip()
    end = text[found.end() : field.close_re.search(text, found.end()).end()]
    written = "\n\n" + begin + json.dumps(ARGUMENTS) + end
    count = 2 if field.repeats else 1
    parser = ResponseParser(template, prefix="")
    parser.feed(written * count)
    read = [one["function"] for one in parser.finalize()[0].get("tool_calls", [])]
    is_read = read == [call["function"]] * count and (begin + end).count(NAME) == 1
    return (begin, end, field.repeats) if is_read else None
