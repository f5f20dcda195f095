"""The blended lookup tree as a drafter: it learns what became of its drafts, and only where it is taught."""

import numpy as np
import pytest

from stand.drafters.blended import BlendedDrafter
from stand.trees import BlendedLookup


class Witness:
    """A lookup that notes what is judged."""

    def __init__(self):
        self.lookup = BlendedLookup()
        self.lookup.learn([], np.tile(np.arange(30, dtype=np.int32), 20))
        self.row_size = self.lookup.row_size
        self.judged = []

    def draft(self, *arguments, **named):
        return self.lookup.draft(*arguments, **named)

    def learn_batch(self, *arguments, **named):
        self.lookup.learn_batch(*arguments, **named)

    def judge(self, histories, runs, *, scopes):
        rows = zip(histories, runs, scopes, strict=True)
        self.judged.append([(history.tolist(), run.tolist(), scope) for history, run, scope in rows])
        self.lookup.judge(histories, runs, scopes=scopes)


def run_step(drafter, histories, rows, *, learns=True):
    rows = np.array(rows, np.int64)
    batch = drafter.draft(
        histories, seed=0, rows=rows, steps=rows, problems=rows + 300, max_depths=rows + 9, is_greedy=False
    )
    if learns:
        ids = np.tile(np.array([[1, 2]], np.int32), (batch.num_nodes, 1))
        probabilities = np.tile(np.array([[0.6, 0.4]], np.float32), (batch.num_nodes, 1))
        drafter.learn(batch, [history[:-1] for history in histories], ids, probabilities, problems=rows + 300)


@pytest.fixture
def histories():
    return [np.arange(first, first + 20, dtype=np.int32) % 30 for first in (0, 5, 9)]


def test_what_was_committed_after_a_draft_is_judged_before_the_next(histories):
    lookup = Witness()
    drafter = BlendedDrafter(lookup, budget=12)
    run_step(drafter, histories, [0, 1, 2])
    assert lookup.judged == []
    later = [np.append(histories[0], [7, 8]).astype(np.int32), np.append(histories[2], [9]).astype(np.int32)]
    run_step(drafter, later, [0, 2])  # row 1 has ended
    first, third = ((histories[row].tolist(), tail, 300 + row - 255) for row, tail in ((0, [7, 8]), (2, [9])))
    assert lookup.judged == [[first, third]]
    run_step(drafter, [later[0][:5]], [0])  # another call: its rows are no longer than those before
    assert lookup.judged[1:] == [[]]


def test_who_does_not_teach_gets_the_same_drafts_again(histories):
    lookup = Witness()
    drafter = BlendedDrafter(lookup, budget=12)
    for _ in range(3):
        run_step(drafter, histories, [0, 1, 2], learns=False)
        histories = [np.append(history, [3]).astype(np.int32) for history in histories]
    assert lookup.judged == []
