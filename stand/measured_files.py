"""Files of what was measured on this machine: the first measurement is kept, so that decisions do not change."""

from __future__ import annotations

import os
import re
import secrets
import tempfile
from collections.abc import Callable
from pathlib import Path

VARIABLE = "STAND_COSTS"  # environment: another folder, or "off": nothing is measured


def measured_folder() -> Path | None:
    """Where the files are: as the environment variable STAND_COSTS says, else in ~/.cache/stand, or for a user without
    a home, as in some containers, among temporary files; None: nothing is measured."""
    named = os.environ.get(VARIABLE)
    if named == "off":
        return None
    if named:
        return Path(named)
    try:
        return Path.home() / ".cache" / "stand"
    except RuntimeError:
        return Path(tempfile.gettempdir()) / f"stand-{os.getuid()}"


def measured_path(folder: Path, *parts: str) -> Path:
    """The file that is named by what a measurement depends on."""
    name = "--".join(re.sub(r"[^a-z0-9.]+", "-", part.lower()).strip("-") for part in parts)
    return folder / f"{name}.json"


def keep_first(path: Path, save: Callable[[Path], None], *, is_sound: Callable[[Path], bool]) -> None:
    """Have `save` write the file, unless another process or thread has written a sound one meanwhile.

    Raises OSError where the folder cannot be written.
    """
    unfinished = path.with_name(f"{path.name}.{secrets.token_hex(4)}")
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        save(unfinished)
        try:
            os.link(unfinished, path)
        except OSError:  # there is one, or a file system without hard links
            if not is_sound(path):
                unfinished.replace(path)
    finally:
        unfinished.unlink(missing_ok=True)
