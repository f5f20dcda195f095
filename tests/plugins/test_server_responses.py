"""The endpoint of responses: OpenAI's own client, a real server on this machine, and a tiny model."""

import copy
import json
import re
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import pytest
from grammar_cases import grammar_tokenizer, take_patterns
from tiny_models import tiny_model

pytest.importorskip("fastapi", reason="fastapi is not installed")
import openai
from served import CALLS, Served, written


def respond(served: Served, given: object, **settings) -> object:
    return served.client.responses.create(model=served.name, input=given, **settings)


@pytest.mark.parametrize("limit", [5, 350])
def test_a_response_is_the_engines(letters, limit):
    alone = letters.alone("ABC", max_new_tokens=limit, temperature=0.0)
    answer = respond(letters, "ABC", max_output_tokens=limit, temperature=0)
    assert answer.output_text == alone.texts[0] and answer.id.startswith("resp_")
    is_cut_off = alone.finish_reasons[0] == "length"
    assert is_cut_off == (limit == 5) and answer.status == ("incomplete" if is_cut_off else "completed")
    assert (answer.incomplete_details is None) != is_cut_off
    assert (answer.usage.input_tokens, answer.usage.output_tokens) == (3, len(alone.token_ids[0]))
    assert 0 <= answer.usage.output_tokens_details.accepted_prediction_tokens < len(alone.token_ids[0])


def test_a_sampled_response_tells_its_numbers(letters):
    settings = {"temperature": 0.8, "top_p": 0.9}
    answer = respond(letters, "ABC", max_output_tokens=20, **settings, extra_body={"top_k": 7})
    (alone,) = letters.repeated("ABC", answer.system_fingerprint, max_new_tokens=20, top_k=7, **settings)
    assert answer.output_text == alone.text


@pytest.mark.parametrize("limit", [9, 350])
def test_pieces_of_a_stream_are_the_response(letters, limit):
    whole = respond(letters, "ABC", max_output_tokens=limit, temperature=0)
    with letters.client.responses.stream(
        model=letters.name, input="ABC", max_output_tokens=limit, temperature=0
    ) as stream:
        events = list(stream)
    pieces = [event.delta for event in events if event.type == "response.output_text.delta"]
    assert "".join(pieces) == whole.output_text and len(pieces) > 3
    last = events[-1]
    assert (last.type, last.response.status) == (f"response.{whole.status}", whole.status)
    assert (
        last.response.incomplete_details == whole.incomplete_details and last.response.output_text == whole.output_text
    )
    assert last.response.usage.output_tokens == whole.usage.output_tokens
    assert [event.sequence_number for event in events] == list(range(len(events)))


def test_a_conversation_goes_on_with_what_was_answered(letters):
    """Its items are given back, as agents do; instructions come first."""
    first = respond(letters, [{"role": "user", "content": [{"type": "input_text", "text": "ABC"}]}],
                    max_output_tokens=4, temperature=0)  # fmt: skip
    items = [{"role": "user", "content": "ABC"}, *first.output, {"type": "message", "role": "user", "content": "Q"}]
    again = respond(letters, items, instructions="HI", max_output_tokens=6, temperature=0)
    alone = letters.alone(f"HIABC{first.output_text}Q", max_new_tokens=6, temperature=0.0)
    assert again.output_text == alone.texts[0] and again.usage.input_tokens == 10


def test_a_response_has_the_form_of_a_schema(tmp_path, monkeypatch):
    take_patterns(monkeypatch)
    served = Served(tmp_path, grammar_tokenizer(), copy.deepcopy(tiny_model("llama")), num_rows=4, seed=3)
    try:
        form = {"format": {"type": "json_schema", "name": "letters", "schema": {"pattern": "(ab|c){3}"}}}
        asked = {"temperature": 1.0, "max_output_tokens": 200}
        texts = [respond(served, "abc", text=form, **asked).output_text for _ in range(4)]
        assert all(re.fullmatch("(ab|c){3}", text) for text in texts)
        free = respond(served, "abc", text={"format": {"type": "text"}}, **asked)
        assert not re.fullmatch("(ab|c){3}", free.output_text)
    finally:
        served.end()


