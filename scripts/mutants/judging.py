"""Run the tests on a mutant: in a fork, likeliest test first, until the first failure."""

from __future__ import annotations

import importlib.abc
import importlib.util
import json
import os
import resource
import signal
import sys
import tempfile
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import mutants.cpp_mutants as cpp_mutants
import mutants.cython_mutants as cython_mutants
from mutants.mutant import Mutant
from mutants.targets import ROOT, Target

MAX_CPU_SECONDS = 200  # of all tests; they take up to 40
LEAST_SECONDS = 0.02  # what every test takes besides its own time
# Of processor time, and ten times what the test usually takes: a mutant that loops is caught. Tests come in another
# order than when they were timed, so that one may fill a cache that others had filled then.
MAX_TEST_SECONDS = 10.0
MOST_WAITING = 30  # times that on the clock: a mutant that waits for ever is caught, also on a busy machine
MAX_MEMORY = 64 << 30  # bytes of data, for a mutant that grows without end; a test maps 32 GiB
TESTS_FAILED, INTERRUPTED = 1, 2  # pytest's: a test failed, or a test module could not even be imported
BROKEN_RUN = (3, 4, 5)  # pytest's: an error of its own, wrong arguments, no tests
REFUSED = "does not compile"
COMPILERS = {
    ".pyx": cython_mutants.compile_module,
    ".pxi": cython_mutants.compile_module,
    ".h": cpp_mutants.compile_module,
}


@dataclass
class Experience:
    """What earlier runs of a target's tests taught: which tests catch faults, and which are quick."""

    seconds: dict[str, float] = field(default_factory=dict)
    caught: Counter[str] = field(default_factory=Counter)  # faults, by test
    caught_in_file: Counter[tuple[str, str]] = field(default_factory=Counter)  # by file and test

    def note(self, file: str, killer: str) -> None:
        """A test that failed; what is no test is passed over."""
        if "::" in killer:
            self.caught[killer] += 1
            self.caught_in_file[file, killer] += 1

    def place(self, test: str, mutant: Mutant) -> float:
        """Sorts tests: what caught most for its time comes first, faults of the same file counted ten times."""
        hopes = 1 + self.caught[test] + 9 * self.caught_in_file[mutant.file, test] + (mutant.path.stem in test)
        return (self.seconds.get(test, 0.0) + LEAST_SECONDS) / hopes


@dataclass(frozen=True)
class Verdict:
    name: str  # caught, survived, or does not compile
    killer: str = ""  # the test that failed, or what ended the process


def in_fork(work: Callable[[], int], *, is_bounded: bool = True) -> int:
    """The exit status of `work` in a silent fork of this process; negative where a signal ended it.

    Processor time is bounded, not the time on the clock: a busy machine must not turn survivors into caught ones.
    """
    child = os.fork()
    if child == 0:
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, 1)
        os.dup2(null, 2)
        if is_bounded:
            resource.setrlimit(resource.RLIMIT_CPU, (MAX_CPU_SECONDS, MAX_CPU_SECONDS))
        # Not of address space: with a limit on that, keys are not kept in mapped pages.
        resource.setrlimit(resource.RLIMIT_DATA, (MAX_MEMORY, MAX_MEMORY))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        status = 3
        try:
            status = work()
        finally:
            os._exit(status)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


class Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Puts a mutant's source, or its compiled module, in place of the shipped one."""

    def __init__(self, mutant: Mutant, compiled: Path | None) -> None:
        self.mutant = mutant
        self.compiled = compiled

    def find_spec(self, fullname, path, target=None):
        if fullname != self.mutant.module:
            return None
        if self.compiled is not None:
            return importlib.util.spec_from_file_location(fullname, self.compiled)
        return importlib.util.spec_from_loader(fullname, self, origin=str(self.mutant.path))

    def create_module(self, spec):
        return None

    def exec_module(self, module):
        exec(compile(self.mutant.source, str(self.mutant.path), "exec"), module.__dict__)


