"""News of another process, read as it is written."""

from __future__ import annotations

import os
import weakref
import zlib
from collections.abc import Iterator
from pathlib import Path

from stand.sharing.news import NewsError
from stand.sharing.own_files import HEADER, MAGIC, MOST_RECORD, RECORD, VERSION
from stand.trees.checked_file import MAX_FINGERPRINT_BYTES

MOST_BEHIND = 4 << 20  # bytes; what is older is passed over


class PeerFile:
    """A file to which its process appends. Raises OSError where it cannot be opened, NewsError for another format."""

    def __init__(self, path: Path):
        self.path = path
        self._file = os.open(path, os.O_RDONLY)
        self.close = weakref.finalize(self, os.close, self._file)
        self.fingerprint, self._place = self._header()  # where the next piece begins

    @property
    def is_removed(self) -> bool:
        return os.fstat(self._file).st_nlink == 0

    def records(self) -> Iterator[bytes]:
        """The complete pieces of news that came since, the oldest first; those that are not taken come again.

        Raises OSError, and NewsError for damage.
        """
        size = os.fstat(self._file).st_size
        while size - self._place > MOST_BEHIND and (length := self._length(size)) is not None:
            self._place += RECORD.size + length
        while (length := self._length(size)) is not None:
            data = os.pread(self._file, RECORD.size + length, self._place)
            if zlib.crc32(memoryview(data)[RECORD.size :]) != RECORD.unpack_from(data)[1]:
                raise NewsError(f"news must match its checksum, got another one at byte {self._place}")
            self._place += len(data)
            yield data[RECORD.size :]

    def _length(self, size: int) -> int | None:
        """Bytes of the next piece; None where it is not there as a whole, in a file of `size` bytes."""
        if size - self._place < RECORD.size:
            return None
        length, _ = RECORD.unpack(os.pread(self._file, RECORD.size, self._place))
        if length > MOST_RECORD:
            raise NewsError(f"news must have at most {MOST_RECORD} bytes, got {length} at byte {self._place}")
        return length if size - self._place >= RECORD.size + length else None

    def _header(self) -> tuple[bytes, int]:
        """The vocabulary's fingerprint, and where news begins."""
        data = os.pread(self._file, HEADER.size + MAX_FINGERPRINT_BYTES, 0)
        magic, version, length = HEADER.unpack_from(data.ljust(HEADER.size, b"\0"))
        if (magic, version) != (MAGIC, VERSION) or len(data) < HEADER.size + length:
            raise NewsError(f"news must begin with {MAGIC!r} and format {VERSION}, got {data[: HEADER.size]!r}")
        return data[HEADER.size :][:length], HEADER.size + length
