"""Files and folders that a run writes: tried before the work begins, and complete up to the last line at any moment."""

from __future__ import annotations

import fcntl
import json
import os
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import BinaryIO


def check_writable(path: Path | None, option: str) -> None:
    """Raise ValueError unless a file can be written at `path`; None means no file and passes.

    Tried with a file that vanishes again, so that a folder without room or rights is found before hours of work.
    option: the command-line option that names the file, for the message.
    """
    if path is None:
        return
    folder = path.absolute().parent
    if not folder.is_dir():
        raise ValueError(f"{option} must name a file in an existing folder, got {path}; make the folder first")
    if path.is_dir():
        raise ValueError(f"{option} must name a file, got the folder {path}; add a file name")
    try:
        if path.exists():
            path.open("r+b").close()
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(b"tried")
    except OSError as error:
        raise ValueError(f"{option} must name a file that can be written, got {path} ({error.strerror})") from error


def check_replaceable(folder: Path, name: str, is_own: Callable[[Path], bool]) -> None:
    """Raise ValueError unless the folder is new, empty, or `is_own` knows what it holds: then it may be replaced.

    name: of what the folder is for, for the message.
    """
    if not folder.exists() or (folder.is_dir() and not any(folder.iterdir())):
        return
    if not folder.is_dir() or not is_own(folder):
        raise ValueError(
            f"the folder for {name} must be new, empty or hold {name}, got {folder}, which holds "
            "something else; remove it or name another folder"
        )


def check_same_settings(
    place: Path, earlier: Mapping[str, object], settings: Mapping[str, object], *, remedy: str
) -> None:
    """Raise ValueError, which names the changes, where a run would go on with `place` under other settings than those
    that an earlier run left there."""
    other = [name for name, value in settings.items() if earlier.get(name) != value]
    if other:
        changes = ", ".join(f"{name} {earlier.get(name)!r} -> {settings[name]!r}" for name in other)
        raise ValueError(f"a run must go on with the settings of {place}, got {changes}; {remedy}")


def replace_text(path: Path, text: str) -> None:
    """Write the whole file or leave the old one: a kill in between loses nothing."""
    unfinished = path.with_name(path.name + ".part")
    unfinished.write_text(text, encoding="utf-8")
    os.replace(unfinished, path)


class JsonLines:
    """A file of JSON lines. Every line is with the operating system when `add` returns: a kill loses none.

    Without a path nothing is written. Raises ValueError where the file cannot be written, or holds something already
    and is not gone on with. goes_on: `earlier` are its lines then; one that a kill has cut off is taken out.
    is_alone: until `close`, or the end of the process, others that ask for the same get a ValueError.
    """

    def __init__(self, path: Path | None, option: str, *, goes_on: bool = False, is_alone: bool = False) -> None:
        check_writable(path, option)
        self.earlier: list[dict[str, object]] = []
        self._file = None if path is None else path.open("ab", buffering=0)
        if path is None:
            return
        if is_alone:
            _lock(self._file, path, option)
        try:
            if path.stat().st_size > 0:
                self.earlier = _earlier_lines(path, option, goes_on=goes_on)
        except ValueError:
            self.close()  # who looks at the error may hold this, and the lock with it
            raise

    def add(self, record: Mapping[str, object]) -> None:
        if self._file is not None:
            line = (json.dumps(record) + "\n").encode("utf-8")
            while line:  # a full disk takes a part of a line, and then raises
                line = line[self._file.write(line) :]

    def close(self) -> None:
        if self._file is not None:
            self._file.close()


def _lock(file: BinaryIO, path: Path, option: str) -> None:
    """Until it is closed. Some network file systems have no locks."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        file.close()
        raise ValueError(
            f"{option} must name a file that no other run writes, got {path}, which one has open; wait for its end, or "
            "name another file"
        ) from error
    except OSError:
        pass


def _earlier_lines(path: Path, option: str, *, goes_on: bool) -> list[dict[str, object]]:
    if not goes_on:
        raise ValueError(f"{option} must name a new file, got {path}, which holds earlier results; move it away")
    return _whole_lines(path, option)


def _whole_lines(path: Path, option: str) -> list[dict[str, object]]:
    """The lines that end; the file is cut behind the last one."""
    content = path.read_bytes()
    whole = content[: content.rfind(b"\n") + 1]
    try:
        records = [json.loads(line) for line in whole.splitlines()]
    except ValueError as error:
        raise ValueError(f"{option} must hold JSON lines, got {path} ({error}); name the file of a run") from error
    strange = [record for record in records if not isinstance(record, dict)]
    if strange:
        raise ValueError(f"{option} must hold JSON objects, got {strange[0]!r} in {path}; name the file of a run")
    if len(whole) < len(content):
        os.truncate(path, len(whole))
    return records
