"""Time marks of a GPU that is not there: a list's length is the clock, in milliseconds."""

from __future__ import annotations

from contextlib import contextmanager

import torch


class FakeEvent:
    """Stands for `torch.cuda.Event`."""

    def __init__(self, clock: list[object], current: list[object], device: object):
        self._clock, self._current, self._device = clock, current, device
        self.time = 0

    def record(self, stream: object = None) -> None:
        """On a stream, or on that of the current device."""
        used = self._current[-1:] if stream is None else [stream]
        assert used == [self._device], "the events of another device tell nothing of this one"
        self.time = len(self._clock)

    def synchronize(self) -> None:
        assert self.time, "an event that was never recorded waits for nothing"

    def elapsed_time(self, later: FakeEvent) -> int:
        return later.time - self.time


def use_fake_events(monkeypatch, clock: list[object], device: object) -> None:
    """For work on `device`, which is not the current one."""
    current = []

    @contextmanager
    def using(one):
        current.append(one)
        yield
        current.pop()

    monkeypatch.setattr(torch.cuda, "device", using)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda one: one)  # a device stands for its stream
    monkeypatch.setattr(torch.cuda, "Event", lambda enable_timing: FakeEvent(clock, current, device))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
