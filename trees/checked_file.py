"""Files of arrays: written atomically, refused when anything about them is wrong.

Layout, all integers little-endian:

    magic        8 bytes
    version      uint32
    header_size  uint32
    header       msgpack map
    arrays       in an order and of shapes that follow from the header
    checksum     blake2b, 32 bytes, of everything before it
"""

from __future__ import annotations

import hashlib
import os
import re
import secrets
import stat
import struct
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import msgpack
import numpy as np

from stand.trees.locked_files import open_locked, remove_abandoned

PREFIX = struct.Struct("<8sII")
MAX_HEADER_BYTES = 4096
MAX_FINGERPRINT_BYTES = 64
CHECKSUM_BYTES = 32
RANDOM_BYTES = 4  # in the names of unfinished files
MAX_NAME_BYTES = 255  # of a file, on the file systems in use

MAGICS = {"BlendedLookup": b"STANDCTX", "LookupTree": b"STANDLUT"}  # by the class that loads such a file

ArrayShape = tuple[tuple[int, ...], str]  # shape, little-endian dtype


class LookupFileError(ValueError):
    """The file is not a lookup that this version can use; the message says why."""


@dataclass(frozen=True, slots=True)
class FileFormat:
    """What tells one kind of file from another. `array_shapes(header)` is only called for a sound header."""

    magic: bytes
    version: int
    header_is_sound: Callable[[Any], bool]
    array_shapes: Callable[[dict[str, Any]], list[ArrayShape]]


def checked_fingerprint(fingerprint: Any) -> bytes:
    """Bytes that fit into a file's header; ValueError otherwise."""
    if not isinstance(fingerprint, bytes):
        raise ValueError(f"fingerprint must be bytes, got {fingerprint!r}; use vocabulary_fingerprint()")
    if len(fingerprint) > MAX_FINGERPRINT_BYTES:
        raise ValueError(
            f"fingerprint must have at most {MAX_FINGERPRINT_BYTES} bytes, got {len(fingerprint)}; use a digest"
        )
    return fingerprint


def write_checked_file(
    path: str | os.PathLike, file_format: FileFormat, header: dict[str, Any], arrays: Sequence[np.ndarray]
) -> None:
    """Write a header and its arrays.

    The bytes go to a new file in the same folder, which then takes the place of `path` in one step; on any error `path`
    is untouched. An existing file keeps its mode; a symbolic link stays, and the file that it leads to is replaced.
    Raises ValueError where something other than a file is there.
    """
    target = Path(os.path.realpath(path))
    if target.exists() and not target.is_file():
        raise ValueError(f"path must name a file, or nothing yet, got {path}, a folder or a device; name another")
    packed = msgpack.packb(header)
    if len(packed) > MAX_HEADER_BYTES or len(header["fingerprint"]) > MAX_FINGERPRINT_BYTES:
        raise ValueError(f"fingerprint must have at most {MAX_FINGERPRINT_BYTES} bytes, got more; use a digest")
    dtypes = [dtype for _, dtype in file_format.array_shapes(header)]
    remove_abandoned(_unfinished(target))  # of processes that were killed while they wrote it
    prefix = _unfinished_prefix(target)
    fresh, file = open_locked(lambda: target.with_name(f"{prefix}{secrets.token_hex(RANDOM_BYTES)}.tmp"))
    try:
        with file:
            if target.exists():
                os.fchmod(file.fileno(), stat.S_IMODE(target.stat().st_mode))
            start = PREFIX.pack(file_format.magic, file_format.version, len(packed))
            _write_parts(file, [start, packed], zip(arrays, dtypes, strict=True))
            file.flush()
            os.fsync(file.fileno())
            os.replace(fresh, target)
    finally:
        fresh.unlink(missing_ok=True)


def _unfinished(target: Path) -> Iterator[Path]:
    """What unfinished files for `target` may lie beside it."""
    name = re.compile(re.escape(_unfinished_prefix(target)) + f"[0-9a-f]{{{2 * RANDOM_BYTES}}}" + re.escape(".tmp"))
    return (other for other in target.parent.glob("*.tmp") if name.fullmatch(other.name))


def _unfinished_prefix(target: Path) -> str:
    """How the names of unfinished files for `target` begin: with its own, cut where all of it would be too long.

    Between two characters: macOS refuses half of one."""
    room = MAX_NAME_BYTES - len("..") - 2 * RANDOM_BYTES - len(".tmp")
    name = target.name
    while len(os.fsencode(name)) > room:
        name = name[:-1]
    return f".{name}."


