"""A run whose requests come while it decodes, from any thread."""

from __future__ import annotations

import atexit
import threading
import traceback
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from types import TracebackType
from weakref import WeakSet, finalize

import torch
from transformers import PreTrainedTokenizerBase

from stand.call import Call
from stand.row import Row
from stand.scheduling.arrivals import Arrivals, OnTokens, Ticket
from stand.scheduling.request import Request, Trajectory
from stand.scheduling.run import trajectory_of
from stand.stats import Stats


class OpenRun:
    """Made by `Engine.open_run`. It decodes in a thread of its own until it is closed, as leaving a `with` block does.

    Requests start in the order in which they came, as places become free. An error of a step ends the run: it is that
    of all requests that had not ended, and the cause of the RuntimeError of later ones.
    """

    def __init__(self, arrivals: Arrivals, new_call: Callable[..., Call], tokenizer: PreTrainedTokenizerBase | None):
        """new_call: makes the call of these arrivals; on_commit= is what it tells of rows' new tokens."""
        self._arrivals = arrivals
        self._call = new_call(on_commit=partial(_tell, arrivals))
        arrivals.notes = self._call.logprobs
        self._decoding = _Decoding(self._call, arrivals, tokenizer)
        self._thread = self._decoding.thread
        finalize(self, arrivals.close).atexit = False  # a run that nobody has any more ends behind what was submitted
        self._thread.start()

    def submit(self, request: Request | object, *, on_tokens: OnTokens | None = None) -> Future[list[Trajectory]]:
        """A future of the request's trajectories, by row; `asyncio.wrap_future` awaits it. `cancel` works until all
        rows have ended: those that run end behind the step that runs.

        request: as one of `Engine.run`'s. What it raises there is raised by the future, and ends nobody else.
        on_tokens: called with a row's number and its new tokens as they are committed, in the run's thread; with
        logprobs= also with their `TokenLogprobs`. It must not wait for this run. What it raises fails the request.

        Raises RuntimeError when the run is closed or has failed.
        """
        if on_tokens is not None and not callable(on_tokens):
            raise ValueError(f"on_tokens must be callable, got {on_tokens!r}; leave it out")
        ticket = Ticket(request if isinstance(request, Request) else Request(request), on_tokens)
        if self._decoding.failure is not None:
            raise RuntimeError(
                "an open run must not have failed, got a request after a step's error; open another one"
            ) from self._decoding.failure
        self._arrivals.put(ticket)
        return ticket.future

    def close(self, *, cancel: bool = False, wait: bool = True) -> None:
        """Take no further request, and wait until those that were submitted have ended. cancel: end them at once. wait:
        False returns meanwhile, as it does in the run's own thread."""
        self._decoding.close(cancel=cancel, wait=wait)

    def __enter__(self) -> OpenRun:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close(cancel=kind is not None)

    @property
    def is_open(self) -> bool:
        """Whether `submit` takes requests."""
        return not self._arrivals.is_closed

    @property
    def stats(self) -> Stats:
        """Of all steps so far; times in which nobody is live do not count."""
        return self._call.stats

    @property
    def seed(self) -> int:
        return self._call.seed


class _Decoding:
    """What the thread of a run holds, so that the run itself may go."""

    def __init__(self, call: Call, arrivals: Arrivals, tokenizer: PreTrainedTokenizerBase | None):
        self._call, self._arrivals, self._tokenizer = call, arrivals, tokenizer
        self.failure: BaseException | None = None
        self.thread = threading.Thread(target=self._decode, name="stand", daemon=True)
        _DECODING.add(self)

    def close(self, *, cancel: bool, wait: bool) -> None:
        """As `OpenRun.close`."""
        unfinished = self._arrivals.close()
        if cancel:
            for ticket in unfinished:
                ticket.future.cancel()
        if wait and threading.current_thread() is not self.thread:
            self.thread.join()

    @torch.inference_mode()
    def _decode(self) -> None:
        steps = self._call.steps(until_ended=True)
        try:
            for _ in steps:
                self._give()
        except BaseException as error:  # whatever it is, those who wait get it
            steps.close()
            traceback.clear_frames(error.__traceback__)  # they hold keys
            self._give()
            self.failure = error.with_traceback(error.__traceback__.tb_next)  # without this frame, which holds the run
            self._arrivals.fail(self.failure)
        finally:
            steps.close()

    def _give(self) -> None:
        """What has ended, to those who wait for it."""
        ended = self._call.scheduler.ended
        while ended:
            job, row = ended.popleft()
            self._arrivals.end(job.number, trajectory_of(self._call, self._tokenizer, job, row))


def _tell(arrivals: Arrivals, row: Row, token_ids: list[int]) -> None:
    ticket = arrivals.open.get(row.request)
    if ticket is not None:
        ticket.tell(row, token_ids, arrivals.notes)


_DECODING: WeakSet[_Decoding] = WeakSet()


@atexit.register
def _end_all() -> None:
    """An interpreter that ends amid a step would abort."""
    for decoding in list(_DECODING):
        if decoding.thread.is_alive():
            decoding.close(cancel=True, wait=True)
