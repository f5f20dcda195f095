"""inspect-ai's harness: the provider `stand`, so `inspect eval TASK --model stand/MODEL` decodes by the engine.

inspect asks for one answer at a time and for many at once. The engine decodes a batch from its start to its end, so
requests that arrive within a moment of each other, with equal settings, are decoded together in a thread.
"""

from __future__ import annotations

import json
import queue
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from functools import cache
from typing import TYPE_CHECKING

from stand.extra import missing_package
from stand.plugins.saving import Saver, check_can_be_written
from stand.trees import BlendedLookup
from stand.trees.arguments import whole

try:
    import anyio  # inspect-ai's own
    from inspect_ai.model import (
        ChatCompletionChoice,
        ChatMessage,
        ChatMessageAssistant,
        GenerateConfig,
        Logprob,
        Logprobs,
        ModelAPI,
        ModelOutput,
        ModelUsage,
        TopLogprob,
        modelapi,
    )
    from inspect_ai.tool import ToolChoice, ToolInfo
except ModuleNotFoundError as error:
    raise missing_package(error, "inspect_ai", asker="stand.plugins.inspect_ai", install="inspect-ai") from error

if TYPE_CHECKING:
    from stand.plugins.json_answers import JsonAnswers

GATHERING = 0.02  # seconds to wait for requests that begin together
ROWS = 16
SERVED = {  # inspect's names of settings: `Engine.generate`'s
    "max_tokens": "max_new_tokens",
    "temperature": "temperature",
    "top_p": "top_p",
    "top_k": "top_k",
    "stop_seqs": "stop",
    "seed": "seed",
}
NOT_THE_MODELS = frozenset({  # of inspect itself, of tools, which are refused, or of servers: no answer depends on them
    "max_retries", "timeout", "attempt_timeout", "stream_idle_timeout", "max_connections", "adaptive_connections",
    "system_message", "parallel_tool_calls", "internal_tools", "max_tool_output", "cache_prompt", "fail_on_refusal",
    "reasoning_history", "extra_headers", "cache", "batch",
})  # fmt: skip
STOP_REASONS = {"eos": "stop", "stop": "stop", "criteria": "stop", "length": "max_tokens", "time": "model_length"}

Chat = list[dict[str, str]]


class RequestBatches:
    """Decodes requests in one thread: those that wait together and have equal settings in one call of the engine."""

    def __init__(
        self, engine: object, *, num_rows: int, seed: int | None = None, json_answers: JsonAnswers | None = None
    ):
        """json_answers: None for such without thoughts, made when a request first names a schema."""
        self.engine, self.num_rows, self.seed, self._json_answers = engine, num_rows, seed, json_answers
        self.requests: queue.Queue[tuple[Chat, Mapping, Future] | None] = queue.Queue()
        self.num_calls = 0
        self._is_closed = False
        self._entrance = threading.Lock()
        self.thread = threading.Thread(target=self._run, name="stand", daemon=True)
        self.thread.start()

    def submit(self, chat: Chat, settings: Mapping) -> Future:
        """A future of the `ModelOutput` fields that `_answers` gives; it raises what the engine raises."""
        future: Future = Future()
        with self._entrance:
            if self._is_closed:
                raise RuntimeError("the provider must be open, got a request after close(); make another one")
            self.requests.put((chat, settings, future))
        return future

    def close(self) -> None:
        """End the thread after what waits already."""
        with self._entrance:
            self._is_closed = True
            self.requests.put(None)

    def _run(self) -> None:
        waiting: list[tuple[Chat, Mapping, Future]] = []
        is_open = True
        while is_open or waiting:
            if not waiting:
                first = self.requests.get()
                is_open = first is not None
                waiting += [first] if is_open else []
                time.sleep(GATHERING if is_open else 0)
            while not self.requests.empty():
                request = self.requests.get()
                is_open = is_open and request is not None
                waiting += [request] if request is not None else []
            if waiting:
                batch = [one for one in waiting if one[1] == waiting[0][1]][: self.num_rows]
                waiting = [one for one in waiting if not any(one is taken for taken in batch)]
                batch = [one for one in batch if one[2].set_running_or_notify_cancel()]
                if batch:
                    self._decode(batch)

    def _decode(self, batch: list[tuple[Chat, Mapping, Future]]) -> None:
        try:
            answers = self._answers([chat for chat, _, _ in batch], batch[0][1])
        except Exception as error:  # whatever it is, those who wait get it; one request must not fail its neighbours
            if len(batch) > 1:
                for one in batch:
                    self._decode([one])
            else:
                batch[0][2].set_exception(error)
            return
        for (_, _, future), answer in zip(batch, answers, strict=True):
            future.set_result(answer)

    def _answers(self, chats: list[Chat], settings: Mapping) -> list[dict]:
        # Here, because it loads torch, and inspect imports this module to list providers.
        from stand.texts.chats import chat_text

        tokenizer = self.engine.tokenizer
        prompts = [tokenizer(chat_text(tokenizer, chat), add_special_tokens=False)["input_ids"] for chat in chats]
        seed = settings.get("seed", self.seed)
        seed = None if seed is None else seed + self.num_calls  # calls must not repeat each other
        settings = {**settings, "seed": seed}
        if (schema := settings.pop("json_schema", None)) is not None:
            self._json_answers = self._json_answers or _json_answers(self.engine, None)
            settings["logits_processors"] = self._json_answers.processor(schema)
        output = self.engine.generate(input_ids=prompts, **settings)
        self.num_calls += 1
        decoded = cache(lambda token: tokenizer.decode([token]))  # of all rows: mostly the same tokens
        worth = {
            "stand_rows": len(chats),
            "stand_tokens_per_step": output.stats.mean_acceptance_length,
            "stand_tokens_per_second": output.stats.tokens_per_second,
        }
        return [
            {
                "text": output.texts[row],
                "reason": STOP_REASONS[output.finish_reasons[row]],
                "num_prompt": len(prompts[row]),
                "num_new": len(output.token_ids[row]),
                "seconds": output.stats.wall_seconds,
                "worth": worth,
                "logprobs": None if output.logprobs is None else _places(decoded, output, row),
            }
            for row in range(len(chats))
        ]


