"""Saved blended lookups, a `checked_file` with

magic   b"STANDCTX"
header  depth, max_bytes, fade, rate, row_size (num_candidates), fingerprint,
        num_roots, num_contexts, num_entries, num_odds
arrays  roots uint32[R], ascending: 2 t for the context that is token t, 2 t + 1 for the context in which t is the
        token before the newest; then the empty context and the contexts of the roots, each before those one token
        longer: sizes uint8[C], visits uint8[C] and, for all their entries latest first, tokens uint32[E],
        weights uint16[E], has_child uint8[E]; odds float32[O], the calibration's factors last

Version 1 had neither the empty context nor those of the token before the newest; such files are refused.
"""

from __future__ import annotations

import os
from typing import Any

import numpy as np

from stand.trees.checked_file import (
    MAGICS,
    ArrayShape,
    FileFormat,
    LookupFileError,
    read_checked_file,
    write_checked_file,
)

MAGIC = MAGICS["BlendedLookup"]
FORMAT_VERSION = 2
PARAMETERS = {"depth": int, "max_bytes": int, "fade": float, "rate": float, "row_size": int, "fingerprint": bytes}
PARAMETER_NAMES = {key: "num_candidates" if key == "row_size" else key for key in PARAMETERS}  # key: argument
UNQUESTIONED_CAP = 1 << 30
LARGEST_CAP_PER_BYTE = 64
COUNTS = {"num_roots": "roots", "num_contexts": "sizes", "num_entries": "tokens", "num_odds": "odds"}
ARRAYS = {  # name: (count, dtype)
    "roots": ("num_roots", "<u4"),
    "sizes": ("num_contexts", "u1"),
    "visits": ("num_contexts", "u1"),
    "tokens": ("num_entries", "<u4"),
    "weights": ("num_entries", "<u2"),
    "has_child": ("num_entries", "u1"),
    "odds": ("num_odds", "<f4"),
}


def write_blended_lookup(path: str | os.PathLike, parameters: dict[str, Any], arrays: dict[str, np.ndarray]) -> None:
    """Write parameters and the arrays of the layout above, in one step."""
    header = {key: parameters[name] for key, name in PARAMETER_NAMES.items()}
    header |= {count: len(arrays[name]) for count, name in COUNTS.items()}
    write_checked_file(path, _format(len(arrays["odds"])), header, [arrays[name] for name in ARRAYS])


def read_blended_lookup(
    path: str | os.PathLike, *, num_odds: int, fingerprint: bytes | None = None, max_bytes: int | None = None
) -> tuple[dict[str, Any], dict[str, np.ndarray], int]:
    """(parameters, arrays, digest) of a file; the contents of arrays are not judged here.

    max_bytes: a cap that will be taken in place of the file's, which then is not judged. Raises LookupFileError.
    """
    header, arrays, digest = read_checked_file(path, _format(num_odds), fingerprint=fingerprint)
    parameters = {name: header[key] for key, name in PARAMETER_NAMES.items()}
    if max_bytes is None:
        _check_cap(path, header["max_bytes"], sum(array.nbytes for array in arrays))
    return parameters, dict(zip(ARRAYS, arrays, strict=True)), digest


def _check_cap(path: str | os.PathLike, max_bytes: int, num_bytes: int) -> None:
    """A cap reserves addresses, and a header can claim anything: a small file must not reserve all there are."""
    most = max(UNQUESTIONED_CAP, LARGEST_CAP_PER_BYTE * num_bytes)
    if max_bytes > most:
        raise LookupFileError(
            f"{path} must have a max_bytes of at most {most} for its {num_bytes} bytes, got {max_bytes}; "
            "pass max_bytes to load() where this is meant"
        )


def _format(num_odds: int) -> FileFormat:
    def header_is_sound(header: Any) -> bool:
        return (
            isinstance(header, dict)
            and set(header) == set(PARAMETERS) | set(COUNTS)
            and all(type(header[name]) is kind for name, kind in PARAMETERS.items())
            and all(type(header[name]) is int and 0 <= header[name] < 2**40 for name in COUNTS)
            and header["num_odds"] == num_odds
        )

    return FileFormat(MAGIC, FORMAT_VERSION, header_is_sound, _array_shapes)


def _array_shapes(header: dict[str, Any]) -> list[ArrayShape]:
    return [((header[count],), dtype) for count, dtype in ARRAYS.values()]
