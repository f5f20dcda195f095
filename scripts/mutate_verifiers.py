"""Break the verification rules on purpose and see whether the tests notice.

Usage: python scripts/mutate_verifiers.py [--only traversal.py,block.py] [--sample 100] [--seed 0]

Every mutant changes one place in one file of verifiers/: a comparison turned round or made (un)strict, a cap or floor
dropped, + and - or * and / swapped, the target's and the drafter's law swapped, a 0 or 1 replaced, an order reversed.
The verifier tests run on it in a fork of this process until the first failure. Last line: JSON with what survived.
"""

from __future__ import annotations

import argparse
import ast
import copy
import importlib
import importlib.abc
import importlib.util
import json
import os
import random
import resource
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TESTS = ["tests/test_verifiers.py", "tests/test_verifiers_step.py", "tests/test_host.py"]
NOT_MUTATED = {"__init__.py"}
MAX_CPU_SECONDS = 90  # the tests take about 25; a mutant that loops is caught by this
MAX_MEMORY = 4 << 30  # bytes of address space; a mutant that grows without end is caught by this

COMPARISONS: dict[type, type] = {
    ast.Lt: ast.GtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
}
REVERSED: dict[type, type] = {ast.Gt: ast.LtE, ast.LtE: ast.Gt, ast.GtE: ast.Lt}
OPERATORS: dict[type, type] = {ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Div, ast.Div: ast.Mult}
SWAPPED_NAMES = {
    "target": "law",
    "law": "target",
    "token_law": "token_mass",
    "children": "parents",
    "parents": "children",
}
CAPS = {"clip", "minimum", "maximum", "min", "max"}

# (file, source line, change) that leave the behaviour as it is, and why.
EQUIVALENT = {
    ("greedy_block.py", "mass = operands.target * 1.0", "Mult -> Div"): "times or divided by 1",
    (
        "set_law.py",
        "step = np.where(left > 0, law[:, columns] / np.where(left > 0, left, 1.0), 0.0)",
        "Gt -> GtE",
    ): "where nothing is left outside a set, the law of what is drawn next is 0 too",
}


@dataclass(frozen=True)
class Mutant:
    path: Path
    line: int
    what: str
    source: str

    @property
    def is_equivalent(self) -> bool:
        text = self.path.read_text(encoding="utf-8").splitlines()[self.line - 1].strip()
        return (self.path.name, text, self.what) in EQUIVALENT


def replacements(node: ast.AST) -> Iterator[tuple[str, ast.AST]]:
    """(what, node in its place) for one node of the syntax tree."""
    if isinstance(node, ast.Compare) and len(node.ops) == 1:
        for table in (COMPARISONS, REVERSED):
            new = table.get(type(node.ops[0]))
            if new is not None:
                yield f"{type(node.ops[0]).__name__} -> {new.__name__}", _with(node, ops=[new()])
    if isinstance(node, ast.BinOp) and type(node.op) in OPERATORS:
        new = OPERATORS[type(node.op)]
        yield f"{type(node.op).__name__} -> {new.__name__}", _with(node, op=new())
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in CAPS:
        kept = node.func.value if node.func.attr == "clip" else node.args[0] if len(node.args) == 2 else None
        if kept is not None:
            yield f"drop {node.func.attr}", kept
    if isinstance(node, ast.Constant) and type(node.value) in (int, float) and node.value in (0, 1):
        yield f"{node.value} -> {1 - node.value}", ast.Constant(type(node.value)(1 - node.value))
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, (ast.USub, ast.Invert, ast.Not)):
        yield f"drop {type(node.op).__name__}", node.operand
    if isinstance(node, ast.Attribute) and node.attr in ("target", "law") and _is_operands(node):
        yield f"{node.attr} -> {SWAPPED_NAMES[node.attr]}", _with(node, attr=SWAPPED_NAMES[node.attr])
    if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load) and node.id in ("children", "parents"):
        yield f"{node.id} -> {SWAPPED_NAMES[node.id]}", _with(node, id=SWAPPED_NAMES[node.id])


def _is_operands(node: ast.Attribute) -> bool:
    return isinstance(node.value, ast.Name) and node.value.id == "operands"


def _with(node: ast.AST, **fields) -> ast.AST:
    changed = copy.deepcopy(node)
    for name, value in fields.items():
        setattr(changed, name, value)
    return changed


