"""How long a piece of work takes on a device, without what a host adds to it."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch

from stand.gpu.runner import captured, own_stream

WARM_UP_RUNS = 3  # kernels are compiled and library handles made before anything is captured or timed
SHORTEST = 1e-3  # seconds that one timed replay should last: shorter ones would wait for their own launch
MOST_RUNS = 200  # of the work in one graph
Work = Callable[[], object]


class DeviceTimer:
    """Medians of `repeats` runs: on a GPU of a captured graph, between events; on a CPU by the clock."""

    def __init__(self, device: torch.device, *, repeats: int):
        if repeats < 1:
            raise ValueError(f"repeats must be at least 1, got {repeats}; 5 gives a stable median")
        self.device = device
        self.repeats = repeats
        self._stream = own_stream(device, self) if device.type == "cuda" else None

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
        with torch.cuda.device(self.device):  # on whose stream events are recorded
            for start, end in marks:
                start.record()
                graph.replay()
                end.record()
        marks[-1][1].synchronize()  # not the device: that would break another thread's capture
        return [start.elapsed_time(end) / 1e3 for start, end in marks]

    def _captured(self, work: Work, num_runs: int) -> torch.cuda.CUDAGraph:
        self._stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self._stream):
            for _ in range(WARM_UP_RUNS):
                work()
        self._stream.synchronize()

        def body() -> None:
            for _ in range(num_runs):
                work()

        return captured(body, self._stream, pool=torch.cuda.graph_pool_handle())


def device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
