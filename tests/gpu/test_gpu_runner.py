"""How graphs are recorded, told by a stand-in for torch.cuda: which streams a replay captures and runs on."""

import gc
import threading
import time
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch
from fake_events import FakeEvent

from stand.fusion import fusion
from stand.gpu import runner
from stand.gpu.runner import TORCH_STREAMS, WARM_UP_RUNS, GraphRunner
from stand.gpu.tuning.device_timer import DeviceTimer

DEVICE = torch.device("cuda")


class FakeCuda:
    """Streams, events and graphs that write down what is done on which stream. There are 32 streams, given in turn."""

    def __init__(self):
        self.log: list[tuple[str, object]] = []
        self.stream = "caller"
        self.num_streams = self.num_pools = 0
        self.pools = []  # of the captures, in order
        self.underway = []  # pools that the allocator believes to be captured into
        self.waited = lambda event: None  # told of events that the caller's stream waits for
        self.devices = []

    def Stream(self, device):
        handle = 1 + self.num_streams % 32
        self.num_streams += 1
        return SimpleNamespace(
            name=f"stream {handle}",
            cuda_stream=handle,
            device_index=0,
            wait_stream=lambda other: None,
            wait_event=lambda event: None,
            synchronize=lambda: None,
        )

    def Event(self, enable_timing=False):
        if enable_timing:
            return FakeEvent(self.log, self.devices, DEVICE)
        return SimpleNamespace(record=lambda stream: None, synchronize=lambda: None)

    @contextmanager
    def device(self, device):
        self.devices.append(device)
        yield
        self.devices.pop()

    def CUDAGraph(self):
        graph = SimpleNamespace(replay=lambda: self.log.append(("replay", self.stream)))
        graph.reset = lambda: self.log.append(("reset", self.stream))
        return graph

    def graph_pool_handle(self):
        self.num_pools += 1
        return (0, self.num_pools)

    def current_stream(self, device):
        return SimpleNamespace(name=self.stream, wait_stream=lambda other: None, wait_event=self.waited)

    @contextmanager
    def using(self, stream):
        before, self.stream = self.stream, stream.name
        try:
            yield
        finally:
            self.stream = before

    @contextmanager
    def graph(self, graph, *, stream, capture_error_mode, pool=None):
        """Like torch's, where a capture that was invalidated cannot be ended: it stays on its stream."""
        assert capture_error_mode == "thread_local"
        before, self.stream = self.stream, stream.name
        self.log.append(("capture", self.stream))
        self.pools.append(pool)
        self.underway.append(pool)
        try:
            yield
        except Exception:
            raise RuntimeError("operation failed due to a previous error during capture")  # noqa: B904
        self.stream = before
        self.underway.remove(pool)

    def end_allocate_to_pool(self, device, pool):
        if pool not in self.underway:
            raise RuntimeError("endAllocatePool: not currently recording to mempool_id")
        self.underway.remove(pool)

    def release_pool(self, device, pool):
        self.log.append(("release", pool))


@pytest.fixture
def cuda(monkeypatch):
    fake = FakeCuda()
    monkeypatch.setattr(runner, "_OWNED", set())
    monkeypatch.setattr(torch.cuda, "synchronize", None)  # of the device: it breaks a capture of another thread
    for name in ("Stream", "Event", "CUDAGraph", "graph_pool_handle", "current_stream", "graph", "device"):
        monkeypatch.setattr(torch.cuda, name, getattr(fake, name))
    monkeypatch.setattr(torch.cuda, "stream", fake.using)
    monkeypatch.setattr(torch._C, "_cuda_endAllocateToPool", fake.end_allocate_to_pool, raising=False)
    monkeypatch.setattr(torch._C, "_cuda_releasePool", fake.release_pool, raising=False)
    monkeypatch.setattr(runner, "_ABANDONED", [])
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


def test_a_step_in_two_parts_is_captured_in_the_order_in_which_it_runs(cuda):
    """The second part reads what the first one has left in their common memory."""
    replay = GraphRunner(DEVICE)
    bodies = {name: lambda name=name: cuda.log.append((name, cuda.stream)) for name in ("step", "best", "forward")}
    program = replay.record(**bodies)
    order = ["forward", "step", "best"]
    captures = [kind for name in order for kind in ("capture", name)]
    assert [kind for kind, _ in cuda.log] == order * WARM_UP_RUNS + captures
    waits, events = [], []
    cuda.waited = waits.append
    replay._decided = SimpleNamespace(record=lambda stream: events.append(stream.name), synchronize=lambda: None)
    cuda.log.clear()
    replay.forward(program)
    assert events == ["caller"]  # so that an interrupt between the parts waits for the first one
    replay.step(program)
    assert cuda.log == [("replay", "caller")] * 2 and events == ["caller"] * 2
    assert waits == [replay._learnable] * 2  # the best tokens of the step before


