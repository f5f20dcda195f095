"""Saved lookup trees: one file, written atomically, refused when anything about it is wrong.

Layout, all integers little-endian:

    magic        8 bytes  b"STANDLUT"
    version      uint32
    header_size  uint32
    header       msgpack map: orders, row_size, min_rate, fingerprint, num_contexts (one per order)
    tables       per order: keys int32[n, order] newest token first, counts uint32[n],
                 row_ids int32[n, S] padded with -1, row_probs float32[n, S]
    checksum     blake2b, 32 bytes, of everything before it
"""

from __future__ import annotations

import hashlib
import os
import secrets
import struct
from collections.abc import Sequence
from pathlib import Path
from typing import Any, BinaryIO

import msgpack
import numpy as np

MAGIC = b"STANDLUT"
FORMAT_VERSION = 1
PREFIX = struct.Struct("<8sII")
MAX_HEADER_BYTES = 4096
MAX_FINGERPRINT_BYTES = 64
CHECKSUM_BYTES = 32
HEADER_KEYS = {"orders", "row_size", "min_rate", "fingerprint", "num_contexts"}

Table = tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]


class LookupFileError(ValueError):
    """The file is not a lookup tree that this version can use; the message says why."""


def write_lookup_file(path: str | os.PathLike, parameters: dict[str, Any], tables: Sequence[Table]) -> None:
    """Write parameters and, per order, (keys, counts, row_ids, row_probs).

    The bytes go to a new file beside `path`, which then takes its place in one step; on any error `path` is untouched.
    """
    target = Path(path)
    header = msgpack.packb({**parameters, "num_contexts": [len(counts) for _, counts, _, _ in tables]})
    if len(header) > MAX_HEADER_BYTES or len(parameters["fingerprint"]) > MAX_FINGERPRINT_BYTES:
        raise ValueError(f"fingerprint must have at most {MAX_FINGERPRINT_BYTES} bytes, got more; use a digest")
    fresh = target.with_name(f".{target.name}.{secrets.token_hex(4)}.tmp")
    try:
        with open(fresh, "xb") as file:
            _write_checked(file, [PREFIX.pack(MAGIC, FORMAT_VERSION, len(header)), header], tables)
            file.flush()
            os.fsync(file.fileno())
        os.replace(fresh, target)
    finally:
        fresh.unlink(missing_ok=True)


def read_lookup_file(
    path: str | os.PathLike, *, fingerprint: bytes | None = None
) -> tuple[dict[str, Any], list[Table]]:
    """(parameters, tables) of a file, with sizes and checksum verified; the contents of rows are not judged here.

    Never allocates more than about the file's own size. Raises LookupFileError.
    """
    with open(path, "rb") as file:
        file_size = os.fstat(file.fileno()).st_size
        digest = hashlib.blake2b(digest_size=CHECKSUM_BYTES)
        header = _read_header(path, file, digest, file_size)
        shapes = _table_shapes(header)
        expected = file.tell() + sum(4 * int(np.prod(shape)) for table in shapes for shape in table) + CHECKSUM_BYTES
        if file_size != expected:
            raise _damaged(path, f"have {expected} bytes", f"{file_size}")
        tables = [_read_table(path, file, digest, table) for table in shapes]
        if file.read(CHECKSUM_BYTES) != digest.digest():
            raise _damaged(path, "match its checksum", "another one")
    parameters = {key: header[key] for key in sorted(HEADER_KEYS - {"num_contexts"})}
    if fingerprint is not None and parameters["fingerprint"] != fingerprint:
        raise LookupFileError(
            f"{path} must be of this tokenizer's vocabulary ({fingerprint.hex()}), "
            f"got {parameters['fingerprint'].hex()}; "
            "token ids differ between vocabularies, so build a lookup tree with this tokenizer"
        )
    return parameters, tables


def _write_checked(file: BinaryIO, parts: list[bytes], tables: Sequence[Table]) -> None:
    digest = hashlib.blake2b(digest_size=CHECKSUM_BYTES)
    for part in parts:
        digest.update(part)
        file.write(part)
    for table in tables:
        for array, dtype in zip(table, ("<i4", "<u4", "<i4", "<f4"), strict=True):
            data = memoryview(np.ascontiguousarray(array, dtype=dtype)).cast("B") if array.size else b""
            digest.update(data)
            file.write(data)
    file.write(digest.digest())


def _read_header(path, file: BinaryIO, digest, file_size: int) -> dict[str, Any]:
    prefix = file.read(PREFIX.size)
    if len(prefix) < PREFIX.size or prefix[: len(MAGIC)] != MAGIC:
        raise LookupFileError(f"{path} must start with {MAGIC!r}, got {prefix[: len(MAGIC)]!r}; it is no lookup tree")
    _, version, header_size = PREFIX.unpack(prefix)
    if version != FORMAT_VERSION:
        raise LookupFileError(
            f"{path} must have format version {FORMAT_VERSION}, got {version}; read it with the release that wrote it"
        )
    if header_size > min(MAX_HEADER_BYTES, file_size):
        raise _damaged(path, f"have a header of at most {MAX_HEADER_BYTES} bytes", f"{header_size}")
    packed = file.read(header_size)
    digest.update(prefix)
    digest.update(packed)
    try:
        header = msgpack.unpackb(packed, max_array_len=64, max_map_len=16, max_str_len=64, max_ext_len=0)
    except (ValueError, msgpack.UnpackException) as error:
        raise _damaged(path, "have a readable header", f"{type(error).__name__}") from error
    if not _header_is_sound(header):
        raise _damaged(path, "have a sound header", "another one")
    return header


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


def _table_shapes(header: dict[str, Any]) -> list[tuple[tuple[int, ...], ...]]:
    width = header["row_size"]
    return [
        ((number, order), (number,), (number, width), (number, width))
        for number, order in zip(header["num_contexts"], header["orders"], strict=True)
    ]


def _read_table(path, file: BinaryIO, digest, shapes: tuple[tuple[int, ...], ...]) -> Table:
    arrays = []
    for shape, dtype in zip(shapes, ("<i4", "<u4", "<i4", "<f4"), strict=True):
        array = np.empty(shape, dtype=dtype)
        if array.size:
            data = memoryview(array).cast("B")
            if file.readinto(data) != len(data):
                raise _damaged(path, f"hold {len(data)} more bytes", "the end of the file")
            digest.update(data)
        arrays.append(array.astype(array.dtype.newbyteorder("="), copy=False))
    return tuple(arrays)


def _damaged(path, rule: str, got: str) -> LookupFileError:
    return LookupFileError(f"{path} must {rule}, got {got}; the file is damaged, build it again or take a backup")
