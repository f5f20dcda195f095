"""Lines of C++, Cython and stubs, which the linter does not count."""

from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
LONGEST = 120
KINDS = ("*.h", "*.pyx", "*.pxi", "*.pyi")

in_the_source = pytest.mark.skipif(not (ROOT / "setup.py").exists(), reason="needs the source")


def long_lines(text: str) -> Iterator[int]:
    return (number for number, line in enumerate(text.splitlines(), start=1) if len(line) > LONGEST)


@in_the_source
def test_no_line_is_too_long():
    files = [path for name in ("stand", "trees", "verifiers") for kind in KINDS for path in (ROOT / name).rglob(kind)]
    found = [f"{path.name}:{number}" for path in files for number in long_lines(path.read_text(encoding="utf-8"))]
    assert len(files) > 50 and not found


def test_a_long_line_is_found():
    assert list(long_lines(f"{'a' * LONGEST}\n{'b' * (LONGEST + 1)}\n")) == [2]
