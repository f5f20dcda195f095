"""What decodes the requests of a server: in place of transformers' generation managers, open runs of the engine."""

from __future__ import annotations

import asyncio
import copy
import json
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from functools import partial

import torch
from transformers import GenerationConfig

from stand.engine import Engine
from stand.extra import missing_package
from stand.plugins.open_runs import OpenRuns
from stand.plugins.server.asked import Asked
from stand.scheduling.arrivals import OnTokens
from stand.scheduling.request import Trajectory

try:
    from transformers.cli.serving.utils import (
        BaseGenerateManager,
        DirectStreamer,
        GenerationState,
        _GenerationCancelled,
        _StreamError,
    )
except ModuleNotFoundError as error:
    raise missing_package(error, "fastapi", asker="stand.plugins.server", install='"transformers[serving]"') from error

ASKED = "_asked_of_stand"  # a request's `Asked`, beside its settings


class Answers(BaseGenerateManager):
    """Of one engine."""

    def __init__(
        self,
        engine: Engine,
        *,
        num_rows: int,
        seed: int | None = None,
        draft: bool = True,
        thoughts_end: str | None = None,
    ):
        """num_rows: that are decoded together at most. draft: False for ordinary decoding. thoughts_end: text behind
        which answers by a schema begin. Raises ValueError where that is no text of the tokenizer."""
        self.engine, self._draft, self._thoughts_end = engine, draft, thoughts_end
        self._runs = OpenRuns(engine, num_rows=num_rows, seed=seed)
        self._json_answers = None
        if thoughts_end is not None:
            self._begin_json()

    def submit(
        self, inputs: Mapping[str, object], config: GenerationConfig, *, on_tokens: OnTokens | None = None
    ) -> Future[list[Trajectory]]:
        """inputs: one prompt, as a tokenizer or a processor gives it."""
        asked: Asked = getattr(config, ASKED)
        law = copy.deepcopy(config)
        delattr(law, ASKED)
        limit, stop = law.max_new_tokens, law.stop_strings
        law.max_new_tokens = law.stop_strings = None
        settings = {
            "generation_config": law, "num_return_sequences": asked.count, "max_new_tokens": limit, "stop": stop,
            "logprobs": asked.logprobs, "draft": None if self._draft else False,
        }  # fmt: skip
        processors = None if asked.schema is None else partial(self._processors, asked.schema)
        return self._runs.submit(
            inputs, settings, processors=processors, of_processors=asked.schema, on_tokens=on_tokens
        )

    async def answers(self, inputs: Mapping[str, object], config: GenerationConfig) -> list[Trajectory]:
        """All of a request."""
        return await asyncio.wrap_future(await asyncio.to_thread(self.submit, inputs, config))

    async def begun(self, inputs: Mapping[str, object], config: GenerationConfig) -> TokenStream:
        """The tokens of one answer as they come, once there are some. Raises what the request is refused by."""
        stream = TokenStream(asyncio.get_running_loop())
        future = await asyncio.to_thread(self.submit, inputs, config, on_tokens=stream.add)
        future.add_done_callback(stream.end)
        await stream.begun
        return stream

    def generate_streaming(self, *given: object, **named: object) -> None:
        """Handlers ask a `Begun` instead."""
        raise NotImplementedError

    async def generate_non_streaming(
        self,
        model: object,
        processor: object,
        inputs: Mapping[str, object],
        gen_config: GenerationConfig,
        request_id: str,
    ) -> tuple[str, int, torch.Tensor]:
        """As transformers' managers, the first answer's."""
        answer = (await self.answers(inputs, gen_config))[0]
        return await Ready(answer).generate_non_streaming(model, processor, inputs, gen_config, request_id)

    def stop(self) -> None:
        """End what is decoded, and take nothing more."""
        self._runs.close(cancel=True)

    def _processors(self, schema: str) -> list:
        self._begin_json()
        return [self._json_answers.processor(schema)]

    def _begin_json(self) -> None:
        if self._json_answers is None:
            from stand.plugins.json_answers import JsonAnswers  # here, because it needs xgrammar

            self._json_answers = JsonAnswers(self.engine, thoughts_end=self._thoughts_end)


