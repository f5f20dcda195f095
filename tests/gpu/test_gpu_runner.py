"""How graphs are recorded, told by a stand-in for torch.cuda: which streams a replay captures and runs on."""

from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch

from stand.gpu.runner import WARM_UP_RUNS, GraphRunner

DEVICE = torch.device("cuda")


class FakeCuda:
    """Streams, events and graphs that write down what is done on which stream."""

    def __init__(self):
        self.log: list[tuple[str, object]] = []
        self.stream = "caller"
        self.num_streams = 0
        self.waited = lambda event: None  # told of events that the caller's stream waits for

    def Stream(self, device):  # noqa: N802
        self.num_streams += 1
        name = f"stream {self.num_streams}"
        return SimpleNamespace(name=name, wait_stream=lambda other: None, wait_event=lambda event: None)

    def Event(self):  # noqa: N802
        return SimpleNamespace(record=lambda stream: None, synchronize=lambda: None)

    def CUDAGraph(self):  # noqa: N802
        return SimpleNamespace(replay=lambda: self.log.append(("replay", self.stream)))

    def graph_pool_handle(self):
        return "pool"

    def current_stream(self, device):
        return SimpleNamespace(name=self.stream, wait_stream=lambda other: None, wait_event=self.waited)

    @contextmanager
    def using(self, stream):
        before, self.stream = self.stream, stream.name
        yield
        self.stream = before

    @contextmanager
    def graph(self, graph, *, pool, stream, capture_error_mode):
        assert (pool, capture_error_mode) == ("pool", "thread_local")
        with self.using(stream):
            self.log.append(("capture", self.stream))
            yield


@pytest.fixture
def cuda(monkeypatch):
    fake = FakeCuda()
    for name in ("Stream", "Event", "CUDAGraph", "graph_pool_handle", "current_stream", "graph"):
        monkeypatch.setattr(torch.cuda, name, getattr(fake, name))
    monkeypatch.setattr(torch.cuda, "stream", fake.using)
    return fake


def test_a_replay_warms_up_and_captures_on_one_stream_of_its_own(cuda):
    """torch 2.13 clears the cuBLAS workspaces of a capture's stream where the graph ends (pytorch #193402)."""
    first, second = GraphRunner(DEVICE), GraphRunner(DEVICE)
    streams = []
    for replay in (first, second, first):
        cuda.log.clear()
        replay.record(lambda: cuda.log.append(("step", cuda.stream)), lambda: cuda.log.append(("best", cuda.stream)))
        runs = [kind for kind, _ in cuda.log]
        assert runs == ["step", "best"] * WARM_UP_RUNS + ["capture", "step", "capture", "best"]
        used = {stream for _, stream in cuda.log}
        assert len(used) == 1 and "caller" not in used
        streams += used
    assert streams[0] == streams[2] != streams[1]


def test_what_runs_alone_is_captured_like_a_step_and_runs_on_the_callers_stream(cuda):
    replay = GraphRunner(DEVICE)
    body = replay.record_alone(lambda: cuda.log.append(("tail", cuda.stream)))
    assert [kind for kind, _ in cuda.log] == ["tail"] * WARM_UP_RUNS + ["capture", "tail"]
    assert {stream for _, stream in cuda.log} == {"stream 1"}
    waits = []
    cuda.waited = waits.append
    cuda.log.clear()
    replay.run_alone(body)
    assert cuda.log == [("replay", "caller")]
    assert waits == [replay._learnable]  # the best tokens of the step before: they share its memory


def test_steps_run_on_the_callers_stream_and_best_tokens_next_to_it(cuda):
    replay = GraphRunner(DEVICE)
    program = replay.record(lambda: None, lambda: None)
    cuda.log.clear()
    replay.step(program)
    replay.wait(program)
    (step, best) = cuda.log
    assert step == ("replay", "caller") and best[1] not in ("caller", "stream 1")
