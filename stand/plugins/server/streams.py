"""Answers that are streamed: tokens as they come, and texts without stop strings."""

from __future__ import annotations

import asyncio
import json
import threading
from collections import deque
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from concurrent.futures import Future

import torch
from transformers import GenerationConfig
from transformers.cli.serving.utils import DirectStreamer, _StreamError, response_events_to_chunks

from stand.laws.logprobs import TokenLogprobs
from stand.plugins.logprob_places import Place, places_of
from stand.plugins.server.unread import ForgivingParser
from stand.scheduling.request import Trajectory

Event = dict[str, object]
Show = Callable[[list[int], TokenLogprobs | None], None]
TokenPlace = tuple[int, TokenLogprobs]  # a token and its log-probabilities

ENDING = "the server must not be ending, got a request then; ask again later"


class TokenStream:
    """Tokens of one answer, which wait until somebody shows them."""

    def __init__(self, loop: asyncio.AbstractEventLoop):
        self._loop = loop
        self.future: Future | None = None  # of the answer
        self._lock = threading.Lock()
        self._waiting: list[tuple[list[int], TokenLogprobs | None]] = []
        self._show: Show | None = None
        self._end: Callable[[Future], None] | None = None
        self._ended: Future | None = None
        self.begun: asyncio.Future = loop.create_future()  # done with the first tokens; what came instead is raised
        self.begun.add_done_callback(lambda done: done.cancelled() or done.exception())  # few are awaited

    def follow(self, future: Future) -> None:
        self.future = future
        future.add_done_callback(self.end)

    def add(self, row: int, token_ids: list[int], logprobs: TokenLogprobs | None = None) -> None:
        """Raises what showing them raises."""
        with self._lock:
            if self._show is None:
                self._waiting.append((token_ids, logprobs))
            else:
                self._show(token_ids, logprobs)
        self._loop.call_soon_threadsafe(self._begin, None)

    def end(self, future: Future) -> None:
        with self._lock:
            self._ended = future
            if self._end is not None:
                self._end(future)
        self._loop.call_soon_threadsafe(self._begin, future)

    def show(self, show: Show, end: Callable[[Future], None]) -> None:
        """show: called with what waits, and with what comes. end: with the future of the answer, when it is done."""
        with self._lock:
            for told in self._waiting:
                show(*told)
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
    """In the place of a manager: an answer that is coming, one of those that a request has."""

    def __init__(self, stream: TokenStream, index: int = 0):
        self.index = index
        self.num_characters = 0  # of the tokens whose log-probabilities were taken
        self._stream = stream
        self._streamer: _Streamer | None = None

    @property
    def answer(self) -> Trajectory:
        """Once its last event has come."""
        (answer,) = self._stream.future.result()
        return answer

    def cancel(self) -> None:
        self._stream.future.cancel()

    def taken(self, text_of: Callable[[int], str], *, is_first: bool, is_last: bool) -> list[Place]:
        """Of the tokens whose text the next event has: the first one has none, the last one all that are left."""
        streamer = self._streamer
        tokens = streamer.unshown if is_last else [] if is_first else streamer.shown.popleft()
        return [place for token, found in tokens for place in places_of([token], found, text_of)]

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
        tokenizer = getattr(processor, "tokenizer", processor)
        if response_parser is not None:
            response_parser = ForgivingParser(response_parser, tokenizer.all_special_tokens)
        stops = stop_strings(gen_config)
        beside = {"response_parser": response_parser, "stops": stops, "future": self._stream.future}
        self._streamer = streamer = _Streamer(tokenizer._tokenizer, loop, queue, **beside)
        streamer.put(inputs["input_ids"])  # the prompt, which it leaves out

        def end(future: Future[list[Trajectory]]) -> None:
            failure = ENDING if future.cancelled() else future.exception()
            if failure is None:
                set_limit(gen_config, future.result()[0])
                streamer.end()
            else:
                told = json.dumps(str(failure))[1:-1]  # transformers puts it between quotes
                loop.call_soon_threadsafe(queue.put_nowait, _StreamError(told))

        self._stream.show(streamer.show, end)
        return queue, streamer