def mutants(path: Path) -> Iterator[Mutant]:
    """Every mutant of one file; strings, annotations, imports and error messages stay."""
    source = path.read_text(encoding="utf-8")
    module = ast.parse(source)
    places = [node for function in _functions(module) for node in _code(function)]
    for place in places:
        for what, new in replacements(place):
            changed = _Replace(place, new).visit(copy.deepcopy(module))
            yield Mutant(path, place.lineno, what, ast.unparse(ast.fix_missing_locations(changed)))


def _functions(module: ast.Module) -> Iterator[ast.FunctionDef]:
    for node in ast.walk(module):
        if isinstance(node, ast.FunctionDef) and node.name != "__repr__":
            yield node


def _code(function: ast.FunctionDef) -> Iterator[ast.AST]:
    """Expressions of the body, without raise statements and nested functions (those come on their own)."""
    queue: list[ast.AST] = list(function.body)
    while queue:
        node = queue.pop()
        if isinstance(node, (ast.Raise, ast.FunctionDef)):
            continue
        yield node
        queue += [child for name, value in ast.iter_fields(node) if name != "annotation" for child in _nodes(value)]


def _nodes(value: object) -> list[ast.AST]:
    return [item for item in (value if isinstance(value, list) else [value]) if isinstance(item, ast.AST)]


class _Replace(ast.NodeTransformer):
    """Puts `new` where `old` stands; a copy is told by its place in the source."""

    def __init__(self, old: ast.AST, new: ast.AST) -> None:
        self.key = self._key(old)
        self.new = new

    @staticmethod
    def _key(node: ast.AST) -> tuple:
        return (
            type(node),
            *(getattr(node, name, None) for name in ("lineno", "col_offset", "end_lineno", "end_col_offset")),
        )

    def visit(self, node: ast.AST) -> ast.AST:
        if self._key(node) == self.key:
            return ast.copy_location(self.new, node)
        return self.generic_visit(node)


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


def run_tests(mutant: Mutant | None) -> int:
    """pytest's exit status with `mutant` in place of the shipped module, which must not have been imported yet."""
    import pytest
    import torch

    torch.set_num_threads(1)

    class Loader(importlib.abc.Loader):
        def create_module(self, spec):
            return None

        def exec_module(self, module):
            exec(compile(mutant.source, str(mutant.path), "exec"), module.__dict__)

    class Finder(importlib.abc.MetaPathFinder):
        def find_spec(self, fullname, path, target=None):
            if fullname == f"stand.verifiers.{mutant.path.stem}":
                return importlib.util.spec_from_loader(fullname, Loader(), origin=str(mutant.path))
            return None

    if mutant is not None:
        sys.meta_path.insert(0, Finder())
    os.chdir(ROOT)
    command = ["-x", "-q", "-p", "no:cacheprovider", "--no-header", *TESTS]
    if mutant is not None:  # the tests named after the rule first: they are the likeliest to see it
        status = int(pytest.main([*command, "-k", mutant.path.stem]))
        if status not in (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED):
            return status
    return int(pytest.main(command))


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="comma-separated file names in verifiers/")
    parser.add_argument("--sample", type=int, default=0, help="try this many mutants, drawn at random (0: all)")
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


def main() -> None:
    options = arguments()
    for name in ("hypothesis", "numpy", "pytest", "stand.trees", "torch"):  # slow to import, and not mutated
        importlib.import_module(name)
    if "stand.verifiers" in sys.modules:
        raise SystemExit("stand.verifiers was imported too early; nothing would be mutated")
    only = set(filter(None, options.only.split(",")))
    paths = [path for path in sorted((ROOT / "verifiers").glob("*.py")) if path.name not in NOT_MUTATED]
    found = [mutant for path in paths if not only or path.name in only for mutant in mutants(path)]
    found = [mutant for mutant in found if not mutant.is_equivalent]
    if options.sample and options.sample < len(found):
        found = random.Random(options.seed).sample(found, options.sample)
    if in_fork(lambda: run_tests(None)) != 0:
        raise SystemExit("the tests must pass before they can judge mutants; run pytest tests/test_verifiers*.py")
    survivors = []
    for number, mutant in enumerate(found, 1):
        status = in_fork(lambda mutant=mutant: run_tests(mutant))
        if status == 0:
            survivors.append(f"{mutant.path.name}:{mutant.line} {mutant.what}")
        print(f"{number}/{len(found)} {mutant.path.name}:{mutant.line} {mutant.what}: "
              f"{'SURVIVED' if status == 0 else 'caught'}", file=sys.stderr, flush=True)  # fmt: skip
    caught = len(found) - len(survivors)
    print(json.dumps({"mutants": len(found), "caught": caught, "share": caught / len(found), "survivors": survivors}))


if __name__ == "__main__":
    main()
