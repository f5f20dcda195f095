"""C++ source with one thing wrong: text changes on expressions, and how to compile the module that includes it."""

from __future__ import annotations

import atexit
import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path

from mutants import text_changes
from mutants.cython_mutants import joined

OPERATORS = text_changes.OPERATORS | {"&&": ["||"], "||": ["&&"]}
OPERATOR = re.compile(r"(?<= )(<=|>=|==|!=|\+=|-=|\*=|&&|\|\||<|>|\+|-|\*|/)(?= )")
UNIT = re.compile(r"(?<![\w.\[:])(0\.0f?|1\.0f?|0|1)(?![\w.])")
FACTOR = re.compile(r"(?<![\w.])(?!0\.0f?\b|1\.0f?\b)(\d+\.\d+)(f?)(?!\w)")
CAP = re.compile(r"\bstd::(min|max)(<\w+>)?\(")
LEAP = re.compile(r"\b(break|continue);")
SKIPPED = ("#", "//", "namespace", "using", "template", "static_assert", "enum")
INCLUDED_BY = {  # folders of headers, and what Cython makes of the module that they are compiled into
    "stand/laws": "stand/laws/filters.cpp",
    "trees/blended/growth": "trees/lookups.cpp",
}


def changes(source: str) -> Iterator[tuple[int, str, str]]:
    """(line, what, changed source), one place at a time.

    A comparison turned round or made (un)strict, an operator replaced, one side of a cap or floor kept, a 0 or 1
    replaced, another constant doubled, a negation, a break or a continue left out.
    """
    lines = source.splitlines(keepends=True)
    numbers = [number for number, line in enumerate(lines) if not line.strip().startswith(SKIPPED)]
    yield from text_changes.changed_sources(lines, numbers, _line_changes, comment="  //")


def _line_changes(code: str) -> Iterator[tuple[str, str]]:
    yield from text_changes.operator_changes(code, OPERATOR, OPERATORS)
    for match in CAP.finditer(code):
        if text_changes.closing(code, match.end()) is not None:
            yield from text_changes.one_argument(code, match)
    for match in UNIT.finditer(code):
        yield text_changes.replaced(code, match, str(1 - int(match[0][0])) + match[0][1:])
    for match in FACTOR.finditer(code):
        yield text_changes.replaced(code, match, f"{2 * float(match[1])}{match[2]}")
    for match in re.finditer(r"!(?=[\w(])", code):
        yield "drop !", code[: match.start()] + code[match.end() :]
    for match in LEAP.finditer(code):
        yield f"drop {match[1]}", code[: match.start()] + ";" + code[match.end() :]


def compile_batch(root: Path, path: Path, sources: Sequence[str], folder: Path) -> Path | None:
    """One module of all these sources of one Cython file (`cython_mutants.joined`); None if one is refused."""
    source = (folder / path.name).with_suffix(".pyx")  # a part of a module may be one by itself
    source.write_text(joined(sources), encoding="utf-8")
    directives = ["boundscheck=False", "wraparound=False", "initializedcheck=False", "cdivision=True"]
    options = ["-3", "--cplus", *(word for directive in directives for word in ("-X", directive))]
    for header in path.parent.glob("*.h"):
        shutil.copy(header, folder)
    done = subprocess.run([sys.executable, "-m", "cython", *options, str(source)], capture_output=True)
    return compile_cpp(source.with_suffix(".cpp")) if done.returncode == 0 else None


STANDARD_HEADER = re.compile(r"^#include <[\w/.]+>$", re.MULTILINE)


def including(root: Path, header: Path) -> Path:
    """The .cpp of the module that a header of the project is compiled into."""
    return root / INCLUDED_BY[header.parent.relative_to(root).as_posix()]


