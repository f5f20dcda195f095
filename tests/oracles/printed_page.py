"""The Python blocks of a page of docs/, run one after the other."""

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from stand.drafters.costs import step_cost


def run_page(page: Path, folder: Path, monkeypatch: pytest.MonkeyPatch, shorten: Callable[[str], str] = str) -> dict:
    """The names that the blocks leave, in a folder with the bundled model alone; fewer steps are timed."""
    monkeypatch.setattr(step_cost, "REPEATS", 1)
    (folder / "scripts").symlink_to(page.parents[1] / "scripts")
    monkeypatch.chdir(folder)
    namespace: dict[str, object] = {}
    for code in re.findall(r"^```python\n(.*?)^```$", page.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE):
        exec(shorten(code), namespace)
    return namespace
