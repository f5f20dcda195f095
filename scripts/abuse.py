"""Try to break the engine's public door, the compiled core and the lookup files, and count what comes of it.

    python scripts/abuse.py --tries 20000 --kills 300 --seed 1

Every try is seeded and runs in a child process, so that a crash or a hang is one more count. It ends as *honoured* (it
was taken, and what came of it is sound), *refused by name* (a ValueError or TypeError that says rule, what it got, and
a remedy), *refused bluntly* (such an error that says less; fine for the core, not for `wrap` and `generate`), or
*wrong*: any other exception, a crash, a hang, unsound results, or silence where something had to be refused.

Damaged files: half of --tries; bits flipped, ends cut off, contents changed under a right checksum. Core: the other
half; calls whose arguments are replaced at random. Besides: kills during a save, forks and threads while lookups learn,
and a table of what users pass to `wrap` and `generate`. Table and what is wrong go to stdout, progress to stderr; the
last stdout line is one JSON document. Exit status 1 where anything is wrong.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections import Counter
from collections.abc import Iterable, Iterator
from itertools import chain
from pathlib import Path

import measuring.interruption  # noqa: F401  (before what loads slowly)
from abuse_parts.child import run_all
from abuse_parts.core_calls import core_calls
from abuse_parts.damaged_files import damaged_files
from abuse_parts.interruptions import forks, kills, threads
from abuse_parts.trial import VERDICTS, WRONG, Outcome, Trial
from measuring.interruption import run_command
from measuring.progress import Progress
from measuring.text_table import format_table

SHOWN = 20  # of what is wrong
SAID_EVERY = 500


class Tally:
    """Verdicts by kind of try, and what was wrong."""

    def __init__(self, total: int) -> None:
        self.counts: dict[str, Counter[str]] = {}
        self.wrong: list[dict[str, str]] = []
        self._progress = Progress(total)
        self._num_unsaid = 0

    def add(self, trial: Trial, outcome: Outcome) -> None:
        self.counts.setdefault(trial.kind, Counter())[outcome.verdict] += 1
        self._num_unsaid += 1
        if outcome.verdict == WRONG:
            self.wrong.append({"kind": trial.kind, "try": trial.name, "what": outcome.detail})
        if self._num_unsaid == SAID_EVERY:
            self._progress.add(self._num_unsaid, f"{trial.kind}: {len(self.wrong)} wrong so far")
            self._num_unsaid = 0

    def table(self) -> str:
        rows = [[kind, count.total(), *(count[one] for one in VERDICTS)] for kind, count in self.counts.items()]
        return format_table(["tries", "number", *VERDICTS], rows)


def trials(options: argparse.Namespace, folder: Path) -> Iterator[Trial]:
    num_files = options.tries // 2
    parts: list[Iterable[Trial]] = [
        damaged_files(num_files, folder, seed=options.seed),
        core_calls(options.tries - num_files, seed=options.seed),
        kills(options.kills, folder, seed=options.seed),
        forks(options.forks),
        threads(options.threads, seed=options.seed),
    ]
    if options.calls:
        from abuse_parts.door_calls import door_calls  # here: torch and a model are not loaded where nobody asks for it

        parts.append(door_calls(options.calls, seed=options.seed))
    return chain.from_iterable(parts)


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--tries", type=int, default=2000, help="damaged files and calls of the core, half each (%(default)s)"
    )
    parser.add_argument("--kills", type=int, default=50, help="during a save (%(default)s)")
    parser.add_argument("--forks", type=int, default=20, help="forks while a lookup learns (%(default)s)")
    parser.add_argument("--threads", type=int, default=20, help="tries with several threads (%(default)s)")
    parser.add_argument(
        "--calls", type=int, default=100, help="of generate with random settings, after its tables (%(default)s)"
    )
    parser.add_argument("--seed", type=int, default=0, help="of the prompts and damages (%(default)s)")
    parsed = parser.parse_args(arguments)
    if min(parsed.tries, parsed.kills, parsed.forks, parsed.threads, parsed.calls) < 0:
        parser.error("numbers of tries must be at least 0, got a negative one; 0 leaves a part out")
    return parsed


def try_all(options: argparse.Namespace, tally: Tally) -> None:
    with tempfile.TemporaryDirectory() as folder:
        run_all(trials(options, Path(folder)), tally.add)


def report(tally: Tally) -> None:
    print(tally.table())
    for one in tally.wrong[:SHOWN]:
        print(f"wrong: {one['kind']}: {one['try']}: {one['what']}")
    if len(tally.wrong) > SHOWN:
        print(f"... and {len(tally.wrong) - SHOWN} more, see the JSON document")
    print(json.dumps({"counts": tally.counts, "wrong": tally.wrong}))


def main(arguments: list[str] | None = None) -> int:
    options = parse(arguments)
    tally = Tally(options.tries + options.kills + options.forks + options.threads + options.calls)
    status = run_command("abuse", lambda interruption: try_all(options, tally))
    report(tally)  # of a run that ended early, too
    return status or (1 if tally.wrong else 0)


if __name__ == "__main__":
    sys.exit(main())
