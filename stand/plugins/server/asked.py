"""What a request's body asks beside transformers' settings, and the refusal of what would be ignored."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass

ADDED = ("top_k", "min_p", "repetition_penalty")  # fields of `GenerationConfig`, by the names that vLLM takes
SERVED = frozenset({
    "model", "temperature", "top_p", "max_tokens", "stop", "seed", "stream", "n", "logprobs", "logit_bias",
    "generation_config", *ADDED,
})  # fmt: skip
OF_CHATS = SERVED | {
    "messages", "max_completion_tokens", "top_logprobs", "response_format", "tools", "chat_template_kwargs",
}  # fmt: skip
OF_TEXTS = SERVED | {"prompt"}
OF_THE_CLIENT = frozenset({  # no answer depends on them
    "metadata", "prompt_cache_key", "prompt_cache_retention", "safety_identifier", "service_tier", "store",
    "stream_options", "user",
})  # fmt: skip
NEUTRAL = {  # values by which a field asks for nothing
    "best_of": (1,), "echo": (False,), "frequency_penalty": (0,), "function_call": ("auto",), "functions": ([],),
    "modalities": (["text"],), "parallel_tool_calls": (True,), "presence_penalty": (0,), "suffix": ("",),
    "tool_choice": ("auto",),
}  # fmt: skip
ANY_OBJECT = '{"type": "object"}'


@dataclass(frozen=True, slots=True)
class Asked:
    """count: answers. logprobs: likeliest tokens per place, None for none. schema: of the answer, as JSON.

    A seed is taken, and follows no further: which rows are decoded together depends on time, so it could repeat no
    answer. What could is told with every answer, see `stand.plugins.server.handlers`."""

    count: int = 1
    logprobs: int | None = None
    schema: str | None = None

    @classmethod
    def of(cls, body: Mapping[str, object]) -> Asked:
        """Raises ValueError for what does not fit, also where answers are streamed."""
        count = _whole(body, "n", 1)
        _whole(body, "seed", None)
        given = body.get("logprobs")
        if isinstance(given, bool) or given is None:  # a chat's
            logprobs = _whole(body, "top_logprobs", 0) if given else None
            if not given and body.get("top_logprobs"):
                raise ValueError(f"top_logprobs needs logprobs=true, got {body['top_logprobs']!r} alone; give both")
        else:
            logprobs = _whole(body, "logprobs", 0)
        if body.get("stream") and (count > 1 or logprobs is not None):
            raise ValueError(
                f"a streamed answer must be one, without log-probabilities, got n={count} and logprobs={given!r}; "
                "leave stream out"
            )
        return cls(count, logprobs, _schema(body.get("response_format")))


def check_fields(body: Mapping[str, object], served: Collection[str]) -> None:
    """Raises ValueError for a field that would be ignored."""
    for name, value in body.items():
        is_free = name in served or name in OF_THE_CLIENT or value is None
        if not is_free and value not in NEUTRAL.get(name, ()):
            raise ValueError(f"{name} must be left out, got {value!r:.80}; this server does not serve it")


def _whole(body: Mapping[str, object], name: str, default: int | None) -> int | None:
    value = body.get(name)
    if value is None:
        return default
    if isinstance(value, bool) or not isinstance(value, int):
        raise ValueError(f"{name} must be an integer, got {value!r:.80}; leave it out for the default")
    return value


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
