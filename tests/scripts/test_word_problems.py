"""The written word problems: every answer is worked out here from the numbers of the statement."""

import math
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).resolve().parents[2] / "scripts"
from workloads.problem_sets import read_tasks  # noqa: E402


def only(values):
    """The one value that satisfies a statement."""
    (value,) = values
    return value


# The opening of a statement, and its answer: by formula, or by trying values.
WORKED_OUT = {
    "A bakery": 14 * 6 + 5,
    "Nadia is": 3 * only(brother for brother in range(100) if (3 * brother + 8) + (brother + 8) == 48),
    "A train": (215 - 48 + 31) // 2,
    "Two numbers": only(larger for larger in range(71) if larger - (70 - larger) == 16),
    "A gardener": sum(4 + 3 * row for row in range(9)),
    "A jacket": 120 * 75 // 100 + 6,
    "A pump": 540 // (18 - 3),
    "Omar has": only(tens for tens in range(23) if 10 * tens + 5 * (22 - tens) == 160),
    "A rectangle": only((width + 4) * width for width in range(27) if 2 * (width + width + 4) == 52),
    "A school": math.ceil(173 / 38),
    "Lena reads": only(day for day in range(1, 100) if 24 + 7 * (day - 1) == 73),
    "At a fair": only(
        drink
        for drink in range(42)
        for ticket in range(42)
        if 5 * ticket + 2 * drink == 41 and 3 * ticket + 2 * drink == 27
    ),
}

TASKS = read_tasks(str(SCRIPTS / "workloads" / "word_problems.jsonl"))


def test_every_problem_is_worked_out_once():
    opened = [[opening for opening in WORKED_OUT if task.statement.startswith(opening)] for task in TASKS]
    assert sorted(opening for found in opened for opening in found) == sorted(WORKED_OUT)
    assert all(len(found) == 1 for found in opened)


@pytest.mark.parametrize("task", TASKS, ids=lambda task: task.statement[:12])
def test_the_answer_is_right(task):
    (answer,) = (answer for opening, answer in WORKED_OUT.items() if task.statement.startswith(opening))
    assert task.answer == answer
