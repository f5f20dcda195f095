"""The README's example runs as printed, and what it names exists."""

import dataclasses
import inspect
import re
from collections.abc import Callable
from pathlib import Path

import pytest

import stand

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
PRODUCT = ("stand", "trees", "verifiers")
PACKAGES = (*PRODUCT, "scripts")
RULES = ("verifiers", "stand/drafters")  # what docs/verifiers.md is about
MOST_LINES = 120

in_the_source = pytest.mark.skipif(
    not all((ROOT / name).is_dir() for name in ("docs", *PACKAGES)), reason="needs the source tree, docs included"
)


def block(text: str, language: str) -> str:
    """The only fenced block of this language."""
    (found,) = re.findall(rf"^```{language}\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)
    return found


def tree_folders(listing: str) -> set[str]:
    """Paths of the folders in an indented listing: the first words of a line, each with its slash, between commas; two
    spaces deeper in its folder."""
    folders, open_folders = set(), []
    for line in listing.splitlines():
        depth = (len(line) - len(line.lstrip())) // 2
        for name in re.match(r"\s*((?:[\w.]+/(?:, |$|(?=\s)))+)", line)[1].split(", "):
            open_folders[depth:] = [name.strip().rstrip("/")]
            folders.add("/".join(open_folders))
    return folders


def package_folders(folder: Path) -> set[str]:
    """Folders with an __init__.py, as they are named where this one lies."""
    return {path.parent.relative_to(folder.parent).as_posix() for path in folder.rglob("__init__.py")}


def unnamed(names: set[str], text: str) -> set[str]:
    """Those that `text` does not hold as a whole word."""
    return {name for name in names if not re.search(rf"(?<![\w]){re.escape(name)}(?!\w)", text)}


def test_the_example_runs_as_printed(tmp_path, monkeypatch, capsys):
    """Offline, with the bundled model, in a folder of its own; what it saved, a new engine has loaded."""
    (tmp_path / "scripts").symlink_to(ROOT / "scripts")
    monkeypatch.chdir(tmp_path)
    namespace: dict[str, object] = {}
    exec(block(README, "python"), namespace)
    *text, acceptance = capsys.readouterr().out.strip().splitlines()
    assert re.fullmatch(r"Answer: \d+", text[-1])
    assert float(re.fullmatch(r"(\d+\.\d\d) tokens per step and row", acceptance)[1]) > 1
    assert (tmp_path / "power.lookup").is_file()
    answers = [text.endswith("Answer: 4") for text in namespace["output"].texts]  # 8^34 mod 5
    assert len(answers) == 8 and sum(answers) > 4
    assert len(namespace["engine"].lookup) > 0
    if (page := ROOT / "docs" / "settings.md").is_file():  # its example goes on from there
        output = namespace["output"]
        exec(block(page.read_text(encoding="utf-8"), "python"), namespace)
        assert len(namespace["output"].texts) == 8 and namespace["output"].texts is not output.texts


def test_readme_is_short():
    assert len(README.splitlines()) <= MOST_LINES


@in_the_source
def test_every_folder_of_the_tree_exists_and_every_package_is_in_it():
    folders = tree_folders(block(README, "text"))
    assert not {folder for folder in folders if not (ROOT / folder).is_dir()}
    assert not set().union(*(package_folders(ROOT / name) for name in PRODUCT)) - folders
    assert set(PACKAGES) <= folders


def test_the_checker_sees_folders_at_their_depth():
    listing = "stand/   a\n  gpu/   b\n    kernels/   c\ntrees/   d\n"
    assert tree_folders(listing) == {"stand", "stand/gpu", "stand/gpu/kernels", "trees"}


@in_the_source
def test_every_command_is_named():
    """With the folders of their parts."""
    page = (ROOT / "docs" / "commands.md").read_text(encoding="utf-8")
    commands = {path.name for path in (ROOT / "scripts").glob("*.py")}
    folders = {f"{name.partition('/')[2]}/" for name in package_folders(ROOT / "scripts")}
    assert len(commands) > 30 and len(folders) > 10 and not unnamed(commands | folders, page)


def test_the_checker_sees_an_unnamed_command():
    assert unnamed({"replay.py", "lay.py"}, "`replay.py`") == {"lay.py"}


def parameters(function: Callable) -> set[str]:
    """Those that have a name and a default, as the page of settings writes them."""
    found = inspect.signature(function).parameters.values()
    return {f"{one.name}=" for one in found if one.default is not one.empty and one.kind is one.KEYWORD_ONLY}


@in_the_source
def test_every_setting_has_its_line():
    page = (ROOT / "docs" / "settings.md").read_text(encoding="utf-8")
    named = set(re.findall(r"`(\w+=)", page))
    settings = parameters(stand.wrap) | parameters(stand.BlendedDrafter)
    settings |= parameters(stand.Engine.generate) | parameters(stand.Engine.run)
    assert len(settings) > 25 and not settings - named


@in_the_source
def test_every_field_of_an_output_and_every_variable_of_the_environment_has_its_line():
    page = (ROOT / "docs" / "settings.md").read_text(encoding="utf-8")
    fields = {field.name for field in dataclasses.fields(stand.GenerationOutput)}
    paths = (path for name in PRODUCT for ending in ("py", "h") for path in (ROOT / name).rglob(f"*.{ending}"))
    sources = "".join(path.read_text(encoding="utf-8") for path in paths)
    variables = set(re.findall(r'"(STAND_[A-Z]+)"', sources))
    assert len(fields) > 5 and len(variables) > 2 and not unnamed(fields | variables, page)


@in_the_source
def test_every_folder_of_tests_is_named():
    folders = {f"`{path.parent.name}/`" for path in (ROOT / "tests").glob("*/test_*.py")}
    assert folders and not unnamed(folders, (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8"))


@in_the_source
def test_functions_that_the_page_of_rules_calls_exist():
    sources = (path.read_text(encoding="utf-8") for name in RULES for path in (ROOT / name).rglob("*.py"))
    defined = {name for source in sources for name in re.findall(r"def (\w+)\(", source)}
    called = set(re.findall(r"`(?:\w+\.)*(\w+)\([^`]*`", (ROOT / "docs" / "verifiers.md").read_text(encoding="utf-8")))
    assert "fitting_names" in called and not called - defined


@in_the_source
def test_links_lead_to_files():
    """Relative links of the README and the documents, headings of other documents included."""
    for path in (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))):
        for target, heading in re.findall(r"\]\((?!https?:)([^)#]*)#?([^)]*)\)", path.read_text(encoding="utf-8")):
            found = (path.parent / target) if target else path
            assert found.is_file(), f"{path.name} links to {target}"
            if heading:
                titles = re.findall(r"^#+ (.*)$", found.read_text(encoding="utf-8"), re.MULTILINE)
                anchors = {re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in titles}
                assert heading in anchors, f"{path.name} links to {target}#{heading}"


def absent_files(text: str, root: Path) -> set[str]:
    """Paths in backticks that lead nowhere from the root, from stand/ or docs/. NAME stands for any name."""
    named = set(re.findall(r"`((?!vllm/)[\w./]+/[\w./]+\.(?:py|pyx|pxi|h|json|jsonl|png))`", text))
    places = (root, root / "stand", root / "docs")
    return {name for name in named if "NAME" not in name and not any((place / name).is_file() for place in places)}


@in_the_source
def test_files_that_documents_name_exist():
    for path in (ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))):
        assert not absent_files(path.read_text(encoding="utf-8"), ROOT), path.name


@in_the_source
def test_the_checker_sees_an_absent_file():
    text = "`stand/engine.py` and `engine/stand.py`, `verifiers/rules/NAME.py`, `gpu/packets/packing.pxi`"
    assert absent_files(text, ROOT) == {"engine/stand.py"}
