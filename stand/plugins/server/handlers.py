"""The endpoints of chats and completions: transformers' own, which also read tools and thoughts out of answers."""

from __future__ import annotations

import asyncio
import copy
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Sequence
from contextlib import aclosing
from dataclasses import replace
from functools import partial
from inspect import signature
from itertools import accumulate, chain

import torch
from fastapi.responses import JSONResponse, StreamingResponse
from transformers import GenerationConfig
from transformers.cli.serving.chat_completion import ChatCompletionHandler
from transformers.cli.serving.completion import CompletionHandler
from transformers.cli.serving.utils import BaseHandler, Modality, build_response_parser

from stand.plugins.logprob_places import Place, bytes_of, places_of, texts_of
from stand.plugins.server.answers import ASKED, Answers, Ready
from stand.plugins.server.asked import ADDED, OF_CHATS, OF_TEXTS, Asked, check_chat, check_fields, is_prompt
from stand.plugins.server.calls import form_of_calls, must_call
from stand.plugins.server.streams import Begun, before_stop, merged, stop_strings
from stand.plugins.server.unread import NO_TEMPLATE, tell_unread, without_template
from stand.scheduling.request import Trajectory

Body = dict[str, object]

OURS = frozenset({  # fields that transformers' handlers would follow in another way, or one of them alone
    "seed", "logit_bias", "frequency_penalty", "presence_penalty",
})  # fmt: skip
LEAST = -9999.0  # JSON has no number for what cannot come
TEXT = frozenset({"text"})
PARTS = {  # of contents, by what a model takes
    Modality.VLM: TEXT | {"image_url", "video_url"},
    Modality.MULTIMODAL: TEXT | {"image_url", "video_url", "input_audio", "audio_url"},
}