class TokenStream:
    """Tokens of one answer, which wait until somebody shows them."""

    def __init__(self, loop: asyncio.AbstractEventLoop):
        self._loop = loop
        self._lock = threading.Lock()
        self._waiting: list[list[int]] = []
        self._show: Callable[[list[int]], None] | None = None
        self._end: Callable[[Future], None] | None = None
        self._ended: Future | None = None
        self.begun: asyncio.Future = loop.create_future()  # done with the first tokens; what came instead is raised

    def add(self, row: int, token_ids: list[int]) -> None:
        """Raises what showing them raises."""
        with self._lock:
            if self._show is None:
                self._waiting.append(token_ids)
            else:
                self._show(token_ids)
        self._loop.call_soon_threadsafe(self._begin, None)

    def end(self, future: Future) -> None:
        with self._lock:
            self._ended = future
            if self._end is not None:
                self._end(future)
        self._loop.call_soon_threadsafe(self._begin, future)

    def show(self, show: Callable[[list[int]], None], end: Callable[[Future], None]) -> None:
        """show: called with what waits, and with what comes. end: with the future of the answer, when it is done."""
        with self._lock:
            for token_ids in self._waiting:
                show(token_ids)
            self._show, self._end = show, end
            if self._ended is not None:
                end(self._ended)

    def _begin(self, future: Future | None) -> None:
        if self.begun.done():
            return
        failure = None if future is None or future.cancelled() else future.exception()
        if failure is None:
            self.begun.set_result(None)
        else:
            self.begun.set_exception(failure)


class Begun:
    """In the place of a manager: an answer that is coming."""

    def __init__(self, stream: TokenStream):
        self._stream = stream

    def generate_streaming(
        self,
        model: object,
        processor: object,
        inputs: Mapping[str, object],
        gen_config: GenerationConfig,
        request_id: str,
        response_parser: object = None,
    ) -> tuple[asyncio.Queue, DirectStreamer]:
        """As transformers' managers: texts go to the queue, None behind the last one. When it comes, `max_new_tokens`
        of the settings tells whether the answer has met its limit."""
        loop, queue = asyncio.get_running_loop(), asyncio.Queue()
        tokenizer = getattr(processor, "tokenizer", processor)._tokenizer
        streamer = DirectStreamer(tokenizer, loop, queue, response_parser=response_parser)
        streamer.put(inputs["input_ids"])  # the prompt, which it leaves out

        def end(future: Future[list[Trajectory]]) -> None:
            failure = None if future.cancelled() else future.exception()
            if failure is None:
                if not future.cancelled():
                    set_limit(gen_config, future.result()[0])
                streamer.end()
            elif not isinstance(failure, _GenerationCancelled):
                told = json.dumps(str(failure))[1:-1]  # transformers puts it between quotes
                loop.call_soon_threadsafe(queue.put_nowait, _StreamError(told))

        self._stream.show(lambda token_ids: streamer.put(torch.tensor(token_ids)), end)
        return queue, streamer


class Ready:
    """In the place of a manager: an answer that is there."""

    def __init__(self, answer: Trajectory):
        self._answer = answer

    async def generate_non_streaming(
        self,
        model: object,
        processor: object,
        inputs: Mapping[str, object],
        gen_config: GenerationConfig,
        request_id: str,
    ) -> tuple[str, int, torch.Tensor]:
        """Text, number of prompt tokens, new tokens."""
        token_ids = torch.tensor(self._answer.token_ids)
        set_limit(gen_config, self._answer)
        text = processor.decode(token_ids, skip_special_tokens=True)
        return text, self._answer.num_prompt_tokens, token_ids


class OneManager(GenerationState):
    """What transformers' handlers ask for a manager."""

    def __init__(self, manager: BaseGenerateManager):
        super().__init__()
        self._manager = manager

    def get_manager(self, model_id: str, use_cb: bool = False) -> BaseGenerateManager:
        return self._manager


def set_limit(config: GenerationConfig, answer: Trajectory) -> None:
    """Where transformers' handlers look whether an answer has met its limit."""
    config.max_new_tokens = len(answer.token_ids) if answer.finish_reason in ("length", "time") else None
