"""The files to which a process writes its news; the oldest goes when a third would begin."""

from __future__ import annotations

import contextlib
import os
import platform
import re
import secrets
import struct
import zlib
from collections import deque
from functools import cache
from hashlib import blake2b
from pathlib import Path
from typing import BinaryIO

from stand.trees.locked_files import open_locked
from stand.trees.system_program import kernel_value

MAGIC, VERSION = b"STANDNEW", 1
# Magic, version, bytes of the vocabulary's fingerprint, which follows, and `Exchange.numbers`.
HEADER = struct.Struct("<8sIIQ")
RECORD = struct.Struct("<II")  # bytes of a piece of news, which follows, and their CRC-32
SUFFIX = ".news"
UNFINISHED = f"{SUFFIX}.tmp"  # ends the name of a file whose header is not written yet
# Machine, process and number of a file. Other files of a folder are let alone.
FILE_NAME = re.compile(rf"[0-9a-f]{{8}}-[0-9a-f]{{8}}-\d{{8}}{re.escape(SUFFIX)}(\.tmp)?")
MOST_RECORD = 4 << 20  # bytes
FILE_BYTES = 3 << 20  # after so many a new file begins; a container's memory for files is often 64 MB
NUM_KEPT = 2  # files of a process


class OwnFiles:
    """Appends pieces of news; a process has `NUM_KEPT` files at most. A file ends with the piece that passes
    `FILE_BYTES`.

    They belong to their user alone: news holds the tokens of texts. Raises OSError where nothing can be written.
    """

    def __init__(self, folder: Path, fingerprint: bytes, numbers: int):
        self._name = folder / f"{machine_word()}-{secrets.token_hex(4)}"
        self._header = HEADER.pack(MAGIC, VERSION, len(fingerprint), numbers) + fingerprint
        self._files: deque[tuple[Path, BinaryIO]] = deque()
        self._num_begun = self._size = 0  # the latter of the newest file
        self._begin()

    @property
    def paths(self) -> list[Path]:
        """The oldest first."""
        return [path for path, _ in self._files]

    @property
    def names(self) -> set[str]:
        return {path.name for path in self.paths}

    @property
    def size(self) -> int:
        """Bytes of the newest file."""
        return self._size

    def write(self, news: bytes) -> None:
        """All of it or, where that fails, nothing."""
        self._append(RECORD.pack(len(news), zlib.crc32(news)) + news)
        if self._size > FILE_BYTES:  # at once: who has read the last piece looks for the next file
            self._begin()

    def close(self) -> None:
        """Remove the files. A process that has one open can read it to its end."""
        while self._files:
            self._remove_oldest()

    def abandon(self) -> None:
        """Close the files of the process that this one is a fork of; they stay."""
        while self._files:
            self._files.popleft()[1].close()

    def _begin(self) -> None:
        while len(self._files) >= NUM_KEPT:
            self._remove_oldest(is_emptied=True)
        self._num_begun += 1
        fresh, file = open_locked(lambda: Path(f"{self._name}-{self._num_begun:08d}{UNFINISHED}"))
        path = fresh.with_suffix("")
        self._files.append((path, file))
        self._size = 0
        try:
            os.fchmod(file.fileno(), 0o600)
            self._append(self._header)
            os.rename(fresh, path)
        except OSError:
            fresh.unlink(missing_ok=True)
            raise

    def _append(self, data: bytes) -> None:
        if not self._files:
            raise OSError("the files are closed")
        file = self._files[-1][1].fileno()
        if (written := os.write(file, data)) < len(data):
            os.ftruncate(file, self._size)
            os.lseek(file, self._size, os.SEEK_SET)
            raise OSError(f"only {written} of {len(data)} bytes could be written")
        self._size += len(data)

    def _remove_oldest(self, *, is_emptied: bool = False) -> None:
        """is_emptied: so that a process that has it open, and does not look, keeps no memory."""
        path, file = self._files.popleft()
        with file, contextlib.suppress(OSError):
            path.unlink(missing_ok=True)
            if is_emptied:
                os.ftruncate(file.fileno(), 0)


@cache
def machine_word() -> str:
    """How names of this machine's files begin: a file system of several machines may keep locks apart, so that a lock
    says nothing about a process elsewhere."""
    try:
        machine = Path("/proc/sys/kernel/random/boot_id").read_bytes()
    except OSError:
        machine = (kernel_value("kern.bootsessionuuid") or platform.node()).encode()  # the former on macOS
    return blake2b(machine, digest_size=4).hexdigest()
