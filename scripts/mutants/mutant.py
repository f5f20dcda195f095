"""One deliberate fault, and the list of all of a file."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import mutants.cpp_mutants as cpp_mutants
import mutants.cython_mutants as cython_mutants
import mutants.python_mutants as python_mutants
from mutants.equivalent import EQUIVALENT
from mutants.targets import ROOT

CHANGES = {
    ".py": python_mutants.changes,
    ".pyx": cython_mutants.changes,
    ".pxi": cython_mutants.changes,
    ".h": cpp_mutants.changes,
}
KEY = ("file", "text", "what", "nth")


@dataclass(frozen=True)
class Mutant:
    path: Path
    line: int
    text: str  # the source line that it changes
    what: str
    source: str
    nth: int = 1  # among equal changes of equal lines of the file

    def __str__(self) -> str:
        return f"{self.file}:{self.line} {self.what}"

    @property
    def file(self) -> str:
        """verifiers/rules/token.py: the path below the project's root."""
        return self.path.relative_to(ROOT).as_posix() if self.path.is_relative_to(ROOT) else self.path.name

    @property
    def key(self) -> tuple[str, str, str, int]:
        """As KEY. Where the line stands does not count, so that a verdict stays when lines above it come and go."""
        return self.file, self.text, self.what, self.nth

    @property
    def module(self) -> str:
        """verifiers/rules/token.py -> stand.verifiers.rules.token; a header, or a part of a Cython module: what it is
        compiled into."""
        owners = {".h": cpp_mutants.including, ".pxi": cython_mutants.including}
        path = owners[self.path.suffix](ROOT, self.path) if self.path.suffix in owners else self.path
        name = ".".join(path.relative_to(ROOT).with_suffix("").parts)
        return name if name.startswith("stand.") else "stand." + name

    @property
    def is_equivalent(self) -> bool:
        return self.key in EQUIVALENT or self.key[:3] in EQUIVALENT


def mutants_of(path: Path) -> Iterator[Mutant]:
    """Every mutant of one file; equal changes on one line are told apart by a number."""
    source = path.read_text(encoding="utf-8")
    lines, seen, alike = source.splitlines(), Counter(), Counter()
    for line, what, changed in CHANGES[path.suffix](source):
        seen[line, what] += 1
        name = what if seen[line, what] == 1 else f"{what} #{seen[line, what]}"
        text = lines[line - 1].strip()
        alike[text, name] += 1
        yield Mutant(path, line, text, name, changed, alike[text, name])
