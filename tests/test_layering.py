"""Arrows point down only: stand -> verifiers -> trees; trees never touches torch, and only stand.gpu needs Triton."""

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

import stand
import stand.trees
import stand.verifiers

FOLDERS = {
    "stand": Path(stand.__file__).parent,
    "gpu": Path(stand.__file__).parent / "gpu",
    "verifiers": Path(stand.verifiers.__file__).parent,
    "trees": Path(stand.trees.__file__).parent,
}
ALLOWED = {
    "trees": ("stand.trees",),
    "verifiers": ("stand.extra", "stand.trees", "stand.verifiers"),
    "stand": ("stand",),
    "gpu": ("stand",),
}
FORBIDDEN = {"trees": ("torch", "transformers", "triton"), "verifiers": ("transformers", "triton")}
FORBIDDEN |= {"stand": ("triton",), "gpu": ()}
ROOT = Path(__file__).resolve().parents[1]
CYTHON_IMPORT = re.compile(r"^ *(?:from ([\w.]+) c?import|c?import ([\w.]+))", re.MULTILINE)


def imports(path: Path) -> set[tuple[str, str]]:
    """(module, the same or what is taken from it, by its whole name); of Cython's the module alone."""
    text, found = path.read_text(encoding="utf-8"), set()
    if path.suffix == ".pyx":
        return {(module or other, module or other) for module, other in CYTHON_IMPORT.findall(text)}
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            found |= {(alias.name, alias.name) for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found |= {(node.module or "", f"{node.module}.{alias.name}") for alias in node.names}
    return found


def imported_modules(path: Path) -> set[str]:
    return {name for names in imports(path) for name in names}


def unshipped_modules(root: Path = ROOT) -> tuple[str, ...]:
    """What commands and tests import, by the names that they import it by: both folders are on the path."""
    found = [path for folder in (root / "scripts", root / "tests" / "oracles") for path in folder.glob("*")]
    modules = {path.stem for path in found if path.suffix == ".py" or (path / "__init__.py").is_file()}
    return tuple(sorted(modules | {"scripts", "tests"}))


def offending(names: set[str], forbidden: tuple[str, ...]) -> set[str]:
    return {name for name in names for prefix in forbidden if name == prefix or name.startswith(prefix + ".")}


@pytest.mark.parametrize("package", FOLDERS)
def test_no_arrow_points_up(package):
    sources = sorted(path for pattern in ("*.py", "*.pyx") for path in FOLDERS[package].rglob(pattern))
    if package == "stand":
        sources = [path for path in sources if FOLDERS["gpu"] not in path.parents]
    assert sources
    for path in sources:
        names = imported_modules(path)
        assert not offending(names, FORBIDDEN[package] + unshipped_modules()), path.name
        own = offending(names, ("stand",))
        assert own == offending(own, ALLOWED[package]), path.name


def test_the_forward_pass_stands_below_what_uses_it():
    users = tuple(f"stand.{name}" for name in ("fusion", "gpu", "scheduling", "drafters", "backend", "call", "engine"))
    for path in sorted((FOLDERS["stand"] / "forward").rglob("*.py")):
        assert not offending(imported_modules(path), users), path.name


def test_the_checker_sees_a_wrong_arrow(tmp_path):
    assert offending({"torch.nn", "numpy"}, FORBIDDEN["trees"]) == {"torch.nn"}
    path = tmp_path / "wrong.pyx"
    path.write_text("cimport cython\nfrom workloads.problems import Problem\nfrom stand.row cimport Row\n")
    names = imported_modules(path)
    assert names == {"cython", "workloads.problems", "stand.row"}
    assert offending(names, unshipped_modules()) == {"workloads.problems"}
    assert not offending(names, ALLOWED["trees"])


def module_files(root: Path) -> dict[str, Path]:
    """Of the product: the files by the names that they are imported by."""
    found = {}
    for package in ("stand", "trees", "verifiers"):
        for path in (root / package).rglob("*.py*"):
            if path.suffix in (".py", ".pyx"):
                parts = path.relative_to(root).with_suffix("").parts
                parts = parts if package == "stand" else ("stand", *parts)
                found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def targets(path: Path, files: dict[str, Path]) -> set[str]:
    """The modules among `files` that one imports from: of a package's name its own module where there is one."""
    return {name if name in files else module for module, name in imports(path)} & set(files)


def circle(arrows: dict[str, set[str]]) -> list[str]:
    """A path that ends where it began, or []."""
    done: set[str] = set()
    for start in arrows:
        path, open_arrows = [start], [iter(sorted(arrows[start]))]
        while path:
            target = next(open_arrows[-1], None)
            if target in path:
                return [*path[path.index(target) :], target]
            if target is None:
                done.add(path.pop())
                open_arrows.pop()
            elif target not in done:
                path.append(target)
                open_arrows.append(iter(sorted(arrows[target])))
    return []


@pytest.mark.skipif(not (ROOT / "stand").is_dir(), reason="needs the source")
def test_no_imports_go_in_circles():
    """Nor late ones, nor those for types. `stand` itself says lazily what it offers."""
    files = module_files(ROOT)
    arrows = {name: targets(path, files) - {name} for name, path in files.items()}
    del arrows["stand"]
    arrows = {name: {other for other in names if other in arrows} for name, names in arrows.items()}
    assert len(arrows) > 200 and sum(map(len, arrows.values())) > 500
    assert not circle(arrows)


def test_a_circle_is_seen():
    arrows = {"a": {"b", "c"}, "b": {"c"}, "c": set(), "d": {"a", "e"}, "e": {"f"}, "f": {"d"}}
    assert circle(arrows) == ["d", "e", "f", "d"]
    assert not circle(arrows | {"f": {"c"}})


def test_no_test_imports_a_test():
    """What several tests share is in tests/oracles."""
    for path in sorted((ROOT / "tests").rglob("test_*.py")):
        assert not {name for name in imported_modules(path) if name.startswith("test_")}, path.name


def run_python(code: str, **kwargs) -> subprocess.CompletedProcess:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, **kwargs)


