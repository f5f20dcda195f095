"""Checks that take a part of the cases leave no test out, and no case for ever."""

from argparse import ArgumentTypeError

import pytest
from every_day import every_day
from thinned import files_in_turn, share, thinned

CASES = [(f"test_{test}", f"test_{test}[{case}]") for test, count in enumerate((1, 2, 7, 40)) for case in range(count)]


def test_each_test_has_its_share():
    for every, wanted in ((1, [1, 2, 7, 40]), (2, [1, 1, 4, 20]), (3, [1, 1, 3, 14]), (100, [1, 1, 1, 1])):
        kept = thinned(CASES, every=every, turn=5)
        assert [sum(name.startswith(f"test_{test}[") for name in kept) for test in range(4)] == wanted


def test_every_case_has_its_turn():
    turns = [thinned(CASES, every=3, turn=turn) for turn in range(30)]
    assert set.union(*turns) == {name for _, name in CASES} and len(set(map(frozenset, turns))) == 30
    assert thinned(reversed(CASES), every=3, turn=7) == turns[7]


def test_every_file_has_its_turn():
    files = [f"test_{number}.py" for number in range(8)]
    turns = [files_in_turn(files * 2, turn=turn) for turn in range(6)]
    assert sorted(len(turn) for turn in turns[:3]) == [2, 3, 3] and set.union(*turns[:3]) == set(files)
    assert turns[3:] == turns[:3] and files_in_turn(reversed(files), turn=1) == turns[1]
    assert files_in_turn([], turn=0) == set()


def test_less_than_all_cases_is_a_share():
    assert share("1") == 1 and share("12") == 12
    for wrong in ("0", "-1", "1.5", "", "a"):  # 0 divides nothing, -1 would leave every test out
        with pytest.raises(ArgumentTypeError, match=f"must be an integer from 1 on, got '{wrong}'; 3 takes a third"):
            share(wrong)


def test_some_case_runs_every_day():
    first, second = every_day(iter(["one", "two"]), "two", "three")
    assert first.values == ("one",) and first.marks[0].name == "slow" and second == "two"
    with pytest.raises(ValueError, match=r"daily must name one of the cases \['one', 'two'\], got \['three'\]"):
        every_day(["one", "two"], "three")
