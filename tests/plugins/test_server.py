"""The server for OpenAI's clients: their own client, a real server on this machine, and a tiny model."""

import asyncio
import copy
import json
import re
import signal
import subprocess
import sys
import threading
import time
import typing
from concurrent.futures import ThreadPoolExecutor
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import numpy as np
import pytest
from grammar_cases import grammar_tokenizer, take_patterns
from letter_tokenizer import letter_tokenizer
from tiny_models import tiny_model

import stand
from stand.plugins.open_runs import ClosedError

pytest.importorskip("fastapi", reason="fastapi is not installed")
import openai
from free_port import free_port
from openai.types.chat.completion_create_params import CompletionCreateParamsNonStreaming as ChatParams
from openai.types.completion_create_params import CompletionCreateParamsNonStreaming as TextParams
from openai.types.responses.response_create_params import ResponseCreateParamsNonStreaming as ResponseParams
from served import CALLS, TEMPLATE, Served, written
from transformers import GenerationConfig

from stand.plugins.server import __main__ as command
from stand.plugins.server.answers import ASKED, Answers
from stand.plugins.server.asked import NEUTRAL, OF_CHATS, OF_RESPONSES, OF_TEXTS, OF_THE_CLIENT, Asked, check_fields
from stand.plugins.server.streams import Begun, _Streamer, before_stop


def test_a_greedy_chat_is_the_engines(letters):
    for limit in (5, 200):
        alone = letters.alone("ABC", max_new_tokens=limit, temperature=0.0)
        answer = letters.chat("ABC", max_tokens=limit, temperature=0)
        (choice,) = answer.choices
        assert choice.message.content == alone.texts[0] and choice.message.role == "assistant"
        assert choice.finish_reason == {"length": "length", "eos": "stop"}[alone.finish_reasons[0]]
        assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (3, len(alone.token_ids[0]))
        details = answer.usage.completion_tokens_details
        assert 0 <= details.accepted_prediction_tokens < len(alone.token_ids[0])
        assert details.rejected_prediction_tokens >= 0
    assert letters.client.models.list().data[0].id == letters.name


@pytest.mark.parametrize("name", ["max_tokens", "max_completion_tokens"])
def test_answers_end_where_they_are_told_to(letters, name):
    answer = letters.chat("ABC", temperature=0, **{name: 3})
    assert answer.usage.completion_tokens == 3 and answer.choices[0].finish_reason == "length"
    whole = letters.alone("HIHI", max_new_tokens=60, temperature=0.0, stop_token_ids=[]).texts[0]
    stop = whole[4:6]
    found = letters.alone("HIHI", max_new_tokens=60, temperature=0.0, stop=stop)
    answer = letters.chat("HIHI", temperature=0, stop=[stop], **{name: 60})
    assert found.texts[0] == whole[:6] and answer.choices[0].message.content == whole[: whole.find(stop)]
    assert answer.choices[0].finish_reason == "stop"
    chunks = list(letters.chat("HIHI", temperature=0, stop=stop, stream=True, **{name: 60}))
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == whole[: whole.find(stop)]
    texts = letters.text(["HIHI", "HIHI"], temperature=0, stop=stop, max_tokens=60).choices
    assert [choice.text for choice in texts] == [whole[: whole.find(stop)]] * 2


@pytest.mark.long
def test_without_a_limit_an_answer_may_fill_the_context(letters):
    answer = letters.text(["QRS"] * 8, temperature=0.9)
    runs = [letters.repeated("QRS", one, temperature=0.9) for one in answer.system_fingerprint.split("; ")]
    assert [choice.text for choice in answer.choices] == [one.text for (one,) in runs]
    assert answer.usage.completion_tokens == sum(len(one.token_ids) for (one,) in runs) > 300


def test_several_answers_with_log_probabilities(letters):
    """Sampled though the model's own configuration does not say so."""
    settings = {"temperature": 0.7, "top_p": 0.9}
    answer = letters.chat("ABC", max_tokens=9, n=3, logprobs=True, top_logprobs=2, seed=21, **settings)
    alone = letters.repeated("ABC", answer.system_fingerprint, max_new_tokens=9, logprobs=2, **settings)
    texts = [one.text for one in alone]
    assert [choice.message.content for choice in answer.choices] == texts and len(set(texts)) == 3
    assert [choice.index for choice in answer.choices] == [0, 1, 2] and answer.usage.prompt_tokens == 3
    assert answer.usage.completion_tokens == sum(len(one.token_ids) for one in alone)
    for one, choice in zip(alone, answer.choices, strict=True):
        places, found = choice.logprobs.content, one.logprobs
        assert [place.token for place in places] == [letters.tokenizer.decode([token]) for token in one.token_ids]
        assert np.allclose([place.logprob for place in places], found.of_tokens, atol=1e-4)
        assert [bytes(place.bytes).decode() for place in places] == [place.token for place in places]
        likely = [[other.logprob for other in place.top_logprobs] for place in places]
        assert np.allclose(likely, found.top, atol=1e-4)