@modelapi(name="stand")
class StandAPI(ModelAPI):
    """A transformers model of this machine, decoded by the engine.

    Model arguments (-M name=value): `rows`, the most requests decoded together (16); `device`, `dtype` ("auto");
    `lookup`, a file that the drafter starts from; `share`, a folder in which processes tell each other what they learn
    (`BlendedDrafter`); `save_lookup`, a file to write what it has learned to, every few minutes and when the provider
    is closed or the process ends: inspect does not close what it was given by name; `thoughts_end`, the text that ends
    thoughts ("</think>"), behind which answers by a `response_schema` begin. Settings that are left out are the model's
    own, as `generation_config.json` has them. A seed, the provider's or a call's own, fixes the random numbers,
    but which requests share a batch depends on time, so a run does not repeat itself token for token.

    Log-probabilities are the model's own, before temperature and filters.

    Raises ValueError by name for what cannot be served: tools, images, penalties, several choices.
    """

    def __init__(
        self,
        model_name: str,
        base_url: str | None = None,
        api_key: str | None = None,
        config: GenerateConfig | None = None,
        *,
        rows: int = ROWS,
        device: str | None = None,
        dtype: str = "auto",
        lookup: str | None = None,
        share: str | None = None,
        save_lookup: str | None = None,
        thoughts_end: str | None = None,
    ):
        config = config or GenerateConfig()
        super().__init__(model_name, base_url=base_url, api_key=api_key, config=config)
        rows = whole(rows, "rows")
        if rows < 1:
            raise ValueError(f"rows must be at least 1, got {rows}; leave it out for the default")
        if save_lookup is not None:
            check_can_be_written(save_lookup, "save_lookup")
        learned = None if lookup is None else BlendedLookup.load(lookup)
        # Here, because inspect imports this module whenever it lists providers.
        import torch
        from transformers import AutoModelForCausalLM, AutoTokenizer

        from stand.drafters.blended import BlendedDrafter
        from stand.wrapping import wrap

        drafter = BlendedDrafter(learned, share=share)  # before the model, which takes minutes
        device = device or ("cuda" if torch.cuda.is_available() else "cpu")
        model = AutoModelForCausalLM.from_pretrained(model_name, dtype=dtype).to(device)
        tokenizer = AutoTokenizer.from_pretrained(model_name)
        if tokenizer.chat_template is None:
            raise ValueError(f"{model_name} must have a chat template, got none; inspect asks in chats")
        engine = wrap(model, tokenizer, drafter=drafter)
        self._begin(engine, rows, save_lookup, config.seed, thoughts_end=thoughts_end)

    def _begin(
        self, engine: object, rows: int, save_lookup: str | None, seed: int | None, *, thoughts_end: str | None = None
    ) -> None:
        self.engine, self.rows = engine, rows
        json_answers = None if thoughts_end is None else _json_answers(engine, thoughts_end)
        self.batches = RequestBatches(engine, num_rows=rows, seed=seed, json_answers=json_answers)
        self.saver = None if save_lookup is None else Saver(self, engine.lookup, save_lookup)

    async def generate(
        self, input: list[ChatMessage], tools: list[ToolInfo], tool_choice: ToolChoice, config: GenerateConfig
    ) -> ModelOutput:
        if tools:
            raise ValueError(f"tools must be left out, got {[tool.name for tool in tools]}; use another provider")
        answer = self.batches.submit([_message(one) for one in input], _settings(config))
        try:
            while not answer.done():
                await anyio.sleep(GATHERING / 2)
        finally:
            answer.cancel()  # where nobody waits any more; one that is decoded goes on
        return _output(self.model_name, answer.result())

    def max_connections(self) -> int:
        """As many as are decoded together."""
        return self.rows

    def connection_key(self) -> str:
        return self.model_name

    def close(self) -> None:
        self.batches.close()
        self.batches.thread.join()
        if self.saver is not None:
            self.saver.finish()