class Witness:
    """A pytest plugin: puts tests in order and writes down, test by test, how each ended and how long it took.

    Where it knows how long tests usually take, one that takes much longer ends the process.
    """

    def __init__(self, log: Path, seconds: dict[str, float], place: Callable[[str], float] = lambda test: 0.0) -> None:
        self.log = log
        self.place = place
        self.seconds = seconds

    def pytest_collection_modifyitems(self, items: list) -> None:
        items.sort(key=lambda item: self.place(item.nodeid))  # stable

    def pytest_runtest_setup(self, item) -> None:
        if self.seconds:
            usual = self.seconds.get(item.nodeid, 0.0)
            bound = MAX_TEST_SECONDS + 10 * usual
            signal.setitimer(signal.ITIMER_PROF, bound)
            signal.setitimer(signal.ITIMER_REAL, MOST_WAITING * bound)

    def pytest_runtest_logreport(self, report) -> None:
        if report.when == "call" or report.failed:
            with self.log.open("a", encoding="utf-8") as file:
                file.write(json.dumps([report.nodeid, report.outcome, report.duration]) + "\n")


def read_log(log: Path) -> list[tuple[str, str, float]]:
    """(test, outcome, seconds) as a Witness wrote them."""
    return [tuple(json.loads(line)) for line in log.read_text(encoding="utf-8").splitlines()] if log.exists() else []


def start_pytest(target: Target, plugin: object, finder: Finder | None = None) -> int:
    """pytest's exit status, with a mutant in place of the shipped module, which must not have been imported yet."""
    import hypothesis
    import pytest

    if finder is not None:
        sys.meta_path.insert(0, finder)
    # The first counterexample is enough.
    phases = (hypothesis.Phase.explicit, hypothesis.Phase.generate)
    hypothesis.settings.register_profile("mutants", phases=phases)
    hypothesis.settings.load_profile("mutants")
    os.chdir(ROOT)
    quiet = ["-x", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", "--tb=no", "--no-header"]
    return int(pytest.main([*quiet, *target.tests], plugins=[plugin]))


def verdict_of(status: int, log: Path) -> Verdict:
    """What the tests' exit status and a Witness's log say."""
    if status == 0:
        return Verdict("survived")
    failed = [name for name, outcome, _ in read_log(log) if outcome == "failed"]
    return Verdict("caught", failed[0] if failed else f"signal {-status}" if status < 0 else "import")


def judge(mutant: Mutant, target: Target, experience: Experience) -> Verdict:
    """What all tests say of a mutant that is put in place before anything is imported; `experience` grows."""
    verdict = _judge(mutant, target, experience, COMPILERS.get(mutant.path.suffix))
    experience.note(mutant.file, verdict.killer)
    return verdict


def check_controls(target: Target, experience: Experience) -> None:
    """Unchanged compiled sources, built as mutants are. Raises SystemExit where the tests do not pass with one."""
    for suffix in COMPILERS:
        path = next((path for path in target.files() if path.suffix == suffix), None)
        if path is not None:
            verdict = judge(Mutant(path, 0, "", "unchanged", path.read_text(encoding="utf-8")), target, experience)
            if verdict.name != "survived":
                found = f"{verdict.name} {verdict.killer}".strip()
                raise SystemExit(f"{path.name}, built anew and unchanged, must pass {target.name}'s tests: {found}")


def _judge(mutant: Mutant, target: Target, experience: Experience, compiler: Callable | None) -> Verdict:
    with tempfile.TemporaryDirectory() as folder:
        compiled, log = None, Path(folder) / "log"
        if compiler is not None:
            compiled = compiler(ROOT, mutant.path, mutant.source, Path(folder))
            if compiled is None:
                return Verdict(REFUSED)
        witness = Witness(log, experience.seconds, lambda test: experience.place(test, mutant))
        status = in_fork(lambda: start_pytest(target, witness, Finder(mutant, compiled)))
        if status in BROKEN_RUN:
            raise SystemExit(f"pytest must run on {mutant}, got its exit status {status}")
        return verdict_of(status, log)