def test_texts_and_token_ids_are_completed_together(letters):
    wanted = [
        letters.alone(prompt, max_new_tokens=6, temperature=0.0, num_return_sequences=2, logprobs=1)
        for prompt in ("ABC", [5, 9, 11])
    ]
    texts = letters.text(["ABC", "ABC"], max_tokens=6, temperature=0, n=2, logprobs=1)
    ids = letters.text([[5, 9, 11]], max_tokens=6, temperature=0, n=2)
    assert [choice.text for choice in texts.choices] == wanted[0].texts * 2
    assert [choice.text for choice in letters.text([5, 9, 11], max_tokens=6, temperature=0).choices] == wanted[1].texts[
        :1
    ]
    assert [choice.text for choice in ids.choices] == wanted[1].texts
    assert [choice.index for choice in texts.choices] == [0, 1, 2, 3] and texts.usage.prompt_tokens == 6
    assert texts.usage.completion_tokens == 2 * sum(map(len, wanted[0].token_ids))
    found = texts.choices[0].logprobs
    assert found.tokens == [letters.tokenizer.decode([token]) for token in wanted[0].token_ids[0]]
    assert np.allclose(found.token_logprobs, wanted[0].logprobs[0].of_tokens, atol=1e-4)
    assert [list(likely.values())[0] for likely in found.top_logprobs] == pytest.approx(found.token_logprobs, abs=1e-4)
    assert found.text_offset == list(range(len(found.tokens)))


@pytest.mark.parametrize("is_chat", [True, False])
def test_pieces_of_a_stream_are_the_answer(letters, is_chat):
    settings = {"max_tokens": 30, "temperature": 0}
    if is_chat:
        whole, chunks = letters.chat("ABC", **settings), list(letters.chat("ABC", stream=True, **settings))
        pieces = [chunk.choices[0].delta.content or "" for chunk in chunks]
        wanted = whole.choices[0].message.content
    else:
        whole, chunks = letters.text("ABC", **settings), list(letters.text("ABC", stream=True, **settings))
        pieces = [chunk.choices[0].text for chunk in chunks]
        wanted = whole.choices[0].text
    assert "".join(pieces) == wanted and len([piece for piece in pieces if piece]) > 3
    assert chunks[-1].choices[0].finish_reason == whole.choices[0].finish_reason
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens


def by_choice(chunks) -> list[dict]:
    """Of each index: its text, its only reason to end, and the numbers it had."""
    made: dict[int, dict] = {}
    for chunk in chunks:
        for one in chunk.choices:
            choice = made.setdefault(one.index, {"text": "", "reason": None})
            choice["text"] += (one.delta.content or "") if hasattr(one, "delta") else one.text
            if one.finish_reason is not None:
                assert choice["reason"] is None
                choice |= {"reason": one.finish_reason, "numbers": chunk.system_fingerprint}
    return [made[index] for index in range(len(made))]


@pytest.mark.parametrize("is_chat", [True, False])
def test_several_answers_come_in_one_stream(letters, is_chat):
    """Each is the row whose numbers it tells, and ends when it does; more of them than are decoded together."""
    ask, settings = letters.chat if is_chat else letters.text, {"temperature": 1.0, "max_tokens": 90, "n": 6}
    chunks = list(ask("QRS", **settings, stream=True))
    choices = by_choice(chunks)
    runs = [letters.repeated("QRS", one["numbers"], temperature=1.0, max_new_tokens=90) for one in choices]
    assert [one["text"] for one in choices] == [run.text for (run,) in runs] and len(
        {one["text"] for one in choices}
    ) > 3
    assert [one["reason"] for one in choices] == [{"eos": "stop"}.get(run.finish_reason, "length") for (run,) in runs]
    order = [one.index for chunk in chunks for one in chunk.choices if one.finish_reason is None]
    assert order != sorted(order)
    usages = [chunk.usage for chunk in chunks if chunk.usage is not None]
    assert usages == [chunks[-1].usage] and usages[0].prompt_tokens == 3
    assert usages[0].completion_tokens == sum(len(run.token_ids) for (run,) in runs)


def test_an_answer_of_a_stream_ends_before_others_do(letters):
    chunks = list(letters.text(["QRS", "ABC"], temperature=1.0, max_tokens=300, n=2, stream=True))
    lengths = [len(one["text"]) for one in by_choice(chunks)]
    ends = [index for index, chunk in enumerate(chunks) if chunk.choices[0].finish_reason is not None]
    assert len(lengths) == 4 and min(lengths) < max(lengths) and ends[0] < len(chunks) - 5
    assert chunks[-1].usage.prompt_tokens == 6


def test_several_prompts_come_in_one_stream(letters):
    settings = {"temperature": 0, "max_tokens": 20, "n": 2}
    wanted = letters.text(["ABC", "BCD"], **settings)
    found = by_choice(letters.text(["ABC", "BCD"], **settings, stream=True))
    assert [one["text"] for one in found] == [choice.text for choice in wanted.choices]
    ids = by_choice(letters.text([5, 9, 11], **settings, stream=True))
    assert [one["text"] for one in ids] == [choice.text for choice in letters.text([5, 9, 11], **settings).choices]
    with pytest.raises(openai.BadRequestError, match="prompt tokens must be in"):
        letters.text([[5, 6], [7, 8], [10**6]], **ENDLESS, stream=True)
    until(lambda: open_requests(letters) == 0)


