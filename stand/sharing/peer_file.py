"""News of another process, read as it is written."""

from __future__ import annotations

import os
import stat
import weakref
import zlib
from collections.abc import Iterator
from pathlib import Path

from stand.sharing.news import NewsError
from stand.sharing.own_files import FILE_BYTES, HEADER, MAGIC, MOST_RECORD, RECORD, VERSION
from stand.trees.checked_file import MAX_FINGERPRINT_BYTES

MOST_BEHIND = 512 << 10  # bytes; what is older is passed over
READ_BYTES = 64 << 10  # at a time: the news of many steps


class PeerFile:
    """A file to which its process appends. start: bytes to leave out, header included.

    Raises OSError where it cannot be opened, NewsError for another format."""

    def __init__(self, path: Path, *, start: int = 0):
        self.path = path
        self._file = os.open(path, os.O_RDONLY | os.O_NONBLOCK)  # no pipe may hold the reader up
        self.close = weakref.finalize(self, os.close, self._file)
        self.is_removed = False  # set by the exchange when the name has gone; then nothing more is written
        self.fingerprint, self.numbers, place = self._header()
        self._place = max(place, start)  # where the next piece begins

    @property
    def is_full(self) -> bool:
        """All that was written is read, and its process has begun another file."""
        return self._place > FILE_BYTES

    def records(self) -> Iterator[memoryview]:
        """The complete pieces of news since the last call, the oldest first. A piece that is not taken comes again.

        Raises OSError, and NewsError for damage.
        """
        most = READ_BYTES
        while True:
            data = memoryview(os.pread(self._file, most, self._place))
            if len(data) == most and self._pass_over_old():
                continue
            start = end = 0
            while (end := _end_of_record(data, start)) is not None:
                self._place += end - start
                yield _checked(data[start:end])
                start = end
            if len(data) < most:
                return
            most = MOST_RECORD + RECORD.size  # what was cut off is read anew, as a whole

    def _pass_over_old(self) -> bool:
        """Skip to the last `MOST_BEHIND` bytes, but not the last piece. Returns whether anything was skipped."""
        size, place = os.fstat(self._file).st_size, self._place
        while size - self._place > MOST_BEHIND:
            start = os.pread(self._file, RECORD.size, self._place)
            if len(start) < RECORD.size:  # what could not be written as a whole was taken back
                break
            end = self._place + RECORD.size + _checked_length(RECORD.unpack(start)[0])
            if end >= size:
                break
            self._place = end
        return self._place > place

    def _header(self) -> tuple[bytes, int, int]:
        """The vocabulary's fingerprint, the numbers that samples are drawn with, and where news begins."""
        if not stat.S_ISREG(os.fstat(self._file).st_mode):
            raise NewsError("news must be in a file, got something else of such a name")
        data = os.pread(self._file, HEADER.size + MAX_FINGERPRINT_BYTES, 0)
        magic, version, length, numbers = HEADER.unpack_from(data.ljust(HEADER.size, b"\0"))
        if (magic, version) != (MAGIC, VERSION) or len(data) < HEADER.size + length:
            raise NewsError(
                f"news must begin with {MAGIC!r} and format {VERSION}, got {data[: HEADER.size]!r}; use one version of "
                "this project in all processes"
            )
        return data[HEADER.size :][:length], numbers, HEADER.size + length


def _end_of_record(data: memoryview, start: int) -> int | None:
    """Where the record that begins at `start` ends; None where it is not there as a whole."""
    if len(data) - start < RECORD.size:
        return None
    length, _ = RECORD.unpack_from(data, start)
    end = start + RECORD.size + _checked_length(length)
    return end if end <= len(data) else None


def _checked_length(length: int) -> int:
    if length > MOST_RECORD:
        raise NewsError(f"news must have at most {MOST_RECORD} bytes, got {length}; the file is damaged")
    return length


def _checked(record: memoryview) -> memoryview:
    news = record[RECORD.size :]
    if zlib.crc32(news) != RECORD.unpack_from(record)[1]:
        raise NewsError(f"news must match its checksum, got {zlib.crc32(news):#x}; the file is damaged")
    return news
