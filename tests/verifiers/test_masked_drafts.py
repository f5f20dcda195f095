"""The adapted promise of drafts that leave out what masks forbid: all joint drafts of two rows."""

from collections.abc import Callable
from functools import cache, partial

import numpy as np
import pytest
from exact_drafts import RULES, JointDraft, assert_adapted, chi_square, distance_from_target, joint_drafts
from planned_masks import planned_masks
from taught_lookups import taught_lookups
from two_rows import HISTORIES, SAME, worlds

from stand.trees import DraftBatch, TokenMasks
from stand.verifiers import get_verifier

ALL = set(range(32))  # that a mask has bits for

GROWN = {  # name: tokens that masks forbid, by what the sum of a path is modulo their number; settings
    "one token": ([{0}], {"budget": 4}),
    "by the path": ([{0}, {2}, {1}], {"budget": 4}),
    "all but one": ([{0, 1}, {1, 2}, {0, 2}], {"budget": 4}),
    "everything at some nodes": ([set(), {0, 1, 2}], {"budget": 4}),
    "one token allowed": ([{0}, ALL - {1}, {2}], {"budget": 4}),
    "few tokens allowed": ([ALL - {1, 2}, {1}], {"budget": 3}),
    "equal histories": ([{1}, {0}], {"budget": 3, "histories": SAME}),
    "a floor and prices": ([{1}, {0}], {"budget": 5, "floor": 0.1, "rises": np.full(5, 0.05, np.float32)}),
    "rows that grow alone": ([{0}, set()], {"budget": 6, "max_nodes": [2, 3]}),
    "two children at most": ([set(), {1}], {"budget": 4, "width": 2}),
    "chains": ([{2}, {0}], {"budget": 3, "width": 1}),
}


@pytest.fixture(scope="module")
def lookups():
    return taught_lookups()


@pytest.fixture(scope="module")
def joint_growth(lookups) -> Callable[[str, str], list[JointDraft]]:
    """(kind, name) -> all joint drafts of `GROWN`, found once."""
    return cache(lambda kind, name: joint_drafts(grown(lookups, kind, name)))


def masks_at(plan: DraftBatch, forbidden) -> TokenMasks:
    masks, _ = planned_masks(plan, lambda row, path: ALL - forbidden[sum(path) % len(forbidden)])
    return masks


def draft(lookup, kind, seed, *, masks=None, histories=HISTORIES, rows=(0, 1), budget=4, **settings) -> DraftBatch:
    place = {"seed": seed, "rows": list(rows), "steps": [4, 4]}
    return lookup.draft(histories, budget, kind=kind, masks=masks, **place, **settings)


def masked(lookup, kind, forbidden, seed, **settings) -> DraftBatch:
    """As the default drafter does: planned without noise."""
    masks = masks_at(draft(lookup, "deterministic", 0, **settings), forbidden)
    return draft(lookup, kind, seed, masks=masks, **settings)


def grown(lookups, kind, name) -> Callable[[int], DraftBatch]:
    """Seed -> joint draft."""
    forbidden, settings = GROWN[name]
    return partial(masked, lookups[kind][0], kind, forbidden, **settings)


@pytest.mark.parametrize("kind", ["sampled", "mixed", "deterministic"])
@pytest.mark.parametrize("name", GROWN)
def test_growth_with_masks_is_adapted(lookups, joint_growth, kind, name):
    if kind == "mixed" and GROWN[name][1].get("width") == 1:
        pytest.skip("mixed drafts cannot be chains")
    size, joint = lookups[kind][1], joint_growth(kind, name)
    assert kind != "deterministic" or len(joint) == 1
    assert_adapted(joint, worlds(size), RULES)


def test_the_masks_matter(lookups, joint_growth):
    """Other masks, other drafts; and none of them holds what its masks forbid at the roots."""
    keys = []
    for name in ("one token", "all but one", "everything at some nodes", "two children at most", "chains"):
        joint = joint_growth("sampled", name)
        keys.append({each.key: round(each.probability, 6) for each in joint})
        forbidden = GROWN[name][0][0]
        batch = grown(lookups, "sampled", name)(5)
        firsts = batch.token_ids[batch.depths == 1]
        assert len(firsts) and not forbidden & set(firsts.tolist())
    assert all(one != other for place, one in enumerate(keys) for other in keys[:place])
    assert max(map(len, keys)) > 5


@pytest.mark.parametrize("name", ["everything at some nodes", "two children at most"])
def test_drafts_come_as_often_as_their_laws_say(lookups, joint_growth, name):
    statistic, degrees = chi_square(grown(lookups, "sampled", name), joint_growth("sampled", name), num_seeds=4000)
    assert degrees > 5 and statistic < degrees + 5 * np.sqrt(2 * degrees)


# What breaks the promise must be seen: by the sum of the drafts' probabilities, and by the law.


def planned_by_the_draft(lookup, seed):
    """Masks where the very draft has nodes, drawn again with the same noise: whether a node has one follows from it."""
    settings = {"budget": 2, "max_depths": [2, 0], "width": 1}
    before = draft(lookup, "sampled", seed, **settings)
    return draft(lookup, "sampled", seed, masks=masks_at(before, [{0}]), **settings)


def test_masks_that_follow_from_the_draw_are_seen(lookups):
    lookup, size = lookups["sampled"]
    joint = joint_drafts(partial(planned_by_the_draft, lookup), most_seeds=3000)
    total = sum(each.probability for each in joint)
    statistic, degrees = chi_square(partial(planned_by_the_draft, lookup), joint, num_seeds=3000)
    assert abs(total - 1.0) > 0.02 or statistic > degrees + 10 * np.sqrt(2 * degrees)
    assert distance_from_target(joint, worlds(size), get_verifier("traversal")) > 0.005


@pytest.mark.long
def test_forbidden_tokens_that_are_taken_out_of_a_drawn_draft_are_seen(lookups):
    """Their laws still give them mass."""

    def thinned(seed):
        batch = draft(lookups["sampled"][0], "sampled", seed, budget=1, max_depths=[1, 0])
        is_forbidden = batch.num_nodes > 2 and batch.token_ids[1] == 0
        return DraftBatch.pending([int(token) for token in (0, 0)]) if is_forbidden else batch

    statistic, degrees = chi_square(thinned, joint_drafts(thinned), num_seeds=4000)
    assert statistic > degrees + 10 * np.sqrt(2 * degrees)