class _Streamer(DirectStreamer):
    """Shows no stop string, and nothing behind one. Whoever leaves ends the answer, also one that waits."""

    def __init__(self, *told: object, response_parser: object, stops: Sequence[str], future: Future):
        self._stops, self._future = stops, future
        self._held = ""  # text that may be the beginning of a stop string
        self._is_over = False
        self.unshown: list[TokenPlace] = []  # of tokens behind the last item
        begins = [] if response_parser is None else response_events_to_chunks(response_parser.initial_events)
        self.shown: deque[list[TokenPlace]] = deque([] for _ in begins)  # by item of the queue
        super().__init__(*told, response_parser=response_parser)

    def show(self, token_ids: list[int], logprobs: TokenLogprobs | None) -> None:
        for place, token in enumerate(token_ids):
            if logprobs is not None:
                self.unshown.append((token, logprobs.between(place, place + 1)))
            self.put(torch.tensor([token]))

    def cancel(self) -> None:
        """Nothing more is shown of a future that is cancelled."""
        self._future.cancel()

    def _enqueue(self, item: object) -> None:
        """Thoughts and calls of tools are shown as they are."""
        if type(item) is not str or not self._stops:
            held, self._held = self._held, ""
            for one in [held, item] if held else [item]:
                self._put(one)
        elif not self._is_over:
            text = self._held + item
            shown = before_stop(text, self._stops)
            self._is_over = len(shown) < len(text)
            count = 0 if self._is_over else _num_held(shown, self._stops)
            self._held = shown[len(shown) - count :]
            if len(shown) > count:
                self._put(shown[: len(shown) - count])

    def _put(self, item: object) -> None:
        if item is not None:
            self.shown.append(self.unshown)
            self.unshown = []
        super()._enqueue(item)


async def merged(streams: Sequence[tuple[Begun, AsyncIterator[str]]]) -> AsyncIterator[tuple[Begun, Event]]:
    """The events of several answers as they come. Whoever leaves ends all that have not ended."""
    queue: asyncio.Queue[tuple[Begun, Event] | None] = asyncio.Queue()

    async def pass_on(begun: Begun, events: AsyncIterator[str]) -> None:
        async for several in events:
            for event in several.split("\n\n")[:-1]:
                queue.put_nowait((begun, json.loads(event.removeprefix("data: "))))

    passing = asyncio.gather(*(pass_on(*stream) for stream in streams))
    passing.add_done_callback(lambda done: queue.put_nowait(None))
    try:
        while (told := await queue.get()) is not None:
            yield told
        await passing
    finally:
        passing.cancel()
        for begun, _ in streams:
            begun.cancel()


def stop_strings(config: GenerationConfig) -> list[str]:
    given = config.stop_strings or []
    return [given] if isinstance(given, str) else list(given)


def before_stop(text: str, stops: Sequence[str]) -> str:
    """What is shown of an answer, which ends with its first stop string."""
    found = [place for place in map(text.find, stops) if place >= 0]
    return text[: min(found)] if found else text


def _num_held(text: str, stops: Sequence[str]) -> int:
    """Characters at its end with which a stop string may begin."""
    most = min(len(text), max(map(len, stops)) - 1)
    return next((count for count in range(most, 0, -1) if any(stop.startswith(text[-count:]) for stop in stops)), 0)


def set_limit(config: GenerationConfig, answer: Trajectory) -> None:
    """Where transformers' handlers look whether an answer has met its limit."""
    config.max_new_tokens = len(answer.token_ids) if is_cut_off(answer) else None


def is_cut_off(answer: Trajectory) -> bool:
    return answer.finish_reason in ("length", "time")
