"""Break the verification rules on purpose and see whether the tests notice.

Usage: python scripts/mutate_verifiers.py [--only traversal.py,draw_compiled.pyx] [--minutes 40] [--seed 0]

Every mutant changes one place in one file of verifiers/, Python (python_mutants.py) or Cython (cython_mutants.py, built
anew): a comparison turned round or made (un)strict, a cap or floor dropped, + and - or * and / swapped, the target's
and the drafter's law swapped, a 0 or 1 replaced, an order reversed. The verifier tests run on it in a fork of this
process until the first failure; mutants come in random order, so that a run cut short is a fair sample. Those that
leave the behaviour as it is (EQUIVALENT, with reasons) or do not compile are not counted. Last line: JSON with the
survivors.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.abc
import importlib.util
import json
import os
import random
import resource
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import mutants.cython_mutants as cython_mutants
import mutants.python_mutants as python_mutants

ROOT = Path(__file__).resolve().parent.parent
TESTS = [
    *(f"tests/verifiers/test_{name}.py" for name in ("compiled", "verifiers", "verifiers_step")),
    "tests/trees/test_draft_kinds.py",
]
NOT_MUTATED = {"__init__.py"}
CHANGES = {".py": python_mutants.changes, ".pyx": cython_mutants.changes}
MAX_CPU_SECONDS = 60  # the tests take about 20; a mutant that loops is caught by this
MAX_MEMORY = 4 << 30  # bytes of address space; a mutant that grows without end is caught by this
REFUSED = -1000  # no test run: the mutant does not compile

# (file, source line, change) that leave the behaviour as it is, and why.
EQUIVALENT: dict[tuple[str, str, str], str] = {
    ("operands.py", "return self.target * 1.0", "Mult -> Div"): "times or divided by 1",
    (
        "set_law.py",
        "step = np.where(left > 0, law[:, columns] / np.where(left > 0, left, 1.0), 0.0)",
        "Gt -> GtE #2",
    ): "where nothing is left outside a set, the law of what is drawn next is 0 too",
    (
        "draw.py",
        "from_rows = _token_at(rows, sums, (points - on_support) / torch.where(scale > 0, scale, 1.0))",
        "1.0 -> 0.0",
    ): "with scale 0 all weight lies on the support: this token is not looked at",
    (
        "draw.py",
        "from_rows = _token_at(rows, sums, (points - on_support) / torch.where(scale > 0, scale, 1.0))",
        "Gt -> GtE",
    ): "with scale 0 all weight lies on the support: this token is not looked at",
    (
        "draw.py",
        "blocks = torch.searchsorted(sums, points, right=True).clip(max=sums.shape[1] - 1)",
        "drop clip",
    ): "a point lies below the total, so a block is always found: a guard for NaN only",
    (
        "draw.py",
        "blocks = torch.searchsorted(sums, points, right=True).clip(max=sums.shape[1] - 1)",
        "Sub -> Add",
    ): "a point lies below the total, so a block is always found: a guard for NaN only",
    (
        "draw.py",
        "blocks = torch.searchsorted(sums, points, right=True).clip(max=sums.shape[1] - 1)",
        "1 -> 0",
    ): "a point lies below the total, so a block is always found: a guard for NaN only",
    (
        "draw.py",
        "return ids.gather(1, within.clip(max=BLOCK_SIZE - 1))[:, 0]",
        "drop clip",
    ): "a point lies below its block's sum, so a token is always found: a guard for NaN only",
    (
        "draw.py",
        "return ids.gather(1, within.clip(max=BLOCK_SIZE - 1))[:, 0]",
        "Sub -> Add",
    ): "a point lies below its block's sum, so a token is always found: a guard for NaN only",
    (
        "draw.py",
        "return ids.gather(1, within.clip(max=BLOCK_SIZE - 1))[:, 0]",
        "1 -> 0",
    ): "a point lies below its block's sum, so a token is always found: a guard for NaN only",
    ("draw_compiled.pyx", "cdef int64_t token = 0", "0 -> 1"): "overwritten by every row; only its sign is read",
    (
        "traversal_compiled.pyx",
        "if failure <= TINY:",
        "<= -> <",
    ): "differs where both sides are equal to the last bit: the bound itself is a matter of rounding",
    (
        "draw_compiled.pyx",
        "if total > 0 and support[slot] >= 0 and mass[slot] > 0 and not found:",
        "> -> >=",
    ): "a total of 0 has no positive mass in it",
    ("draw_compiled.pyx", "if total > 0 and not found:", "> -> >="): "a total of 0 has no positive weight in it",
    (
        "traversal.py",
        "possible = failure > operands.tiny",
        "Gt -> GtE",
    ): "differs where both sides are equal to the last bit: the bound itself is a matter of rounding",
    (
        "rrs.py",
        "possible = total > operands.tiny  # else the child always passes: what stands here is never reached",
        "Gt -> GtE",
    ): "differs where both sides are equal to the last bit: the bound itself is a matter of rounding",
    (
        "ot_traversal.py",
        "inherited = operands.ratio(weights, np.where(left > operands.tiny, left, 0.0))",
        "Gt -> GtE",
    ): "differs where both sides are equal to the last bit: the bound itself is a matter of rounding",
    (
        "ot_traversal.py",
        "if failure <= operands.tiny:",
        "LtE -> Lt",
    ): "differs where both sides are equal to the last bit: the bound itself is a matter of rounding",
    (
        "transport.py",
        "for other in np.flatnonzero(movable[column] > ROUNDING).tolist():",
        "Gt -> GtE",
    ): "differs where both sides are equal to the last bit: the bound itself is a matter of rounding",
    (
        "transport.py",
        "if spare[column] > ROUNDING:",
        "Gt -> GtE",
    ): "differs where both sides are equal to the last bit: the bound itself is a matter of rounding",
    (
        "transport.py",
        "previous = {int(column): -1 for column in np.flatnonzero(entry > ROUNDING)}",
        "Gt -> GtE",
    ): "differs where both sides are equal to the last bit: the bound itself is a matter of rounding",
    (
        "transport.py",
        "slack = np.maximum(supply - flow.sum(axis=1), 0.0)",
        "drop maximum",
    ): "removes what rounding left below 0",
    (
        "transport.py",
        "spare = np.maximum(capacity - flow.sum(axis=0), 0.0)",
        "drop maximum",
    ): "removes what rounding left below 0",
    ("transport.py", "flow = np.maximum(flow + change, 0.0)", "drop maximum"): "removes what rounding left below 0",
    (
        "requirements.py",
        "departs[children] = np.abs(batch.law[children] - expected).max(axis=1) > LAW_TOLERANCE",
        "Gt -> GtE",
    ): "differs where both sides are equal to the last bit: the bound itself is a matter of rounding",
    (
        "spectr.py",
        "meets = 1.0 - (1.0 - accepted) ** num_children <= middle * accepted",
        "LtE -> Lt",
    ): "differs where both sides are equal to the last bit: the bound itself is a matter of rounding",
    (
        "spectr.py",
        "low, high = operands.ones(), num_children.clip(min=1.0)",
        "drop clip",
    ): "for nodes without children, whose rho meets no law",
    (
        "spectr.py",
        "low, high = operands.ones(), num_children.clip(min=1.0)",
        "1.0 -> 0.0",
    ): "for nodes without children, whose rho meets no law",
    (
        "draw.py",
        "cdf = torch.where(inside, rows.gather(1, ids).double(), 0.0).cumsum(1)",
        "0.0 -> 1.0",
    ): "weight behind the row's end, and points lie before it",
    (
        "spectr.py",
        "mass = (operands.target - common * kept[:, None]).clip(min=0.0)",
        "drop clip",
    ): "removes what rounding left below 0",
}


@dataclass(frozen=True)
class Mutant:
    path: Path
    line: int
    text: str  # the source line that it changes
    what: str
    source: str

    def __str__(self) -> str:
        return f"{self.path.name}:{self.line} {self.what}"

    @property
    def module(self) -> str:
        """verifiers/rules/token.py -> stand.verifiers.rules.token."""
        return "stand." + ".".join(self.path.relative_to(ROOT).with_suffix("").parts)

    @property
    def is_equivalent(self) -> bool:
        return (self.path.name, self.text, self.what) in EQUIVALENT


def mutants(path: Path) -> Iterator[Mutant]:
    """Every mutant of one file; equal changes on one line are told apart by a number."""
    source = path.read_text(encoding="utf-8")
    lines, seen = source.splitlines(), Counter()
    for line, what, changed in CHANGES[path.suffix](source):
        seen[line, what] += 1
        name = what if seen[line, what] == 1 else f"{what} #{seen[line, what]}"
        yield Mutant(path, line, lines[line - 1].strip(), name, changed)


def in_fork(work: Callable[[], int]) -> int:
    """The exit status of `work` in a silent fork of this process; negative where a signal ended it.

    Processor time is bounded, not the time on the clock: a busy machine must not turn survivors into caught ones.
    """
    child = os.fork()
    if child == 0:
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, 1)
        os.dup2(null, 2)
        resource.setrlimit(resource.RLIMIT_CPU, (MAX_CPU_SECONDS, MAX_CPU_SECONDS))
        resource.setrlimit(resource.RLIMIT_AS, (MAX_MEMORY, MAX_MEMORY))
        status = 3
        try:
            status = work()
        finally:
            os._exit(status)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


class Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Puts a mutant's source, or its compiled module, in place of the shipped one."""

    def __init__(self, mutant: Mutant, compiled: Path | None) -> None:
        self.mutant = mutant
        self.compiled = compiled

    def find_spec(self, fullname, path, target=None):
        if fullname != self.mutant.module:
            return None
        if self.compiled is not None:
            return importlib.util.spec_from_file_location(fullname, self.compiled)
        return importlib.util.spec_from_loader(fullname, self, origin=str(self.mutant.path))

    def create_module(self, spec):
        return None

    def exec_module(self, module):
        exec(compile(self.mutant.source, str(self.mutant.path), "exec"), module.__dict__)


