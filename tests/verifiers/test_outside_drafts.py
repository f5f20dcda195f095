"""The adapted promise of drafts that blend laws from outside of the lookup: all joint drafts of two rows."""

from collections.abc import Callable
from functools import cache, partial

import numpy as np
import pytest
from exact_drafts import RULES, JointDraft, assert_adapted, chi_square, distance_from_target, joint_drafts
from outside_trees import outside_laws
from taught_lookups import taught_lookups
from two_rows import HISTORIES, SAME, worlds

from stand.trees import DraftBatch, OutsideLaws
from stand.verifiers import get_verifier

ANY = OutsideLaws.ANY_TOKEN

# Rows that disagree with the lookup; laws below drawn tokens, below any token, and no law at all.
DEEP = [(-1, 0, [(2, 0.7), (0, 0.2)]), (0, 2, [(1, 0.6), (2, 0.3)]), (0, 0, [(1, 0.9)]), (1, 1, [(0, 0.8)])]
FLAT = [(-1, 0, [(1, 0.4), (2, 0.3), (0, 0.3)])]
LOOSE = [(-1, 0, [(0, 0.5), (1, 0.3)]), (0, ANY, [(2, 0.9)]), (1, ANY, [(0, 0.5), (1, 0.5)])]
LEVELS = [  # a law for each token before, or for any; nodes without children go on as the one of any token
    (-1, 0, [(0, 0.5), (1, 0.3)]), (0, ANY, [(2, 0.9)]), (0, 1, [(0, 0.6), (2, 0.3)]), (1, ANY, [(1, 0.7)]),
    (1, 0, [(2, 0.5), (1, 0.4)]),
]  # fmt: skip
UNSEEN = [(-1, 0, [(5, 0.5), (6, 0.4)]), (0, 5, [(7, 0.9)])]  # tokens that the lookup of three does not know

GROWN = {  # name: laws of the two rows, settings
    "laws at the roots": ([FLAT, FLAT], {"budget": 3}),
    "laws below drawn tokens": ([DEEP, DEEP], {"budget": 4}),
    "one row has none": ([DEEP, []], {"budget": 4}),
    "any token": ([LOOSE, FLAT], {"budget": 4}),
    "levels": ([LEVELS, DEEP], {"budget": 4}),
    "levels, one row alone": ([LEVELS, []], {"budget": 5, "max_depths": [3, 1]}),
    "equal histories, other laws": ([DEEP, LOOSE], {"budget": 3, "histories": SAME}),
    "a floor and prices": ([DEEP, LOOSE], {"budget": 5, "floor": 0.1, "rises": np.full(5, 0.05, np.float32)}),
    "rows that grow alone": ([DEEP, FLAT], {"budget": 6, "max_nodes": [2, 3]}),
    "two children at most": ([DEEP, LOOSE], {"budget": 4, "width": 2}),
    "chains": ([DEEP, LOOSE], {"budget": 3, "width": 1}),
}


@pytest.fixture(scope="module")
def lookups():
    return taught_lookups()


@pytest.fixture(scope="module")
def joint_growth(lookups) -> Callable[[str, str], list[JointDraft]]:
    """(kind, name) -> all joint drafts of `GROWN`, found once."""
    return cache(lambda kind, name: joint_drafts(grown(lookups, kind, name)))


def grown(lookups, kind, name) -> Callable[[int], DraftBatch]:
    """Seed -> joint draft."""
    trees, settings = GROWN[name]
    return partial(grow, lookups[kind][0], kind, outside_laws(trees), **settings)


def grow(lookup, kind, laws, seed, *, histories=HISTORIES, rows=(0, 1), **settings):
    settings = {"budget": 4, **settings}
    return lookup.draft(
        histories, settings.pop("budget"), seed=seed, rows=list(rows), steps=[4, 4], kind=kind, outside=laws, **settings
    )


@pytest.mark.parametrize("kind", ["sampled", "mixed", "deterministic"])
@pytest.mark.parametrize("name", GROWN)
def test_growth_with_laws_from_outside_is_adapted(lookups, joint_growth, kind, name):
    if kind == "mixed" and GROWN[name][1].get("width") == 1:
        pytest.skip("mixed drafts cannot be chains")
    size, joint = lookups[kind][1], joint_growth(kind, name)
    assert kind != "deterministic" or len(joint) == 1
    assert kind != "sampled" or len(joint) > 5
    assert_adapted(joint, worlds(size), RULES)


def test_the_laws_matter(lookups):
    """Other laws, other drafts, and tokens that the lookup has never seen."""
    lookup, _ = lookups["sampled"]
    keys = []
    for trees in ([DEEP, DEEP], [FLAT, FLAT], [LOOSE, LOOSE], [[], []]):
        joint = joint_drafts(partial(grow, lookup, "sampled", outside_laws(trees)))
        keys.append({each.key: round(each.probability, 6) for each in joint})
    assert all(one != other for place, one in enumerate(keys) for other in keys[:place])
    unseen = grow(lookup, "deterministic", outside_laws([UNSEEN, UNSEEN]), 0)
    assert 5 in unseen.token_ids


@pytest.mark.parametrize("name", ["laws below drawn tokens", "a floor and prices"])
def test_drafts_come_as_often_as_their_laws_say(lookups, joint_growth, name):
    draft_with = grown(lookups, "sampled", name)
    statistic, degrees = chi_square(draft_with, joint_growth("sampled", name), num_seeds=4000)
    assert degrees > 10 and statistic < degrees + 5 * np.sqrt(2 * degrees)


# What breaks the promise must be seen: by the sum of the drafts' probabilities, and by the law.

ALONE, ALIKE = outside_laws([FLAT, []]), outside_laws([FLAT, FLAT])


def looks_at_the_noise(lookup, seed):
    """Laws that depend on what the very draft draws first: not made before it."""
    before = grow(lookup, "sampled", ALONE, seed, budget=1, max_depths=[1, 0])
    guess = [(-1, 0, [(int(before.token_ids[1]), 0.9)])]
    return grow(lookup, "sampled", outside_laws([guess, []]), seed, budget=2, max_depths=[1, 0])


def same_noise_in_both_rows(lookup, seed):
    return grow(lookup, "sampled", ALIKE, seed, histories=SAME, rows=(0, 0))


@pytest.mark.parametrize("builder", [looks_at_the_noise, same_noise_in_both_rows])
def test_broken_promises_are_seen(lookups, builder):
    lookup, size = lookups["sampled"]
    joint = joint_drafts(partial(builder, lookup), most_seeds=3000)
    total = sum(each.probability for each in joint)
    statistic, degrees = chi_square(partial(builder, lookup), joint, num_seeds=3000)
    assert abs(total - 1.0) > 0.02 or statistic > degrees + 10 * np.sqrt(2 * degrees)
    assert distance_from_target(joint, worlds(size), get_verifier("traversal")) > 0.005


def test_a_law_that_was_not_drawn_from_is_seen(lookups):
    """The head's own law recorded instead of the blended one."""

    def lying(seed):
        batch = grow(lookups["sampled"][0], "sampled", ALONE, seed, budget=1, max_depths=[1, 0])
        own = dict(FLAT[0][2])
        batch.law[1] = [own.get(int(token), 0.0) for token in batch.support_ids[0]]
        return batch

    statistic, degrees = chi_square(lying, joint_drafts(lying), num_seeds=4000)
    assert statistic > degrees + 10 * np.sqrt(2 * degrees)
