"""Mutants: what is changed, what is left alone, and that the list of harmless ones is up to date."""

import ast
import sys
from pathlib import Path

import mutants.cython_mutants as cython_mutants  # noqa: E402
import mutants.python_mutants as python_mutants  # noqa: E402
import mutate_verifiers  # noqa: E402
import pytest

SOURCES = Path(__file__).resolve().parents[2] / "verifiers"
from_sources = pytest.mark.skipif(not SOURCES.is_dir(), reason="mutants are made of the source tree")

PYTHON = '''
def rule(operands, children, parents, limit: int = 1):
    """1 < 2 stays as it is."""
    if limit > 3:
        raise ValueError(f"{1 + 1} stays as it is")
    kept = operands.target[parents].clip(max=1.0)
    return kept - operands.law[children]
'''
CYTHON = '''
cdef double rule(double[::1] mass, const double[::1] law,
                 Py_ssize_t size) noexcept nogil:
    """1 < 2 stays as it is."""
    cdef Py_ssize_t slot
    cdef double total = 0.0
    for slot in range(mass.shape[0]):
        total += min(mass[slot], <double> law[slot])  # a - b stays as it is
        if not total < 1.0:
            break
    return total


CONSTANT = 1
'''


def changed_lines(changes, source):
    """{(line, what): the changed line}."""
    return {(line, what): changed.splitlines()[line - 1].strip() for line, what, changed in changes(source)}


def test_python_changes():
    seen = {(line, what) for line, what, _ in python_mutants.changes(PYTHON)}
    assert seen == {
        (4, "Gt -> GtE"),
        (4, "Gt -> LtE"),
        (6, "target -> law"),
        (6, "parents -> children"),
        (6, "drop clip"),
        (6, "1.0 -> 0.0"),
        (7, "Sub -> Add"),
        (7, "law -> target"),
        (7, "children -> parents"),
    }
    original = ast.unparse(ast.parse(PYTHON))
    for _, what, changed in python_mutants.changes(PYTHON):
        different = [
            pair for pair in zip(original.splitlines(), changed.splitlines(), strict=True) if len(set(pair)) == 2
        ]
        assert len(different) == 1, what


def test_cython_changes():
    assert changed_lines(cython_mutants.changes, CYTHON) == {
        (6, "0.0 -> 1.0"): "cdef double total = 1.0",
        (8, "+= -> -="): "total -= min(mass[slot], <double> law[slot])  # a - b stays as it is",
        (8, "min -> its argument 1"): "total += (mass[slot])  # a - b stays as it is",
        (8, "min -> its argument 2"): "total += (<double> law[slot])  # a - b stays as it is",
        (8, "mass -> law"): "total += min(law[slot], <double> law[slot])  # a - b stays as it is",
        (8, "law -> mass"): "total += min(mass[slot], <double> mass[slot])  # a - b stays as it is",
        (9, "< -> <="): "if not total <= 1.0:",
        (9, "< -> >="): "if not total >= 1.0:",
        (9, "drop not"): "if total < 1.0:",
        (9, "1.0 -> 0.0"): "if not total < 0.0:",
        (10, "break -> pass"): "pass",
    }


@from_sources
def test_the_list_of_harmless_changes_is_up_to_date():
    """Every entry is a mutant of today's source, and says why it is harmless."""
    paths = mutate_verifiers.sources()
    keys = {(path.name, mutant.text, mutant.what) for path in paths for mutant in mutate_verifiers.mutants(path)}
    assert set(mutate_verifiers.EQUIVALENT) <= keys
    assert all(len(reason) > 10 for reason in mutate_verifiers.EQUIVALENT.values())


@from_sources
def test_every_rule_has_mutants():
    counts = {path.name: len(list(mutate_verifiers.mutants(path))) for path in mutate_verifiers.sources()}
    assert sum(counts.values()) > 800 and counts["draw_compiled.pyx"] + counts["traversal_compiled.pyx"] > 120
    assert all(counts[name] > 5 for name in ("traversal.py", "block.py", "rrs.py", "token.py", "match.py", "draw.py"))


def test_equal_changes_on_one_line_have_numbers(tmp_path):
    source = tmp_path / "rule.py"
    source.write_text("def rule(a):\n    return a + 1 + 1\n", encoding="utf-8")
    names = [str(mutant) for mutant in mutate_verifiers.mutants(source)]
    assert sorted(names) == [
        "rule.py:2 1 -> 0",
        "rule.py:2 1 -> 0 #2",
        "rule.py:2 Add -> Sub",
        "rule.py:2 Add -> Sub #2",
    ]


def test_a_mutant_takes_the_place_of_its_module():
    """In a fork: the changed source is what `stand.verifiers` imports, and the status says what the work said."""
    path = mutate_verifiers.ROOT / "verifiers" / "walk.py"
    mutant = mutate_verifiers.Mutant(path, 1, "", "", "NONE = 77\n")
    spec = mutate_verifiers.Finder(mutant, None).find_spec("stand.verifiers.walk", None)
    module = type(sys)("walk")
    spec.loader.exec_module(module)
    assert module.NONE == 77
    assert mutate_verifiers.Finder(mutant, None).find_spec("stand.verifiers.rules.token", None) is None
    assert mutate_verifiers.in_fork(lambda: 5) == 5


def test_expressions_must_close_on_their_line():
    with pytest.raises(ValueError, match="write the expression on one line"):
        list(cython_mutants.changes("cdef f(x):\n    y = min(x,\n            1)\n"))
