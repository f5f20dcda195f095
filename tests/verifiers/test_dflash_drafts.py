"""The adapted promise of drafts from blocks of laws: all joint drafts of two rows, by laws that stand in a table."""

from functools import cache, partial

import numpy as np
import pytest
from draft_requests import draft_request
from draft_worlds import dense_world
from exact_drafts import RULES, JointDraft, assert_adapted, chi_square, distance_from_target, joint_drafts

import stand
from stand.trees import DraftBatch
from stand.verifiers import get_verifier

SIZE = 3
HISTORIES = [np.array([0, 1, 0], np.int32), np.array([2, 0, 2], np.int32)]
SAME = [HISTORIES[0], HISTORIES[0]]
IDS = np.tile(np.arange(SIZE, dtype=np.int32), (2, 1))  # two places
LAWS = np.random.default_rng(3).dirichlet(np.full(SIZE, 10.0), size=(SIZE, 2)).astype(np.float32)  # by pending token
BEFORE = np.array([[0, 1], [1, 2]], np.int32)  # tokens that have laws of their own: not 0 at the second place
PAIRED = np.random.default_rng(4).dirichlet(np.full(SIZE, 10.0), size=(SIZE, 2, 2)).astype(np.float32)


def block(pending: int, *, is_paired: bool) -> tuple[np.ndarray, ...]:
    """Of one row, as `BlockLaws` has them."""
    if not is_paired:
        return IDS, LAWS[pending]
    before = BEFORE.copy()
    before[0] = pending
    return IDS, LAWS[pending], before, np.tile(np.arange(SIZE, dtype=np.int32), (2, 2, 1)), PAIRED[pending]


def draft(seed, *, budget, histories=HISTORIES, depth=3, rows=None, is_paired=False, **settings) -> DraftBatch:
    request = draft_request(histories, seed=seed, max_depth=depth, is_greedy=settings.pop("is_greedy", False))
    if rows is not None:
        request.rows[:] = rows
    drafter = stand.DFlashDrafter("table", budget=budget, **settings)
    drafter._blocks = lambda asked: [block(int(history[-1]), is_paired=is_paired) for history in asked.histories]
    return drafter.draft(request)


CASES = {
    "budget 2": {"budget": 2},
    "budget 3": {"budget": 3},
    "pairs": {"budget": 3, "is_paired": True},
    "pairs, equal rows": {"budget": 3, "is_paired": True, "histories": SAME},
    "depth 1": {"budget": 4, "depth": 1},
    "chains": {"budget": 4, "is_chain": True},
    "chains of pairs": {"budget": 3, "is_chain": True, "is_paired": True},
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


@pytest.mark.parametrize("name", ["budget 3", "chains of pairs"])
def test_drafts_come_as_often_as_their_laws_say(name):
    statistic, degrees = chi_square(partial(draft, **CASES[name]), joint_of(name), num_seeds=1500)
    assert degrees > 10 and statistic < degrees + 5 * np.sqrt(2 * degrees)


@pytest.mark.parametrize("is_paired", [False, True])
def test_a_node_has_the_law_of_its_place_and_of_the_token_before(is_paired):
    batch = draft(0, budget=60, depth=9, is_paired=is_paired)
    assert batch.depths.max() == 2 and batch.num_nodes - 2 == 2 * (3 + 9)
    for row, history in enumerate(HISTORIES):
        tree, pending = batch[row], int(history[-1])
        for node in range(1, tree.num_nodes):
            parent = int(tree.parents[node])
            place = int(parent > 0)
            if parent in tree.parents[1:node]:
                continue  # a later child, drawn from what was left
            known = np.flatnonzero(BEFORE[place] == tree.token_ids[parent]) if place else [0]
            expected = PAIRED[pending, place, known[0]] if is_paired and len(known) else LAWS[pending, place]
            found = dict(zip(tree.support_ids[parent].tolist(), tree.law[node].tolist(), strict=True))
            np.testing.assert_allclose([found[token] for token in range(SIZE)], expected, atol=1e-6)


def test_greedy_chains_hold_the_likeliest_tokens():
    batch = draft(0, budget=4, is_chain=True, is_greedy=True)
    for row, history in enumerate(HISTORIES):
        assert batch[row].token_ids.tolist() == [history[-1], *LAWS[history[-1]].argmax(axis=1).tolist()]
        assert batch[row].parents.tolist() == [-1, 0, 1]


def test_settings_are_checked():
    for settings, message in (
        ({"budget": -1}, "budget must be an integer in .*, got -1"),
        ({"is_chain": 1}, "is_chain must be True or False, got 1"),
        ({"temperature": -1.0}, "temperature must be .*, got -1.0"),
        ({"num_candidates": 0}, "num_candidates must be .*, got 0"),
    ):
        with pytest.raises(ValueError, match=message):
            stand.DFlashDrafter("table", **settings)


# What breaks the promise must be seen: by the sum of the drafts' probabilities, and by the law.


def shared_noise(seed):
    return draft(seed, budget=2, histories=SAME, rows=(0, 0))


def other_law(seed):
    """The law whatever stands before is recorded where that of the token before was drawn from."""
    batch = draft(seed, budget=2, is_paired=True)
    batch.law[1] = LAWS[HISTORIES[0][-1], 0]
    return batch


@pytest.mark.long
def test_broken_promises_are_seen():
    joint = joint_drafts(shared_noise, most_seeds=600)
    assert abs(sum(each.probability for each in joint) - 1.0) > 0.01
    assert distance_from_target(joint, worlds, get_verifier("traversal")) > 0.003
    statistic, degrees = chi_square(other_law, joint_drafts(other_law), num_seeds=4000)
    assert statistic > degrees + 10 * np.sqrt(2 * degrees)