def test_trees_import_without_torch():
    result = run_python("import sys, stand.trees; print('torch' in sys.modules, 'transformers' in sys.modules)")
    assert result.stdout.split() == ["False", "False"], result.stderr


@pytest.fixture(scope="module")
def imported() -> list[str]:
    """What a new process prints: of `import stand` alone, then which kernels came with the engine, and its `wrap`."""
    result = run_python(
        "import sys, stand; print(stand.trees.LookupTree.__name__, stand.verifiers.Verifier.__name__)\n"
        "import stand.wrapping; print([name for name in sys.modules if name.startswith('stand.gpu')])\n"
        "print(stand.wrap.__name__)"
    )
    assert result.returncode == 0, result.stderr
    return result.stdout.splitlines()


def test_stand_imports_without_its_kernels(imported):
    assert imported[1:] == ["[]", "wrap"]


@pytest.mark.parametrize("package", ["trees", "verifiers"])
def test_a_folder_is_refused_under_its_bare_name(package, tmp_path):
    source = FOLDERS[package] / "__init__.py"
    copy = tmp_path / package
    copy.mkdir()
    (copy / "__init__.py").write_text(source.read_text(encoding="utf-8"), encoding="utf-8")
    result = run_python(f"import {package}", cwd=tmp_path)
    assert f"must be imported as stand.{package}" in result.stderr


def test_the_packages_are_there_after_one_import(imported):
    assert imported[0] == "LookupTree Verifier"


def test_unknown_names_are_refused():
    with pytest.raises(AttributeError, match="it offers"):
        stand.no_such_name  # noqa: B018
    for name in stand.__all__:
        assert getattr(stand, name) is not None