class Checked:
    """Before a handler of transformers: what it would ignore is refused, several answers and log-probabilities are
    given, and a temperature above 0 switches sampling on, as in `Engine.generate`."""

    _served: frozenset[str]  # fields of requests

    def _validate_request(self, body: Body) -> None:
        check_fields(body, self._served)
        Asked.of(body)

    def _check_shown(self, body: Body, messages: list[Body], tools: list[Body] | None) -> None:
        """Raises ValueError for what the chat template does not show to the model: tools, and messages, but for those
        of which templates may leave out parts. Each message stands here as one word."""
        _, model, processor = self._resolve_model({"model": body.get("model")})
        template = str(getattr(processor, "chat_template", None) or "")
        if tools and "tools" not in template:
            raise ValueError("tools must be left out, got some; the model's chat template shows it none")
        modality = self.model_manager.get_model_modality(model, processor=processor)
        probes = [
            {**one, "content": f"probe{place}of{len(messages)}"} if _is_said(one) else one
            for place, one in enumerate(messages)
        ]
        kwargs = {**self.chat_template_kwargs, **(body.get("chat_template_kwargs") or {})}
        try:
            made = self.get_processor_inputs_from_messages(probes, modality)
            text = processor.apply_chat_template(
                made, add_generation_prompt=True, tools=tools, tokenize=False, **kwargs
            )
        except Exception:  # a template may raise anything, and will again where the request is read
            return
        for one in probes:
            if _is_said(one) and one["content"] not in text.lower():
                raise ValueError(
                    f"messages must be such as the model's chat template shows, got one of role {one['role']!r} that "
                    "it leaves out; say it as another role, such as user"
                )

    def _build_generation_config(
        self, body: Body, model_generation_config: GenerationConfig, use_cb: bool = False
    ) -> GenerationConfig:
        given = {name: value for name, value in body.items() if name not in OURS}
        limit = given.pop("max_completion_tokens", None)
        limit = given.pop("max_tokens", None) if limit is None else limit
        config = super()._build_generation_config(given, model_generation_config, use_cb=use_cb)
        for name in ADDED:
            if body.get(name) is not None:
                is_off = name == "top_k" and body[name] == -1  # as vLLM says it
                setattr(config, name, 0 if is_off else body[name])
        if (body.get("temperature") or 0) > 0:
            config.do_sample = True
        if body.get("generation_config") is None or limit is not None:
            config.max_new_tokens = limit  # None: as many as the context holds
        if body.get("logit_bias"):
            config.sequence_bias = {(int(token),): float(bias) for token, bias in body["logit_bias"].items()}
        setattr(config, ASKED, self._with_calls(Asked.of(body), body))
        return config

    def _with_calls(self, asked: Asked, body: Body) -> Asked:
        """With the form of an answer that must call a tool."""
        functions = must_call(body)
        if not functions:
            return asked
        if asked.of_laws.schema is not None:
            raise ValueError(
                f"tool_choice must be auto beside a response_format, got {body['tool_choice']!r:.80}; leave one out"
            )
        _, model, processor = self._resolve_model({"model": body.get("model")})
        calls = form_of_calls(processor, model, functions, is_one=body["tool_choice"] != "required")
        return replace(asked, of_laws=replace(asked.of_laws, calls=calls))

    async def handle_request(self, body: Body, request_id: str) -> object:
        given = {name: value for name, value in body.items() if name != "tools" or body.get("tool_choice") != "none"}
        try:
            reading = super().handle_request(given, request_id)
            answer = await self._manager.read(partial(_returned, reading))
            return await answer()
        except TypeError as error:  # of values that are only looked at where they are used
            free = [name for name in ("generation_config", "chat_template_kwargs") if body.get(name)]
            if not free:
                raise
            raise ValueError(f"{' and '.join(free)} must hold values that fit, got others; {error}") from error

    @staticmethod
    def get_processor_inputs_from_messages(messages: list[Body], modality: Modality) -> list[Body]:
        """Transformers leaves out what a model does not take."""
        allowed = PARTS.get(modality, TEXT)
        parts = [part for one in messages if isinstance(one.get("content"), list) for part in one["content"]]
        kinds = sorted({part["type"] for part in parts} - allowed)
        if kinds:
            taken, got = ", ".join(sorted(allowed)), ", ".join(kinds)
            raise ValueError(
                f"contents must be of {taken} for this model, got {got}; leave them out, or ask another one"
            )
        made = BaseHandler.get_processor_inputs_from_messages(messages, modality)
        for one, given in zip(made, messages, strict=True):
            if given.get("reasoning_content"):
                one["reasoning_content"] = given["reasoning_content"]
        return made

    @property
    def _manager(self) -> Answers:
        return self.generation_state.get_manager(self.model_manager.force_model)

    def _streaming(self, *told: object, **beside: object) -> Callable[[], Awaitable[StreamingResponse]]:
        """Transformers returns what this gives, so a request that is refused gets a status."""
        return partial(self._streamed, [signature(super()._streaming).bind(*told, **beside).arguments])

    async def _streamed(self, of_prompts: Sequence[Body]) -> StreamingResponse:
        """All answers in one stream. of_prompts: arguments of transformers' handler."""
        begun, streams = [], []
        try:
            for asked in of_prompts:
                begun.append(await self._manager.begun(asked["inputs"], asked["gen_config"]))
            await self._manager.wait([firsts[0] for firsts in begun])
            for place, stream in enumerate(chain.from_iterable(begun)):
                asked = of_prompts[place // len(begun[0])]
                one, config = Begun(stream, place), copy.copy(asked["gen_config"])
                response = super()._streaming(**asked | {"gen_manager": one, "gen_config": config})
                streams.append((one, response.body_iterator))
        except BaseException:
            for stream in chain.from_iterable(begun):
                stream.future.cancel()
            raise
        asked, text_of = getattr(asked["gen_config"], ASKED), _text_of(asked["processor"])
        events = self._events([one for one, _ in streams], merged(streams), asked, text_of)
        return StreamingResponse(events, media_type="text/event-stream")

    async def _non_streaming(self, *told: object, **beside: object) -> Callable[[], Awaitable[JSONResponse]]:
        """What transformers' handler of the request returns."""
        return partial(self._whole, signature(super()._non_streaming).bind(*told, **beside).arguments)

    async def _whole(self, asked: Body) -> JSONResponse:
        inputs, config, processor = asked["inputs"], asked["gen_config"], asked["processor"]
        request: Asked = getattr(config, ASKED)
        answers = await self._manager.answers(inputs, config)
        made: list[Body] = []
        for answer in answers:
            asked["gen_manager"] = Ready(answer)
            try:
                response = await super()._non_streaming(**asked)
            except Exception as error:  # nobody says which ones a parser raises
                build_response_parser(processor, asked["model"], inputs["input_ids"])  # raises what a template lacks
                tell_unread(error)
                plain = {"model": NO_TEMPLATE, "processor": without_template(processor)}
                response = await super()._non_streaming(**asked | plain)
            made.append(self._cut(json.loads(response.body), answer, stop_strings(config)))
        return JSONResponse(self._joined(made, answers, request, _text_of(processor)))

    def _joined(self, made: list[Body], answers: list[Trajectory], asked: Asked, text_of: Callable[[int], str]) -> Body:
        """The answers of one prompt in one body. What drafts were worth is where OpenAI tells it of its predictions."""
        choices = [{**body["choices"][0], "index": place} for place, body in enumerate(made)]
        for choice, answer in zip(choices, answers, strict=True):
            if answer.logprobs is not None:
                choice["logprobs"] = self._logprobs(places_of(answer.token_ids, answer.logprobs, text_of))
        usage = usage_of(answers, len(answers))
        return {**made[0], "choices": choices, "usage": usage, "system_fingerprint": numbers_of(answers)}

    async def _events(
        self,
        begun: list[Begun],
        events: AsyncIterator[tuple[Begun, Body]],
        asked: Asked,
        text_of: Callable[[int], str],
    ) -> AsyncIterator[str]:
        """As OpenAI has them. The last one of an answer tells its numbers, the very last one the usage of all."""
        num_left = len(begun)
        async with aclosing(events):
            async for one, event in events:
                beside: list[Body] = []
                if "error" in event:
                    event = {"error": error_told("server_error", event["error"])}
                for choice in event.get("choices", []):
                    choice["index"], is_last = one.index, choice.get("finish_reason") is not None
                    if places := one.taken(text_of, is_first="role" in choice.get("delta", {}), is_last=is_last):
                        choice["logprobs"] = self._logprobs(places, one.num_characters)
                        one.num_characters += sum(len(own[0]) for own, *_ in places)
                    if is_last:
                        num_left -= 1
                        usage = None if num_left else usage_of([each.answer for each in begun], asked.count)
                        event |= {"usage": usage, "system_fingerprint": numbers_of([one.answer])}
                        if asked.is_usage_apart and not num_left:
                            event["usage"] = None
                            beside = [{**event, "choices": [], "usage": usage}]
                for told in (event, *beside):
                    yield f"data: {json.dumps(told)}\n\n"
                if "error" in event:
                    break
        yield "data: [DONE]\n\n"


class ChatHandler(Checked, ChatCompletionHandler):
    """/v1/chat/completions"""

    _served = OF_CHATS

    def _validate_request(self, body: Body) -> None:
        super()._validate_request(body)
        check_chat(body)
        self._check_shown(body, body["messages"], body.get("tools"))

    @staticmethod
    def _cut(made: Body, answer: Trajectory, stops: list[str]) -> Body:
        message = made["choices"][0]["message"]
        if answer.finish_reason == "stop" and message.get("content"):
            message["content"] = before_stop(message["content"], stops)
        return made

    @staticmethod
    def _logprobs(places: list[Place], offset: int = 0) -> Body:
        return {
            "content": [
                {**_entry(*own), "top_logprobs": [_entry(*other) for other in others]} for own, *others in places
            ]
        }


class TextHandler(Checked, CompletionHandler):
    """/v1/completions: one prompt or several, texts or token ids."""

    _served = OF_TEXTS

    @staticmethod
    def _cut(made: Body, answer: Trajectory, stops: list[str]) -> Body:
        if answer.finish_reason == "stop":
            made["choices"][0]["text"] = before_stop(made["choices"][0]["text"], stops)
        return made

    async def handle_request(self, body: Body, request_id: str) -> object:
        prompts = _prompts(body.get("prompt"))
        if len(prompts) == 1 and isinstance(prompts[0], str):
            return await super().handle_request({**body, "prompt": prompts[0]}, request_id)
        self._validate_request({**body, "prompt": ""})
        asked = await self._manager.read(lambda: [self._asked({**body}, prompt, request_id) for prompt in prompts])
        if body.get("stream"):
            return await self._streamed(asked)
        tasks = [asyncio.create_task(self._whole(each)) for each in asked]
        try:
            made = [json.loads(response.body) for response in await asyncio.gather(*tasks)]
        finally:
            for task in tasks:
                task.cancel()  # where one of them has failed, or nobody waits any more
        return JSONResponse(_of_prompts(made))

    def _asked(self, body: Body, prompt: str | list[int], request_id: str) -> Body:
        """Arguments of transformers' handler."""
        model_id, model, processor = self._resolve_model(body)
        tokenizer = getattr(processor, "tokenizer", processor)
        return {
            "request_id": request_id, "model": model, "processor": processor, "model_id": model_id,
            "inputs": tokenizer(prompt, return_tensors="pt") if isinstance(prompt, str) else _ids(prompt),
            "gen_config": self._build_generation_config(body, model.generation_config),
            "gen_manager": self._manager,
        }  # fmt: skip

    @staticmethod
    def _logprobs(places: list[Place], offset: int = 0) -> Body:
        """offset: characters of tokens before."""
        texts = [own[0] for own, *_ in places]
        return {
            "tokens": texts,
            "token_logprobs": [max(own[1], LEAST) for own, *_ in places],
            "top_logprobs": [{text: max(value, LEAST) for text, value in others} for _, *others in places],
            "text_offset": list(accumulate(map(len, texts), initial=offset))[:-1],
        }


def _is_said(message: Body) -> bool:
    """Whether it has something to be shown that no model has written, and no tool."""
    return message["role"] not in ("assistant", "tool") and bool(message.get("content"))


def _returned(reading: Coroutine[None, None, object]) -> object:
    """By a coroutine that waits for nothing."""
    try:
        reading.send(None)
    except StopIteration as done:
        return done.value
    raise RuntimeError("transformers' handler waits for something before it decodes")


def usage_of(answers: Sequence[Trajectory], count: int) -> Body:
    """count: answers of each prompt."""
    num_prompt = sum(one.num_prompt_tokens for one in answers[::count])
    num_new = sum(len(one.token_ids) for one in answers)
    return {
        "prompt_tokens": num_prompt,
        "completion_tokens": num_new,
        "total_tokens": num_prompt + num_new,
        "completion_tokens_details": worth_of_drafts(answers),
    }


def error_told(kind: str, message: str) -> Body:
    """As OpenAI's clients read it."""
    return {"message": message, "type": kind, "param": None, "code": None}


def worth_of_drafts(answers: list[Trajectory]) -> dict[str, int]:
    accepted = sum(len(one.token_ids) - one.num_steps for one in answers)
    num_drafted = sum(one.num_draft_tokens for one in answers)
    return {"accepted_prediction_tokens": accepted, "rejected_prediction_tokens": num_drafted - accepted}


def numbers_of(answers: list[Trajectory]) -> str:
    """Which random numbers they had: with `match` and `coupled` a run of this seed repeats rows of these numbers."""
    return f"seed {answers[0].seed}, rows {answers[0].row} to {answers[-1].row}"


def _of_prompts(made: list[Body]) -> Body:
    """The bodies of several prompts in one."""
    choices = [choice for body in made for choice in body["choices"]]
    names = ("prompt_tokens", "completion_tokens", "total_tokens")
    usage = {name: sum(body["usage"][name] for body in made) for name in names}
    numbers = "; ".join(body["system_fingerprint"] for body in made)
    choices = [{**one, "index": place} for place, one in enumerate(choices)]
    return {**made[0], "choices": choices, "usage": usage, "system_fingerprint": numbers}


def _text_of(processor: object) -> Callable[[int], str]:
    return texts_of(getattr(processor, "tokenizer", processor))


def _entry(text: str, value: float) -> Body:
    return {"token": text, "logprob": max(value, LEAST), "bytes": bytes_of(text)}


def _prompts(given: object) -> list[str | list[int]]:
    """Raises ValueError for what is neither texts nor token ids."""
    listed = [given] if is_prompt(given) else given
    if not isinstance(listed, list) or not all(one and is_prompt(one) for one in listed) or not listed:
        raise ValueError(f"prompt must be a text or token ids, or several, got {given!r:.80}; see OpenAI's reference")
    return listed


def _ids(prompt: list[int]) -> dict[str, torch.Tensor]:
    return {"input_ids": torch.tensor([prompt])}
