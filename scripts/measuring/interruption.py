"""Ending a run early without losing what it found: SIGINT and SIGTERM as one exception.

Every command imports this before anything else: from then on Ctrl-C ends it with one line instead of a traceback.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType, TracebackType
from typing import TypeVar

from measuring.progress import say

SIGNALS = (signal.SIGINT, signal.SIGTERM)
IMPORTING = "<frozen importlib._bootstrap>"  # file of the frames that load a module
COMMAND = Path(sys.argv[0]).resolve()

Result = TypeVar("Result")


class Interrupted(BaseException):
    """A signal asked the run to end. Not an Exception, so that no library takes it for an error of its own."""

    def __init__(self, number: int) -> None:
        super().__init__(signal.Signals(number).name)
        self.exit_status = 128 + number


class Interruption:
    """While it is entered, the first SIGINT or SIGTERM raises `Interrupted`; a second one acts as it always does."""

    def __init__(self) -> None:
        self._number: int | None = None

    def __enter__(self) -> Interruption:
        self._earlier = {number: signal.signal(number, self._arrive) for number in SIGNALS}
        return self

    def __exit__(self, *_: object) -> None:
        self._restore()

    def check(self) -> None:
        """Raise `Interrupted` again where something swallowed it: Python drops exceptions raised in a `__del__`."""
        if self._number is not None:
            raise Interrupted(self._number)

    def _arrive(self, number: int, frame: FrameType | None) -> None:
        self._number = number
        self._restore()
        raise Interrupted(number)

    def _restore(self) -> None:
        for number, handler in self._earlier.items():
            signal.signal(number, handler)


def run_command(name: str, run: Callable[[Interruption], None]) -> int:
    """The exit status of a command: 0, 2 after an error that its user can mend, 130 or 143 after a signal."""
    with Interruption() as interruption:
        try:
            run(interruption)
        except Interrupted as interrupted:
            if signal.getsignal(signal.SIGINT) is _arrive_early:  # a second one meets a process that is about to go
                signal.signal(signal.SIGINT, signal.SIG_DFL)
            say(f"{name}: ended early by {interrupted}")
            return interrupted.exit_status
        except (ValueError, OSError, ImportError) as error:
            say(f"{name}: {error}")
            return 2
    return 0


def run_and_report(
    name: str,
    results: Iterator[Result],
    report: Callable[[list[Result]], None],
    draw: Callable[[list[Result]], None] | None = None,
) -> int:
    """As `run_command`, of results that come one after the other: those of a run that ended early are reported, too.

    draw: what is made of a whole run alone, and may fail as the run may.
    """
    found: list[Result] = []
    status = run_command(name, lambda interruption: found.extend(results))
    if found:
        report(found)
    if status == 0 and draw is not None:
        status = run_command(name, lambda interruption: draw(found))
    return status


def _arrive_early(number: int, frame: FrameType | None) -> None:
    """While a module loads the process ends at once: libraries swallow what is raised there, or rename it."""
    while frame is not None and frame.f_code.co_filename != IMPORTING:
        frame = frame.f_back
    if frame is None:
        raise KeyboardInterrupt
    _say_end()
    signal.signal(number, signal.SIG_DFL)
    os.kill(os.getpid(), number)


def _say_end() -> None:
    say(f"{COMMAND.stem}: ended early by SIGINT")


def _say_error(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    if issubclass(kind, KeyboardInterrupt):
        _say_end()
    else:
        sys.__excepthook__(kind, error, trace)


is_command = COMMAND.parent == Path(__file__).resolve().parents[1]
if is_command and signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # a background job ignores it
    if multiprocessing.current_process().name == "MainProcess":
        signal.signal(signal.SIGINT, _arrive_early)
        sys.excepthook = _say_error
    else:  # a terminal sends it to every process: the command ends those that it spawned, and says so once
        signal.signal(signal.SIGINT, signal.SIG_IGN)
