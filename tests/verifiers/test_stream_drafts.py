"""The adapted promise of drafts from streams: all joint drafts of two rows, by laws that stand in a table."""

from functools import cache, partial

import numpy as np
import pytest
from draft_requests import draft_request
from draft_worlds import dense_world
from exact_drafts import (
    RULES,
    SET_RULES,
    JointDraft,
    assert_adapted,
    assert_refused_where_widths_are_not_settled,
    chi_square,
    distance_from_target,
    joint_drafts,
)

import stand
from stand.drafters.streams import drafter as streaming
from stand.trees import DraftBatch
from stand.verifiers import get_verifier

SIZE = 3
HISTORIES = [np.array([0, 1, 0], np.int32), np.array([2, 0, 2], np.int32)]
SAME = [HISTORIES[0], HISTORIES[0]]
LAWS = np.random.default_rng(3).dirichlet(np.full(SIZE, 10.0), size=(SIZE, 2)).astype(np.float32)  # two streams


class TableRider:
    def __init__(self, unknown=()):
        self.unknown = unknown

    def laws_of(self, request):
        ids = np.tile(np.arange(SIZE, dtype=np.int32), (2, 1))
        tokens = [history[0] for history in request.histories]
        return [None if token in self.unknown else (ids, LAWS[token]) for token in tokens]


def draft(seed, *, budget, histories=HISTORIES, depth=3, rows=None, unknown=()) -> DraftBatch:
    request = draft_request(histories, seed=seed)
    request.max_depths[:] = depth
    if rows is not None:
        request.rows[:] = rows
    drafter = stand.StreamingDrafter("table", budget=budget)
    drafter.rider = TableRider(unknown)
    return drafter.draft(request)


CASES = {
    "budget 2": {"budget": 2},
    "budget 3": {"budget": 3},
    "equal rows": {"budget": 3, "histories": SAME},
    "depth 1": {"budget": 4, "depth": 1},
    "one row has no laws": {"budget": 4, "unknown": (2,)},
}
worlds = [dense_world(seed, SIZE, 2).as_float() for seed in (5, 6)]


@cache
def joint_of(name: str) -> list[JointDraft]:
    return joint_drafts(partial(draft, **CASES[name]))


@pytest.mark.parametrize("name", CASES)
def test_growth_is_adapted(name):
    joint = joint_of(name)
    assert len(joint) > 5
    assert_adapted(joint, worlds, RULES)


@pytest.mark.parametrize("rule", SET_RULES)
def test_rules_over_sets_refuse_grown_drafts(rule):
    joint = joint_drafts(partial(draft, budget=3, depth=1))
    assert_refused_where_widths_are_not_settled(joint, worlds, rule)


def test_drafts_come_as_often_as_their_laws_say():
    statistic, degrees = chi_square(partial(draft, budget=3), joint_of("budget 3"), num_seeds=1500)
    assert degrees > 10 and statistic < degrees + 5 * np.sqrt(2 * degrees)


def test_drafts_are_two_deep_and_use_the_budget():
    batch = draft(0, budget=40, depth=9)
    assert batch.depths.max() == 2 and batch.num_nodes - 2 == 2 * (3 + 9)
    assert draft(0, budget=40, depth=9, unknown=(0, 2)).num_nodes == 2


# What breaks the promise must be seen: by the sum of the drafts' probabilities, and by the law.


def shared_noise(seed):
    return draft(seed, budget=2, histories=SAME, rows=(0, 0))


def pruned(seed, monkeypatch):
    """An early exit that drops a drawn node by its token, as the paper's pruning does."""

    def grow(drafts, law_of, budget):
        whole_growth(drafts, law_of, budget)
        for each in drafts:
            if len(each.token_ids) > 1 and each.token_ids[-1] == 0:
                for column in (each.token_ids, each.parents, each.depths, each.chances, each.laws):
                    column.pop()

    whole_growth = streaming.grow_best_first
    with monkeypatch.context() as patched:
        patched.setattr(streaming, "grow_best_first", grow)
        return draft(seed, budget=3)


def test_broken_promises_are_seen(monkeypatch):
    for builder in (shared_noise, partial(pruned, monkeypatch=monkeypatch)):
        joint = joint_drafts(builder, most_seeds=600)
        assert abs(sum(each.probability for each in joint) - 1.0) > 0.01
        assert distance_from_target(joint, worlds, get_verifier("traversal")) > 0.003