def captures_of(cuda, work) -> set[str]:
    """The streams that `work` captures on."""
    cuda.log.clear()
    work()
    return {stream for kind, stream in cuda.log if kind == "capture"}


def test_no_other_capture_runs_on_an_engines_stream(cuda):
    """torch gives the same 32 streams in turn: timers and engines that come and go meet each one again."""
    first = GraphRunner(DEVICE)
    (own,) = captures_of(cuda, lambda: first.record_alone(lambda: None))
    others = set()
    for _ in range(40):
        others |= captures_of(cuda, lambda: GraphRunner(DEVICE).record_alone(lambda: None))
    timers = [DeviceTimer(DEVICE, repeats=1) for _ in range(2)]
    for timer in timers * 20:
        found = captures_of(cuda, lambda timer=timer: timer.seconds(lambda: None))
        assert len(found) == 1
        others |= found
    assert len(others) > 2 and own not in others


def test_streams_that_are_all_taken_are_refused_and_given_back(cuda):
    engines = [GraphRunner(DEVICE) for _ in range(TORCH_STREAMS // 2)]  # captures, and what runs beside a step
    with pytest.raises(RuntimeError, match="a stream of its own, got 32 taken ones; let engines go"):
        GraphRunner(DEVICE)
    engines[0].others = engines  # a cycle
    del engines
    GraphRunner(DEVICE)  # what only the collector finds is found


def test_a_capture_that_is_refused_leaves_the_callers_stream_and_its_own_error(cuda):
    def refused():
        if cuda.log:  # not a warm-up
            raise ValueError("this waits for the device") from KeyError("the reason")

    with pytest.raises(ValueError, match="waits for the device") as raised:
        GraphRunner(DEVICE).record_alone(refused)
    assert cuda.stream == "caller" and isinstance(raised.value.__cause__, KeyError)
    assert cuda.underway == []  # or torch's allocator would give back no memory from then on
    assert ([kind for kind, _ in cuda.log].count("release"), len(runner._ABANDONED)) == (1, 1)
    cuda.log.clear()
    with pytest.raises(ValueError, match="waits for the device"):
        DeviceTimer(DEVICE, repeats=1).seconds(refused)
    assert cuda.stream == "caller"


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


def test_no_engine_captures_where_another_ones_best_tokens_run(cuda):
    first = GraphRunner(DEVICE)
    beside = []
    program = first.record(lambda: None, lambda: beside.append(cuda.stream))
    cuda.log.clear()
    first.step(program)
    first.wait(program)
    ((_, side),) = [entry for entry in cuda.log if entry[1] != "caller"]
    captures = set()
    for _ in range(40):
        captures |= captures_of(cuda, lambda: GraphRunner(DEVICE).record_alone(lambda: None))
    assert len(captures) > 2 and side not in captures


def test_graphs_share_a_pool_until_they_are_forgotten(cuda):
    """torch takes a pool whose graphs are all gone for freed, and refuses to capture into it."""
    replay = GraphRunner(DEVICE)
    replay.record(lambda: None, lambda: None)
    replay.record_alone(lambda: None)
    assert len(set(cuda.pools)) == 1
    replay.forget()
    replay.record_alone(lambda: None)
    assert len(set(cuda.pools)) == 2 and cuda.pools[-1] != cuda.pools[0]


def test_no_two_threads_capture_at_once(cuda, monkeypatch):
    """torch takes one capture at a time in a process: where one begins it waits for the device, which breaks others."""
    most = []
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: most.append(1 + len(cuda.underway)))

    def body():
        time.sleep(0.01)
        most.append(len(cuda.underway))

    threads = [threading.Thread(target=GraphRunner(DEVICE).record_alone, args=(body,)) for _ in range(3)]
    threads.append(threading.Thread(target=lambda: (time.sleep(0.05), fusion._empty_cache())))
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert max(most) == 1 and gc.isenabled()


def test_the_collector_does_not_run_inside_a_capture(cuda):
    """It could end another engine's graphs there."""
    enabled = []
    GraphRunner(DEVICE).record_alone(lambda: enabled.append(gc.isenabled()))
    assert enabled == [True] * WARM_UP_RUNS + [False] and gc.isenabled()
    gc.disable()
    try:
        GraphRunner(DEVICE).record_alone(lambda: None)
        assert not gc.isenabled()  # as its user wants it
    finally:
        gc.enable()
