"""inspect-ai's harness: the provider `stand`, so `inspect eval TASK --model stand/MODEL` decodes by the engine.

inspect asks for one answer at a time and for many at once. Those with equal settings are decoded together, in an open
run: each begins when it comes and a place is free.
"""

from __future__ import annotations

import json
from concurrent.futures import Future
from functools import partial
from typing import TYPE_CHECKING

from stand.extra import missing_package
from stand.plugins.logprob_places import Place, bytes_of, places_of, texts_of
from stand.plugins.open_runs import OpenRuns
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
    from stand.plugins.request_processors import AskedOfLaws
    from stand.scheduling.request import Trajectory

POLLING = 0.01  # seconds between two looks at whether an answer is there
ROWS = 16
SERVED = {  # inspect's names of settings: `Engine.generate`'s
    "max_tokens": "max_new_tokens",
    "temperature": "temperature",
    "top_p": "top_p",
    "top_k": "top_k",
    "stop_seqs": "stop",
    "seed": "seed",
}
OF_LAWS = frozenset({"response_schema", "presence_penalty", "frequency_penalty", "reasoning_tokens"})
NOT_THE_MODELS = frozenset({  # of inspect itself, of tools, which are refused, or of servers: no answer depends on them
    "max_retries", "timeout", "attempt_timeout", "stream_idle_timeout", "max_connections", "adaptive_connections",
    "system_message", "parallel_tool_calls", "internal_tools", "max_tool_output", "cache_prompt", "fail_on_refusal",
    "reasoning_history", "extra_headers", "cache", "batch",
})  # fmt: skip
STOP_REASONS = {"eos": "stop", "stop": "stop", "criteria": "stop", "length": "max_tokens", "time": "model_length"}

Chat = list[dict[str, str]]


@modelapi(name="stand")
class StandAPI(ModelAPI):
    """A transformers model of this machine, decoded by the engine.

    Model arguments (-M name=value): `rows`, the most requests decoded together (16); `device`, `dtype` ("auto");
    `lookup`, a file that the drafter starts from; `share`, a folder in which processes tell each other what they learn
    (`BlendedDrafter`); `save_lookup`, a file to write what it has learned to, every few minutes and when the provider
    is closed or the process ends: inspect does not close what it was given by name; `thoughts_end` and
    `thoughts_begin`, the texts that end and begin thoughts ("</think>", "<think>"), for answers by a `response_schema`,
    which begin behind them, and for `reasoning_tokens`. Settings that are left out are the model's own, as
    `generation_config.json` has them. A seed, the provider's or a call's own, fixes the random numbers,
    but which requests are decoded together depends on time, so a run does not repeat itself token for token.

    Log-probabilities are the model's own, before temperature and filters.

    Raises ValueError by name for what cannot be served: tools, images, several choices.
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
        thoughts_begin: str | None = None,
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
        marks = {"thoughts_begin": thoughts_begin, "thoughts_end": thoughts_end}
        self._begin(engine, rows, save_lookup, config.seed, **marks)

    def _begin(self, engine: object, rows: int, save_lookup: str | None, seed: int | None, **marks: str | None) -> None:
        from stand.plugins.request_processors import RequestProcessors  # here, because it loads transformers

        self.engine, self.rows = engine, rows
        self._processors = RequestProcessors(engine, **marks)
        self.runs = OpenRuns(engine, num_rows=rows, seed=seed)
        self.saver = None if save_lookup is None else Saver(self, engine.lookup, save_lookup)

    async def generate(
        self, input: list[ChatMessage], tools: list[ToolInfo], tool_choice: ToolChoice, config: GenerateConfig
    ) -> ModelOutput:
        if tools:
            raise ValueError(f"tools must be left out, got {[tool.name for tool in tools]}; use another provider")
        asked = partial(self._submit, [_message(one) for one in input], _settings(config))
        with anyio.CancelScope(shield=True):  # else a request might be submitted that nobody waits for
            answer = await anyio.to_thread.run_sync(asked)
        try:
            while not answer.done():
                await anyio.sleep(POLLING)
        finally:
            answer.cancel()  # where nobody waits any more
        return self._output(answer.result()[0])

    def max_connections(self) -> int:
        """As many as are decoded together."""
        return self.rows

    def connection_key(self) -> str:
        return self.model_name

    def close(self) -> None:
        self.runs.close()
        if self.saver is not None:
            self.saver.finish()

    def _submit(self, chat: Chat, settings: dict) -> Future[list[Trajectory]]:
        # Here, because it loads torch, and inspect imports this module to list providers.
        from stand.texts.chats import chat_text

        tokenizer, asked = self.engine.tokenizer, settings.pop("of_laws")
        prompt = tokenizer(chat_text(tokenizer, chat), add_special_tokens=False)["input_ids"]
        return self.runs.submit(prompt, settings, **self._processors.arguments(prompt, asked))

    def _output(self, answer: Trajectory) -> ModelOutput:
        message = ChatMessageAssistant(content=answer.text, model=self.model_name, source="generate")
        logprobs = None
        if answer.logprobs is not None:
            logprobs = _logprobs(places_of(answer.token_ids, answer.logprobs, texts_of(self.engine.tokenizer)))
        num_new, seconds = len(answer.token_ids), answer.ended - answer.started
        reason = STOP_REASONS[answer.finish_reason]
        return ModelOutput(
            model=self.model_name,
            choices=[ChatCompletionChoice(message=message, stop_reason=reason, logprobs=logprobs)],
            usage=ModelUsage(
                input_tokens=answer.num_prompt_tokens,
                output_tokens=num_new,
                total_tokens=answer.num_prompt_tokens + num_new,
            ),
            time=seconds,
            metadata={
                "stand_tokens_per_step": num_new / answer.num_steps,
                "stand_tokens_per_second": num_new / seconds if seconds else 0.0,
            },
        )


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
        is_known = is_known or name in OF_LAWS or name in ("logprobs", "top_logprobs")
        if value is not None and value is not False and not is_known:
            raise ValueError(f"{name} must be left out, got {value!r}; the provider `stand` does not serve it")
    given = {ours: getattr(config, theirs) for theirs, ours in SERVED.items()}
    given["logprobs"] = (config.top_logprobs or 0) if config.logprobs else None
    given = {name: value for name, value in given.items() if value is not None}
    return {**given, "of_laws": _of_laws(config)}


def _of_laws(config: GenerateConfig) -> AskedOfLaws:
    from stand.plugins.request_processors import AskedOfLaws  # here, because it loads transformers

    form = config.response_schema
    return AskedOfLaws(
        schema=None if form is None else json.dumps(form.json_schema.model_dump(exclude_none=True)),
        presence=config.presence_penalty or 0.0,
        frequency=config.frequency_penalty or 0.0,
        thinking_tokens=config.reasoning_tokens,
    )


def _logprobs(places: list[Place]) -> Logprobs:
    made = []
    for (token, value), *others in places:
        top = [TopLogprob(token=other, logprob=likely, bytes=bytes_of(other)) for other, likely in others]
        made.append(Logprob(token=token, logprob=value, bytes=bytes_of(token), top_logprobs=top or None))
    return Logprobs(content=made)
