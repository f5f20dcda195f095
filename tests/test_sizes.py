"""How long lines and files may be, and how many files a folder of the product may hold: what a reader can take in."""

import re
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGES = ("stand", "trees", "verifiers")
KINDS = (".py", ".pyx", ".pxi", ".pyi", ".h")
LONGEST_LINE, MOST_LINES, MOST_FILES = 120, 400, 16

in_the_source = pytest.mark.skipif(not (ROOT / "setup.py").exists(), reason="needs the source")


def source_files(root: Path) -> list[Path]:
    return sorted(path for name in PACKAGES for path in (root / name).rglob("*") if path.suffix in KINDS)


def long_lines(text: str) -> Iterator[int]:
    return (number for number, line in enumerate(text.splitlines(), start=1) if len(line) > LONGEST_LINE)


def long_prose(text: str) -> Iterator[int]:
    """Long lines of Markdown, but for tables, code in paragraphs of its own, and lines with a link or a picture."""
    lines = text.splitlines()
    return (number for number in long_lines(text) if not re.match(r"\||    |.*\]\(", lines[number - 1]))


def crowded(files: Iterable[Path]) -> dict[Path, int]:
    """Folders with more than `MOST_FILES` of these. A package's __init__.py is its label, not a room."""
    counts = Counter(path.parent for path in files if path.name != "__init__.py")
    return {folder: count for folder, count in counts.items() if count > MOST_FILES}


@in_the_source
def test_no_line_is_too_long():
    files = source_files(ROOT)
    found = [f"{path.name}:{number}" for path in files for number in long_lines(path.read_text(encoding="utf-8"))]
    assert len(files) > 200 and not found


@in_the_source
def test_no_line_of_a_document_is_too_long():
    files = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]
    found = [f"{path.name}:{number}" for path in files for number in long_prose(path.read_text(encoding="utf-8"))]
    assert len(files) > 15 and not found


@in_the_source
def test_no_file_is_too_long():
    lengths = {path: len(path.read_text(encoding="utf-8").splitlines()) for path in source_files(ROOT)}
    assert not {path: length for path, length in lengths.items() if length > MOST_LINES}


@in_the_source
def test_no_folder_is_crowded():
    assert not crowded(source_files(ROOT))


def test_a_long_line_is_found():
    assert list(long_lines(f"{'a' * LONGEST_LINE}\n{'b' * (LONGEST_LINE + 1)}\n")) == [2]


def test_long_prose_is_found():
    long = "a" * LONGEST_LINE
    assert list(long_prose(f"{long} b\n| {long} |\n    {long}\n[{long}](c)\n- {long}\n{long}\n")) == [1, 5]


def test_a_crowded_folder_is_found():
    files = [Path("few/__init__.py"), *(Path(f"few/{number}.py") for number in range(MOST_FILES))]
    files += [Path(f"many/{number}.h") for number in range(MOST_FILES + 1)]
    assert crowded(files) == {Path("many"): MOST_FILES + 1}
