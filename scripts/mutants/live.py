"""Put a mutant in place of code that is imported already."""

from __future__ import annotations

import ast
import gc
import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path
from types import CodeType, FunctionType, ModuleType

from mutants.mutant import Mutant

FunctionsByCode = dict[CodeType, list[FunctionType]]


def live_functions() -> FunctionsByCode:
    """Every Python function of this process, by its code; also those that `gc.freeze` hides, as tests/conftest.py does
    with all that it has collected."""
    found: FunctionsByCode = {}
    gc.unfreeze()
    for thing in gc.get_objects():
        if type(thing) is FunctionType:
            found.setdefault(thing.__code__, []).append(thing)
    gc.freeze()  # forks need not look through them
    return found


def put_python(mutant: Mutant, functions: FunctionsByCode) -> bool:
    """Give the functions of an imported module the mutant's code; False where the fault is in no function of it.

    What the module computed when it was imported stays.
    """
    text = mutant.path.read_text(encoding="utf-8")
    sources = (text, ast.unparse(ast.parse(text)), mutant.source)  # the mutant's source is an unparsed one too
    listed = [list(_codes(compile(source, str(mutant.path), "exec"))) for source in sources]
    if len({len(codes) for codes in listed}) != 1:
        return False  # a nested function or comprehension went
    changed = [(live, new) for live, old, new in zip(*listed, strict=True) if old != new and live in functions]
    if any(len(live.co_freevars) != len(new.co_freevars) for live, new in changed):
        return False
    for live, new in changed:
        for function in functions[live]:
            function.__code__ = new
    return bool(changed)


def _codes(code: CodeType) -> Iterator[CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _codes(constant)


def put_compiled(mutant: Mutant, number: int, built: Path) -> None:
    """Replace the functions of an imported compiled module, wherever they were imported to.

    built: what `cpp_mutants.compile_batch` made, with this mutant as the `number`-th.
    """
    batch, suffix = _loaded(mutant.module, built), f"__{number}"
    things = {name.removesuffix(suffix): thing for name, thing in vars(batch).items() if name.endswith(suffix)}
    _replace(mutant.module, things)


def put_rebuilt(mutant: Mutant, built: Path) -> None:
    """Replace the classes and functions of an imported compiled module, wherever they were imported to, by those of
    `built`, the same module with the mutant's header. Objects that exist already stay what they are.
    """
    things = vars(_loaded(mutant.module, built))
    own = {name: thing for name, thing in things.items() if getattr(thing, "__module__", None) == mutant.module}
    _replace(mutant.module, own)


def _loaded(name: str, built: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, built)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _replace(module: str, things: dict[str, object]) -> None:
    """Everywhere, what `module` has under these names."""
    live = vars(sys.modules[module])
    new = {id(live[name]): thing for name, thing in things.items()}
    for other in list(sys.modules.values()):
        for name, thing in list(getattr(other, "__dict__", {}).items()):
            if id(thing) in new:
                setattr(other, name, new[id(thing)])
