"""Files that belong to a living process: it holds a lock on each, so that others can tell one that was left behind."""

from __future__ import annotations

import contextlib
import fcntl
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import BinaryIO


def open_locked(new_path: Callable[[], Path]) -> tuple[Path, BinaryIO]:
    """A new file, written in binary, that is locked until it is closed. new_path: a name that is free."""
    while True:
        path = new_path()
        file = open(path, "xb")
        with contextlib.suppress(OSError):  # without locks nobody takes the file for abandoned either
            fcntl.flock(file, fcntl.LOCK_EX)
        if path.exists():
            return path, file
        file.close()  # removed before it was locked


def remove_abandoned(paths: Iterable[Path]) -> None:
    """Remove those of the files whose processes have ended."""
    for path in paths:
        with contextlib.suppress(OSError), open(path, "r+b") as file:  # network file systems lock no file for reading
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # raises while its process lives
            path.unlink()
