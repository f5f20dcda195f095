"""Requests of many settings, each decoded in an open run of its settings, for servers and harnesses."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from typing import TYPE_CHECKING

from stand.seeds import call_seed, checked_seed

if TYPE_CHECKING:  # they load torch
    from stand.engine import Engine
    from stand.scheduling.arrivals import OnTokens
    from stand.scheduling.open_run import OpenRun
    from stand.scheduling.request import Request, Trajectory

OF_REQUESTS = ("num_return_sequences", "max_new_tokens", "stop", "stop_token_ids")
MOST_OPEN = 4  # runs, since each has a cache: one that nobody waits for is closed before a further one is opened


class ClosedError(RuntimeError):
    """A request came after `OpenRuns.close`."""


class OpenRuns:
    """Opens a run where settings come that no open one has. Runs of several settings take turns, step by step."""

    def __init__(self, engine: Engine, *, num_rows: int, seed: int | None = None):
        """num_rows: that a run decodes together at most. seed: of requests that bring none."""
        self._engine, self._num_rows, self._seed = engine, num_rows, seed
        self._runs: dict[tuple, OpenRun] = {}  # by settings, the latest last
        self._waiting: dict[tuple, int] = {}  # requests that somebody waits for
        self._num_opened: dict[int, int] = {}  # runs, by their seeds
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
        """As `OpenRun.submit`. Where no run of such settings is open, it waits: for a step; for steps that are timed of
        the first run of a size; and where `MOST_OPEN` runs are in use, until nobody needs one of them. So callbacks of
        a run may ask for settings of their own run, and for no others.

        settings: as `Engine.generate` takes them; what a `Request` has belongs to the request, what is None is left
        out. A seed is that of the first run that has it; later ones follow from it.
        processors: makes the logits processors of a run; of_processors: what tells those from others.

        Raises ClosedError after `close`, and ValueError for settings that do not fit.
        """
        from stand.scheduling.request import Request

        given = {name: value for name, value in settings.items() if value is not None}
        own = {name: given.pop(name) for name in OF_REQUESTS if name in given}
        key = (of_processors, *sorted((name, _frozen(value)) for name, value in given.items()))
        request = Request(prompt, **own)
        future = self._submitted(key, request, on_tokens)
        while future is None:
            with self._opening:
                if key not in self._runs or not self._runs[key].is_open:
                    self._open(key, given, processors)
            future = self._submitted(key, request, on_tokens)
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

    def _submitted(self, key: tuple, request: Request, on_tokens: OnTokens | None) -> Future[list[Trajectory]] | None:
        """None where no run of these settings is open."""
        with self._left:
            self._check_open()
            run = self._runs.get(key)
            if run is None or not run.is_open:
                return None
            self._runs[key] = self._runs.pop(key)
            future = run.submit(request, on_tokens=on_tokens)
            self._waiting[key] = self._waiting.get(key, 0) + 1
            return future

    def _open(self, key: tuple, settings: dict[str, object], processors: Callable[[], list] | None) -> None:
        self._make_room(key)
        seed = settings.get("seed", self._seed)
        if seed is not None:
            number = self._num_opened.get(checked_seed(seed), 0)
            settings = {**settings, "seed": call_seed(seed, number)}
            self._num_opened[seed] = number + 1
        if processors is not None:
            settings = {**settings, "logits_processors": processors()}
        run = self._engine.open_run(max_rows=self._num_rows, **settings)
        with self._left:
            self._runs[key] = run

    def _make_room(self, key: tuple) -> None:
        """For a run of these settings: one that has failed goes, and the one that nobody has needed for longest where
        there are as many as may be, once there is one."""
        with self._left:
            self._runs.pop(key, None)
            while len(self._runs) >= MOST_OPEN:
                self._check_open()
                unused = next((other for other in self._runs if other not in self._waiting), None)
                if unused is None:
                    self._left.wait()
                else:
                    self._runs.pop(unused).close(wait=False)

    def _leave(self, key: tuple) -> None:
        with self._left:
            self._waiting[key] -= 1
            if not self._waiting[key]:
                del self._waiting[key]
                self._left.notify_all()

    def _check_open(self) -> None:
        if self._is_closed:
            raise ClosedError("requests must come before close(), got one after it; make another object")


def _frozen(value: object) -> object:
    """What tells settings apart, to be found again; True is not 1, which few settings may be."""
    if isinstance(value, bool):
        return bool, value
    if isinstance(value, Mapping):
        return dict, *((_frozen(name), _frozen(each)) for name, each in value.items())
    if isinstance(value, (list, tuple, set)):
        return tuple(map(_frozen, value))
    if hasattr(value, "tolist"):  # of an array or a tensor
        return _frozen(value.tolist())
    return value.to_json_string() if hasattr(value, "to_json_string") else value  # of a `GenerationConfig`
