"""What takes long to find is found by one process of a test run, and read by those beside it."""

import fcntl
import json
import os
from collections.abc import Callable

import pytest


def found_once(tmp_path_factory: pytest.TempPathFactory, name: str, find: Callable[[], object]) -> object:
    """What `find` returns, which JSON can hold. name: of the result, alone in a run."""
    folder = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:  # each has a folder of its own in that of the run
        folder = folder.parent
    path = folder / f"{name}.json"
    with open(folder / f"{name}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not path.exists():
            path.write_text(json.dumps(find()), encoding="utf-8")
    return json.loads(path.read_text(encoding="utf-8"))
