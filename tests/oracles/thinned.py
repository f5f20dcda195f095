"""A share of the cases of every parametrised test, and of the files with long tests, another one in every turn."""

from argparse import ArgumentTypeError
from collections import defaultdict
from collections.abc import Hashable, Iterable
from hashlib import blake2b

LONG_EVERY = 3  # turns in which a file's long tests run once


def thinned(cases: Iterable[tuple[Hashable, str]], *, every: int, turn: int) -> set[str]:
    """Of (test, name of a case) names: of each test's the N-th part, rounded up. Which ones follows from names and
    turn alone, so that no place in a list, such as the second value of every pair, is always left out."""
    names = defaultdict(list)
    for test, name in cases:
        names[test].append(name)
    kept: set[str] = set()
    for of_test in names.values():
        of_test.sort(key=lambda name: blake2b(f"{turn} {name}".encode()).digest())
        kept.update(of_test[: -(-len(of_test) // every)])
    return kept


def files_in_turn(files: Iterable[str], *, turn: int) -> set[str]:
    """A third of the files, another one where the turn has another remainder."""
    names = sorted(set(files), key=lambda name: blake2b(name.encode()).digest())
    return set(names[turn % LONG_EVERY :: LONG_EVERY])


def share(text: str) -> int:
    """Of `--every`."""
    if not text.isdecimal() or int(text) < 1:
        raise ArgumentTypeError(f"must be an integer from 1 on, got {text!r}; 3 takes a third of the cases")
    return int(text)
