"""Pack a wheel again, smaller: the same files, compressed as well as deflate can (Zopfli).

    python scripts/pack_wheel.py build/wheel/stand_decoding-0.1.0-cp311-abi3-linux_x86_64.whl

Needs `pip install ".[wheel]"`. Takes a minute. The wheel is replaced once all of its files read back as they were.
"""

from __future__ import annotations

import argparse
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest import mock

import measuring.interruption  # noqa: F401  (before what loads slowly)
import zopfli

ITERATIONS = 60  # beyond that a wheel of a megabyte gets a hundred bytes smaller a minute


@contextmanager
def zopfli_zips() -> Iterator[None]:
    """Within it `zipfile` deflates by Zopfli. It has no public way to be given a compressor."""

    def compressor(*_: object) -> zopfli.ZopfliCompressor:
        return zopfli.ZopfliCompressor(zopfli.ZOPFLI_FORMAT_DEFLATE, iterations=ITERATIONS, block_splitting_max=0)

    with mock.patch.object(zipfile, "_get_compressor", compressor):
        yield


def contents(path: Path) -> dict[str, bytes]:
    """Of a zip file, in its order. Raises zipfile.BadZipFile for a wrong checksum."""
    with zipfile.ZipFile(path) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


def pack(wheel: Path) -> None:
    """Replace a wheel by a smaller one with the same files."""
    smaller = wheel.with_suffix(".smaller")
    with zopfli_zips(), zipfile.ZipFile(wheel) as given, zipfile.ZipFile(smaller, "w", zipfile.ZIP_DEFLATED) as packed:
        for entry in given.infolist():
            packed.writestr(entry, given.read(entry), zipfile.ZIP_DEFLATED)
    if contents(smaller) != contents(wheel):
        raise zipfile.BadZipFile(f"a packed wheel must hold the same files, got others in {smaller}; keep {wheel}")
    smaller.replace(wheel)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("wheel", type=Path, help="the .whl file, which is replaced")
    wheel = parser.parse_args().wheel
    if not zipfile.is_zipfile(wheel):
        parser.error(f"must be a wheel, got {wheel}; build one first (make wheel)")
    before = wheel.stat().st_size
    pack(wheel)
    print(f"{wheel.name}: {before:,} bytes packed into {wheel.stat().st_size:,}")


if __name__ == "__main__":
    main()