@pytest.mark.parametrize("is_stream", [False, True])
def test_calls_of_functions_are_items_and_come_back(letters, monkeypatch, is_stream):
    """In the tiny model's marks, where the template says that it shows tools."""
    monkeypatch.setattr(letters.tokenizer, "response_template", CALLS, raising=False)
    template = "{% for one in messages %}{{ one['content'] or 'F' }}{% endfor %}{# tools #}"
    monkeypatch.setattr(letters.tokenizer, "chat_template", template)
    tools = [{"type": "function", "name": "A", "parameters": {"type": "object"}}]
    asked = {"temperature": 0, "max_output_tokens": 20, "tools": tools, **written(letters.tokenizer, "CDTAtrueU=")}
    if is_stream:
        with letters.client.responses.stream(model=letters.name, input="ABC", **asked) as stream:
            output = list(stream)[-1].response.output
    else:
        output = respond(letters, "ABC", **asked).output
    message, call = output
    assert message.content[0].text == "D" and (call.type, call.name, call.arguments) == ("function_call", "A", "true")
    given = {"type": "function_call_output", "call_id": call.call_id, "output": "QRS"}
    call = call.model_copy(update={"arguments": "{}"})  # as templates take them
    items = [{"role": "user", "content": "ABC"}, message, call, given]
    again = respond(letters, items, temperature=0, max_output_tokens=3)
    assert again.usage.input_tokens == 3 + 1 + 3


@pytest.mark.parametrize("is_stream", [False, True])
@pytest.mark.parametrize("choice", [None, "auto", "none"])
def test_the_choice_of_tools_comes_back(letters, monkeypatch, is_stream, choice):
    template = "{% for one in messages %}{{ one['content'] }}{% endfor %}{# tools #}"
    monkeypatch.setattr(letters.tokenizer, "chat_template", template)
    tools = [{"type": "function", "name": "A", "parameters": {"type": "object"}}]
    asked = {"temperature": 0, "max_output_tokens": 3, "tools": tools}
    asked |= {} if choice is None else {"tool_choice": choice}
    if is_stream:
        with letters.client.responses.stream(model=letters.name, input="ABC", **asked) as stream:
            told = [event.response for event in stream if hasattr(event, "response")]
        assert len(told) >= 2
    else:
        told = [respond(letters, "ABC", **asked)]
    assert {one.tool_choice for one in told} == {choice or "auto"}


@pytest.mark.parametrize("is_stream", [False, True])
def test_an_answer_of_calls_alone_has_no_message(letters, monkeypatch, is_stream):
    """So that both ways lead to the same next turn."""
    monkeypatch.setattr(letters.tokenizer, "response_template", CALLS, raising=False)
    asked = {"temperature": 0, "max_output_tokens": 30, **written(letters.tokenizer, "CTAtrueU=")}
    if is_stream:
        with letters.client.responses.stream(model=letters.name, input="ABC", **asked) as stream:
            events = list(stream)
        assert [event.sequence_number for event in events] == list(range(len(events)))
        assert {event.output_index for event in events if hasattr(event, "output_index")} == {0}
        output = events[-1].response.output
    else:
        output = respond(letters, "ABC", **asked).output
    assert [(item.type, item.name) for item in output] == [("function_call", "A")]


def test_thoughts_that_are_given_back_are_shown_to_the_template(letters, monkeypatch):
    template = "{% for one in messages %}{{ one['reasoning_content'] }}{{ one['content'] }}{% endfor %}"
    monkeypatch.setattr(letters.tokenizer, "chat_template", template)
    thoughts = {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "QR"}]}
    items = [{"role": "user", "content": "ABC"}, thoughts, {"role": "assistant", "content": "D"}]
    asked = {"temperature": 0, "max_output_tokens": 3}
    assert respond(letters, items, **asked).usage.input_tokens == 3 + 2 + 1
    messages = [items[0], {**items[2], "reasoning_content": "QR"}]
    answer = letters.client.chat.completions.create(model=letters.name, messages=messages, max_tokens=3, temperature=0)
    assert answer.usage.prompt_tokens == 3 + 2 + 1


@pytest.mark.parametrize("instructions", [None, "HI"])
def test_a_history_may_begin_with_a_call(letters, monkeypatch, instructions):
    template = "{% for one in messages %}{{ one['content'] or 'F' }}{% endfor %}"
    monkeypatch.setattr(letters.tokenizer, "chat_template", template)
    call = {"type": "function_call", "call_id": "c", "name": "A", "arguments": "{}"}
    items = [call, {"type": "function_call_output", "call_id": "c", "output": "QRS"}]
    told = {} if instructions is None else {"instructions": instructions}
    answer = respond(letters, items, max_output_tokens=2, temperature=0, **told)
    assert answer.usage.input_tokens == len(instructions or "") + 1 + 3
    cut_off = respond(letters, items[1:], max_output_tokens=2, temperature=0, **told)
    assert cut_off.usage.input_tokens == len(instructions or "") + 3


