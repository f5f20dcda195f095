"""A part of the benchmark in a process of its own: a hang, a crash or an illegal access costs that part alone."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class PartRun:
    """What came of a part: its result as far as it got, what it printed but the document, and what ended it early."""

    result: dict[str, object] | None
    printed: str
    failure: str | None


def run_part(
    command: Callable[[Path], Sequence[str]], output: Path, *, limit: float, fine: Sequence[int] = (0, 1)
) -> PartRun:
    """Run command(output) for at most `limit` seconds; it keeps its document complete in the file `output`, and what it
    prints goes to one beside it. Where this process is killed, both stay, for `left_in`.

    fine: exit statuses of a part that went to its end (1: a measurement failed or a check did not hold, which is in the
    result).
    """
    failure = None
    output.parent.mkdir(parents=True, exist_ok=True)
    output.unlink(missing_ok=True)
    with _printed(output).open("w", encoding="utf-8") as printed:
        try:
            done = subprocess.run(command(output), stdout=printed, timeout=limit, check=False)
            if done.returncode not in fine:
                failure = f"its process ended with status {done.returncode}"
        except subprocess.TimeoutExpired:  # the process has been killed
            failure = f"it took more than {limit:.0f} seconds"
    return left_in(output, failure=failure)


def left_in(output: Path, *, failure: str | None = None) -> PartRun:
    """What came of a part that was to write to `output`, whose files are removed."""
    printed = _printed(output)
    lines = printed.read_text(encoding="utf-8", errors="replace").splitlines() if printed.is_file() else []
    results = json.loads(output.read_text(encoding="utf-8"))["results"] if output.is_file() else []
    for path in (printed, output):
        path.unlink(missing_ok=True)
    tables = "\n".join(line for line in lines if not line.startswith('{"format"'))
    return PartRun(results[0] if results else None, tables.strip(), failure)


def _printed(output: Path) -> Path:
    return output.with_suffix(".txt")