@pytest.mark.parametrize("is_asked", [True, False])
def test_usage_comes_apart_where_it_is_asked_for(letters, is_asked):
    options = {"stream_options": {"include_usage": is_asked}}
    chunks = list(letters.chat("ABC", temperature=0, max_tokens=4, n=2, stream=True, **options))
    usages = [chunk.usage and chunk.usage.completion_tokens for chunk in chunks]
    assert usages == [None] * (len(chunks) - 1) + [8] and bool(chunks[-1].choices) != is_asked


def test_a_stream_that_is_refused_does_not_begin(letters):
    with pytest.raises(openai.BadRequestError, match="must fit into the model's context of 512 tokens, got 3 \\+ 4000"):
        letters.chat("ABC", stream=True, max_tokens=4000)
    with pytest.raises(openai.BadRequestError, match="temperature must be >= 0"):
        letters.text("ABC", stream=True, temperature=-1.0)


@pytest.mark.long
def test_requests_that_wait_for_a_run_hold_up_no_others(letters):
    """Four runs are in use, and more requests wait for runs of their own than an event loop has threads."""
    done, begun = [], threading.Semaphore(0)

    def ask(name, limit, penalty, temperature=0.0):
        endless = {"extra_body": {"generation_config": '{"eos_token_id": []}'}}
        given = {"temperature": temperature, "max_tokens": limit, "presence_penalty": penalty, **endless}
        for number, _ in enumerate(letters.chat("ABC", **given, stream=True)):
            if number == 1:
                begun.release()
        done.append(name)

    with ThreadPoolExecutor(32) as pool:
        for number in range(4):
            pool.submit(ask, "long", 300, number / 4)
        for _ in range(4):
            begun.acquire(timeout=60)
        waiting = [pool.submit(ask, "waiting", 2, 0.0, 1.0 + number) for number in range(12)]
        time.sleep(0.3)
        pool.submit(ask, "short", 2, 0.5).result()
        assert done == ["short"] and not any(one.done() for one in waiting)


def test_a_prompt_that_is_still_read_holds_up_nobody(letters, monkeypatch):
    begun, may_end = threading.Event(), threading.Event()
    read = letters.tokenizer.apply_chat_template

    def read_slowly(*given, **named):
        begun.set()
        assert may_end.wait(60)
        return read(*given, **named)

    monkeypatch.setattr(letters.tokenizer, "apply_chat_template", read_slowly)
    with ThreadPoolExecutor(1) as pool:
        try:
            waiting = pool.submit(letters.chat, "ABC", max_tokens=2)
            assert begun.wait(60) and letters.client.with_options(timeout=10).models.list().data
        finally:
            may_end.set()
    assert waiting.result().choices


def test_clients_are_decoded_together(letters):
    settings = {"max_tokens": 40, "temperature": 0, "extra_body": {"generation_config": '{"eos_token_id": []}'}}
    engine, prompts = letters.answers.engine, ["ABC", "BCD", "CDE", "DEF"]
    steps = []
    forward = engine.model.forward
    engine.model.forward = lambda *given, **named: steps.append(1) or forward(*given, **named)
    try:
        with ThreadPoolExecutor(4) as pool:
            found = list(pool.map(lambda text: letters.chat(text, **settings).choices[0].message.content, prompts))
    finally:
        del engine.model.forward
    assert found == [
        letters.alone(text, max_new_tokens=40, temperature=0.0, stop_token_ids=[]).texts[0] for text in prompts
    ]