def _json_answers(engine: object, thoughts_end: str | None) -> JsonAnswers:
    from stand.plugins.json_answers import JsonAnswers  # here, because few runs need what it imports

    return JsonAnswers(engine, thoughts_end=thoughts_end)


def _message(message: ChatMessage) -> dict[str, str]:
    if message.role == "tool":
        raise ValueError("messages must be of system, user or assistant, got one of a tool; use another provider")
    if not isinstance(message.content, str) and any(part.type not in ("text", "reasoning") for part in message.content):
        raise ValueError("messages must be text, got another kind of content; use another provider")
    return {"role": message.role, "content": message.text}


def _settings(config: GenerateConfig) -> dict:
    """Arguments of `Engine.generate`. Raises ValueError for settings that would be ignored."""
    for name, value in vars(config).items():
        is_known = name in SERVED or name in NOT_THE_MODELS or (name in ("num_choices", "best_of") and value == 1)
        if name == "top_logprobs" and value and not config.logprobs:
            raise ValueError(f"top_logprobs needs logprobs=True, got {value!r} alone; give both")
        is_known = is_known or name in ("logprobs", "top_logprobs", "response_schema")
        if value is not None and value is not False and not is_known:
            raise ValueError(f"{name} must be left out, got {value!r}; the provider `stand` does not serve it")
    given = {ours: getattr(config, theirs) for theirs, ours in SERVED.items()}
    given["logprobs"] = (config.top_logprobs or 0) if config.logprobs else None
    if config.response_schema is not None:
        given["json_schema"] = json.dumps(config.response_schema.json_schema.model_dump(exclude_none=True))
    return {name: value for name, value in given.items() if value is not None}


def _places(decoded: Callable[[int], str], output: object, row: int) -> list[list[tuple[str, float]]]:
    """For each new token of a row: text and log-probability of its own, then of the likeliest tokens there."""
    found = output.logprobs[row]
    own = zip(output.token_ids[row], found.of_tokens.tolist(), strict=True)
    others = (zip(*pair, strict=True) for pair in zip(found.top_ids.tolist(), found.top.tolist(), strict=True))
    return [
        [(decoded(token), value) for token, value in (first, *rest)] for first, rest in zip(own, others, strict=True)
    ]


def _logprobs(places: list[list[tuple[str, float]]]) -> Logprobs:
    made = []
    for (token, value), *others in places:
        top = [TopLogprob(token=other, logprob=likely, bytes=_bytes(other)) for other, likely in others]
        made.append(Logprob(token=token, logprob=value, bytes=_bytes(token), top_logprobs=top or None))
    return Logprobs(content=made)


def _bytes(text: str) -> list[int] | None:
    """Of a token's text; None where it is a part of a character, which its text does not tell."""
    from stand.texts.pieces import UNFINISHED  # here, because it loads torch

    return None if UNFINISHED in text else list(text.encode())


def _output(model_name: str, answer: dict) -> ModelOutput:
    message = ChatMessageAssistant(content=answer["text"], model=model_name, source="generate")
    total = answer["num_prompt"] + answer["num_new"]
    logprobs = None if answer["logprobs"] is None else _logprobs(answer["logprobs"])
    usage = ModelUsage(input_tokens=answer["num_prompt"], output_tokens=answer["num_new"], total_tokens=total)
    return ModelOutput(
        model=model_name,
        choices=[ChatCompletionChoice(message=message, stop_reason=answer["reason"], logprobs=logprobs)],
        usage=usage,
        time=answer["seconds"],
        metadata=answer["worth"],
    )
