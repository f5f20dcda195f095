"""Every file of scripts/ is a command: it explains itself, the documents name it, and nothing else imports it."""

import argparse
import ast
import importlib
import signal
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SCRIPTS = ROOT / "scripts"
COMMANDS = sorted(path.stem for path in SCRIPTS.glob("*.py"))
PACKAGES = sorted(str(path.parent.relative_to(SCRIPTS)) for path in SCRIPTS.rglob("__init__.py"))
SEPARATE = {"compile_kernels"}  # chooses Triton's compiler when it is imported, for the whole process
HEADS = ("dflash", "eagle", "streams")
MOST_FILES = 12  # of a package


def imported_modules(path: Path) -> set[str]:
    """Top-level names of everything that a file imports, wherever in the file."""
    nodes = list(ast.walk(ast.parse(path.read_text(encoding="utf-8"))))
    names = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    names |= {node.module or "" for node in nodes if isinstance(node, ast.ImportFrom)}
    return {name.split(".")[0] for name in names}


def help_of(command: str, monkeypatch, capsys) -> str:
    """What the command prints when it is asked for help."""
    if command in SEPARATE:
        asked = [sys.executable, SCRIPTS / f"{command}.py", "--help"]
        return subprocess.run(asked, capture_output=True, text=True, timeout=300, check=True).stdout
    main = importlib.import_module(command).main
    monkeypatch.setattr(sys, "argv", [f"{command}.py", "--help"])
    with pytest.raises(SystemExit, match="^0$"):
        main()
    return capsys.readouterr().out


@pytest.mark.parametrize("command", COMMANDS)
def test_help_explains_the_command(command, monkeypatch, capsys):
    text = help_of(command, monkeypatch, capsys)
    assert text.startswith(f"usage: {command}.py")
    assert f"scripts/{command}.py" in text, "the help must show a command line to begin with"


@pytest.mark.parametrize(
    ("command", "options"),
    [("compare_drafters", ["--temperature "]), *((f"train_{name}", ["--top-k", "--top-p"]) for name in HEADS)],
)
def test_help_lists_no_option_that_is_refused(command, options, monkeypatch, capsys):
    text = help_of(command, monkeypatch, capsys)
    assert [option for option in options if option in text] == []


def untold_defaults(parser: argparse.ArgumentParser) -> list[str]:
    """Options with a default value that their help does not tell."""
    valued = [action for action in parser._actions if action.nargs != 0 and action.default not in (None, "", [], {})]
    return [action.option_strings[0] for action in valued if not tells_default(action)]


def tells_default(action: argparse.Action) -> bool:
    values = action.default if isinstance(action.default, list | tuple) else [action.default]
    written = [getattr(value, "pattern", str(value)) for value in values]  # of a regular expression
    ways = ("%(default)s", "default: ", *(f"({mark.join(written)})" for mark in (" ", ",")))
    return any(way in (action.help or "") for way in ways)


@pytest.mark.parametrize("command", [name for name in COMMANDS if name not in SEPARATE])
def test_help_tells_every_default(command, monkeypatch, capsys):
    parsers = []
    shown = argparse.ArgumentParser.print_help
    monkeypatch.setattr(
        argparse.ArgumentParser, "print_help", lambda self, file=None: (parsers.append(self), shown(self, file))
    )
    help_of(command, monkeypatch, capsys)
    assert [untold_defaults(parser) for parser in parsers] == [[]]


def test_an_untold_default_is_noticed():
    parser = argparse.ArgumentParser()
    parser.add_argument("--told", default=[8, 80], help="nodes (8 80)")
    parser.add_argument("--other", default=3, help="nodes (8)")
    parser.add_argument("--bare", default=0.0)
    assert untold_defaults(parser) == ["--other", "--bare"]


@pytest.mark.parametrize("command", COMMANDS)
def test_documents_name_the_command(command):
    texts = [path.read_text(encoding="utf-8") for path in (ROOT / "README.md", *(ROOT / "docs").glob("*.md"))]
    assert any(f"{command}.py" in text for text in texts)


def test_no_file_imports_a_command():
    importers = {path.relative_to(SCRIPTS): imported_modules(path) & set(COMMANDS) for path in SCRIPTS.rglob("*.py")}
    assert {path: names for path, names in importers.items() if names} == {}


def test_imports_of_commands_are_found(tmp_path):
    path = tmp_path / "file.py"
    path.write_text("def late():\n    from throughput import run\n    import replay as r\n    import numpy.linalg\n")
    assert imported_modules(path) == {"throughput", "replay", "numpy"}


@pytest.mark.parametrize("command", COMMANDS)
def test_an_interruption_is_expected_before_anything_loads_slowly(command):
    body = ast.parse((SCRIPTS / f"{command}.py").read_text(encoding="utf-8")).body
    imports = [node for node in body if isinstance(node, (ast.Import, ast.ImportFrom))]
    names = [node.names[0].name if isinstance(node, ast.Import) else node.module for node in imports]
    assert [name for name in names if name.split(".")[0] not in sys.stdlib_module_names][0] == "measuring.interruption"


@pytest.mark.parametrize("is_loading", [True, False])
def test_an_interruption_ends_a_command_with_one_line(is_loading, tmp_path):
    source, slow = "import sys; import measuring.interruption; ", "import signal; signal.raise_signal(signal.SIGINT)\n"
    (tmp_path / "slow.py").write_text(f"try:\n    {slow}except KeyboardInterrupt:\n    raise RuntimeError from None\n")
    source += "import slow" if is_loading else slow
    called = "import signal, sys; signal.signal(signal.SIGINT, signal.default_int_handler)"  # a shell's `&` ignores it
    called += f"; sys.argv = [{str(SCRIPTS / 'replay.py')!r}]; sys.path[:0] = {[str(SCRIPTS), str(tmp_path)]}"
    done = subprocess.run([sys.executable, "-c", f"{called}; {source}"], capture_output=True, text=True, timeout=300)
    assert done.stderr == "replay: ended early by SIGINT\n"
    assert done.returncode == -signal.SIGINT


@pytest.mark.parametrize("package", PACKAGES)
def test_packages_stay_easy_to_survey(package):
    files = [path for path in (SCRIPTS / package).glob("*.py") if path.name != "__init__.py"]
    assert 0 < len(files) <= MOST_FILES, sorted(path.name for path in files)
    assert all(ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) for path in files)
