"""Arrows point down only: stand -> verifiers -> trees; trees never touches torch, and only stand.gpu needs Triton."""

import ast
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
FORBIDDEN = {
    "trees": ("torch", "transformers", "stand.verifiers", "stand.engine", "scripts"),
    "verifiers": ("transformers", "stand.engine", "stand.drafters.drafter", "stand.row", "scripts"),
    "stand": ("scripts", "tests", "triton"),
    "gpu": ("scripts", "tests"),
}


def imported_modules(path: Path) -> set[str]:
    names = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names |= {node.module or ""} | {f"{node.module}.{alias.name}" for alias in node.names}
    return names


def offending(names: set[str], forbidden: tuple[str, ...]) -> set[str]:
    return {name for name in names for prefix in forbidden if name == prefix or name.startswith(prefix + ".")}


@pytest.mark.parametrize("package", FOLDERS)
def test_no_arrow_points_up(package):
    sources = sorted(FOLDERS[package].rglob("*.py"))
    if package == "stand":
        sources = [path for path in sources if FOLDERS["gpu"] not in path.parents]
    assert sources
    for path in sources:
        names = imported_modules(path)
        assert not offending(names, FORBIDDEN[package]), path.name
        own = {name for name in names if name == "stand" or name.startswith("stand.")}
        allowed = {
            "trees": ("stand.trees",),
            "verifiers": ("stand.extra", "stand.trees", "stand.verifiers"),
            "stand": ("stand",),
            "gpu": ("stand",),
        }[package]
        assert not {name for name in own if not name.startswith(allowed)}, path.name


def test_the_checker_sees_a_wrong_arrow():
    assert offending({"torch.nn", "numpy"}, FORBIDDEN["trees"]) == {"torch.nn"}


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
        "import stand.engine; print([name for name in sys.modules if name.startswith('stand.gpu')])\n"
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