REFUSED = [
    ({"presence_penalty": 2.5}, r"presence_penalty must be a number in \[-2, 2\], got 2.5"),
    ({"extra_body": {"frequency_penalty": "1"}}, r"frequency_penalty must be a number in \[-2, 2\], got '1'"),
    ({"extra_body": {"presence_penalty": False}}, r"presence_penalty must be a number in \[-2, 2\], got False"),
    ({"extra_body": {"thinking_token_budget": -1}}, "thinking_token_budget must be an integer >= 0, got -1"),
    ({"extra_body": {"thinking_token_budget": 9}}, "a thinking budget needs to know how thoughts end, got 9 tokens"),
    ({"tool_choice": "required"}, "tool_choice must be auto, none, required, or a function that is among the tools"),
    ({"reasoning_effort": "low"}, "reasoning_effort must be left out"),
    ({"extra_body": {"guided_json": {}}}, "guided_json must be left out"),
    ({"stream_options": {"include_usage": "yes"}}, "stream_options must be an object"),
    ({"top_logprobs": 2}, "top_logprobs needs logprobs=true"),
    ({"n": 0}, "n must be an integer in \\[1, 1024\\], got 0"),
    ({"n": 2000}, "n must be an integer in"),
    ({"extra_body": {"n": "two"}}, "n must be an integer in .*got 'two'"),
    ({"logprobs": True, "top_logprobs": 21}, "top_logprobs must be an integer in"),
    ({"extra_body": {"stream": "yes"}}, "stream must be true or false"),
    ({"extra_body": {"temperature": "0.5"}}, "temperature must be a number"),
    ({"extra_body": {"max_tokens": [1]}}, "max_tokens must be an integer"),
    ({"extra_body": {"stop": 5}}, "stop must be a text, or several"),
    ({"extra_body": {"logit_bias": [1]}}, "logit_bias must be an object of token ids and numbers"),
    ({"extra_body": {"logit_bias": {"a": 1}}}, "logit_bias must be an object of token ids and numbers"),
    ({"extra_body": {"generation_config": "{"}}, "generation_config must be a text of JSON"),
    ({"extra_body": {"generation_config": '{"nonsense": 3}'}}, "generation_config must be a text of JSON"),
    ({"extra_body": {"chat_template_kwargs": {"tokenize": False}}}, "chat_template_kwargs must be an object"),
    ({"extra_body": {"tools": 5}}, "tools must be a list of objects"),
    ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "the model's chat template shows it none"),
    ({"extra_body": {"messages": []}}, "messages must be a list of at least one message"),
    ({"extra_body": {"messages": [{}]}}, "messages must be a list of at least one message"),
    ({"extra_body": {"messages": [{"role": "user", "content": 5}]}}, "messages must be a list of at least"),
    ({"extra_body": {"messages": [{"role": "user", "content": [{"type": "text"}]}]}}, "messages must be a list of"),
    (
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "http://none"}}]}]},
        "contents must be of text for this model, got image_url",
    ),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "nonsense"}}}},
        "response_format must be a schema that xgrammar compiles here",
    ),
    ({"response_format": {"type": "xml"}}, "response_format must be of type"),
    ({"response_format": {"type": "json_schema"}}, "response_format must be of type"),
    ({"temperature": -1.0}, "temperature must be >= 0"),
    ({"max_tokens": 0}, "max_tokens must be an integer >= 1, got 0"),
    ({"max_completion_tokens": -1}, "max_completion_tokens must be an integer >= 1, got -1"),
    ({"max_tokens": 4000}, "must fit into the model's context"),
    ({"model": "another"}, "pinned to"),
]


@pytest.mark.parametrize(("settings", "message"), REFUSED, ids=lambda given: None)
def test_what_cannot_be_honoured_is_refused(letters, settings, message):
    given = {"model": letters.name, "messages": [{"role": "user", "content": "ABC"}], "max_tokens": 2, **settings}
    with pytest.raises(openai.BadRequestError, match=message) as raised:
        letters.client.chat.completions.create(**given)
    assert raised.value.body["type"] == "invalid_request_error"


KNOWS = "{%- for one in messages %}{% if one.role in ('system', 'user') %}{{ one.content }}{% endif %}{% endfor %}"
FIRST = "{%- for one in messages %}{% if one.role == 'user' or loop.first %}{{ one.content }}{% endif %}{% endfor %}"
REFUSES = "{%- for one in messages %}{% if one.role == 'system' %}{{ raise_exception('no system here') }}{% endif %}"
REFUSES += "{{ one.content }}{% endfor %}"
SHOUTS = "{%- for one in messages %}{{ one.content | trim | upper }}{% endfor %}"


@pytest.mark.parametrize(
    ("template", "roles", "message"),
    [
        (KNOWS, ["system", "user", "assistant", "user"], None),
        (KNOWS, ["developer", "user"], "got one of role 'developer' that it leaves out"),
        (FIRST, ["system", "user"], None),
        (FIRST, ["user", "system", "user"], "got one of role 'system' that it leaves out"),
        (REFUSES, ["system", "user"], "no system here"),
        (SHOUTS, ["system", "user"], None),
    ],
)
def test_messages_that_the_template_leaves_out_are_refused(letters, monkeypatch, template, roles, message):
    """Of answers it may leave out parts, and of contents it may change letters."""
    monkeypatch.setattr(letters.tokenizer, "chat_template", template)
    asked = {"model": letters.name, "max_tokens": 2}
    for content in ("ABC", [{"type": "text", "text": "ABC"}]):
        messages = [{"role": role, "content": content} for role in roles]
        if message is None:
            assert letters.client.chat.completions.create(messages=messages, **asked).choices
        else:
            with pytest.raises(openai.BadRequestError, match=message):
                letters.client.chat.completions.create(messages=messages, **asked)
    empty = [{"role": "developer", "content": ""}, {"role": "user", "content": "ABC"}]
    if template == KNOWS:
        assert letters.client.chat.completions.create(messages=empty, **asked).choices


@pytest.mark.parametrize("prompt", [[], 5, [[1], None], {"text": "ABC"}, [[True]], [[]]])
def test_prompts_are_texts_or_token_ids(letters, prompt):
    with pytest.raises(openai.BadRequestError, match="prompt must be a text or token ids, or several"):
        letters.text(prompt, max_tokens=2)


@pytest.mark.parametrize("path", ["completions", "chat/completions", "nowhere"])
@pytest.mark.parametrize(
    "body", [b"{", b'{"prompt": "a\\ud800", "messages": [{"role": "user", "content": "\\ud800"}]}']
)
def test_errors_have_the_form_of_openais(letters, path, body):
    """Also of what is no JSON, of half a character, and of paths that are not served."""
    request = Request(f"{letters.client.base_url}{path}", body, {"Content-Type": "application/json"})
    with pytest.raises(HTTPError) as raised:
        urlopen(request, timeout=60)
    assert raised.value.code == (404 if path == "nowhere" else 400)
    error = json.load(raised.value)["error"]
    assert error["type"] == "invalid_request_error"
    if body == b"{" and path != "nowhere":
        assert re.fullmatch("the body must be an object of JSON, got JSON decode error; see .*", error["message"])


