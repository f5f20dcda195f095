"""Mutants: what is changed, what is left alone, and that the list of harmless ones is up to date."""

import ast
import json
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import mutants.cpp_mutants as cpp_mutants
import mutants.cython_mutants as cython_mutants
import mutants.judging as judging
import mutants.python_mutants as python_mutants
import mutate
import pytest
from mutants.equivalent import EQUIVALENT
from mutants.judging import REFUSED, Finder, Verdict, in_fork
from mutants.mutant import KEY, Mutant, mutants_of
from mutants.targets import ROOT, TARGETS, all_files

from_sources = pytest.mark.skipif(not (ROOT / "verifiers").is_dir(), reason="mutants are made of the source tree")

PYTHON = '''
def rule(operands, children, parents, limit: int = 1):
    """1 < 2 stays as it is."""
    if limit > 3 and limit is not None:
        raise ValueError(f"{1 + 1} stays as it is")
    kept = operands.target[parents].clip(max=1.0)
    return kept - operands.law[children]


TINY, LARGE = {"float64": 1e-12}, 7
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
cdef double TINY = 1e-12  # of rounding
'''
CPP = """
// a < b stays as it is
template <typename Key> inline float rule(const std::vector<float>& mass, int32_t size) {
    float total = 1.0f;  // a - b stays as it is
    for (int32_t slot = 0; slot < size; ++slot) {
        if (!is_known(slot) && mass[slot] > 0.25f) continue;
        total -= std::min(mass[slot], bound(slot,
                                            total));
    }
    return std::max<float>(total, 0.0f);
}
"""


def changed_lines(changes, source):
    """{(line, what): the changed line}."""
    return {(line, what): changed.splitlines()[line - 1].strip() for line, what, changed in changes(source)}


def test_python_changes():
    seen = {(line, what) for line, what, _ in python_mutants.changes(PYTHON)}
    assert seen == {
        (4, "Gt -> GtE"),
        (4, "Gt -> LtE"),
        (4, "And -> Or"),
        (4, "IsNot -> Is"),
        (6, "target -> law"),
        (6, "parents -> children"),
        (6, "drop clip"),
        (6, "1.0 -> 0.0"),
        (7, "Sub -> Add"),
        (7, "law -> target"),
        (7, "children -> parents"),
        (10, "1e-12 times 1e8"),
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
        (15, "1e-12 times 1e8"): "cdef double TINY = 0.0001  # of rounding",
    }


def test_cpp_changes():
    condition = "if (!is_known(slot) && mass[slot] > 0.25f) continue;"
    assert changed_lines(cpp_mutants.changes, CPP) == {
        (4, "1.0f -> 0.0f"): "float total = 0.0f;  // a - b stays as it is",
        (5, "0 -> 1"): "for (int32_t slot = 1; slot < size; ++slot) {",
        (5, "< -> <="): "for (int32_t slot = 0; slot <= size; ++slot) {",
        (5, "< -> >="): "for (int32_t slot = 0; slot >= size; ++slot) {",
        (6, "&& -> ||"): condition.replace("&&", "||"),
        (6, "> -> >="): condition.replace("> ", ">= "),
        (6, "> -> <="): condition.replace("> ", "<= "),
        (6, "0.25f -> 0.5f"): condition.replace("0.25f", "0.5f"),
        (6, "drop !"): condition.replace("!", ""),
        (6, "drop continue"): condition.replace("continue", ""),
        (7, "-= -> +="): "total += std::min(mass[slot], bound(slot,",
        (10, "max -> its argument 1"): "return (total);",
        (10, "max -> its argument 2"): "return (0.0f);",
        (10, "0.0f -> 1.0f"): "return std::max<float>(total, 1.0f);",
    }


