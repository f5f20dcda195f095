"""Ending a run early without losing what it found: SIGINT and SIGTERM as one exception."""

from __future__ import annotations

import signal
from collections.abc import Callable
from types import FrameType

from measuring.progress import say

SIGNALS = (signal.SIGINT, signal.SIGTERM)


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
            say(f"{name}: ended early by {interrupted}")
            return interrupted.exit_status
        except (ValueError, OSError) as error:
            say(f"{name}: {error}")
            return 2
    return 0
