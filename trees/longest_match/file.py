"""Saved lookup trees, a `checked_file` with

magic   b"STANDLUT"
header  orders, row_size (num_candidates S), min_rate, fingerprint, num_contexts (one per order)
arrays  per order: keys int32[n, order] newest token first, counts uint32[n],
        top_ids int32[n, S] padded with -1, top_probs float32[n, S]
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import numpy as np

from stand.trees.checked_file import MAGICS, ArrayShape, FileFormat, read_checked_file, write_checked_file

MAGIC = MAGICS["LookupTree"]
FORMAT_VERSION = 1
PARAMETER_NAMES = {  # key: argument
    "orders": "orders",
    "row_size": "num_candidates",
    "min_rate": "min_rate",
    "fingerprint": "fingerprint",
}
HEADER_KEYS = {*PARAMETER_NAMES, "num_contexts"}
ARRAYS_PER_TABLE = 4

Table = tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]


def write_lookup_tree(path: str | os.PathLike, parameters: dict[str, Any], tables: Sequence[Table]) -> None:
    """Write parameters and, per order, (keys, counts, top_ids, top_probs), in one step."""
    header = {key: parameters[name] for key, name in PARAMETER_NAMES.items()}
    header |= {"num_contexts": [len(counts) for _, counts, _, _ in tables]}
    write_checked_file(path, _format(), header, [array for table in tables for array in table])


def read_lookup_tree(
    path: str | os.PathLike, *, fingerprint: bytes | None = None
) -> tuple[dict[str, Any], list[Table], int]:
    """(parameters, tables, digest) of a file; the contents of tables are not judged here. Raises LookupFileError."""
    header, arrays, digest = read_checked_file(path, _format(), fingerprint=fingerprint)
    parameters = {name: header[key] for key, name in PARAMETER_NAMES.items()}
    firsts = range(0, len(arrays), ARRAYS_PER_TABLE)
    return parameters, [tuple(arrays[first : first + ARRAYS_PER_TABLE]) for first in firsts], digest


def _format() -> FileFormat:
    return FileFormat(MAGIC, FORMAT_VERSION, _header_is_sound, _array_shapes)


def _header_is_sound(header: Any) -> bool:
    if not isinstance(header, dict) or set(header) != HEADER_KEYS:
        return False
    orders, num_contexts = header["orders"], header["num_contexts"]
    return (
        isinstance(orders, list)
        and isinstance(num_contexts, list)
        and len(orders) == len(num_contexts)
        and all(type(order) is int and 1 <= order <= 16 for order in orders)
        and all(type(number) is int and 0 <= number < 2**32 for number in num_contexts)
        and type(header["row_size"]) is int
        and 1 <= header["row_size"] <= 256
        and type(header["min_rate"]) is float
        and type(header["fingerprint"]) is bytes
    )


def _array_shapes(header: dict[str, Any]) -> list[ArrayShape]:
    width = header["row_size"]
    return [
        array
        for number, order in zip(header["num_contexts"], header["orders"], strict=True)
        for array in (
            ((number, order), "<i4"),
            ((number,), "<u4"),
            ((number, width), "<i4"),
            ((number, width), "<f4"),
        )
    ]