def test_cpp_that_does_not_compile_is_refused(tmp_path):
    (tmp_path / "sound.cpp").write_text('extern "C" int answer() { return 7; }', encoding="utf-8")
    (tmp_path / "broken.cpp").write_text('extern "C" int answer() { return no_such_name; }', encoding="utf-8")
    assert cpp_mutants.compile_cpp(tmp_path / "sound.cpp").stat().st_size > 0
    assert cpp_mutants.compile_cpp(tmp_path / "broken.cpp") is None


@pytest.fixture(scope="module")
def changes() -> dict[Path, list[tuple[str, str, str, int]]]:
    """By file, what identifies each of its mutants; their sources are not written out, which takes most of the time."""
    files = dict.fromkeys(path for _, path in all_files())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(python_mutants.ast, "unparse", lambda module: "")
        return {path: [mutant.key for mutant in mutants_of(path)] for path in files}


@from_sources
def test_the_list_of_harmless_changes_is_up_to_date(changes):
    """Every entry is a mutant of today's source, and says why it is harmless."""
    keys = {key for found in changes.values() for key in found}
    assert set(EQUIVALENT) <= keys | {key[:3] for key in keys}
    assert all(len(reason) > 10 for reason in EQUIVALENT.values())


@from_sources
def test_every_target_has_mutants_and_tests(changes):
    for target in TARGETS:
        counts = {path.name: len(changes[path]) for path in target.files()}
        assert sum(counts.values()) > 30, target.name
        assert all((ROOT / test.partition("::")[0]).is_file() for test in target.tests), target.name
        if target.name == "verifiers":
            assert sum(counts.values()) > 800
            assert counts["verdict_compiled.pxi"] > 120
            rules = ("traversal.py", "block.py", "rrs.py", "token.py", "match.py", "draw.py")
            assert all(counts[name] > 5 for name in rules)


def test_equal_changes_on_one_line_have_numbers(tmp_path):
    source = tmp_path / "rule.py"
    source.write_text("def rule(a):\n    return a + 1 + 1\n", encoding="utf-8")
    names = [str(mutant) for mutant in mutants_of(source)]
    assert sorted(names) == [
        "rule.py:2 1 -> 0",
        "rule.py:2 1 -> 0 #2",
        "rule.py:2 Add -> Sub",
        "rule.py:2 Add -> Sub #2",
    ]


def test_a_mutant_takes_the_place_of_its_module():
    """The changed source is what `stand.verifiers` imports; headers count for the module that they are part of."""
    mutant = Mutant(ROOT / "verifiers" / "walk.py", 1, "", "", "NONE = 77\n")
    spec = Finder(mutant, None).find_spec("stand.verifiers.walk", None)
    module = type(sys)("walk")
    spec.loader.exec_module(module)
    assert module.NONE == 77
    assert Finder(mutant, None).find_spec("stand.verifiers.rules.token", None) is None
    assert Mutant(ROOT / "stand" / "laws" / "sampling.py", 1, "", "", "").module == "stand.laws.sampling"
    growth = ROOT / "trees" / "blended" / "growth" / "growth.h"
    assert Mutant(growth, 1, "", "", "").module == "stand.trees.lookups"
    assert Mutant(ROOT / "stand" / "laws" / "block_passes.h", 1, "", "", "").module == "stand.laws.filters"
    for part in ("include/noise.pxi", "layouts/layout.pxi"):
        assert Mutant(ROOT / "trees" / part, 1, "", "", "").module == "stand.trees.compiled"
    with pytest.raises(ValueError, match=r"a \.pxi must be included by a module"):
        _ = Mutant(ROOT / "trees" / "none.pxi", 1, "", "", "").module
    assert in_fork(lambda: 5) == 5


