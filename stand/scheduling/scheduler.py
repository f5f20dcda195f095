"""Who is live and who waits: rows in the order of their requests, places handed on as rows end, the youngest put back
where memory runs out. No model, no clock."""

from __future__ import annotations

import warnings
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from stand.media.media import MediaError
from stand.row import Row
from stand.scheduling.admission import Admission, lies_beyond
from stand.scheduling.arrivals import Arrivals
from stand.scheduling.request import Job, which_request
from stand.seeds import prompt_word


@dataclass(frozen=True, slots=True, eq=False)
class Entry:
    """`row` starts in `place`, which nobody has; keys: what `ready` gave for it."""

    place: int
    row: Row
    keys: object


@dataclass(frozen=True, slots=True, eq=False)
class Move:
    """`row`, in the last place `source`, takes `target`, whose row has left."""

    source: int
    target: int
    row: Row


Change = Entry | Move
END = object()  # of the requests
MOST_KEPT = 2  # prompts of rows that are live, for requests that may come


class Scheduler:
    """Places 0 .. len(live) - 1 are taken; between steps `settle` lets ended rows go and waiting ones in.

    Requests are read when a place is free for their first row, and one further request ahead, so that its prompt can
    be prefilled in time. Rows start in the order of the requests; nobody overtakes. So a row that is put back comes
    before all that have not started. Where memory runs out, it is the one that started last, and the first row of all
    always goes on.

    What a request ends in that cannot be read, or does not fit, is kept until the rows before it have ended: see
    `raise_failure`. No further request is read then. A job that names who is to be told (`Job.refuse`) goes alone.
    """

    def __init__(self, jobs: Iterator[Job | None], admission: Admission, *, border: int | None = None):
        """jobs: where others may come later, they are `Arrivals`, which say None where none waits now.
        border: tokens of a row behind which its keys are computed anew; no step has rows from both sides of it."""
        self.live: list[Row] = []  # by place
        self.ended: deque[tuple[Job, Row]] = deque()  # in the order in which they ended; the caller takes them out
        self._jobs = jobs
        self._arrivals = jobs if isinstance(jobs, Arrivals) else None
        self._most_open = 0 if self._arrivals is None else self._arrivals.num_places  # places of a run with arrivals
        self.admission = admission
        self.num_put_back = 0  # times that a row was
        self._put_back: list[Row] = []  # rows that wait for their return, the next one last
        self._border = border
        self._is_beyond = False  # on which side of the border those lie that are live
        self._turns: dict[int, int] = {}  # by row that has started and not ended: its turn
        self._num_entered = 0
        self._waiting: Iterator[Row] = iter(())  # of the request that is next
        self._next: Row | None = None  # the first one of them
        self._num_left: dict[int, int] = {}  # by request: rows that have not ended
        self._open: dict[int, Job] = {}  # the requests that have such rows
        self._cancelled: deque[int] = deque()  # numbers of requests whose rows are to end
        self._ids: set[int | None] = set()  # that requests had which were read, by their hashes
        self._is_over = False  # no further request is read
        self._failure: Exception | None = None  # of the request that would be next
        self.num_places: int | None = None  # set when the first rows have entered: no more are live at once. Set anew
        # where the next row does not fit beside as many places; then nobody is live

    @property
    def waiting_row(self) -> Row | None:
        """Who enters next, as far as requests were read."""
        return self._put_back[-1] if self._put_back else self._next

    def next_row(self) -> Row | None:
        """Who enters next; reads a request where nobody waits."""
        if self._put_back:
            return self._put_back[-1]
        if self._next is None:
            self._next = next(self._waiting, None)
        if self._next is None and not self._is_over and (job := self._next_job()) is not None:
            self._open[job.number], self._num_left[job.number] = job, len(job.rows)
            if self._arrivals is None:
                self._ids.add(_hash_of(job.id))
            word = prompt_word(job.prompt, job.shown)
            shared = {"problem": job.problem, "request": job.number, "prompt_word": word, "media": job.media}
            self._waiting = (Row(index, job.prompt, job.limit, **shared) for index in job.rows)
            self._next = next(self._waiting)
        return self._next

    def prepared(self, row: Row, ready: Callable[[Row], object | None]) -> object | None:
        """The keys that the next row begins with; None where they are to come, or never will: what a prompt shows may
        not fit. Then its request is as one that cannot be read."""
        try:
            return ready(row)
        except MediaError as error:
            if row is not self._next or self._num_left[row.request] < len(self._open[row.request].rows):
                raise
            job = self._open.pop(row.request)
            del self._num_left[row.request]
            self._next, self._waiting = None, iter(())
            self._refuse(job, error)
            return None

    def _next_job(self) -> Job | None:
        """The next request, None where there is none, none yet, or none that fits."""
        while not self._is_over:
            try:
                job = next(self._jobs, END)
            except Exception as error:  # a request's, or of whoever makes them
                self._failure, job = error, END
            self._is_over = job is END
            if job is None or job is END:
                break
            try:
                self.admission.check(job)
            except ValueError as error:
                self._refuse(job, error)
            else:
                return job
        return None

    def _refuse(self, job: Job, error: Exception) -> None:
        error.add_note(which_request(job.number, job.id))
        if job.refuse is None:
            self._failure, self._is_over = error, True
        else:
            job.refuse(job, error)

    def fail(self, row: Row, error: Exception) -> None:
        """The request of a live row ends in this error. It is raised where nobody else is to be told."""
        job = self._open[row.request]
        error.add_note(which_request(job.number, job.id))
        if self._arrivals is None:
            raise error
        self._arrivals.fail_one(job.number, error)

    def raise_failure(self) -> None:
        """Raises what the request that would be next has ended in: to be called where nobody is live, or where rows
        are given all together."""
        if self._failure is not None:
            failure, self._failure = self._failure, None
            raise failure

    def job_of(self, row: Row) -> Job:
        """Of a row that waits or is live."""
        return self._open[row.request]

    def cancel(self, id: object) -> None:
        """The rows of requests with this id are to end, as far as they were read; warns where none had it. From any
        thread."""
        self._cancelled.extend(job.number for job in list(self._open.values()) if _is(job.id, id))
        if _hash_of(id) not in self._ids:
            warnings.warn(
                f"an id to cancel must be that of a request that was read so far, got {id!r:.80}; nothing ends by it: "
                "pass a request's id, or leave later requests out where they are made",
                stacklevel=3,
            )

    @property
    def has_news(self) -> bool:
        """Whether a request could be read that came meanwhile, or nobody waits for one any more."""
        arrivals = self._arrivals
        if self._cancelled or arrivals is None:
            return bool(self._cancelled)
        return arrivals.has_left or self.waiting_row is None and arrivals.is_waiting

    def wait(self) -> bool:
        """Where nobody is live: whether the call goes on. What has ended is to be given first; then a request that may
        come is waited for, unless one was read."""
        if self._arrivals is None:
            return False
        return bool(self.ended) or self.waiting_row is not None or self._arrivals.wait()

    def rows_left(self) -> list[Row]:
        """The rows, live or not, that nobody waits for any more; each is to be ended."""
        numbers = {self._cancelled.popleft() for _ in range(len(self._cancelled))}
        if self._arrivals is not None:
            numbers.update(self._arrivals.take_left())
        if not numbers:
            return []
        rows = [row for row in (*self.live, *self._put_back) if row.request in numbers and row.finish_reason is None]
        self._put_back = [row for row in self._put_back if row.request not in numbers]
        if self._next is not None and self._next.request in numbers:
            rows += [self._next, *self._waiting]
            self._next, self._waiting = None, iter(())
        return rows

    def is_running(self) -> bool:
        """Whether a live row goes on where it is."""
        return any(row.finish_reason is None and not self._has_crossed(row) for row in self.live)

    def is_held(self) -> bool:
        """Whether all rows that go on may take another step: memory holds what they need, and none has crossed the
        border."""
        going = [row for row in self.live if row.finish_reason is None]
        return self.admission.holds(going) and (self._border is None or not any(map(self._has_crossed, going)))

    def has_memory_for(self, row: Row) -> bool:
        """Whether `row`, which waits, could start beside the rows that go on, were a place free."""
        going = [other for other in self.live if other.finish_reason is None]
        return self.admission.fits(going, row) and not (going and self._parts(row))

    def problems_to_keep(self) -> list[int]:
        """Those of which further requests may come while their rows are live, the latest ones; none where the next row
        needs the memory."""
        coming = self.next_row()
        if self._arrivals is None or coming is not None and not self.has_memory_for(coming):
            return []
        begun = sorted(self.live, key=lambda row: self._turns.get(row.index, -1), reverse=True)
        return list(dict.fromkeys(row.problem for row in begun if row.finish_reason is None))[:MOST_KEPT]

    def settle(
        self, ready: Callable[[Row], object | None], leave: Callable[[Row, int], None] = lambda row, place: None
    ) -> list[Change]:
        """Let ended rows go, put rows back that memory does not hold or that have crossed the border, and let waiting
        ones in; what follows for the places, in order.

        ready: the keys that a row begins with, or None where they are still to come; then nobody enters. leave: told
        before of every row that has ended or was put back, with its place, where its keys are of no further use: the
        memory that they give back is what the keys of those who wait are computed into.
        """
        going = [row for row in self.live if row.finish_reason is None]
        for row in () if self._border is None else [row for row in going if self._has_crossed(row)]:
            self._send_back(row, going)
        while len(going) > 1 and not self.admission.holds(going):
            self._send_back(max(going, key=self._turn), going)
        staying = {row.index for row in going}
        holes = deque(place for place, row in enumerate(self.live) if row.index not in staying)
        for place in holes:
            leave(self.live[place], place)
        changes: list[Change] = []
        while (entering := self._entering(going, ready)) is not None:
            row, keys = entering
            place = holes.popleft() if holes else len(self.live)
            self.live[place : place + 1] = [row]
            changes.append(Entry(place, row, keys))
        for place in reversed(holes):
            last = self.live.pop()
            if place < len(self.live):
                self.live[place] = last
                changes.append(Move(len(self.live), place, last))
        if self.num_places is None and self.live:
            if self._arrivals is None:
                more = self.admission.most_places if self.next_row() is not None else None
            else:
                more = self._most_open
            self.num_places = max(len(self.live), more or 0)
            self.admission.settle(self.num_places)
        return changes

    def end(self, row: Row) -> bool:
        """A live row has ended; it leaves its place when `settle` is called. Whether it was its request's last one."""
        self.ended.append((self._open[row.request], row))
        self.admission.leave(row)
        self._turns.pop(row.index, None)
        self._num_left[row.request] -= 1
        is_last = not self._num_left[row.request]
        if is_last:
            del self._open[row.request], self._num_left[row.request]
        return is_last

    def _entering(self, going: list[Row], ready: Callable[[Row], object | None]) -> tuple[Row, object] | None:
        """The next row with its keys, if it may start now; it is among `going` then."""
        row = self.next_row() if self.num_places is None or len(going) < self.num_places else None
        if row is not None and not going and self.admission.is_cramped(row):
            self.admission.unsettle()
            self.num_places, self._most_open = None, self._most_open // 2
        if row is None or going and (self._parts(row) or not self.admission.allows(going, row)):
            return None
        keys = self.prepared(row, ready)
        if keys is None:
            return None
        going.append(row)
        self._is_beyond = lies_beyond(row, self._border)
        self.admission.enter(row)
        self._turns.setdefault(row.index, self._num_entered)
        self._num_entered += 1
        if self._put_back:
            self._put_back.pop()
        else:
            self._next = None
        return row, keys

    def _send_back(self, row: Row, going: list[Row]) -> None:
        going.remove(row)
        self.admission.leave(row)
        self._put_back.append(row)
        self._put_back.sort(key=self._turn, reverse=True)
        self.num_put_back += 1

    def _turn(self, row: Row) -> int:
        return self._turns[row.index]

    def _has_crossed(self, row: Row) -> bool:
        return lies_beyond(row, self._border) and not self._is_beyond

    def _parts(self, row: Row) -> bool:
        """Whether `row` lies on the other side of the border than those that are live."""
        return lies_beyond(row, self._border) != self._is_beyond


def _hash_of(id: object) -> int | None:
    """None of what has none, as lists and arrays."""
    try:
        return hash(id)
    except TypeError:
        return None


def _is(id: object, other: object) -> bool:
    """Also of arrays, whose equality is no yes or no."""
    try:
        return id is other or bool(id == other)
    except (TypeError, ValueError):
        return False
