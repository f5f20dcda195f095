"""Judge many mutants on tests that were collected once: each in a fork, by the quick tests, until the first failure."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import mutants.cpp_mutants as cpp_mutants
from mutants.judging import Experience, Verdict, Witness, in_fork, read_log, start_pytest, verdict_of
from mutants.live import FunctionsByCode, live_functions, put_compiled, put_python, put_rebuilt
from mutants.mutant import Mutant
from mutants.reached import Reached, reached_lines
from mutants.targets import ROOT, Target

QUICK_SECONDS = 1.0  # tests that usually take longer are left out
BATCH_SIZE = 16  # mutants compiled into one module
UNCHANGED = 77  # exit status of a fork that could not put the mutant in place
FAILED = 1  # of one in which a test failed


class Bench:
    """A pytest plugin: hands the collected tests over instead of running them."""

    def __init__(self, work: Callable[[list], None]) -> None:
        self.work = work

    def pytest_runtestloop(self, session) -> bool:
        self.work(session.items)
        return True


class LastWitness(Witness):
    """Ends the process at the first failure."""

    def pytest_runtest_logreport(self, report) -> None:
        super().pytest_runtest_logreport(report)
        if report.failed:
            os._exit(FAILED)


def check_tests(target: Target) -> dict[str, float]:
    """How long each test takes on the shipped code. Raises SystemExit where one fails."""
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "log"
        if in_fork(lambda: start_pytest(target, Witness(log, {}))) != 0:
            command = f"pytest {' '.join(target.tests)}"
            raise SystemExit(f"the tests of {target.name} must pass before they can judge mutants; run {command}")
        return {name: seconds for name, _, seconds in read_log(log)}


def check_bench(target: Target, seconds: dict[str, float]) -> None:
    """Unchanged compiled sources on the bench. Raises SystemExit where a test fails with one."""
    first = {path.suffix: path for path in reversed(target.files()) if path.suffix != ".py"}
    unchanged = [Mutant(path, 0, "", "unchanged", path.read_text(encoding="utf-8")) for path in first.values()]
    with tempfile.NamedTemporaryFile("a+", encoding="utf-8") as failures:  # verdicts come from another process

        def note(mutant: Mutant, verdict: Verdict) -> None:
            print(f"{mutant.path.name}: {verdict.killer}", file=failures, flush=True)

        judge_on_bench(target, unchanged, Experience(seconds=seconds), note, is_over=lambda: False)
        failures.seek(0)
        if found := failures.read():
            raise SystemExit(f"unchanged sources must pass {target.name}'s tests on the bench, got:\n{found}")


def judge_on_bench(
    target: Target,
    mutants: Sequence[Mutant],
    experience: Experience,
    record: Callable[[Mutant, Verdict], None],
    *,
    is_over: Callable[[], bool],
) -> None:
    """`record` every mutant that a quick test catches, until time is over; the others need `judging.judge`.

    Modules are imported before a mutant is put in place, so what they compute on import is the shipped code's.
    A header's mutant is a module of its own: objects that a test module made before it are the shipped code's.
    """

    def work(items: list) -> None:
        functions = live_functions()
        quick = [item for item in items if experience.seconds.get(item.nodeid, 0.0) <= QUICK_SECONDS]
        with tempfile.TemporaryDirectory() as folder:
            batches = _Batches(mutants, Path(folder))
            reached = reached_lines(quick, {mutant.path for mutant in mutants}, Path(folder))
            for mutant in sorted(mutants, key=lambda mutant: mutant.path.suffix):  # headers first, Cython last
                if is_over():
                    break
                able = _able(quick, mutant, reached)
                ordered = sorted(able, key=lambda item: experience.place(item.nodeid, mutant))
                log = Path(folder) / "log"
                log.unlink(missing_ok=True)
                witness = LastWitness(log, experience.seconds)
                put = _way_in(mutant, batches, functions)
                status = in_fork(partial(_run, put, ordered, witness)) if put is not None else UNCHANGED
                if status == FAILED or status < 0:  # what broke for another reason stays open too
                    verdict = verdict_of(status, log)
                    experience.note(mutant.file, verdict.killer)
                    record(mutant, verdict)

    if mutants and in_fork(lambda: start_pytest(target, Bench(work)), is_bounded=False) != 0:
        raise SystemExit(f"the tests of {target.name} must be collected and judge all mutants, got an error")


def _able(items: list, mutant: Mutant, reached: Reached) -> list:
    """The tests that reach the mutant's line; all of them where that is not known, as of compiled code."""
    tests = reached.get((str(mutant.path), mutant.line))
    return items if tests is None else [item for item in items if item.nodeid in tests]


class _Batches:
    """Cython mutants, compiled when the first of a batch is wanted."""

    def __init__(self, mutants: Sequence[Mutant], folder: Path) -> None:
        self.folder = folder
        self.waiting: dict[Path, list[Mutant]] = {}
        self.places: dict[Mutant, tuple[int, Path] | None] = {}
        for mutant in mutants:  # of all files; only Cython's are asked for
            self.waiting.setdefault(mutant.path, []).append(mutant)

    def place(self, mutant: Mutant) -> tuple[int, Path] | None:
        """(number, module); None for one that does not compile."""
        if mutant not in self.places:
            waiting = self.waiting[mutant.path]
            batch, self.waiting[mutant.path] = waiting[:BATCH_SIZE], waiting[BATCH_SIZE:]
            self._build(batch)
        return self.places[mutant]

    def _build(self, batch: Sequence[Mutant]) -> None:
        """One module; where it is refused, two of half the mutants, down to the one that does not compile."""
        below = Path(tempfile.mkdtemp(dir=self.folder))
        built = cpp_mutants.compile_batch(ROOT, batch[0].path, [mutant.source for mutant in batch], below)
        if built is None and len(batch) > 1:
            self._build(batch[: len(batch) // 2])
            self._build(batch[len(batch) // 2 :])
        else:
            self.places.update({mutant: built and (number, built) for number, mutant in enumerate(batch)})


def _way_in(mutant: Mutant, batches: _Batches, functions: FunctionsByCode) -> Callable[[], bool | None] | None:
    """What puts the mutant in place in a fork and says False where it cannot; None where it does not compile."""
    if mutant.path.suffix == ".py":
        return partial(put_python, mutant, functions)
    if mutant.path.suffix == ".h":
        below = Path(tempfile.mkdtemp(dir=batches.folder))
        built = cpp_mutants.compile_functions(ROOT, mutant.path, mutant.source, below)
        return built and partial(put_rebuilt, mutant, built)
    place = batches.place(mutant)
    return place and partial(put_compiled, mutant, *place)


def _run(put: Callable[[], bool | None], items: list, witness: Witness) -> int:
    """The exit status of a fork: 0 where no test failed, UNCHANGED where the mutant could not be put in place."""
    if put() is False:
        return UNCHANGED
    if items:
        items[0].config.pluginmanager.register(witness)
    for item, following in zip(items, [*items[1:], None], strict=True):
        item.config.hook.pytest_runtest_protocol(item=item, nextitem=following)
    return 0
