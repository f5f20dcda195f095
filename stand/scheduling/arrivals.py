"""Requests that come while others are decoded: they wait here until the call has a place for them."""

from __future__ import annotations

import threading
import traceback
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import replace

from stand.laws.logprobs import LogprobNotes
from stand.row import Row
from stand.scheduling.request import Job, Request, Trajectory
from stand.simd.threads import release_pool

OnTokens = Callable[..., None]  # (row, token ids), behind them their `TokenLogprobs` where the run has some


class Ticket:
    """A request, who waits for it, and what has become of it so far."""

    def __init__(self, request: Request, on_tokens: OnTokens | None):
        self.request, self._on_tokens = request, on_tokens
        self.future: Future[list[Trajectory]] = Future()
        self.num_rows = 0  # known when it was read
        self.ended: list[Trajectory] = []
        self._is_settled = False

    def tell(self, row: Row, token_ids: list[int], notes: LogprobNotes | None) -> None:
        """What a callback of the user's raises is the request's error."""
        if self._on_tokens is not None and not self.future.done():
            try:
                beside = () if notes is None else (notes.newest(row, len(token_ids)),)
                self._on_tokens(row.index, token_ids, *beside)
            except BaseException as error:
                error.add_note(f"raised by on_tokens=:\n{''.join(traceback.format_tb(error.__traceback__)[1:])}")
                self.fail(_without_frames(error))

    def succeed(self) -> None:
        """All rows have ended."""
        self._settle(lambda: self.future.set_result(sorted(self.ended, key=lambda one: one.row)))

    def fail(self, error: BaseException) -> None:
        """While the run goes on, no frame of it may be held by the error's traceback: they hold keys."""
        self._settle(lambda: self.future.set_exception(error))

    def pass_over(self) -> None:
        """Nobody waits for it any more."""
        self._settle(lambda: None)

    def _settle(self, settle: Callable[[], None]) -> None:
        """Once. Those who wait for several futures are told of one that was cancelled, too."""
        if not self._is_settled:
            self._is_settled = True
            if self.future.set_running_or_notify_cancel():
                settle()


class Arrivals(Iterator[Job | None]):
    """The jobs of a call, in the order in which their requests were put here by any thread; None says that none waits
    now. It ends when it was closed and is empty.

    A request that cannot be read, or that memory will never hold, fails alone, and one that was cancelled is passed
    over. A future that is done before its request has ended (cancelled, or its callback has failed) ends the rows.
    """

    def __init__(self, read: Callable[[Request], Job], forget: Callable[[Job], None], num_places: int):
        """forget: told of a job that was read and has no row. num_places: rows that may be live at once, as nobody
        knows how many come."""
        self._read, self._forget, self.num_places = read, forget, num_places
        self._changed = threading.Condition()
        self._waiting: deque[Ticket] = deque()
        self._reading: Ticket | None = None
        self._left: deque[int] = deque()  # numbers of requests nobody waits for any more
        self.notes: LogprobNotes | None = None  # of the call's log-probabilities
        self.is_closed = False
        self.open: dict[int, Ticket] = {}  # by number: requests whose rows have not all ended

    def put(self, ticket: Ticket) -> None:
        """Raises RuntimeError after `close`."""
        with self._changed:
            if self.is_closed:
                raise RuntimeError("an open run must not be closed, got a request after that; open another one")
            self._waiting.append(ticket)
            self._changed.notify()

    def close(self) -> list[Ticket]:
        """No further request comes; those that have not ended, which the caller may cancel."""
        with self._changed:
            self.is_closed = True
            self._changed.notify()
            reading = [] if self._reading is None else [self._reading]
            return [*self.open.copy().values(), *reading, *self._waiting]

    def end(self, number: int, trajectory: Trajectory) -> None:
        """A row of the request has ended; with the last one those who wait get all."""
        ticket = self.open[number]
        ticket.ended.append(trajectory)
        if len(ticket.ended) == ticket.num_rows:
            del self.open[number]
            ticket.succeed()

    def fail_one(self, number: int, error: Exception) -> None:
        """What a request ends in whose rows are live; they go before the next step."""
        self.open[number].fail(_without_frames(error))

    def fail(self, error: BaseException) -> None:
        """The call has ended in it: that is what those get who wait, and nobody else may come."""
        for ticket in self.close():
            ticket.fail(error)
        self.open.clear()

    def wait(self) -> bool:
        """Until a request waits; False where none will. Asked by the thread that decodes, which computes nothing
        meanwhile, so that others may compute faster."""
        release_pool()
        with self._changed:
            self._changed.wait_for(lambda: self._waiting or self.is_closed)
            return bool(self._waiting)

    @property
    def is_waiting(self) -> bool:
        """Whether there is one, at a glance."""
        return bool(self._waiting)

    @property
    def has_left(self) -> bool:
        """Whether somebody has ceased to wait."""
        return bool(self._left)

    def take_left(self) -> list[int]:
        """The numbers of the requests since it was last asked."""
        return [self._left.popleft() for _ in range(len(self._left))]

    def __next__(self) -> Job | None:
        while True:
            with self._changed:
                if not self._waiting:
                    if self.is_closed:
                        raise StopIteration
                    return None
                ticket = self._reading = self._waiting.popleft()
            job = None if ticket.future.done() else self._begun(ticket)
            self._reading = None
            if job is not None:
                return job
            ticket.pass_over()

    def _begun(self, ticket: Ticket) -> Job | None:
        try:
            job = self._read(ticket.request)
        except Exception as error:  # a template or a tokenizer may raise anything
            ticket.fail(_without_frames(error))
            return None
        ticket.num_rows = len(job.rows)
        self.open[job.number] = ticket
        ticket.future.add_done_callback(lambda future: self._leave(job.number))
        return replace(job, refuse=self._refuse)

    def _refuse(self, job: Job, error: Exception) -> None:
        self._forget(job)
        self.open.pop(job.number).fail(_without_frames(error))

    def _leave(self, number: int) -> None:
        if number in self.open:
            self._left.append(number)


def _without_frames(error: BaseException) -> BaseException:
    """The error, and those behind it, without tracebacks."""
    linked: BaseException | None = error
    while linked is not None:
        linked.__traceback__, linked = None, linked.__cause__ or linked.__context__
    return error