TESTS = """
from stand.trees.draft import NO_TOKEN, DraftTree

def test_quick():
    assert NO_TOKEN < 0

def test_exact():
    assert NO_TOKEN == -1

def test_chain():
    assert DraftTree.chain([5, 6]).law.sum() == 1
"""
FREEZING = """
import gc

def pytest_collection_finish(session):
    gc.freeze()
"""
JUDGED = """
import os, sys
from ast import parse, unparse
from mutants.bench import check_tests, judge_on_bench
from mutants.judging import Experience, judge
from mutants.mutant import Mutant
from mutants.targets import ROOT, Target
target, path = Target("drafts", (), (sys.argv[1],)), ROOT / "trees" / "draft.py"
experience, source = Experience(seconds=check_tests(target)), path.read_text()
for value in ("-2", "3", "-1", "nothing"):
    changed = source.replace("NO_TOKEN = -1", f"NO_TOKEN = {value}")
    verdict = judge(Mutant(path, 1, "", "", changed), target, experience)
    print(value, verdict.name, verdict.killer.partition("::")[2] or verdict.killer)
changes = [("np.ones((len(tokens)", "np.zeros((len(tokens)"), ("law[ROOT] = 0.0", "law[ROOT] = 0"), ("= -1", "= 3")]
sources = [unparse(parse(source.replace(*change))) for change in changes]
listed = [Mutant(path, number, "", "", changed) for number, changed in enumerate(sources)]
heard = os.fdopen(os.dup(1), "w")  # on the bench nothing is printed
say = lambda mutant, verdict: print("bench", mutant.line, verdict.killer.partition("::")[2], file=heard, flush=True)
judge_on_bench(target, listed, experience, say, is_over=lambda: False)
"""


@pytest.mark.long
@from_sources
def test_judging_begins_with_the_test_that_caught_the_last_one(tmp_path):
    """In a process of its own, which has not imported what is mutated; 3 would fail in two tests. On the bench a change
    of a function is put in place, a change of a module's constant is not; also where what was collected is frozen, as
    this project's tests are."""
    (tmp_path / "conftest.py").write_text(FREEZING, encoding="utf-8")
    tests = tmp_path / "test_three.py"
    tests.write_text(TESTS, encoding="utf-8")
    command = [sys.executable, "-c", JUDGED, str(tests)]
    done = subprocess.run(command, cwd=ROOT / "scripts", capture_output=True, text=True, check=True)
    expected = [
        "-2 caught test_exact",
        "3 caught test_exact",
        "-1 survived",
        "nothing caught import",
        "bench 0 test_chain",
    ]
    assert [line.strip() for line in done.stdout.splitlines()] == expected


@from_sources
@pytest.mark.parametrize("content", [b"# words\n", b"\x89PNG", b"{}\n", b"[1]\n"])
def test_a_file_without_verdicts_is_refused(content, tmp_path):
    (tmp_path / "file").write_bytes(content)
    with pytest.raises(SystemExit, match="--output must be a file of verdicts, got .*; name a run's"):
        mutate.read_verdicts(tmp_path / "file")


def test_a_report_counts_what_was_judged(tmp_path):
    """Verdicts of lines that have changed since are passed over."""
    target = next(target for target in TARGETS if target.name == "sampling")
    mutants = [(target, mutant) for mutant in mutants_of(target.files()[0])]
    output = tmp_path / "mutants.jsonl"
    verdicts = ["caught", "caught", "survived", REFUSED]
    keys = [mutant.key for _, mutant in mutants[:4]] + [("stand/laws/sampling.py", "an older line", "1 -> 0", 1)]
    for key, verdict in zip(keys, [*verdicts, "survived"], strict=True):
        record = dict(zip(KEY, key, strict=True)) | {"verdict": verdict}
        with output.open("a", encoding="utf-8") as file:
            file.write(json.dumps(record) + "\n")
    table = mutate.report(mutants, output)
    assert f"| sampling | {len(mutants)} | 4 | 1 | 2 | 1 | 66.7 % |" in table
    assert table.count(f"- {mutants[2][1]}") == 1 and "older" not in table
    with pytest.raises(SystemExit, match="--only must name targets .*, got everything"):
        mutate.chosen_mutants("everything")


TWO_FUNCTIONS = """
import numpy as np

cdef double TINY = {}

def rule(double x):
    return inner(x) {} TINY

cdef double inner(double x) noexcept nogil:
    return x
"""