def read_checked_file(
    path: str | os.PathLike, file_format: FileFormat, *, fingerprint: bytes | None = None
) -> tuple[dict[str, Any], list[np.ndarray], int]:
    """(header, arrays, digest) of a file, with sizes and checksum verified; the contents of arrays are not judged here.

    digest: 64 bits of the checksum, which name the file's content.

    Never allocates more than about the file's own size. Raises LookupFileError, and ValueError on a fingerprint that
    is none.
    """
    if fingerprint is not None:
        checked_fingerprint(fingerprint)
    with open(os.fspath(path), "rb") as file:
        file_size = os.fstat(file.fileno()).st_size
        digest = hashlib.blake2b(digest_size=CHECKSUM_BYTES)
        header = _read_header(path, file, file_format, digest, file_size)
        shapes = file_format.array_shapes(header)
        payload = sum(int(np.prod(shape)) * np.dtype(dtype).itemsize for shape, dtype in shapes)
        expected = file.tell() + payload + CHECKSUM_BYTES
        if file_size != expected:
            raise damaged(path, f"have {expected} bytes", f"{file_size}")
        arrays = [_read_array(path, file, digest, shape, dtype) for shape, dtype in shapes]
        if file.read(CHECKSUM_BYTES) != digest.digest():
            raise damaged(path, "match its checksum", "another one")
    if fingerprint is not None and header["fingerprint"] != fingerprint:
        raise LookupFileError(
            f"{path} must be of this tokenizer's vocabulary ({fingerprint.hex()}), "
            f"got {header['fingerprint'].hex()}; "
            "token ids differ between vocabularies, so build a lookup with this tokenizer"
        )
    return header, arrays, int.from_bytes(digest.digest()[:8], "little")


def empty_lookup(cls: type, path: str | os.PathLike, parameters: dict[str, Any]) -> Any:
    """One with the parameters of a file. Raises LookupFileError where no lookup may have them."""
    try:
        return cls(**parameters)
    except (ValueError, OverflowError) as error:
        raise LookupFileError(f"{path} must hold sound parameters, got {parameters}; build it again") from error


def damaged(path: str | os.PathLike, rule: str, got: str) -> LookupFileError:
    return LookupFileError(f"{path} must {rule}, got {got}; the file is damaged, build it again or take a backup")


def _write_parts(file: BinaryIO, parts: list[bytes], arrays) -> None:
    digest = hashlib.blake2b(digest_size=CHECKSUM_BYTES)
    for part in parts:
        digest.update(part)
        file.write(part)
    for array, dtype in arrays:
        data = memoryview(np.ascontiguousarray(array, dtype=dtype)).cast("B") if array.size else b""
        digest.update(data)
        file.write(data)
    file.write(digest.digest())


def _read_header(path, file: BinaryIO, file_format: FileFormat, digest, file_size: int) -> dict[str, Any]:
    prefix = file.read(PREFIX.size)
    magic, version = file_format.magic, file_format.version
    if prefix[: len(magic)] != magic:
        kinds = {known: name for name, known in MAGICS.items()}
        kind = kinds.get(prefix[: len(magic)])
        if kind not in (None, kinds[magic]):
            raise LookupFileError(f"{path} must hold a {kinds[magic]}, got a {kind}; load it with {kind}.load")
        raise LookupFileError(f"{path} must start with {magic!r}, got {prefix[: len(magic)]!r}; it is no lookup")
    if len(prefix) < PREFIX.size:
        raise damaged(path, f"have at least {PREFIX.size} bytes", f"{len(prefix)}")
    _, got_version, header_size = PREFIX.unpack(prefix)
    if got_version != version:
        raise LookupFileError(
            f"{path} must have format version {version}, got {got_version}; read it with the release that wrote it"
        )
    if header_size > MAX_HEADER_BYTES:
        raise damaged(path, f"have a header of at most {MAX_HEADER_BYTES} bytes", f"{header_size}")
    if PREFIX.size + header_size > file_size:
        raise damaged(path, f"have at least {PREFIX.size + header_size} bytes", f"{file_size}")
    packed = file.read(header_size)
    digest.update(prefix)
    digest.update(packed)
    try:
        header = msgpack.unpackb(packed, max_array_len=64, max_map_len=16, max_str_len=64, max_ext_len=0)
    except (ValueError, msgpack.UnpackException) as error:
        raise damaged(path, "have a readable header", f"{type(error).__name__}") from error
    if not file_format.header_is_sound(header):
        raise damaged(path, "have a sound header", "another one")
    return header


def _read_array(path, file: BinaryIO, digest, shape: tuple[int, ...], dtype: str) -> np.ndarray:
    array = np.empty(shape, dtype=dtype)
    if array.size:
        data = memoryview(array).cast("B")
        if file.readinto(data) != len(data):
            raise damaged(path, f"hold {len(data)} more bytes", "the end of the file")
        digest.update(data)
    return array.astype(array.dtype.newbyteorder("="), copy=False)
