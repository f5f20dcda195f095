"""How long a piece of work takes on a device, without what a host adds to it."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch

WARM_UP_RUNS = 3  # kernels are compiled and library handles made before anything is captured or timed
SHORTEST = 1e-3  # seconds that one timed replay should last: shorter ones would wait for their own launch
MOST_RUNS = 200  # of the work in one graph
Work = Callable[[], object]


class DeviceTimer:
    """Medians of `repeats` runs: on a GPU of a captured graph, between events; on a CPU by the clock."""

    def __init__(self, device: torch.device, *, repeats: int):
        if repeats < 1:
            raise ValueError(f"repeats must be at least 1, got {repeats}")
        self.device = device
        self.repeats = repeats

    def seconds(self, work: Work) -> float:
        """One run of `work`, which must use the same memory every time and never wait for the device."""
        return statistics.median(self._on_gpu(work) if self.device.type == "cuda" else self._on_cpu(work))

    def _on_cpu(self, work: Work) -> list[float]:
        work()
        seconds = []
        for _ in range(self.repeats):
            start = time.perf_counter()
            work()
            seconds.append(time.perf_counter() - start)
        return seconds

    def _on_gpu(self, work: Work) -> list[float]:
        single = statistics.median(self._replayed(self._captured(work, 1)))
        num_runs = min(max(round(SHORTEST / max(single, 1e-9)), 1), MOST_RUNS)
        return [seconds / num_runs for seconds in self._replayed(self._captured(work, num_runs))]

    def _replayed(self, graph: torch.cuda.CUDAGraph) -> list[float]:
        marks = [
            (torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(self.repeats)
        ]
        graph.replay()
        for start, end in marks:
            start.record()
            graph.replay()
            end.record()
        torch.cuda.synchronize(self.device)
        return [start.elapsed_time(end) / 1e3 for start, end in marks]

    def _captured(self, work: Work, num_runs: int) -> torch.cuda.CUDAGraph:
        side = torch.cuda.Stream(self.device)
        side.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(side):
            for _ in range(WARM_UP_RUNS):
                work()
        side.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=side, capture_error_mode="thread_local"):
            for _ in range(num_runs):
                work()
        return graph


def device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
