"""Who runs a step's body: a GPU by replaying its graph, a CPU by calling it.

A body is a function without arguments that reads and writes memory at fixed addresses.
"""

from __future__ import annotations

import gc
import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol
from weakref import finalize

import torch

Body = Callable[[], None]
WARM_UP_RUNS = 2  # before capture: kernels are compiled and libraries make their handles, which a capture must not
TORCH_STREAMS = 32  # that torch has of a device and hands out in turn
_OWNED: set[int] = set()  # handles of streams whose owners live
_ABANDONED: list[torch.cuda.CUDAGraph] = []  # which torch's allocators may still ask whether they are being captured
CAPTURING = threading.Lock()  # held by who captures, and by who empties torch's cache, which no capture survives
LOGGER = logging.getLogger("stand")


@dataclass(frozen=True, slots=True)
class Program:
    """A step up to its verdict, and what may follow while the host works on the verdict."""

    step: Body
    best: Body
    forward: Body | None = None  # what comes first where the host acts between it and `step`


class Runner(Protocol):
    """Used in this order: forward where the program has one, step, wait, wait_for_best."""

    def record(self, step: Body, best: Body, forward: Body | None = None) -> Program:
        """Make the bodies ready to run often. They are run a few times: their packet must hold padding alone."""

    def record_alone(self, body: Body) -> Body:
        """The same for a body that runs between two steps."""

    def run_alone(self, body: Body) -> None:
        """Run what `record_alone` gave, after a step's verdict and before the next step, and wait for it."""

    def forget(self) -> None:
        """Nothing that was recorded so far will run again, and nobody holds it."""

    def forward(self, program: Program) -> None:
        """Start the first part of a step, on the stream that is then current."""

    def step(self, program: Program) -> None:
        """Start a step, or the rest of it."""

    def wait(self, program: Program) -> None:
        """Until its verdict has arrived; then its best tokens are on their way."""

    def wait_for_step(self) -> None:
        """Until the last step that was started, or a part of it, is over, whether anybody waits for it or not."""

    def wait_for_best(self) -> None:
        """Until the best tokens of the last step waited for have arrived."""


def runner_for(device: torch.device) -> Runner:
    return GraphRunner(device) if device.type == "cuda" else DirectRunner()


class DirectRunner:
    """Calls the bodies, everything in order."""

    def record(self, step: Body, best: Body, forward: Body | None = None) -> Program:
        return Program(step, best, forward)

    def record_alone(self, body: Body) -> Body:
        return body

    def run_alone(self, body: Body) -> None:
        body()

    def forget(self) -> None:
        pass

    def forward(self, program: Program) -> None:
        program.forward()

    def step(self, program: Program) -> None:
        program.step()

    def wait(self, program: Program) -> None:
        program.best()

    def wait_for_step(self) -> None:
        pass

    def wait_for_best(self) -> None:
        pass


