"""Answers that must call a tool, of a tiny model whose templates write calls as JSON between marks."""

import copy
import json

import pytest
from byte_tokenizer import byte_tokenizer
from tiny_models import tiny_model

pytest.importorskip("fastapi", reason="fastapi is not installed")
pytest.importorskip("xgrammar", reason="xgrammar is not installed")
import openai
from served import Served
from transformers import GenerationConfig

from stand.plugins.server.calls import form_of_calls

TEMPLATE = (  # calls are written as <C>{"name": "f", "arguments": {...}}</C>
    "{# tools #}{% for one in messages %}{{ one['content'] }}{% for call in one['tool_calls'] or [] %}<C>"
    '{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}</C>'
    "{% endfor %}{% endfor %}"
)
CALLS = {
    "start_anchor": "AB",
    "fields": {
        "tool_calls": {
            "open_pattern": r"\s*<C>", "close": "</C>", "content": "json", "repeats": True,
            "transform": {"type": "function", "function": "{content}"},
        },
        "content": {"close_pattern": "<end>", "content": "text"},
    },
}  # fmt: skip


def tool(name: str, *values: str) -> dict:
    """With one argument, which has one of these values."""
    schema = {"type": "object", "properties": {"a": {"enum": values}}, "required": ["a"], "additionalProperties": False}
    return {"type": "function", "function": {"name": name, "parameters": schema}}


TOOLS = [tool("f", "B", "C"), tool("g", "D")]
NAMED = {"type": "function", "function": {"name": "g"}}
ALLOWED = {("f", '{"a": "B"}'), ("f", '{"a": "C"}'), ("g", '{"a": "D"}')}
ASKED = {"temperature": 1.0, "max_tokens": 480, "tools": TOOLS}


@pytest.fixture(scope="module")
def calling(tmp_path_factory):
    tokenizer, model = byte_tokenizer('<>/{}":, _\nrstu'), copy.deepcopy(tiny_model("llama"))
    tokenizer.response_template = CALLS
    model.generation_config = GenerationConfig(eos_token_id=tokenizer.eos_token_id)
    served = Served(tmp_path_factory.mktemp("calls"), tokenizer, model, chat_template=TEMPLATE, num_rows=6, seed=5)
    yield served
    served.end()


def told(calls) -> list[tuple[str, str]]:
    return [(one.function.name, json.dumps(json.loads(one.function.arguments))) for one in calls or []]


@pytest.mark.parametrize("choice", ["required", NAMED])
def test_a_chat_must_call(calling, choice):
    found = calling.chat("AB", **ASKED, n=12, tool_choice=choice).choices
    calls = [told(choice.message.tool_calls) for choice in found]
    whole = [own for own, choice in zip(calls, found, strict=True) if choice.finish_reason == "tool_calls"]
    assert len(whole) > 6 and set().union(*whole) <= ALLOWED and all(whole)
    if choice == NAMED:
        assert all(own == [("g", '{"a": "D"}')] for own in whole)
    else:
        assert {name for own in whole for name, _ in own} == {"f", "g"} and max(map(len, whole)) > 1
    assert not any(told(one.message.tool_calls) for one in calling.chat("AB", **ASKED, n=6).choices)


def test_a_stream_must_call(calling):
    parts = [part.choices[0] for part in calling.chat("AB", **ASKED, tool_choice=NAMED, stream=True)]
    calls = [told([call]) for part in parts for call in part.delta.tool_calls or []]
    assert calls == [[("g", '{"a": "D"}')]] and parts[-1].finish_reason == "tool_calls"


def test_a_response_must_call(calling):
    tools = [{"type": "function", **one["function"]} for one in TOOLS]
    asked = {
        "temperature": 1.0,
        "max_output_tokens": 480,
        "tools": tools,
        "tool_choice": {"type": "function", "name": "g"},
    }
    answer = calling.client.responses.create(model=calling.name, input="AB", **asked)
    assert answer.tool_choice.model_dump() == asked["tool_choice"]
    assert [(item.type, item.name, json.loads(item.arguments)) for item in answer.output] == [
        ("function_call", "g", {"a": "D"})
    ]


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({"tool_choice": {"type": "function", "function": {"name": "h"}}}, "or a function that is among the tools"),
        ({"tool_choice": "any"}, "tool_choice must be auto, none, required"),
        ({"tool_choice": "required", "tools": [tool('f"', "B")]}, "with names of letters"),
        ({"tool_choice": "required", "response_format": {"type": "json_object"}}, "beside a response_format"),
        ({"tool_choice": NAMED, "tools": [tool("g", "D") | {"function": {"name": "g", "parameters": {"type": "x"}}}]},
         "parameters of tools must be a schema that xgrammar compiles"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("is_stream", [False, True])
def test_what_cannot_be_forced_is_refused(calling, asked, message, is_stream):
    with pytest.raises(openai.BadRequestError, match=message):
        calling.chat("AB", **ASKED | asked, stream=is_stream)


NOT_READ = copy.deepcopy(CALLS)
NOT_READ["fields"]["tool_calls"]["open_pattern"] = "<D>"
NO_JSON = copy.deepcopy(CALLS)
NO_JSON["fields"]["tool_calls"] |= {
    "content": "xml-inline",
    "content_args": {"tag_pattern": "<(?P<key>.*)>(?P<value>.*)"},
}


@pytest.mark.parametrize("template", [None, NOT_READ, NO_JSON], ids=["none", "not read", "no JSON"])
def test_where_the_form_of_calls_is_not_known_it_is_refused(calling, monkeypatch, template):
    monkeypatch.setattr(calling.tokenizer, "response_template", template)
    with pytest.raises(openai.BadRequestError, match="tool_choice must be auto or none for this model"):
        calling.chat("AB", **ASKED, tool_choice="required")


QWEN = (  # of Qwen3's own template, what matters here
    "{% for one in messages %}<|im_start|>{{ one.role }}\n{{ one.content }}{% for call in one.tool_calls or [] %}"
    "{{ '\n' if not loop.first or one.content else '' }}<tool_call>\n{\"name\": \"{{ call.function.name }}\", "
    '"arguments": {{ call.function.arguments | tojson }}}\n</tool_call>{% endfor %}<|im_end|>\n{% endfor %}'
)


def test_qwens_calls_are_written_as_its_template_does():
    """By the template that transformers has for answers of the family."""
    tokenizer, model = byte_tokenizer(), tiny_model("qwen2")
    tokenizer.chat_template = QWEN
    form = json.loads(form_of_calls(tokenizer, model, [TOOLS[1]["function"]], is_one=False))["format"]
    assert form["type"] == "plus"
    (tag,) = form["content"]["elements"][1]["elements"]
    assert (tag["begin"], tag["end"]) == ('<tool_call>\n{"name": "g", "arguments": ', "}\n</tool_call>")
