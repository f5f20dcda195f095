"""Files that a long run writes: tried before the work begins, and complete up to the last line at any moment."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path


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


def replace_text(path: Path, text: str) -> None:
    """Write the whole file or leave the old one: a kill in between loses nothing."""
    unfinished = path.with_name(path.name + ".part")
    unfinished.write_text(text, encoding="utf-8")
    os.replace(unfinished, path)


class JsonLines:
    """A new file of JSON lines. Every line is with the operating system when `add` returns: a kill loses none.

    Without a path nothing is written. Raises ValueError where the file cannot be written or holds something already.
    """

    def __init__(self, path: Path | None, option: str) -> None:
        check_writable(path, option)
        if path is not None and path.exists() and path.stat().st_size > 0:
            raise ValueError(f"{option} must name a new file, got {path}, which holds earlier results; move it away")
        self._file = None if path is None else path.open("ab", buffering=0)

    def add(self, record: Mapping[str, object]) -> None:
        if self._file is not None:
            self._file.write((json.dumps(record) + "\n").encode("utf-8"))