class GraphRunner:
    """CUDA graphs; the step on the caller's stream, the best tokens on one next to it.

    No two graphs run at once: best tokens wait for their step, and whatever runs next waits for them. So all graphs may
    share one memory pool. All warm-ups and captures of a runner run on a stream of its own (`own_stream`).
    """

    def __init__(self, device: torch.device):
        self._device = device
        self._pool = torch.cuda.graph_pool_handle()
        self._captures = own_stream(device, self)
        self._side = own_stream(device, self)  # or another engine could capture on it
        self._decided = torch.cuda.Event()
        self._learnable = torch.cuda.Event()
        self._alone = torch.cuda.Event()

    def record(self, step: Body, best: Body, forward: Body | None = None) -> Program:
        if forward is None:
            return Program(*self._captured(step, best))
        forward, step, best = self._captured(forward, step, best)
        return Program(step, best, forward)

    def record_alone(self, body: Body) -> Body:
        return self._captured(body)[0]

    def run_alone(self, body: Body) -> None:
        stream = torch.cuda.current_stream(self._device)
        stream.wait_event(self._learnable)
        body()
        self._alone.record(stream)
        self._alone.synchronize()

    def forget(self) -> None:
        """The next graphs get a pool of their own: torch takes one whose graphs are all gone for freed."""
        self._pool = torch.cuda.graph_pool_handle()

    def forward(self, program: Program) -> None:
        self._start(program.forward)

    def step(self, program: Program) -> None:
        self._start(program.step)

    def wait(self, program: Program) -> None:
        with torch.cuda.stream(self._side):
            self._side.wait_event(self._decided)
            program.best()
            self._learnable.record(self._side)
        self._decided.synchronize()

    def wait_for_step(self) -> None:
        self._decided.synchronize()

    def wait_for_best(self) -> None:
        self._learnable.synchronize()

    def _start(self, body: Body) -> None:
        stream = torch.cuda.current_stream(self._device)
        stream.wait_event(self._learnable)
        body()
        self._decided.record(stream)

    def _captured(self, *bodies: Body) -> list[Body]:
        """Graphs of bodies that follow each other."""
        self._captures.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._captures):
            for _ in range(WARM_UP_RUNS):
                for body in bodies:
                    body()
        torch.cuda.current_stream(self._device).wait_stream(self._captures)
        return [captured(body, self._captures, pool=self._pool).replay for body in bodies]


def own_stream(device: torch.device, owner: object) -> torch.cuda.Stream:
    """A stream for captures that nobody else gets from here while `owner` lives.

    torch hands out the same few streams in turn, and where a graph ends, torch 2.13 clears the cuBLAS workspaces of the
    stream that it was captured on (pytorch #193402), which other live graphs may still use. Raises RuntimeError where
    none is left.
    """
    for _ in range(2):
        for _ in range(TORCH_STREAMS):
            stream = torch.cuda.Stream(device)
            if stream.cuda_stream not in _OWNED:
                _OWNED.add(stream.cuda_stream)
                finalize(owner, _OWNED.discard, stream.cuda_stream)
                return stream
        gc.collect()  # what is left of engines that ended
    raise RuntimeError(f"a capture needs a stream of its own, got {TORCH_STREAMS} taken ones; let engines go")


@contextmanager
def _undisturbed() -> Iterator[None]:
    """One capture at a time: torch waits for the whole device and empties its cache where one begins, and both break
    any other. And keep the garbage collector from ending another engine's graphs in the middle of one."""
    with CAPTURING:
        was_enabled = gc.isenabled()
        gc.disable()
        try:
            yield
        finally:
            if was_enabled:
                gc.enable()


@_undisturbed()
def captured(body: Body, stream: torch.cuda.Stream, *, pool: tuple[int, int]) -> torch.cuda.CUDAGraph:
    """A graph of `body`, with its memory in `pool`. Raises what `body` raises, also where the capture cannot be ended
    then."""
    graph, failures = torch.cuda.CUDAGraph(), []
    try:
        with (
            torch.cuda.stream(stream),  # the next one, where it cannot end the capture, does not leave the stream
            torch.cuda.graph(graph, stream=stream, pool=pool, capture_error_mode="thread_local"),
        ):
            try:
                body()
            except Exception as error:
                failures.append(error)
                raise
    except BaseException:
        _abandon(graph, stream, pool)
        raise
    finally:
        if failures:
            raise failures.pop()
    return graph


def _abandon(graph: torch.cuda.CUDAGraph, stream: torch.cuda.Stream, pool: tuple[int, int]) -> None:
    """After a capture that failed. Where it could not be ended, torch 2.11 to 2.13 take it for one that still goes on,
    and give back no memory from then on; later versions end it in `reset`, and say so by an error here."""
    _ABANDONED.append(graph)
    try:
        graph.reset()
        torch._C._cuda_endAllocateToPool(stream.device_index, pool)
        torch._C._cuda_releasePool(stream.device_index, pool)
    except (RuntimeError, AttributeError) as error:
        LOGGER.debug("nothing was left of a capture that failed: %s", error)