HALF = "a\ud800"
A_CALL = {"type": "function_call", "call_id": "c", "name": "A", "arguments": "{}"}
MALFORMED = [
    {"input": [{"role": "user", "content": [{"type": ["input_text"]}]}]},
    {"input": [{"type": {}, "role": "user", "content": "A"}, {"type": []}]},
    {"input": "A", "tools": [{"type": None}]},
    {"input": "A", "tools": [{"type": "function", "name": HALF}]},
    *[
        {"input": [{"role": "user", "content": "A"}, {**A_CALL, "arguments": text}]}
        for text in ("[1]", "null", "3", "{")
    ],
    {"input": [{"role": "user", "content": "A"}, {**A_CALL, "arguments": '{"a": "\\ud800"}'}]},
    {"input": [{"role": "user", "content": "A"}, {**A_CALL, "name": 5}]},
    {"input": 5},
    {"input": [{"type": "nothing"}]},
    {"input": "A", "temperature": 10**400},
    {"input": "A", "repetition_penalty": 10**400},
    {"input": "A", "generation_config": '{"top_k": [1]}'},
    {"input": "A", "chat_template_kwargs": {"chat_template": "{{ 1/0 }}"}},
    {"input": "A", "chat_template_kwargs": {"messages": []}},
    {"input": "A", "chat_template_kwargs": {"a": HALF}},
]


@pytest.mark.parametrize("body", MALFORMED, ids=lambda body: None)
def test_what_is_malformed_is_the_clients_fault(letters, body):
    data = json.dumps({"model": letters.name, "max_output_tokens": 2, **body}).encode()
    request = Request(f"{letters.client.base_url}responses", data, {"Content-Type": "application/json"})
    with pytest.raises(HTTPError) as raised:
        urlopen(request, timeout=60)
    assert raised.value.code == 400 and json.load(raised.value)["error"]["type"] == "invalid_request_error"


REFUSED = [
    ({"input": []}, "messages must be a list of at least one message"),
    ({"input": [3]}, "input must be a text, or messages, calls of functions"),
    ({"input": [{"role": "user", "content": "A"}, {"type": "function_call"}]}, "input must be a text, or messages"),
    ({"input": [{"role": "user", "content": [{"type": "input_text"}]}]}, "messages must be a list of at least"),
    ({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]}, "got image_url"),
    ({"tools": [{"type": "web_search"}]}, "tools must be functions, got web_search"),
    ({"tools": [3]}, "input must be a text, or messages"),
    ({"tools": [{"type": "function", "name": "A"}]}, "template shows it none"),
    ({"text": {"format": None, "verbosity": "low"}}, "text must hold a format alone"),
    ({"text": {"format": {"type": "xml"}}}, "response_format must be of type"),
    ({"max_output_tokens": "9"}, "max_output_tokens must be an integer"),
    ({"max_output_tokens": 0}, "max_output_tokens must be"),
    ({"previous_response_id": "resp_1"}, "previous_response_id must be left out"),
    ({"reasoning": {"effort": "low"}}, "reasoning must be left out"),
    ({"extra_body": {"max_tokens": 3}}, "max_tokens must be left out"),
    ({"extra_body": {"response_format": {"type": "text"}}}, "response_format must be left out"),
    ({"extra_body": {"n": 2}}, "n must be left out"),
    ({"top_logprobs": 2}, "top_logprobs must be left out"),
    ({"background": True}, "background must be left out"),
    ({"truncation": "auto"}, "truncation must be left out"),
]


@pytest.mark.parametrize("is_stream", [False, True])
@pytest.mark.parametrize(("settings", "message"), REFUSED, ids=lambda given: None)
def test_what_cannot_be_honoured_is_refused(letters, settings, message, is_stream):
    given = {"model": letters.name, "input": "ABC", "stream": is_stream, **settings}
    with pytest.raises(openai.BadRequestError, match=message):
        letters.client.responses.create(**given)


def test_tools_that_are_not_to_be_called_are_left_out(letters):
    found = respond(letters, "ABC", max_output_tokens=2, tools=[{"type": "web_search"}], tool_choice="none")
    assert found.usage.input_tokens == 3
