"""Break the code on purpose and see whether the tests notice.

Usage: python scripts/mutate.py [--only verifiers,growth,stand/laws/sampling.py] [--output mutants.jsonl] [--minutes 40]
       python scripts/mutate.py --output mutants.jsonl --report

Every mutant changes one place in one file: a comparison turned round or made (un)strict, a cap or floor dropped, + and
- or * and / swapped, the target's and the drafter's law swapped, a 0 or 1 replaced, a tiny bound made larger. The files
and the tests that judge them are listed in mutants/targets.py: the verification rules, the laws, the cache, the
drafters, the drafts and the C++ that grows them. Python is changed in its syntax tree; Cython and C++ line by line, and
built anew. Tests run in a fork of this process until the first failure. Mutants come in random order, so that a run cut
short is a fair sample. Those that leave the behaviour as it is (mutants/equivalent.py, with reasons) or do not compile
are not counted.

Each verdict is appended to the output as a line of JSON, and holds as long as its line of code stands in its file. A
run with the same output goes on where it stopped; verdicts on lines that are gone are passed over. Last: a table, and
the survivors. Run it on a copy of this folder that is installed into an environment of its own, if you go on writing
meanwhile: what is broken here and now would catch every mutant.
"""

from __future__ import annotations

import argparse
import gc
import importlib
import json
import os
import random
import sys
import time
from hashlib import blake2b
from importlib.util import find_spec
from pathlib import Path

import measuring.interruption  # noqa: F401  (before what loads slowly)
from measuring.option_types import positive_number
from measuring.output_file import check_writable
from mutants.bench import check_bench, check_tests, judge_on_bench
from mutants.judging import REFUSED, Experience, Verdict, check_controls, judge
from mutants.mutant import KEY, Mutant, mutants_of
from mutants.targets import ROOT, SUFFIXES, Target, all_files

SLOW_IMPORTS = ("hypothesis", "numpy", "pytest", "torch", "transformers", "tiny_models")  # none of them is mutated


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="comma-separated targets, or files below the project's root")
    parser.add_argument(
        "--output", type=Path, default=Path("mutants.jsonl"), help="verdicts, one per line (%(default)s)"
    )
    parser.add_argument(
        "--minutes",
        type=positive_number,
        default=1e6,
        help="of collecting tests and judging; unchanged tests run before (default: until all are judged)",
    )
    parser.add_argument("--seed", type=int, default=0, help="of the order in which they are tried (%(default)s)")
    parser.add_argument("--quick", action="store_true", help="leave what the quick tests do not catch for a later run")
    parser.add_argument("--report", action="store_true", help="judge nothing, only read the output")
    options = parser.parse_args()
    if not options.report:
        try:
            check_writable(options.output, "--output")
        except ValueError as error:
            parser.error(str(error))
    if options.report and not options.output.exists():
        parser.error(f"--report needs an --output that a run has written, got {options.output}; name that file")
    return options


def chosen_mutants(only: str) -> list[tuple[Target, Mutant]]:
    """Without the equivalent ones. Raises SystemExit for a name that is no target and no file of one."""
    names = set(filter(None, only.split(",")))
    listed = [(target, path, path.relative_to(ROOT).as_posix()) for target, path in all_files()]
    unknown = names - {target.name for target, _, _ in listed} - {file for _, _, file in listed}
    if unknown:
        targets = ", ".join(dict.fromkeys(target.name for target, _, _ in listed))
        raise SystemExit(f"--only must name targets ({targets}) or their files, got {', '.join(sorted(unknown))}")
    chosen = [(target, path) for target, path, file in listed if not names or names & {target.name, file}]
    return [(target, mutant) for target, path in chosen for mutant in mutants_of(path) if not mutant.is_equivalent]


def read_verdicts(output: Path) -> dict[tuple, str]:
    """{key of a mutant: verdict}. Raises SystemExit for a file that holds something else."""
    if not output.exists():
        return {}
    try:
        records = [json.loads(line) for line in output.read_text(encoding="utf-8").splitlines()]
        return {tuple(record[name] for name in KEY): record["verdict"] for record in records}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise SystemExit(f"--output must be a file of verdicts, got {output} ({error}); name a run's") from error


def experience_of(target: Target, output: Path) -> Experience:
    """How long the tests take, from a file beside `output` where nothing has changed since, and what caught what."""
    beside = output.with_suffix(".seconds")
    kept = json.loads(beside.read_text(encoding="utf-8")) if beside.exists() else {}
    state = f"{' '.join(target.tests)} {digest_of_files()}"
    if kept.get(target.name, {}).get("state") != state:
        kept[target.name] = {"state": state, "seconds": check_tests(target)}
        check_controls(target, Experience(seconds=kept[target.name]["seconds"]))
        check_bench(target, kept[target.name]["seconds"])
        beside.write_text(json.dumps(kept), encoding="utf-8")
    experience = Experience(seconds=kept[target.name]["seconds"])
    for line in output.read_text(encoding="utf-8").splitlines() if output.exists() else ():
        record = json.loads(line)
        experience.note(record["file"], record["killer"])
    return experience