@pytest.mark.parametrize(
    ("params", "served"), [(ChatParams, OF_CHATS), (TextParams, OF_TEXTS), (ResponseParams, OF_RESPONSES)]
)
def test_every_field_of_the_client_is_served_harmless_or_refused(params, served):
    fields = set(typing.get_type_hints(params))
    assert len(fields) > 15
    for name in fields - served - OF_THE_CLIENT:
        with pytest.raises(ValueError, match=f"{name} must be left out, got 'something'"):
            check_fields({name: "something"}, served)
        check_fields({name: None}, served)
    for name, values in NEUTRAL.items():
        for value in values:
            check_fields({name: value}, served)


def test_neutral_fields_are_taken(letters):
    answer = letters.chat("ABC", max_tokens=2, presence_penalty=0, n=1, user="me", store=False, tool_choice="auto")
    assert answer.usage.completion_tokens <= 2
    assert letters.chat("ABC", max_tokens=2, response_format={"type": "text"}).usage.completion_tokens <= 2
    nothing = {"chat_template_kwargs": None, "tools": None, "stop": None, "top_k": -1}
    assert letters.chat("ABC", max_tokens=2, extra_body=nothing).usage.completion_tokens <= 2
    tools = [{"type": "function", "function": {"name": "f"}}]
    assert letters.chat("ABC", max_tokens=2, tools=tools, tool_choice="none").usage.prompt_tokens == 3


def test_added_fields_are_the_engines(letters):
    more = {"top_k": 3, "min_p": 0.05, "repetition_penalty": 1.3}
    settings = {"temperature": 1.0, "max_tokens": 12}
    answer = letters.chat("ABC", extra_body=more, **settings)
    (alone,) = letters.repeated("ABC", answer.system_fingerprint, temperature=1.0, max_new_tokens=12, **more)
    assert answer.choices[0].message.content == alone.text
    biased = {"temperature": 0, "max_tokens": 4, "logit_bias": {"7": 100}}
    assert letters.chat("ABC", **biased).choices[0].message.content == letters.tokenizer.decode([7] * 4)
    assert letters.text("ABC", **biased).choices[0].text == letters.tokenizer.decode([7] * 4)


def test_requests_of_one_seed_are_draws_of_their_own(letters):
    answers = [
        letters.chat("ABC", temperature=1.0, max_tokens=20, seed=77).choices[0].message.content for _ in range(3)
    ]
    assert len(set(answers)) == 3


@pytest.mark.parametrize("thoughts_end", [None, "z"])
def test_answers_have_the_form_of_a_schema(tmp_path, monkeypatch, thoughts_end):
    take_patterns(monkeypatch)
    model = copy.deepcopy(tiny_model("llama"))
    served = Served(tmp_path, grammar_tokenizer(), model, num_rows=4, seed=3, thoughts_end=thoughts_end)
    try:
        form = {"type": "json_schema", "json_schema": {"name": "letters", "schema": {"pattern": "(ab|c){3}"}}}
        answer = served.chat("abc", temperature=1.0, max_tokens=200, n=12, response_format=form)
        texts = [choice.message.content for choice in answer.choices]
        if thoughts_end is not None:  # some end in their thoughts, by the end token
            texts = [text.partition(thoughts_end)[2] for text in texts if thoughts_end in text]
        assert len(texts) > 1 and all(re.fullmatch("(ab|c){3}", text) for text in texts)
        free = served.chat("abc", temperature=1.0, max_tokens=20)
        assert not re.fullmatch("(ab|c){3}", free.choices[0].message.content)
    finally:
        served.end()


@pytest.mark.parametrize("asked", [{"presence_penalty": 2.0}, {"frequency_penalty": 1.5, "presence_penalty": -0.5}])
def test_penalties_are_those_of_the_engine(letters, asked):
    """Of a chat, of a text, and of a stream; with none the answer is another one."""
    penalties = stand.OutputPenalties(**{name.partition("_")[0]: value for name, value in asked.items()})
    settings = {"max_new_tokens": 30, "temperature": 0.0}
    alone = letters.alone("ABC", **settings, logits_processors=penalties).texts[0]
    assert alone != letters.alone("ABC", **settings).texts[0]
    asked = {"max_tokens": 30, "temperature": 0, **asked}
    assert letters.chat("ABC", **asked).choices[0].message.content == alone
    assert letters.text("ABC", **asked).choices[0].text == alone
    pieces = letters.chat("ABC", **asked, stream=True)
    assert "".join(piece.choices[0].delta.content or "" for piece in pieces if piece.choices) == alone


