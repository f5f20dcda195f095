"""Lookups in the middle of their work: kills during a save, forks and other threads while they learn."""

from __future__ import annotations

import os
import signal
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np

from abuse_parts.damaged_files import KEYS, Lookup, must_work, taught
from abuse_parts.trial import HONOURED_ONLY, Trial, Unsound
from stand.trees import BlendedLookup

LONGEST_WAIT_S = 0.02  # before a kill: some saves
ALARM_S = 20  # for a forked child


def kills(
    number: int, folder: Path, *, seed: int, save: Callable[[Lookup, Path], None] | None = None
) -> Iterator[Trial]:
    """SIGKILL at random instants of saves over an older file. save: what is tried; the library's own."""
    save = save or (lambda lookup, path: lookup.save(path))

    def trial(place: int) -> Trial:
        def run() -> None:
            before, after = taught(), taught()
            name = list(before)[place % len(before)]
            text = np.random.default_rng(place).integers(0, 3000, 3000).astype(np.int32)
            after[name].learn([], text)
            path = folder / f"killed-{name.replace(' ', '-')}"
            whole = set()
            for lookup in (after[name], before[name]):
                save(lookup, path)
                whole.add(path.read_bytes())
            begun, begin = os.pipe()
            child = os.fork()
            if child == 0:
                os.write(begin, b".")
                while True:
                    save(after[name], path)
                    save(before[name], path)
            os.read(begun, 1)
            time.sleep(float(np.random.default_rng([seed, place]).uniform(0, LONGEST_WAIT_S)))
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            if path.read_bytes() not in whole:
                raise Unsound("the file is neither the one that was there nor the one that was written")
            loaded = type(before[name]).load(path)
            must_work(loaded)
            save(before[name], path)
            if left := [other.name for other in folder.glob(f".{path.name}.*")]:
                raise Unsound(f"unfinished files stay: {left}")

        return Trial("killed during a save", f"number {place}", run, HONOURED_ONLY)

    return (trial(place) for place in range(number))


def busy(lookups: list[Lookup], work: Callable[[], None]) -> None:
    """Do `work` while one thread per lookup learns."""
    is_over = False
    text = np.random.default_rng(0).integers(0, 500, 2000).astype(np.int32)

    def learn(lookup: Lookup) -> None:
        while not is_over:
            lookup.learn([], text)

    threads = [threading.Thread(target=learn, args=(lookup,)) for lookup in lookups]
    for thread in threads:
        thread.start()
    try:
        work()
    finally:
        is_over = True
        for thread in threads:
            thread.join()


def forks(number: int) -> Iterator[Trial]:
    """Forks while other threads learn: the child must be able to go on."""

    def fork(lookups: list[Lookup]) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # of forks beside threads: that is the point
            child = os.fork()
        if child == 0:
            signal.alarm(ALARM_S)
            status = 1
            try:
                for lookup in lookups:
                    must_work(lookup)
                status = 0
            finally:
                os._exit(status)
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        if status != 0:
            raise Unsound(f"the child ended with {status}")

    def run() -> None:
        lookups = list(taught().values())
        busy(lookups, lambda: fork(lookups))

    return (Trial("forked while threads learn", f"number {place}", run, HONOURED_ONLY) for place in range(number))


def threads(number: int, *, seed: int) -> Iterator[Trial]:
    """Random verbs of a lookup while others learn from it."""

    def trial(place: int) -> Trial:
        def run() -> None:
            rng = np.random.default_rng([seed, place])
            lookups = list(taught().values())

            def work() -> None:
                for verb in rng.integers(0, 5, 60):
                    for lookup in lookups:
                        one_verb(lookup, int(verb))

            busy([*lookups, *lookups], work)
            for lookup in lookups:
                must_work(lookup)

        return Trial("used by several threads", f"number {place}", run, HONOURED_ONLY)

    return (trial(place) for place in range(number))


def one_verb(lookup: Lookup, verb: int) -> None:
    if verb == 0:
        must_work(lookup)
    elif verb == 1:
        len(lookup), lookup.nbytes, repr(lookup)
    elif verb == 2 and isinstance(lookup, BlendedLookup):
        drafted = lookup.draft([np.array([3, 5], np.int32)], 8, **KEYS)
        lookup.record_outcome(drafted, [np.empty(0, np.int32)], [7], kind="deterministic")
    elif verb == 3 and len(lookup) > 20_000:
        lookup.clear()
    else:
        lookup.learn([1, 2], [3, 4])
