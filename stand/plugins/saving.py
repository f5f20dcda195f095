"""Files that a lookup is written to while it is used and at the end: engines kill their processes."""

from __future__ import annotations

import logging
import os
import tempfile
import threading
from multiprocessing.util import Finalize
from pathlib import Path

from stand.trees import BlendedLookup

LOGGER = logging.getLogger("stand")
PAUSE = 60.0  # seconds between two files of a small lookup
PAUSE_PER_BYTE = 2e-6  # of a large one: writing it takes about 1 % of that


def check_can_be_written(path: str, option: str) -> None:
    """Raise ValueError where no file can take the place of `path`: known now, not after days."""
    target = Path(os.path.realpath(path))
    try:
        with tempfile.TemporaryFile(dir=target.parent):
            reason = "a folder or a device" if target.exists() and not target.is_file() else ""
    except OSError as error:
        reason = error.strerror
    if reason:
        raise ValueError(
            f"{option} must name a file that can be written, got {path} ({reason}); make its folder, or name another"
        )


class Saver:
    """Writes a lookup now and then, and by `finish`, which is called when the owner is freed or the process ends.

    A child of multiprocessing, too, ends by `finish`, though not one that is killed. The lookup's users take turns with
    the copy, and do not wait while it is written.
    """

    def __init__(self, owner: object, lookup: BlendedLookup, path: str):
        self._lookup, self._path = lookup, os.path.abspath(path)  # a harness may change its folder meanwhile
        # Digest of what needs no writing: an empty lookup would only take the place of a file that holds something.
        self._written: int | None = None if len(lookup) else lookup.digest
        self._one = threading.RLock()  # the collector may call `finish` in the middle of a write
        self._is_over = threading.Event()
        self.finish = Finalize(owner, self._finish, exitpriority=0)
        threading.Thread(target=self._run, name="stand-saver", daemon=True).start()

    def _run(self) -> None:
        while not self._is_over.wait(max(PAUSE, PAUSE_PER_BYTE * self._lookup.nbytes)):
            try:
                self._write()
            except Exception as error:  # memory that is short, too: the thread must live
                LOGGER.warning("STAND: the lookup could not be written, it is tried again: %s", error)

    def _finish(self) -> None:
        self._is_over.set()
        self._write()

    def _write(self) -> None:
        with self._one:
            digest = self._lookup.digest
            if digest != self._written:
                self._lookup.save(self._path)
                self._written = digest
