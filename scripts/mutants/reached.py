"""Which lines of the mutated files each test reaches: no other test can notice what is wrong there."""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Collection, Sequence
from pathlib import Path

from mutants.judging import in_fork

Reached = dict[tuple[str, int], set[str]]  # {(file, line): tests}


def reached_lines(items: Sequence, files: Collection[Path], folder: Path) -> Reached:
    """By running the collected tests once, in a fork. Python only; what is reached on import is not seen, and what a
    shared fixture reaches counts for the first test that takes it.
    """
    log = folder / "reached"
    names = {str(path) for path in files if path.suffix == ".py"}
    if names:
        in_fork(lambda: _trace(items, names, log), is_bounded=False)
    found: Reached = {}
    for line in log.read_text(encoding="utf-8").splitlines() if log.exists() else ():
        test, places = json.loads(line)
        for file, number in places:
            found.setdefault((file, number), set()).add(test)
    return found


def _trace(items: Sequence, names: Collection[str], log: Path) -> int:
    seen: set[tuple[str, int]] = set()

    def trace(frame, event, argument):
        if frame.f_code.co_filename not in names:
            return None
        seen.add((frame.f_code.co_filename, frame.f_lineno))
        return trace

    for item, following in zip(items, [*items[1:], None], strict=True):
        seen.clear()
        threading.settrace(trace)
        sys.settrace(trace)
        item.config.hook.pytest_runtest_protocol(item=item, nextitem=following)
        sys.settrace(None)
        with log.open("a", encoding="utf-8") as file:
            file.write(json.dumps([item.nodeid, sorted(seen)]) + "\n")
    return 0
