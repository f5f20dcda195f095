"""Cython source with one thing wrong: text changes on the expressions of function bodies, and how to compile them."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from mutants import text_changes

PACKAGES = ("stand", "trees", "verifiers")
INCLUDE = re.compile(r'^include "(.+)"$', re.MULTILINE)
OPERATORS = text_changes.OPERATORS | {"and": ["or"], "or": ["and"]}
OPERATOR = re.compile(r"(?<= )(<=|>=|==|!=|\+=|-=|\*=|<|>|\+|-|\*|/|and|or)(?= )")
NAMES = {"mass": "law", "law": "mass", "m": "law", "parent": "node", "on_support": "others", "others": "on_support"}
NAME = re.compile(rf"(?<![\w.])({'|'.join(NAMES)})(?![\w(]|\.shape)")
NUMBER = re.compile(r"(?<![\w.\[:])(0\.0|1\.0|0|1)(?![\w.])")
CAP = re.compile(r"\b(min|max)\(")
BOUND = re.compile(r"^(cdef double \w+ = )(\d+e-\d+)")  # a constant of the module
FUNCTION = re.compile(r"^(?:def|cdef [\w ]+?) (\w+)\(", re.MULTILINE)
NUMBER_NAME = re.compile(r"^cdef double (\w+) = ", re.MULTILINE)


def changes(source: str) -> Iterator[tuple[int, str, str]]:
    """(line, what, changed source), one place at a time.

    A comparison turned round or made (un)strict, an operator replaced, one side of a cap or floor kept, the target's
    and the drafter's law, a node and its parent, or two parts of a sum swapped, a 0 or 1 replaced, a break left out;
    a tiny bound of the module made larger.
    """
    lines = source.splitlines(keepends=True)
    yield from text_changes.changed_sources(lines, _code_lines(lines), _line_changes, comment="  #")
    for number, line in enumerate(lines):
        match = BOUND.match(line)
        if match:
            changed = f"{match[1]}{float(match[2]) * 1e8:g}{line[match.end() :]}"
            yield number + 1, f"{match[2]} times 1e8", text_changes.with_line(lines, number, changed)


def _code_lines(lines: list[str]) -> Iterator[int]:
    """Lines of function bodies that compute: no signatures, declarations, docstrings, comments or error messages."""
    in_text = in_signature = in_raise = in_function = False
    for number, line in enumerate(lines):
        text = line.strip()
        is_text = in_text or text.startswith('"""')
        if text.count('"""') == 1:
            in_text = not in_text
        if is_text or not text or text.startswith("#"):
            continue
        if in_signature or re.match(r"(cdef|def)\b.*\(", text) and not line.startswith(" "):
            in_signature, in_function = not text.endswith(":"), True
            continue
        if not line.startswith(" "):
            in_function = False
        in_raise = text.startswith("raise") or in_raise and line.startswith(" " * 12)
        is_declaration = text.startswith("cdef") and "=" not in text
        if in_function and not in_raise and not is_declaration:
            yield number


def _line_changes(code: str) -> Iterator[tuple[str, str]]:
    yield from text_changes.operator_changes(code, OPERATOR, OPERATORS)
    for match in CAP.finditer(code):
        if text_changes.closing(code, match.end()) is None:
            raise ValueError(f"brackets must close on their line, got {code.strip()!r}; write it on one line")
        yield from text_changes.one_argument(code, match)
    for match in NAME.finditer(code):
        if not code.strip().startswith("cdef"):
            yield text_changes.replaced(code, match, NAMES[match[0]])
    for match in NUMBER.finditer(code):
        new = str(1 - int(match[0])) if match[0].isdigit() else str(1.0 - float(match[0]))
        yield text_changes.replaced(code, match, new)
    for match in re.finditer(r"\bnot ", code):
        yield "drop not", code[: match.start()] + code[match.end() :]
    if code.strip() == "break":
        yield "break -> pass", code.replace("break", "pass")


def _all_but_headers(folder: str, names: list[str]) -> list[str]:
    return [name for name in names if not name.endswith((".h", ".pxi")) and not (Path(folder) / name).is_dir()]


def joined(sources: Sequence[str]) -> str:
    """One source with the functions of every one, named `name__0`, `name__1`...

    Only for modules of functions alone. What they share, down to the first function, is taken from the first source.
    """
    heads, bodies = zip(*map(_split_head, sources), strict=True)
    return heads[0] + "".join(_renamed(body, f"__{number}") for number, body in enumerate(bodies))


def _split_head(source: str) -> tuple[str, str]:
    """(what stands before the first function, the numbers there and the functions)."""
    start = min(match.start() for match in re.finditer(FUNCTION, source))
    head, functions = source[:start], source[start:]
    numbers = [line for line in head.splitlines(keepends=True) if NUMBER_NAME.match(line)]
    return "".join(line for line in head.splitlines(keepends=True) if line not in numbers), "".join(numbers) + functions


def _renamed(body: str, suffix: str) -> str:
    names = [match[1] for match in FUNCTION.finditer(body)] + [match[1] for match in NUMBER_NAME.finditer(body)]
    return re.sub(rf"\b({'|'.join(names)})\b(?!=)", rf"\1{suffix}", body) + "\n\n"


def including(root: Path, part: Path) -> Path:
    """The module that a part is included into."""
    for package in PACKAGES:
        for module in sorted((root / package).rglob("*.pyx")):
            names = INCLUDE.findall(module.read_text(encoding="utf-8"))
            if any((module.parent / name).resolve() == part.resolve() for name in names):
                return module
    raise ValueError(f"a .pxi must be included by a module of {', '.join(PACKAGES)}, got {part}; see setup.py")


def compile_module(root: Path, path: Path, source: str, folder: Path) -> Path | None:
    """The compiled `source` in place of `path`, below `folder`, by the project's own setup.py; None if it is refused.

    root: the project; path: trees/compiled.pyx in it, or trees/include/noise.pxi, a part of a module. Only this one
    module is built.
    """
    module = path if path.suffix == ".pyx" else including(root, path)
    for name in ("setup.py", "pyproject.toml", "README.md"):
        shutil.copy(root / name, folder / name)
    for package in PACKAGES:  # setup.py writes the code that all modules share into `stand`
        shutil.copytree(root / package, folder / package, ignore=_all_but_headers)
    for file, text in ((module, module.read_text(encoding="utf-8")), (path, source)):
        copy = folder / file.relative_to(root)
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.write_text(text, encoding="utf-8")
    built = subprocess.run(
        [sys.executable, "setup.py", "-q", "build_ext", "--build-lib", "built", "--build-temp", "temporary"],
        cwd=folder,
        capture_output=True,
    )
    found = sorted((folder / "built").rglob(f"{module.stem}*.so")) if built.returncode == 0 else []
    return found[0] if found else None