@pytest.mark.parametrize(
    ("work", "number"), [(lambda: time.sleep(60), signal.SIGALRM), (lambda: sum(iter(int, 1)), signal.SIGPROF)],
    ids=["waits", "loops"],
)  # fmt: skip
def test_a_test_that_never_ends_is_ended(work, number, monkeypatch, tmp_path):
    monkeypatch.setattr(judging, "MAX_TEST_SECONDS", 0.05)
    witness = judging.Witness(tmp_path / "log", {"a test": 0.0})

    def run() -> int:
        witness.pytest_runtest_setup(SimpleNamespace(nodeid="a test"))
        work()
        return 0

    assert in_fork(run) == -number


def test_cython_mutants_are_joined_with_names_of_their_own():
    joined = cython_mutants.joined([TWO_FUNCTIONS.format("1e-12", "-"), TWO_FUNCTIONS.format("1e-4", "+")])
    assert joined.count("import numpy") == 1
    assert "cdef double TINY__0 = 1e-12" in joined and "cdef double TINY__1 = 1e-4" in joined
    assert "return inner__0(x) - TINY__0" in joined and "return inner__1(x) + TINY__1" in joined
    assert "def rule__1(double x):" in joined and "cdef double inner__0(double x)" in joined


def test_expressions_must_close_on_their_line():
    with pytest.raises(ValueError, match="write it on one line"):
        list(cython_mutants.changes("cdef f(x):\n    y = min(x,\n            1)\n"))


def cython_sources() -> list[Path]:
    return [path for target in TARGETS for path in target.files() if path.suffix in (".pyx", ".pxi")]


@from_sources
@pytest.mark.parametrize("source", cython_sources(), ids=lambda path: path.name)
def test_a_module_is_compiled_with_its_headers(source, tmp_path, monkeypatch):
    """Without them it does not compile, whatever is changed."""
    folders = []
    monkeypatch.setattr(
        cython_mutants.subprocess, "run",
        lambda command, *, cwd, **_: folders.append(cwd) or subprocess.CompletedProcess(command, 1),
    )  # fmt: skip
    assert cython_mutants.compile_module(ROOT, source, source.read_text(), tmp_path) is None
    (folder,) = folders
    copy = folder / source.relative_to(ROOT)
    module = source if source.suffix == ".pyx" else cython_mutants.including(ROOT, source)
    headers = re.findall(r'cdef extern from "([\w./]+\.h)"', copy.read_text())
    assert all((folder / module.relative_to(ROOT).parent / header).is_file() for header in headers), headers


def test_another_folders_code_is_not_judged(monkeypatch, tmp_path):
    mutate.check_installation()
    monkeypatch.setattr(mutate, "ROOT", tmp_path)
    with pytest.raises(SystemExit, match="the tests must import the code of .*__init__.py; install this folder"):
        mutate.check_installation()


@from_sources
@pytest.mark.parametrize("changes", [False, True])
def test_a_verdict_does_not_count_where_a_file_has_changed(changes, monkeypatch, tmp_path):
    target, path = next(all_files())
    mutant = Mutant(path, 1, "a", "b", "")
    states = iter("ab" if changes else "aa")
    monkeypatch.setattr(mutate, "digest_of_files", lambda: next(states))
    monkeypatch.setattr(mutate, "experience_of", lambda target, output: None)
    monkeypatch.setattr(
        mutate,
        "judge_on_bench",
        lambda target, own, experience, record, is_over: record(mutant, Verdict("caught", "t")),
    )
    output = tmp_path / "verdicts.jsonl"
    settings = {"minutes": 1, "seed": 0, "is_quick": True}
    if changes:
        with pytest.raises(SystemExit, match="1"):
            mutate.run([(target, mutant)], output, **settings)
    else:
        mutate.run([(target, mutant)], output, **settings)
    assert output.exists() != changes
