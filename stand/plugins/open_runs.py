"""Requests of many settings, each decoded in an open run of its settings, for servers and harnesses."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # they load torch
    from stand.engine import Engine
    from stand.scheduling.arrivals import OnTokens
    from stand.scheduling.open_run import OpenRun
    from stand.scheduling.request import Trajectory

OF_REQUESTS = ("num_return_sequences", "max_new_tokens", "stop", "stop_token_ids")
MOST_OPEN = 8  # runs, since each has a cache: one that nobody waits for is closed before a further one is opened


class OpenRuns:
    """Opens a run where settings come that no open one has. Runs of several settings take turns, step by step."""

    def __init__(self, engine: Engine, *, num_rows: int, seed: int | None = None):
        """num_rows: that a run decodes together at most. seed: of requests that bring none."""
        self._engine, self._num_rows, self._seed = engine, num_rows, seed
        self._runs: dict[tuple, OpenRun] = {}  # by settings, the latest last
        self._waiting: dict[tuple, int] = {}  # requests that somebody waits for
        self._num_opened = 0
        self._is_closed = False
        self._opening = threading.Lock()  # held while a run is opened, which may wait for another one's step
        self._left = threading.Condition()  # taken in the middle of steps, so nothing is done in it that waits for one

    def submit(
        self,
        prompt: object,
        settings: Mapping[str, object],
        *,
        processors: Callable[[], list] | None = None,
        of_processors: object = None,
        on_tokens: OnTokens | None = None,
    ) -> Future[list[Trajectory]]:
        """As `OpenRun.submit`. It may wait: for a step; for steps that are timed, of the first run of a size; and where
        `MOST_OPEN` runs are in use, until nobody needs one of them.

        settings: as `Engine.generate` takes them; what a `Request` has belongs to the request, what is None is left
        out. A seed is that of the run, to which the number of runs before is added: they must not repeat each other.
        processors: makes the logits processors of a run; of_processors: what tells those from others.

        Raises RuntimeError after `close`, and ValueError for settings that do not fit.
        """
        from stand.scheduling.request import Request

        given = {name: value for name, value in settings.items() if value is not None}
        own = {name: given.pop(name) for name in OF_REQUESTS if name in given}
        key = (of_processors, *sorted((name, _frozen(value)) for name, value in given.items()))
        with self._opening:
            self._check_open()
            run = self._runs.pop(key, None)
            if run is None or not run.is_open:
                run = self._open(given, processors)
            self._runs[key] = run
            future = run.submit(Request(prompt, **own), on_tokens=on_tokens)
            with self._left:
                self._waiting[key] = self._waiting.get(key, 0) + 1
        future.add_done_callback(lambda future: self._leave(key))
        return future

    def close(self, *, cancel: bool = False) -> None:
        """End all runs; cancel: without what waits or is decoded."""
        with self._left:
            self._is_closed = True
            self._left.notify_all()
        with self._opening:
            runs, self._runs = list(self._runs.values()), {}
        for run in runs:
            run.close(cancel=cancel)

    def _open(self, settings: dict[str, object], processors: Callable[[], list] | None) -> OpenRun:
        while len(self._runs) >= MOST_OPEN:
            self._runs.pop(self._unused()).close()
        seed = settings.get("seed", self._seed)
        settings = {**settings, "seed": None if seed is None else (seed + self._num_opened) % 2**63}
        if processors is not None:
            settings["logits_processors"] = processors()
        run = self._engine.open_run(max_rows=self._num_rows, **settings)
        self._num_opened += 1
        return run

    def _unused(self) -> tuple:
        """The settings of the run that nobody has needed for longest, once there is one."""
        with self._left:
            while True:
                self._check_open()
                for key in self._runs:
                    if key not in self._waiting:
                        return key
                self._left.wait()

    def _leave(self, key: tuple) -> None:
        with self._left:
            self._waiting[key] -= 1
            if not self._waiting[key]:
                del self._waiting[key]
                self._left.notify_all()

    def _check_open(self) -> None:
        if self._is_closed:
            raise RuntimeError("requests must come before close(), got one after it; make another object")


def _frozen(value: object) -> object:
    if isinstance(value, (str, int, float)):
        return value
    return tuple(value) if isinstance(value, (list, tuple)) else value.to_json_string()  # of a `GenerationConfig`
