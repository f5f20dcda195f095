"""What is installed is whole: every module of the source is there and can be imported, with its type information."""

import ast
import importlib
import inspect
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import stand

ROOT = Path(__file__).resolve().parents[1]
INSTALLED = Path(stand.__file__).parent
INSTALLED_TREES = Path(stand.trees.__file__).parent


def source_files() -> list[str]:
    """Modules of the source tree; away from it, those that were listed when the tests were copied there."""
    listed = ROOT / "modules.txt"
    if listed.exists():
        return sorted(listed.read_text().split())
    folders = ("stand", "trees", "verifiers")
    found = [path for folder in folders for path in (ROOT / folder).rglob("*.py*") if path.suffix in (".py", ".pyx")]
    return sorted(str(path.relative_to(ROOT)) for path in found)


def module_of(file: str) -> str:
    """trees/shape.py -> stand.trees.shape; stand/gpu/__init__.py -> stand.gpu."""
    parts = Path(file).with_suffix("").parts
    return ".".join((*(() if parts[0] == "stand" else ("stand",)), *parts)).removesuffix(".__init__")


OTHERS_LIBRARIES = {"stand/plugins/lm_eval.py": "lm_eval", "stand/plugins/inspect_ai.py": "inspect_ai"}
OTHERS_LIBRARIES |= {"stand/plugins/llama_cpp/": "llama_cpp", "stand/plugins/mlx/": "mlx_lm"}


@pytest.mark.parametrize("file", source_files())
def test_module_is_installed(file):
    if not file.startswith("trees/"):
        pytest.importorskip("torch")
    if file.startswith("stand/gpu/"):
        pytest.importorskip("triton")
    for other, library in OTHERS_LIBRARIES.items():
        if file.startswith(other):
            pytest.importorskip(library, exc_type=ImportError)
    module = importlib.import_module(module_of(file))
    assert Path(module.__file__).suffix == (".so" if file.endswith(".pyx") else ".py")


def test_modules_are_named_as_they_are_imported():
    names = [module_of(file) for file in ("stand/engine.py", "trees/lookups.pyx", "verifiers/__init__.py")]
    assert names == ["stand.engine", "stand.trees.lookups", "stand.verifiers"]
    assert len(source_files()) > 80


def test_every_folder_of_modules_is_named_as_a_package():
    """An editable install finds the others too; a wheel leaves them out."""
    packaging = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    folders = {str(Path(file).parent) for file in source_files()}
    assert set(packaging["package-dir"].values()) == folders
    assert set(packaging["packages"]) == set(packaging["package-dir"])


def test_types_come_along():
    assert (INSTALLED_TREES / "lookups.pyi").exists()
    assert (INSTALLED / "py.typed").exists()


@pytest.mark.parametrize("name", ["BlendedLookup", "LookupTree"])
def test_inspect_reads_the_parameters_that_the_stub_of_a_lookup_names(name):
    module = importlib.import_module("stand.trees.lookups")
    stub = ast.parse((INSTALLED_TREES / "lookups.pyi").read_text(encoding="utf-8"))
    read = {}
    for kind in [node for node in stub.body if isinstance(node, ast.ClassDef) and node.name == name]:
        for method in [node for node in kind.body if isinstance(node, ast.FunctionDef)]:
            given = getattr(getattr(module, kind.name), method.name)
            if callable(given) and not method.name.startswith("__"):  # others are properties
                stubbed = [argument.arg for argument in (*method.args.args, *method.args.kwonlyargs)]
                read[method.name] = list(inspect.signature(given).parameters)
                assert read[method.name] == [argument for argument in stubbed if argument != "cls"], method.name
    assert {"learn", "draft", "save", "load"} <= read.keys()


def import_at(folder: Path) -> subprocess.CompletedProcess:
    """`import stand` by a program that is run in `folder`, without what is installed."""
    return subprocess.run([sys.executable, "-S", "-c", "import stand"], cwd=folder, capture_output=True, text=True)


def test_a_source_folder_that_was_not_built_says_so(tmp_path):
    """In one line with a remedy, instead of the name of the first compiled module that somebody asks for."""
    (tmp_path / "stand").mkdir()
    for name in ("__init__.py", "extra.py"):
        shutil.copy(INSTALLED / name, tmp_path / "stand" / name)
    refused = import_at(tmp_path)
    assert refused.returncode == 1
    said = refused.stderr.strip().splitlines()[-1]
    assert re.fullmatch(r"ImportError: stand must be built .*, got .*; .*pip install --editable .*", said)
    assert f" {tmp_path}, " in said
    (tmp_path / "stand" / "trees.py").touch()
    assert import_at(tmp_path).returncode == 1  # packages at their place, compiled modules absent
    (tmp_path / "stand" / "_cyutility.py").touch()
    assert import_at(tmp_path).returncode == 0, "whatever has both is taken"