def test_thoughts_have_a_budget_unless_the_prompt_ends_them(tmp_path):
    """z ends thoughts. Settings of laws may differ by request, and each is decoded by its own."""
    served = Served(tmp_path, grammar_tokenizer(), copy.deepcopy(tiny_model("llama")), num_rows=4, thoughts_end="z")
    try:
        budget = {"extra_body": {"thinking_token_budget": 4, "generation_config": '{"eos_token_id": []}'}}
        asked = {"temperature": 1.0, "max_tokens": 30, "n": 6, **budget}

        def by_chat(prompt):
            chosen = served.chat(prompt, **asked, logprobs=True).choices
            return [[place.token for place in one.logprobs.content] for one in chosen]

        for answers in (
            by_chat("abc"),
            [one.logprobs.tokens for one in served.text("abc", **asked, logprobs=0).choices],
        ):
            assert len(answers) == 6 and all("z" in tokens[:5] for tokens in answers)
            assert any("z" not in tokens[:4] for tokens in answers)
        assert any("z" not in tokens[:5] for tokens in by_chat("abcz"))
    finally:
        served.end()


def test_an_answer_by_a_schema_begins_at_once_where_the_prompt_ends_thoughts(tmp_path, monkeypatch):
    take_patterns(monkeypatch)
    served = Served(tmp_path, grammar_tokenizer(), copy.deepcopy(tiny_model("llama")), num_rows=4, thoughts_end="z")
    try:
        form = {"type": "json_schema", "json_schema": {"name": "letters", "schema": {"pattern": "(ab|c){3}"}}}
        answer = served.chat("abcz", temperature=1.0, max_tokens=200, n=4, response_format=form)
        assert all(re.fullmatch("(ab|c){3}", choice.message.content) for choice in answer.choices)
    finally:
        served.end()


def test_a_model_that_may_think_or_not(tmp_path, monkeypatch):
    """y begins thoughts, z ends them; a prompt may end with either, or name one in the middle."""
    take_patterns(monkeypatch)
    marks = {"thoughts_begin": "y", "thoughts_end": "z"}
    served = Served(tmp_path, grammar_tokenizer(), copy.deepcopy(tiny_model("llama")), num_rows=4, seed=3, **marks)
    begin, end = (served.tokenizer.encode(mark, add_special_tokens=False) for mark in "yz")
    form = {"type": "json_schema", "json_schema": {"name": "letters", "schema": {"pattern": "(ab|c){3}"}}}
    try:
        asked = {"temperature": 1.0, "max_tokens": 200, "n": 16, "response_format": form}
        asked["logit_bias"] = {str(begin[0]): 3, str(end[0]): 3}
        answers = [choice.message.content for choice in served.chat("abc", **asked).choices]
        thought = [text for text in answers if text.startswith("y")]
        assert all(re.fullmatch("(ab|c){3}", text) for text in answers if text not in thought)
        assert 0 < len(thought) < len(answers)
        assert all(re.fullmatch("(ab|c){3}", text.partition("z")[2]) for text in thought if "z" in text)

        def tokens_of(prompt):
            settings = {"temperature": 0, "max_tokens": 24, "logprobs": True, "logit_bias": {str(begin[0]): -100}}
            (choice,) = served.chat(prompt, **settings, extra_body={"thinking_token_budget": 2}).choices
            return [place.token for place in choice.logprobs.content]

        assert tokens_of("aby")[2] == "z" and "z" not in tokens_of("ayb")[2:3] and "z" not in tokens_of("abyz")[2:3]
    finally:
        served.end()


def test_a_beginning_of_thoughts_needs_their_end(letters):
    with pytest.raises(ValueError, match="thoughts_begin needs thoughts_end, got 'A' alone"):
        Answers(letters.answers.engine, num_rows=2, thoughts_begin="A")


def test_token_ids_that_are_none_are_refused_beside_laws_too(tmp_path):
    served = Served(tmp_path, grammar_tokenizer(), copy.deepcopy(tiny_model("llama")), num_rows=4, thoughts_end="z")
    try:
        for prompt in ([-1, 5], [2**40]):
            with pytest.raises(openai.BadRequestError, match="prompt"):
                served.text(prompt, max_tokens=3, extra_body={"thinking_token_budget": 3})
    finally:
        served.end()


@pytest.mark.parametrize(
    ("text", "limit", "content", "reason"),
    [
        ("CDTAtrueU=", 20, "D", "tool_calls"),
        ("CDTAtrxU=", 20, "DTAtrxU=", "stop"),  # no JSON
        ("CDTAtrueU=", 5, "DTAtr", "length"),
        ("CDEFG=", 20, "DEFG", "stop"),
    ],
)
def test_calls_of_tools_are_told_and_what_is_none_is_text(letters, monkeypatch, text, limit, content, reason):
    """Whole answers, several of them, and streams."""
    monkeypatch.setattr(letters.tokenizer, "response_template", CALLS, raising=False)
    asked = {"temperature": 0, "max_tokens": limit, **written(letters.tokenizer, text)}
    calls = [("A", "true")] if reason == "tool_calls" else []
    for choice in letters.chat("ABC", **asked, n=2).choices:
        found = [(one.function.name, one.function.arguments) for one in choice.message.tool_calls or []]
        assert (choice.message.content, choice.finish_reason, found) == (content, reason, calls)
    parts = [part.choices[0] for part in letters.chat("ABC", **asked, stream=True) if part.choices]
    streamed = [call for part in parts for call in part.delta.tool_calls or []]
    assert "".join(part.delta.content or "" for part in parts) == content and parts[-1].finish_reason == reason
    assert [(one.function.name, one.function.arguments) for one in streamed] == calls


