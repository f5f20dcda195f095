"""Errors say rule, value and remedy: `top_p must be in (0, 1], got 1.7; use 1 to switch it off`."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import stand
import stand.trees
import stand.verifiers

PACKAGES = {"stand": stand, "trees": stand.trees, "verifiers": stand.verifiers}
REFUSALS = ("ValueError", "TypeError", "UnsupportedModelError")
# Raised by who calls a kernel within this project: the engine has checked before, and turns them into its own refusals.
EXCEPTIONS = {
    "{} must be {} in {} beside a query {} in {}, got {} in {}",
    "rule must be one of {}, got {}",
    "activation must be one of {}, got {}",
    "keys and values of all layers must have one type and lie on one device, got others",
}


def messages(source: str) -> Iterator[str]:
    """Of every refusal raised with a text of its own; {} where a value is put in."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call) and node.exc.args:
            is_judged = isinstance(node.exc.func, ast.Name) and node.exc.func.id in REFUSALS
            text = _text(node.exc.args[0])
            if is_judged and text is not None:
                yield text


def _text(argument: ast.expr) -> str | None:
    """A literal or an f-string; None for anything else."""
    parts = argument.values if isinstance(argument, ast.JoinedStr) else [argument]
    if not isinstance(argument, (ast.JoinedStr, ast.Constant)):
        return None
    return "".join(part.value if isinstance(part, ast.Constant) else "{}" for part in parts)


def without_remedy(source: str) -> set[str]:
    return {text for text in messages(source) if "must" in text and "got" in text and ";" not in text}


def test_a_rule_and_a_value_come_with_a_remedy():
    found = set()
    for package in PACKAGES.values():
        paths = sorted(Path(package.__file__).parent.rglob("*.py"))
        assert paths
        found |= set().union(*(without_remedy(path.read_text(encoding="utf-8")) for path in paths))
    assert found == EXCEPTIONS


@pytest.mark.parametrize(
    ("statement", "is_found"),
    [
        ('raise ValueError("rows must be positive, got 0")', True),
        ('raise TypeError(f"rows must be {kind}, got {rows}")', True),
        ('raise UnsupportedModelError("layers must be rotary, got ALiBi")', True),
        ("raise ValueError(f\"names must be known, got {'; '.join(names)}\") from None", True),
        ('raise ValueError(f"rows must be positive, got {rows}; 1 is usual")', False),
        ('raise ValueError("nothing to say")', False),
        ('raise OSError("rows must be positive, got 0")', False),
    ],
)
def test_a_message_without_a_remedy_is_seen(statement, is_found):
    assert bool(without_remedy(statement)) is is_found
