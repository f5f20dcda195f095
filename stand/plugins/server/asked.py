"""What a request's body asks beside transformers' settings. What does not fit, or would be ignored, is refused."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass

from transformers import GenerationConfig

from stand.plugins.request_processors import AskedOfLaws

Body = Mapping[str, object]

ADDED = ("top_k", "min_p", "repetition_penalty")  # fields of `GenerationConfig`, by the names that vLLM takes
SERVED = frozenset({
    "model", "temperature", "top_p", "max_tokens", "stop", "seed", "stream", "stream_options", "n", "logprobs",
    "logit_bias", "generation_config", "frequency_penalty", "presence_penalty", "thinking_token_budget", *ADDED,
})  # fmt: skip
OF_CHATS = SERVED | {
    "messages", "max_completion_tokens", "top_logprobs", "response_format", "tools", "tool_choice",
    "chat_template_kwargs",
}  # fmt: skip
OF_TEXTS = SERVED | {"prompt"}
OF_RESPONSES = SERVED - {"max_tokens", "stop", "n", "logprobs"} | {
    "input", "instructions", "max_output_tokens", "text", "tools", "tool_choice", "chat_template_kwargs",
}  # fmt: skip
OF_THE_CLIENT = frozenset({  # no answer depends on them
    "metadata", "prompt_cache_key", "prompt_cache_retention", "safety_identifier", "service_tier", "store",
    "user",
})  # fmt: skip
NEUTRAL = {  # values by which a field asks for nothing
    "background": (False,), "best_of": (1,), "echo": (False,), "function_call": ("auto",), "functions": ([],),
    "include": ([],), "modalities": (["text"],), "parallel_tool_calls": (True,), "suffix": ("",),
    "tool_choice": ("auto", "none"), "truncation": ("disabled",),
}  # fmt: skip
NUMBERS = ("temperature", "top_p", "min_p", "repetition_penalty")
WHOLE = ("max_tokens", "max_completion_tokens", "max_output_tokens", "top_k", "seed")
OF_THE_SERVER = frozenset({
    "add_generation_prompt", "tokenize", "return_tensors", "return_dict", "tools", "messages", "conversation",
    "chat_template", "load_audio_from_video",
})  # fmt: skip
MOST_ANSWERS = 1024  # of a request: those of later ones wait for them
MOST_LOGPROBS = 20  # per place, as OpenAI has it
MOST_PENALTY = 2  # as OpenAI has it
LARGEST = 1e300  # whole numbers beyond are no floats
ANY_OBJECT = '{"type": "object"}'


@dataclass(frozen=True, slots=True)
class Asked:
    """count: answers. logprobs: likeliest tokens per place, None for none. of_laws: what takes logits processors.
    is_usage_apart: whether a stream tells its usage in an event of its own. tool_choice: as the client gave it.

    A seed is taken, and follows no further: which rows are decoded together depends on time, so it could repeat no
    answer. What could is told with every answer, see `stand.plugins.server.handlers`."""

    count: int = 1
    logprobs: int | None = None
    of_laws: AskedOfLaws = AskedOfLaws()
    is_usage_apart: bool = False
    tool_choice: object = "auto"

    @classmethod
    def of(cls, body: Body) -> Asked:
        """Raises ValueError for what does not fit, also where answers are streamed."""
        count = 1 if body.get("n") is None else _whole(body, "n", least=1, most=MOST_ANSWERS)
        given = body.get("logprobs")
        if isinstance(given, bool) or given is None:  # a chat's
            if not given and body.get("top_logprobs"):
                raise ValueError(f"top_logprobs needs logprobs=true, got {body['top_logprobs']!r} alone; give both")
            of_top = 0 if body.get("top_logprobs") is None else _whole(body, "top_logprobs", most=MOST_LOGPROBS)
            logprobs = of_top if given else None
        else:
            logprobs = _whole(body, "logprobs", most=MOST_LOGPROBS)
        choice = "auto" if body.get("tool_choice") is None else body["tool_choice"]
        return cls(count, logprobs, _of_laws(body), is_usage_apart=_is_usage_apart(body), tool_choice=choice)


def check_fields(body: Body, served: Collection[str]) -> None:
    """Raises ValueError for a field that would be ignored, and for a value of another kind."""
    try:
        json.dumps(body, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"requests must hold whole characters, got half of one; {error.reason}") from None
    for name, value in body.items():
        is_free = name in served or name in OF_THE_CLIENT or value is None
        if not is_free and value not in NEUTRAL.get(name, ()):
            raise ValueError(f"{name} must be left out, got {value!r:.80}; this server does not serve it")
    for name in NUMBERS:
        value = body.get(name)
        _check(value is None or _is_number(value), name, "a number", value)
    for name in WHOLE:
        if body.get(name) is not None:
            _whole(body, name, least=1 if name.startswith("max") else None)
    _check(body.get("stream") in (None, True, False), "stream", "true or false", body.get("stream"))
    stop = body.get("stop")
    is_stop = stop is None or _is_text(stop) or isinstance(stop, list) and all(map(_is_text, stop))
    _check(is_stop, "stop", "a text, or several", stop)
    _check_bias(body.get("logit_bias"))
    _check_config(body.get("generation_config"))


def check_chat(body: Body) -> None:
    """Raises ValueError for what is no chat."""
    messages, kwargs, tools = (body.get(name) for name in ("messages", "chat_template_kwargs", "tools"))
    is_chat = isinstance(messages, list) and messages and all(map(_is_message, messages))
    rule = "a list of at least one message, each with a role and a content of text or parts"
    _check(bool(is_chat), "messages", rule, messages)
    is_named = kwargs is None or isinstance(kwargs, dict) and not OF_THE_SERVER & set(kwargs)
    _check(is_named, "chat_template_kwargs", "an object of the template's own names", kwargs)
    is_listed = tools is None or isinstance(tools, list) and all(isinstance(one, dict) for one in tools)
    _check(is_listed, "tools", "a list of objects", tools)


def _is_message(message: object) -> bool:
    if not isinstance(message, dict) or not _is_text(message.get("role")):
        return False
    content, calls = message.get("content"), message.get("tool_calls")
    are_calls = calls is None or isinstance(calls, list) and all(map(_is_call, calls))
    is_listed = isinstance(content, list) and all(map(_is_part, content))
    return are_calls and (is_listed or _is_text(content) or content is None and bool(calls))


def _is_call(call: object) -> bool:
    """Of a function, with arguments by name."""
    function = call.get("function") or call if isinstance(call, dict) else None
    if not isinstance(function, dict) or not _is_text(function.get("name")):
        return False
    try:
        given = function.get("arguments")
        given = json.loads(given) if isinstance(given, str) else given
        json.dumps(given, ensure_ascii=False).encode()
    except ValueError:  # no JSON, or half of a character
        return False
    return isinstance(given, dict)


def _is_part(part: object) -> bool:
    if not isinstance(part, dict) or not _is_text(part.get("type")):
        return False
    return part["type"] != "text" or _is_text(part.get("text"))


def _check_bias(bias: object) -> None:
    is_bias = (
        bias is None
        or isinstance(bias, dict)
        and all(_is_text(token) and token.isdigit() and _is_number(value) for token, value in bias.items())
    )
    _check(is_bias, "logit_bias", "an object of token ids and numbers", bias)


def _check_config(config: object) -> None:
    if config is None:
        return
    try:
        names = set(json.loads(config))
    except (TypeError, ValueError):
        names = {""}
    unknown = sorted(names - set(GenerationConfig().to_dict()))
    _check(not unknown, "generation_config", "a text of JSON with fields of a GenerationConfig", config)


def _check(is_sound: bool, name: str, rule: str, value: object) -> None:
    if not is_sound:
        raise ValueError(f"{name} must be {rule}, got {value!r:.80}; see docs/server.md and OpenAI's reference")


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) < LARGEST


def _is_text(value: object) -> bool:
    """No half of a character, which JSON can name, and no tokenizer takes."""
    return isinstance(value, str) and not any("\ud800" <= letter <= "\udfff" for letter in value)


def is_prompt(value: object) -> bool:
    """A text, or token ids."""
    is_ids = isinstance(value, list) and all(isinstance(one, int) and not isinstance(one, bool) for one in value)
    return _is_text(value) or is_ids


def _whole(body: Body, name: str, *, least: int | None = 0, most: int | None = None) -> int:
    value = body[name]
    is_whole = isinstance(value, int) and not isinstance(value, bool)
    if not is_whole or least is not None and value < least or most is not None and value > most:
        bound = "" if least is None else f" >= {least}" if most is None else f" in [{least}, {most}]"
        rule = f"an integer{bound}"
        raise ValueError(f"{name} must be {rule}, got {value!r:.80}; leave it out for the default")
    return value


def _of_laws(body: Body) -> AskedOfLaws:
    budget = body.get("thinking_token_budget")
    return AskedOfLaws(
        schema=_schema(body.get("response_format")),
        presence=_penalty(body, "presence_penalty"),
        frequency=_penalty(body, "frequency_penalty"),
        thinking_tokens=None if budget is None else _whole(body, "thinking_token_budget"),
    )


def _is_usage_apart(body: Body) -> bool:
    options = body.get("stream_options") or {}
    is_told = isinstance(options, dict) and options.get("include_usage") in (None, True, False)
    _check(is_told, "stream_options", "an object, its include_usage true or false", options)
    return bool(options.get("include_usage"))


def _penalty(body: Body, name: str) -> float:
    value = 0.0 if body.get(name) is None else body[name]
    is_sound = _is_number(value) and -MOST_PENALTY <= value <= MOST_PENALTY
    _check(is_sound, name, f"a number in [-{MOST_PENALTY}, {MOST_PENALTY}]", value)
    return float(value)


def _schema(response_format: object) -> str | None:
    """Of `response_format`, as JSON."""
    if response_format is None or response_format == {"type": "text"}:
        return None
    if response_format == {"type": "json_object"}:
        return ANY_OBJECT
    try:
        return json.dumps(response_format["json_schema"]["schema"])
    except (KeyError, TypeError):
        raise ValueError(
            "response_format must be of type text, json_object, or json_schema with a schema in it, got "
            f"{response_format!r:.80}; see OpenAI's reference"
        ) from None
