"""Where a process writes its news: files of its own, the older ones of which go."""

from __future__ import annotations

import os
import re
import secrets
import struct
import zlib
from collections import deque
from pathlib import Path
from typing import BinaryIO

from stand.trees.locked_files import open_locked

MAGIC, VERSION = b"STANDNEW", 1
HEADER = struct.Struct("<8sII")  # magic, version, bytes of the vocabulary's fingerprint, which follows
RECORD = struct.Struct("<II")  # bytes of a piece of news, which follows, and their CRC-32
SUFFIX = ".news"
UNFINISHED = f"{SUFFIX}.tmp"  # of a file without a header
FILE_NAME = re.compile(rf"[0-9a-f]{{16}}{re.escape(SUFFIX)}(\.tmp)?")  # other files of a folder are let alone
MOST_RECORD = 4 << 20  # bytes
FILE_BYTES = 16 << 20  # after so many a new file begins
NUM_KEPT = 2  # files of a process


class OwnFiles:
    """Appends pieces of news; a process has `NUM_KEPT` files at most, `FILE_BYTES` each.

    They belong to their user alone: news holds the tokens of texts. Raises OSError where nothing can be written.
    """

    def __init__(self, folder: Path, fingerprint: bytes):
        self._folder, self._fingerprint = folder, fingerprint
        self._files: deque[tuple[Path, BinaryIO]] = deque()
        self._begin()

    @property
    def names(self) -> set[str]:
        return {path.name for path, _ in self._files}

    def write(self, news: bytes) -> None:
        """All of it or, where that fails, nothing."""
        if self._size > FILE_BYTES:
            self._begin()
        self._append(RECORD.pack(len(news), zlib.crc32(news)) + news)

    def close(self) -> None:
        """Remove the files. Who has opened them reads them to their ends."""
        while self._files:
            self._remove_oldest()

    def abandon(self) -> None:
        """Close the files of the process that this one is a fork of; they stay."""
        while self._files:
            self._files.popleft()[1].close()

    def _begin(self) -> None:
        while len(self._files) >= NUM_KEPT:
            self._remove_oldest()
        fresh, file = open_locked(lambda: self._folder / f"{secrets.token_hex(8)}{UNFINISHED}")
        path = fresh.with_suffix("")
        self._files.append((path, file))
        self._size = 0  # of this newest file
        os.fchmod(file.fileno(), 0o600)
        self._append(HEADER.pack(MAGIC, VERSION, len(self._fingerprint)) + self._fingerprint)
        os.rename(fresh, path)

    def _append(self, data: bytes) -> None:
        file = self._files[-1][1].fileno()
        if (written := os.write(file, data)) < len(data):
            os.ftruncate(file, self._size)
            os.lseek(file, self._size, os.SEEK_SET)
            raise OSError(f"only {written} of {len(data)} bytes could be written")
        self._size += len(data)

    def _remove_oldest(self) -> None:
        path, file = self._files.popleft()
        path.unlink(missing_ok=True)
        file.close()