class LikeliestFirst:
    """A pytest plugin: tests named after the rule come first, since they are the likeliest to see the change."""

    def __init__(self, stem: str) -> None:
        self.stem = stem

    def pytest_collection_modifyitems(self, items: list) -> None:
        items.sort(key=lambda item: self.stem not in item.nodeid)  # stable


def run_tests(finder: Finder | None = None) -> int:
    """pytest's exit status with a mutant in place of the shipped module, which must not have been imported yet."""
    import pytest
    import torch

    torch.set_num_threads(1)
    plugins = []
    if finder is not None:
        sys.meta_path.insert(0, finder)
        plugins.append(LikeliestFirst(finder.mutant.path.stem))
    os.chdir(ROOT)
    return int(pytest.main(["-x", "-q", "-p", "no:cacheprovider", "--no-header", *TESTS], plugins=plugins))


def judge(mutant: Mutant) -> int:
    """The status of the tests on a mutant: 0 where it survives."""
    if mutant.path.suffix == ".py":
        return in_fork(lambda: run_tests(Finder(mutant, None)))
    with tempfile.TemporaryDirectory() as folder:
        compiled = cython_mutants.compile_module(ROOT, mutant.path, mutant.source, Path(folder))
        if compiled is None:
            return REFUSED
        return in_fork(lambda: run_tests(Finder(mutant, compiled)))


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="comma-separated file names in verifiers/")
    parser.add_argument("--minutes", type=float, default=1e6, help="stop after the mutant at which these are over")
    parser.add_argument("--seed", type=int, default=0, help="of the order in which they are tried")
    return parser.parse_args()