@pytest.mark.parametrize("is_stream", [False, True])
def test_a_template_that_is_none_is_told(letters, monkeypatch, is_stream):
    monkeypatch.setattr(letters.tokenizer, "response_template", {"fields": {}}, raising=False)
    with pytest.raises(openai.BadRequestError, match="response_template"):
        letters.chat("ABC", temperature=0, max_tokens=3, stream=is_stream)


def test_whoever_leaves_a_stream_ends_its_row(letters):
    """The client's end of a stream, as the server's handlers tell it."""
    config = GenerationConfig(max_new_tokens=400, eos_token_id=None)
    setattr(config, ASKED, Asked())
    told = []

    async def leave():
        inputs = letters.tokenizer("ABC", return_tensors="pt")
        (stream,) = await letters.answers.begun(inputs, config)
        begun = Begun(stream)
        queue, streamer = begun.generate_streaming(letters.model, letters.tokenizer, inputs, config, "one")
        told.append(await asyncio.wait_for(queue.get(), 60))
        streamer.cancel()
        while any(run._arrivals.open for run in letters.answers._runs._runs.values()):
            await asyncio.sleep(0.01)
        return streamer.total_tokens

    assert asyncio.run(leave()) < 400 and told[0]


def open_requests(served: Served) -> int:
    return sum(len(run._arrivals.open) for run in served.answers._runs._runs.values())


def until(holds, seconds: float = 60) -> None:
    begun = time.monotonic()
    while not holds():
        assert time.monotonic() - begun < seconds
        time.sleep(0.01)


ENDLESS = {"max_tokens": 400, "temperature": 1.0, "extra_body": {"generation_config": '{"eos_token_id": []}'}}


@pytest.fixture
def slow(letters, monkeypatch):
    """Forwards of 20 ms, so that 400 tokens take seconds."""
    forward = letters.answers.engine.model.forward
    monkeypatch.setattr(
        letters.answers.engine.model, "forward", lambda *given, **named: time.sleep(0.02) or forward(*given, **named)
    )


@pytest.mark.parametrize("is_stream", [False, True])
def test_whoever_hangs_up_ends_his_answer(letters, slow, is_stream):
    """Also where it waits for a place."""
    begun = time.monotonic()
    with ThreadPoolExecutor(6) as pool:
        impatient = letters.client.with_options(timeout=1.0)

        def ask(_: int) -> None:
            messages = [{"role": "user", "content": "ABC"}]
            made = impatient.chat.completions.create(model=letters.name, messages=messages, stream=is_stream, **ENDLESS)
            next(iter(made))
            made.close()

        asked = [pool.submit(ask, number) for number in range(6)]
        until(lambda: open_requests(letters) > 0)
        assert all(one.exception(60) is None or isinstance(one.exception(), openai.APITimeoutError) for one in asked)
    until(lambda: open_requests(letters) == 0, seconds=3)
    assert time.monotonic() - begun < 6


def test_a_stream_that_the_server_ends_does_not_look_whole(tmp_path, monkeypatch):
    served = Served(tmp_path, letter_tokenizer(), copy.deepcopy(tiny_model("llama")), num_rows=2)
    forward = served.model.forward
    monkeypatch.setattr(served.model, "forward", lambda *given, **named: time.sleep(0.02) or forward(*given, **named))
    coming = served.chat("ABC", **ENDLESS, n=2, stream=True)
    next(coming)
    served.end()
    with pytest.raises(openai.APIError, match="the server must not be ending"):
        list(coming)


def test_a_bad_prompt_of_several_ends_the_others(letters, slow):
    with pytest.raises(openai.BadRequestError, match="prompt tokens must be in"):
        letters.text([[5, 6], [7, 8], [10**6]], **ENDLESS)
    until(lambda: open_requests(letters) == 0, seconds=3)


def test_streams_end_as_openais_do(letters):
    messages = [{"role": "user", "content": "ABC"}]
    body = {"model": letters.name, "messages": messages, "stream": True, "max_tokens": 3}
    with letters.client.chat.completions.with_streaming_response.create(**body) as response:
        lines = [line for line in response.iter_lines() if line]
    assert lines[-1] == "data: [DONE]" and all(line.startswith("data: ") for line in lines)


def test_the_model_is_named_and_others_are_not(letters):
    assert letters.client.models.retrieve(letters.name).id == letters.name
    with pytest.raises(openai.NotFoundError, match="another is not served"):
        letters.client.models.retrieve("another")