def compile_functions(root: Path, path: Path, source: str, folder: Path) -> Path | None:
    """Like `compile_module`, but only the headers' functions are compiled anew; None if they are refused.

    Where nothing is inlined every inline function is a weak symbol of its own, and of two the linker takes the first:
    the mutant's. What a caller has taken in all the same, such as a default value, stays as it was.
    """
    module = including(root, path)
    parts = _shipped_parts(root, module)
    _copy_headers(root, path, source, folder)
    lines = ["#define inline inline __attribute__((used))"]
    lines += [f'#include "{header.relative_to(root)}"' for header in sorted(path.parent.glob("*.h"))]
    functions = folder / "functions.cpp"
    functions.write_text("\n".join(lines), encoding="utf-8")
    command = ["c++", *_flags(), "-c", f"-I{folder}", "-include", str(parts / "standard.h"), str(functions)]
    done = subprocess.run([*command, "-o", str(folder / "functions.o")], capture_output=True)
    if done.returncode != 0:
        return None
    built = folder / f"{module.stem}{sysconfig.get_config_var('EXT_SUFFIX')}"
    objects = [str(folder / "functions.o"), str(parts / "module.o")]
    subprocess.run(["c++", *_shared(), *objects, "-o", str(built)], check=True, capture_output=True)
    return built


def _copy_headers(root: Path, path: Path, source: str, folder: Path) -> None:
    """Those of the header's package, to the same places below `folder`; `source` in place of the header's own."""
    package = path.relative_to(root).parts[0]
    for header in (root / package).rglob("*.h"):
        copy = folder / header.relative_to(root)
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(header, copy)
    (folder / path.relative_to(root)).write_text(source, encoding="utf-8")


@cache
def _shipped_parts(root: Path, module: Path) -> Path:
    """A folder with the shipped module's object and the standard headers beside it, precompiled; it goes with this
    process."""
    folder = Path(tempfile.mkdtemp(prefix="mutants"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    texts = [path.read_text(encoding="utf-8") for path in sorted(module.parent.rglob("*.h"))]
    included = sorted({include for text in texts for include in STANDARD_HEADER.findall(text)})
    (folder / "standard.h").write_text("\n".join(included) + "\n", encoding="utf-8")
    headers = ["-x", "c++-header", str(folder / "standard.h"), "-o", str(folder / "standard.h.gch")]
    for command in (headers, ["-c", str(module), "-o", str(folder / "module.o")]):
        subprocess.run(["c++", *_flags(), *command], check=True, capture_output=True)
    return folder


def _shared() -> list[str]:
    """Python's own functions are found when the module is loaded; the linker of macOS must be told so."""
    return ["-shared", *(["-undefined", "dynamic_lookup"] if sys.platform == "darwin" else [])]


def _flags() -> list[str]:
    import numpy

    includes = [f"-I{sysconfig.get_path('include')}", f"-I{numpy.get_include()}"]
    # setup.py compiles for the stable ABI too: a module of another one cannot share code with the project's others.
    macros = ["-DNDEBUG", *([] if sysconfig.get_config_var("Py_GIL_DISABLED") else ["-DPy_LIMITED_API=0x030B0000"])]
    return ["-fPIC", "-O1", "-fno-inline", "-std=c++17", "-ffp-contract=off", "-w", *macros, *includes]


def compile_module(root: Path, path: Path, source: str, folder: Path) -> Path | None:
    """The module that the header `path` is compiled into, with `source` in its place, below `folder`; None if it is
    refused.

    The .cpp is the one that the project's build left; with little optimisation, which is quicker to compile.
    """
    _copy_headers(root, path, source, folder)
    module = including(root, path)
    return compile_cpp(Path(shutil.copy(module, folder / module.relative_to(root))))


def compile_cpp(source: Path) -> Path | None:
    """The extension module that `source`, generated by Cython, makes; None if the compiler refuses it."""
    built = source.with_suffix(sysconfig.get_config_var("EXT_SUFFIX"))
    done = subprocess.run(["c++", *_shared(), *_flags(), str(source), "-o", str(built)], capture_output=True)
    return built if done.returncode == 0 else None
