"""Who runs a step's body: a GPU by replaying its graph, a CPU by calling it.

A body is a function without arguments that reads and writes memory at fixed addresses.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch

Body = Callable[[], None]
WARM_UP_RUNS = 2  # before capture: kernels are compiled and libraries make their handles, which a capture must not


@dataclass(frozen=True, slots=True)
class Program:
    """A step up to its verdict, and what may follow while the host works on the verdict."""

    step: Body
    best: Body


class Runner(Protocol):
    """Used in this order: step, wait, wait_for_best."""

    def record(self, step: Body, best: Body) -> Program:
        """Make both bodies ready to run often. They are run a few times: their packet must hold padding alone."""

    def record_alone(self, body: Body) -> Body:
        """The same for a body that runs between two steps."""

    def run_alone(self, body: Body) -> None:
        """Run what `record_alone` gave, after a step's verdict and before the next step, and wait for it."""

    def step(self, program: Program) -> None:
        """Start a step."""

    def wait(self, program: Program) -> None:
        """Until its verdict has arrived; then its best rows are on their way."""

    def wait_for_best(self) -> None:
        """Until the best rows of the last step waited for have arrived."""


def runner_for(device: torch.device) -> Runner:
    return GraphRunner(device) if device.type == "cuda" else DirectRunner()


class DirectRunner:
    """Calls the bodies, everything in order."""

    def record(self, step: Body, best: Body) -> Program:
        return Program(step, best)

    def record_alone(self, body: Body) -> Body:
        return body

    def run_alone(self, body: Body) -> None:
        body()

    def step(self, program: Program) -> None:
        program.step()

    def wait(self, program: Program) -> None:
        program.best()

    def wait_for_best(self) -> None:
        pass


class GraphRunner:
    """CUDA graphs; the step on the caller's stream, the best tokens on one next to it.

    No two graphs run at once: best tokens wait for their step, and whatever runs next waits for them. So all graphs may
    share one memory pool. All warm-ups and captures of a replay run on a stream of its own: where a graph ends, torch
    2.13 clears the cuBLAS workspaces of the stream that it was captured on (pytorch #193402), which other engines' live
    graphs may still use.
    """

    def __init__(self, device: torch.device):
        self._device = device
        self._pool = torch.cuda.graph_pool_handle()
        self._captures = torch.cuda.Stream(device)
        self._side = torch.cuda.Stream(device)
        self._decided = torch.cuda.Event()
        self._learnable = torch.cuda.Event()
        self._alone = torch.cuda.Event()

    def record(self, step: Body, best: Body) -> Program:
        return Program(*self._captured(step, best))

    def record_alone(self, body: Body) -> Body:
        return self._captured(body)[0]

    def run_alone(self, body: Body) -> None:
        stream = torch.cuda.current_stream(self._device)
        stream.wait_event(self._learnable)
        body()
        self._alone.record(stream)
        self._alone.synchronize()

    def step(self, program: Program) -> None:
        stream = torch.cuda.current_stream(self._device)
        stream.wait_event(self._learnable)
        program.step()
        self._decided.record(stream)

    def wait(self, program: Program) -> None:
        with torch.cuda.stream(self._side):
            self._side.wait_event(self._decided)
            program.best()
            self._learnable.record(self._side)
        self._decided.synchronize()

    def wait_for_best(self) -> None:
        self._learnable.synchronize()

    def _captured(self, *bodies: Body) -> list[Body]:
        """Graphs of bodies that follow each other."""
        self._captures.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._captures):
            for _ in range(WARM_UP_RUNS):
                for body in bodies:
                    body()
        torch.cuda.current_stream(self._device).wait_stream(self._captures)
        return [self._capture(body) for body in bodies]

    def _capture(self, body: Body) -> Body:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool, stream=self._captures, capture_error_mode="thread_local"):
            body()
        return graph.replay