def digest_of_files() -> str:
    """Of all code that mutants stand in, and of the tests."""
    state = blake2b(digest_size=16)
    for folder, suffixes in (("tests", (".py",)), *((name, SUFFIXES) for name in ("stand", "trees", "verifiers"))):
        for path in sorted(path for path in (ROOT / folder).rglob("*") if path.suffix in suffixes):
            state.update(path.read_bytes())
    return state.hexdigest()


def check_installation() -> None:
    """Raise SystemExit where tests import another folder's code: its faults would count as caught mutants."""
    found = find_spec("stand")
    if found is None or not Path(found.origin).is_relative_to(ROOT):
        raise SystemExit(
            f"the tests must import the code of {ROOT}, got {found and found.origin}; install this folder "
            "(pip install --editable .) into an environment of its own, and run there"
        )


def run(mutants: list[tuple[Target, Mutant]], output: Path, *, minutes: float, seed: int, is_quick: bool) -> None:
    """Judge what `output` does not hold yet and append to it, target by target."""
    known = read_verdicts(output)
    waiting = [(target, mutant) for target, mutant in mutants if mutant.key not in known]
    random.Random(seed).shuffle(waiting)
    left, progress, files = 60 * minutes, os.fdopen(os.dup(2), "w"), digest_of_files()

    def tell(line: str) -> None:
        print(line, file=progress, flush=True)

    def record(mutant: Mutant, verdict: Verdict) -> None:
        if digest_of_files() != files:
            tell("no file must change while mutants are judged, got one that did; run the command again")
            raise SystemExit(1)
        line = dict(zip(KEY, mutant.key, strict=True)) | {"verdict": verdict.name, "killer": verdict.killer}
        with output.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")
        tell(f"{mutant}: {verdict.name} {verdict.killer}")

    for target in dict.fromkeys(target for target, _ in waiting):
        if left <= 0:
            tell(f"{target.name}: no time was left for it")
            continue
        tell(f"{target.name}: its tests on the unchanged code")
        experience = experience_of(target, output)
        begin = time.monotonic()
        end = begin + left
        own = [mutant for other, mutant in waiting if other == target]
        judge_on_bench(target, own, experience, record, is_over=lambda end=end: time.monotonic() > end)
        known = read_verdicts(output)
        for mutant in () if is_quick else own:
            if mutant.key not in known and time.monotonic() < end:
                record(mutant, judge(mutant, target, experience))
        left -= time.monotonic() - begin
        if left <= 0 and read_verdicts(output).keys().isdisjoint(mutant.key for mutant in own):
            tell(f"{target.name}: to collect its tests took all of the time, nothing was judged; give more --minutes")


def report(mutants: list[tuple[Target, Mutant]], output: Path) -> str:
    """A table by target and the list of survivors, in Markdown."""
    known = read_verdicts(output)
    lines, survivors, totals = [], [], [0, 0, 0, 0]
    for name in dict.fromkeys(target.name for target, _ in mutants):
        listed = [mutant for target, mutant in mutants if target.name == name]
        verdicts = [known.get(mutant.key) for mutant in listed]
        refused, caught, survived = (verdicts.count(verdict) for verdict in (REFUSED, "caught", "survived"))
        counts = [len(listed), refused, caught, survived]
        totals = [total + count for total, count in zip(totals, counts, strict=True)]
        lines.append(_line(name, *counts))
        survivors += [f"- {mutant}: `{mutant.text}`" for mutant in listed if known.get(mutant.key) == "survived"]
    header = ["| target | mutants | judged | do not compile | caught | survived | share caught |", "|" + "---|" * 7]
    return "\n".join([*header, *lines, _line("all", *totals), "", *survivors])


def _line(name: str, found: int, refused: int, caught: int, survived: int) -> str:
    share = f"{100 * caught / (caught + survived):.1f} %" if caught + survived else "-"
    return f"| {name} | {found} | {refused + caught + survived} | {refused} | {caught} | {survived} | {share} |"


def warm_up() -> None:
    """Import what is slow, so that forks need not; `stand` must stay out, or nothing would be mutated."""
    os.environ.setdefault("TRITON_INTERPRET", "1")
    sys.path.insert(0, str(ROOT / "tests" / "oracles"))
    for name in SLOW_IMPORTS:
        importlib.import_module(name)
    import torch

    torch.set_num_threads(1)
    torch.zeros(2, 1, device="meta").gather(1, torch.zeros(2, 1, dtype=torch.int64, device="meta"))
    if "stand" in sys.modules:
        raise SystemExit("stand was imported too early; nothing would be mutated")
    sys.dont_write_bytecode = False  # so that test modules are rewritten once
    gc.freeze()  # forks need not look through what is imported here


def main() -> None:
    options = arguments()
    read_verdicts(options.output)  # a wrong file is refused before the tests are tried
    mutants = chosen_mutants(options.only)
    if not options.report:
        check_installation()
        warm_up()
        run(mutants, options.output, minutes=options.minutes, seed=options.seed, is_quick=options.quick)
    print(report(mutants, options.output))


if __name__ == "__main__":
    main()
