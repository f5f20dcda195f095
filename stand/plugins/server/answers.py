"""What decodes the requests of a server: in place of transformers' generation managers, open runs of the engine."""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import TypeVar

import torch
from transformers import GenerationConfig
from transformers.cli.serving.utils import GenerationState

from stand.engine import Engine
from stand.plugins.open_runs import ClosedError, OpenRuns
from stand.plugins.request_processors import AskedOfLaws, RequestProcessors
from stand.plugins.server.asked import Asked
from stand.plugins.server.streams import ENDING, TokenStream, set_limit
from stand.scheduling.arrivals import OnTokens
from stand.scheduling.request import Trajectory

Awaited = TypeVar("Awaited")
MOST_SUBMITTING = 256  # requests: each waits in a thread until a run of its settings is open
ASKED = "_asked_of_stand"  # a request's `Asked`, beside its settings


class Answers:
    """Of one engine. Handlers that ask transformers' managers for texts are given a `Ready` or a `Begun`."""

    def __init__(
        self,
        engine: Engine,
        *,
        num_rows: int,
        seed: int | None = None,
        draft: bool = True,
        thoughts_begin: str | None = None,
        thoughts_end: str | None = None,
    ):
        """num_rows: that are decoded together at most. draft: False for ordinary decoding. thoughts_begin,
        thoughts_end: as `RequestProcessors`. Raises ValueError where they are no texts of the tokenizer."""
        self.engine, self._draft, self._is_stopped = engine, draft, False
        self._threads = ThreadPoolExecutor(MOST_SUBMITTING)
        self._reading = ThreadPoolExecutor(1)  # as nobody promises that tokenizers and processors take several
        self._runs = OpenRuns(engine, num_rows=num_rows, seed=seed)
        self._processors = RequestProcessors(engine, thoughts_begin=thoughts_begin, thoughts_end=thoughts_end)

    def submit(
        self, inputs: Mapping[str, object], config: GenerationConfig, *, told: Sequence[OnTokens] = ()
    ) -> list[Future[list[Trajectory]]]:
        """inputs: one prompt, as a tokenizer or a processor gives it. told: of one answer each, all in one otherwise.

        Such answers are requests of their own, so that each ends when it does; those of one prompt share its keys."""
        inputs = inputs.to("cpu") if hasattr(inputs, "to") else inputs  # here, where no step waits for it
        asked: Asked = getattr(config, ASKED)
        law = copy.deepcopy(config)
        delattr(law, ASKED)
        limit, stop = law.max_new_tokens, law.stop_strings
        law.max_new_tokens = law.stop_strings = None
        settings = {
            "generation_config": law, "num_return_sequences": 1 if told else asked.count, "max_new_tokens": limit,
            "stop": stop, "logprobs": asked.logprobs, "draft": None if self._draft else False,
        }  # fmt: skip
        (prompt,) = inputs["input_ids"]
        of_laws = self._processors.arguments(prompt, asked.of_laws, made=self._made)
        return [self._runs.submit(inputs, settings, **of_laws, on_tokens=each) for each in told or [None]]

    async def read(self, read: Callable[[], Awaited]) -> Awaited:
        """What tokenizes, or loads images, in a thread: it takes a second, in which others are to be answered."""
        return await asyncio.get_running_loop().run_in_executor(self._reading, read)

    async def answers(self, inputs: Mapping[str, object], config: GenerationConfig) -> list[Trajectory]:
        """All of a request. Whoever is cancelled meanwhile ends them. Raises ClosedError where the server ends."""
        (future,) = await self._submitted(inputs, config)
        return await self._unless_closed(future, asyncio.wrap_future(future))

    async def begun(self, inputs: Mapping[str, object], config: GenerationConfig) -> list[TokenStream]:
        """The tokens of each answer as they come. Raises ClosedError where the server ends."""
        loop, count = asyncio.get_running_loop(), getattr(config, ASKED).count
        streams = [TokenStream(loop) for _ in range(count)]
        futures = await self._submitted(inputs, config, told=[stream.add for stream in streams])
        for stream, future in zip(streams, futures, strict=True):
            stream.follow(future)
        return streams

    async def wait(self, streams: Sequence[TokenStream]) -> None:
        """Until each of them has tokens. Raises what one is refused by."""
        for stream in streams:
            await self._unless_closed(stream.future, stream.begun)

    async def _submitted(self, *given: object, **named: object) -> list[Future[list[Trajectory]]]:
        """In a thread of our own, for it may wait: asyncio's are few."""
        loop = asyncio.get_running_loop()
        submitting = asyncio.ensure_future(loop.run_in_executor(self._threads, partial(self.submit, *given, **named)))
        try:
            return await asyncio.shield(submitting)
        except asyncio.CancelledError:
            submitting.add_done_callback(lambda done: done.exception() or [one.cancel() for one in done.result()])
            raise

    async def _unless_closed(self, future: Future, awaited: Awaitable[Awaited]) -> Awaited:
        try:
            return await awaited
        except asyncio.CancelledError:
            if self._is_stopped and future.cancelled():
                raise ClosedError(ENDING) from None
            raise

    def stop(self) -> None:
        """End what is decoded, and take nothing more."""
        self._is_stopped = True
        self._runs.close(cancel=True)

    def _made(self, of_laws: AskedOfLaws) -> list:
        """Raises ValueError where xgrammar is absent or cannot follow the schema."""
        try:
            return self._processors.made(of_laws)
        except (ImportError, RuntimeError) as error:
            name = "response_format" if of_laws.calls is None else "parameters of tools"
            got = of_laws.schema or of_laws.calls
            raise ValueError(f"{name} must be a schema that xgrammar compiles here, got {got:.80}; {error}") from error


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

    def __init__(self, manager: Answers):
        super().__init__()
        self._manager = manager

    def get_manager(self, model_id: str, use_cb: bool = False) -> Answers:
        return self._manager