@pytest.mark.parametrize(
    ("pieces", "stops", "shown"),
    [
        (["a", "b", "c"], [], "abc"),
        (["ab", "cd"], ["bc"], "a"),
        (["ab", "ab", "ac"], ["abac"], "ab"),
        (["ab", "ab", "ad"], ["abac"], "ababad"),
        (["xab"], ["abc", "b"], "xa"),
        (["x", "", "yz"], ["z!"], "xyz"),
        (["stop"], ["stop"], ""),
    ],
)
def test_no_stop_string_is_shown(pieces, stops, shown):
    loop, queue = asyncio.new_event_loop(), asyncio.Queue()
    streamer = _Streamer(letter_tokenizer()._tokenizer, loop, queue, response_parser=None, stops=stops, future=None)
    for piece in [*pieces, None]:
        streamer._enqueue(piece)
    loop.call_soon(loop.stop)
    loop.run_forever()
    loop.close()
    found = [queue.get_nowait() for _ in range(queue.qsize())]
    assert found[-1] is None and "".join(found[:-1]) == shown == before_stop("".join(pieces), stops)


@pytest.mark.long
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_the_server_soon_and_saves(tmp_path, number):
    folder, lookup = tmp_path / "letters", tmp_path / "letters.lookup"
    tokenizer, model = letter_tokenizer(), copy.deepcopy(tiny_model("llama"))
    tokenizer.chat_template = TEMPLATE
    model.generation_config = GenerationConfig(eos_token_id=None)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    port = free_port()
    command_line = [sys.executable, "-m", "stand.plugins.server", str(folder), "--device", "cpu", "--port", str(port)]
    process = subprocess.Popen([*command_line, "--save-lookup", str(lookup)], stderr=subprocess.PIPE, text=True)
    try:
        client = openai.OpenAI(base_url=f"http://localhost:{port}/v1", api_key="none", max_retries=0, timeout=60)
        until(lambda: process.poll() is None and listens(client))
        asked = {"model": str(folder), "messages": [{"role": "user", "content": "ABC"}]}
        client.chat.completions.create(**asked, max_tokens=20)
        with ThreadPoolExecutor(1) as pool:
            waiting = pool.submit(client.chat.completions.create, **asked, n=1024, max_tokens=400)
            time.sleep(0.5)
            process.send_signal(number)
            process.wait(20)
            assert isinstance(waiting.exception(60), (openai.APIConnectionError, openai.InternalServerError))
    finally:
        process.kill()
    assert "terminate called" not in process.stderr.read()
    assert len(stand.BlendedLookup.load(lookup)) > 0


def listens(client: openai.OpenAI) -> bool:
    try:
        return bool(client.models.list().data)
    except openai.APIConnectionError:
        return False


def test_a_server_that_ends_ends_its_runs(tmp_path):
    served = Served(tmp_path, letter_tokenizer(), copy.deepcopy(tiny_model("llama")), num_rows=2)
    served.chat("ABC", max_tokens=3)
    (run,) = served.answers._runs._runs.values()
    served.end()
    assert not run.is_open and not run._thread.is_alive()
    with pytest.raises(ClosedError, match=r"requests must come before close\(\)"):
        served.answers._runs.submit([5], {})


def test_the_command_serves_and_saves(tmp_path, monkeypatch):
    folder, lookup = tmp_path / "letters", tmp_path / "letters.lookup"
    tokenizer = letter_tokenizer()
    tokenizer.chat_template = TEMPLATE
    tiny_model("llama").save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    given = {}

    def run(server):
        given.update(host=server.config.host, port=server.config.port, log_level=server.config.log_level)
        routes = {route.path for route in server.config.app.routes}
        assert {"/v1/chat/completions", "/v1/completions", "/v1/models", "/health"} <= routes
        made[-1].engine.lookup.learn([1], [2, 3])
        if server._saver is not None:
            server._saver.finish()

    def new_answers(*told, **how):
        made.append(Answers(*told, **how))
        return made[-1]

    made: list[Answers] = []
    monkeypatch.setattr(command, "Answers", new_answers)
    monkeypatch.setattr(command.Server, "run", run)
    command.main(
        [str(folder), "--save-lookup", str(lookup), "--device", "cpu", "--port", "81", "--keep-prompts", "0.1"]
    )
    assert given == {"host": "localhost", "port": 81, "log_level": "warning"}
    assert len(stand.BlendedLookup.load(lookup)) > 0
    command.main([str(folder), "--lookup", str(lookup), "--device", "cpu", "--no-drafts"])
    with pytest.raises(SystemExit, match="save"):
        command.main([str(folder), "--save-lookup", str(tmp_path / "none" / "letters.lookup")])


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (["--rows", "0"], "--rows must be an integer >= 1, got 0"),
        (["--seed", "-1"], "seed must"),
        (["--keep-prompts", "-1"], "--keep-prompts must be a positive number of GiB, got -1.0"),
        (["--keep-prompts", "nan"], "--keep-prompts must be a positive number of GiB, got nan"),
        (["--lookup", "no such file"], "--lookup must be a file that was saved, got 'no such file' .No such file"),
        (["--lookup", "."], "--lookup must be a file that was saved, got '.'"),
        (["--chat-template-kwargs", "[1]"], "--chat-template-kwargs must be an object of JSON, got .1."),
    ],
)
def test_options_that_do_not_fit_are_refused_in_a_line_before_anything_is_loaded(given, message):
    with pytest.raises(SystemExit, match=message) as raised:
        command.main(["no such model", *given])
    assert len(raised.value.code.splitlines()) == 1
