"""A part of the benchmark in a process of its own: a hang, a crash or an illegal access costs that part alone."""

from __future__ import annotations

import json
import subprocess
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class PartRun:
    """What came of a part: its result as far as it got, what it printed but the document, and what ended it early."""

    result: dict[str, object] | None
    printed: str
    failure: str | None


def run_part(command: Callable[[Path], Sequence[str]], *, limit: float, fine: Sequence[int] = (0, 1)) -> PartRun:
    """Run command(output) for at most `limit` seconds; it keeps its document complete in the file `output`.

    fine: exit statuses of a part that went to its end (1: a measurement failed or a check did not hold, which is in the
    result).
    """
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / "part.json"
        failure = None
        try:
            done = subprocess.run(command(output), stdout=subprocess.PIPE, text=True, timeout=limit, check=False)
            printed = done.stdout
            if done.returncode not in fine:
                failure = f"its process ended with status {done.returncode}"
        except subprocess.TimeoutExpired as expired:  # the process has been killed
            printed = expired.stdout or ""
            printed = printed.decode() if isinstance(printed, bytes) else printed
            failure = f"it took more than {limit:.0f} seconds"
        document = json.loads(output.read_text(encoding="utf-8")) if output.is_file() else {"results": []}
    tables = "\n".join(line for line in printed.splitlines() if not line.startswith('{"format"'))
    return PartRun(document["results"][0] if document["results"] else None, tables.strip(), failure)