def sources() -> list[Path]:
    """The files of verifiers/ that have mutants."""
    paths = (ROOT / "verifiers").rglob("*")
    return sorted(path for path in paths if path.suffix in CHANGES and path.name not in NOT_MUTATED)


def chosen_mutants(options: argparse.Namespace) -> list[Mutant]:
    """In random order, without the equivalent ones."""
    only = set(filter(None, options.only.split(",")))
    paths = [path for path in sources() if (not only or path.name in only)]
    found = [mutant for path in paths for mutant in mutants(path) if not mutant.is_equivalent]
    random.Random(options.seed).shuffle(found)
    return found


def main() -> None:
    options = arguments()
    for name in ("hypothesis", "numpy", "pytest", "stand.trees", "torch"):  # slow to import, and not mutated
        importlib.import_module(name)
    if "stand.verifiers" in sys.modules:
        raise SystemExit("stand.verifiers was imported too early; nothing would be mutated")
    found = chosen_mutants(options)
    if in_fork(run_tests) != 0:
        raise SystemExit(f"the tests must pass before they can judge mutants; run pytest {' '.join(TESTS)}")
    survivors, refused, end = [], 0, time.monotonic() + 60 * options.minutes
    for number, mutant in enumerate(found, 1):
        status = judge(mutant)
        refused += status == REFUSED
        survivors += [str(mutant)] if status == 0 else []
        verdict = {0: "SURVIVED", REFUSED: "does not compile"}.get(status, "caught")
        print(f"{number}/{len(found)} {mutant}: {verdict}", file=sys.stderr, flush=True)
        if time.monotonic() > end:
            break
    judged = number - refused
    caught = judged - len(survivors)
    print(json.dumps({"of": len(found), "mutants": judged, "caught": caught, "share": caught / judged,
                      "survivors": survivors}))  # fmt: skip


if __name__ == "__main__":
    main()
