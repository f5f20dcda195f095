"""A part of the benchmark in a process of its own: a hang, a crash or an illegal access costs that part alone."""

from __future__ import annotations

import ctypes
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from threading import Thread
from typing import IO

LAST_LINES = 200  # of what a part that ended badly wrote to stderr: where crashes and hangs leave their stacks
SIGNAL_AT_PARENTS_END = 1  # of prctl, PR_SET_PDEATHSIG
LIBC = ctypes.CDLL(None)
SECONDS_TO_END = 10  # that a killed process may take; one that is stuck in a driver may never end


@dataclass(frozen=True, slots=True)
class PartRun:
    """What came of a part: its result as far as it got, what it printed, what ended it early, and the last lines of its
    stderr where that was so."""

    result: dict[str, object] | None
    printed: str
    failure: str | None
    last_errors: str = ""


def run_part(
    command: Callable[[Path], Sequence[str]], output: Path, *, limit: float, fine: Sequence[int] = (0, 1)
) -> PartRun:
    """Run command(output) for at most `limit` seconds; it keeps its document complete in the file `output`, and what it
    prints goes to files beside it (its stderr to ours, too). Where this process is killed, the part ends with it, and
    they stay, for `left_in`.

    fine: exit statuses of a part that went to its end (1: a measurement failed or a check did not hold, which is in the
    result).
    """
    failure = None
    output.parent.mkdir(parents=True, exist_ok=True)
    output.unlink(missing_ok=True)
    with _printed(output).open("w", encoding="utf-8") as printed, _errors(output).open("wb") as errors:
        process = subprocess.Popen(
            command(output), stdout=printed, stderr=subprocess.PIPE, start_new_session=True, preexec_fn=end_with_parent
        )
        copier = Thread(target=_copy, args=(process.stderr, errors), daemon=True)
        copier.start()
        try:
            status = process.wait(timeout=limit)
            if status not in fine:
                failure = f"its process ended with status {status}"
        except subprocess.TimeoutExpired:
            failure = f"it took more than {limit:.0f} seconds"
        finally:
            _end(process)
        copier.join(timeout=SECONDS_TO_END)
    return left_in(output, failure=failure)


def left_in(output: Path, *, failure: str | None = None) -> PartRun:
    """What came of a part that was to write to `output`, whose files are removed."""
    lines, errors = _lines(_printed(output)), _lines(_errors(output))
    results = json.loads(output.read_text(encoding="utf-8"))["results"] if output.is_file() else []
    for path in (_printed(output), _errors(output), output):
        path.unlink(missing_ok=True)
    last_errors = "" if failure is None else "\n".join(errors[-LAST_LINES:])
    return PartRun(results[0] if results else None, "\n".join(lines).strip(), failure, last_errors)


def differing_settings(output: Path, settings: Mapping[str, object]) -> list[str]:
    """Which of these what is left in `output` was made with other values of."""
    left = json.loads(output.read_text(encoding="utf-8")) if output.is_file() else {}
    return [name for name, value in settings.items() if left.get(name, value) != value]


def end_with_parent() -> None:
    """In a new process, before its program starts: should the parent be killed, it would go on and hold the GPU."""
    if sys.platform == "linux":
        LIBC.prctl(SIGNAL_AT_PARENTS_END, signal.SIGKILL)


def _end(process: subprocess.Popen) -> None:
    """Kill what is left of the process and its children, and do not wait for what cannot be killed."""
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    with suppress(subprocess.TimeoutExpired):
        process.wait(timeout=SECONDS_TO_END)


def _copy(source: IO[bytes], target: IO[bytes]) -> None:
    """Line by line, to the file and to this process's stderr."""
    with suppress(ValueError, OSError):  # closed, where a child that cannot be killed still writes
        for line in source:
            target.write(line)
            target.flush()
            sys.stderr.write(line.decode(errors="replace"))
            sys.stderr.flush()


def _lines(path: Path) -> list[str]:
    return path.read_text(encoding="utf-8", errors="replace").splitlines() if path.is_file() else []


def _printed(output: Path) -> Path:
    return output.with_suffix(".txt")


def _errors(output: Path) -> Path:
    return output.with_suffix(".err")
