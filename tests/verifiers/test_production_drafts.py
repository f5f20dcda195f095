"""The adapted promise of the shipped drafters: all joint drafts of two rows, and the law that verification makes."""

import dataclasses
from collections.abc import Callable
from functools import cache, partial
from itertools import product

import numpy as np
import pytest
from exact_drafts import (
    ROUNDING,
    RULES,
    SET_RULES,
    JointDraft,
    assert_adapted,
    chi_square,
    distance_from_target,
    joint_drafts,
)
from taught_lookups import SCOPES, laws_of, taught_lookups
from two_rows import HISTORIES, SAME, worlds

from stand.trees import BlendedLookup, LookupTree, TreeShape
from stand.verifiers import get_verifier

BATCH_RULES = [*RULES, *SET_RULES]
INDEPENDENT_RULES = [*RULES, "specinfer", "spectr"]
CHAIN_RULES = [*BATCH_RULES, "specinfer", "spectr", "token", "block"]


@pytest.fixture(scope="module")
def blended() -> dict[str, tuple[BlendedLookup, int]]:
    return taught_lookups()


def draft_blended(lookup, kind, *, seed, budget=4, histories=HISTORIES, rows=(0, 1), steps=(4, 4), **settings):
    return lookup.draft(histories, budget, seed=seed, rows=list(rows), steps=list(steps), kind=kind, **settings)


GROWTH = {  # name: settings of `draft_blended`
    "budget 2": {"budget": 2},
    "budget 4": {},
    "budget 8": {"budget": 8, "max_depths": [2, 2]},
    "floor": {"budget": 6, "floor": 0.15},
    "higher floor": {"budget": 6, "floor": 0.25},
    "depths": {"budget": 6, "max_depths": [1, 3]},
    "one row only": {"budget": 6, "max_depths": [0, 2]},
    "one row, deep": {"budget": 5, "max_depths": [0, 3]},
    "rises": {"budget": 6, "rises": np.full(6, 0.05, np.float32)},
    "steeper rises": {"budget": 6, "rises": np.linspace(0.02, 0.14, 6, dtype=np.float32)},
    "scopes": {"budget": 5, "scopes": SCOPES},
    "equal histories": {"histories": SAME},
    "two steps of one row": {"histories": SAME, "rows": (3, 3), "steps": (0, 1)},
    "caps below the budget": {"budget": 6, "max_nodes": [1, 3]},
    "one cap for all, rows compete": {"budget": 5, "max_nodes": 3},
    "a row without nodes": {"budget": 6, "max_nodes": [0, 3]},
    "a cap, a floor and prices": {
        "budget": 6,
        "max_nodes": [2, 3],
        "floor": 0.1,
        "rises": np.full(6, 0.05, np.float32),
    },
    "two children at most": {"budget": 6, "width": 2, "max_depths": [2, 2]},
    "two children at most, caps": {"budget": 6, "width": 2, "max_nodes": [3, 2]},
}
CHAINS = {
    "chains": {"budget": 4, "width": 1},
    "chains under caps": {"budget": 6, "width": 1, "max_nodes": [1, 3]},
    "chains under a cap, rows compete": {"budget": 3, "width": 1, "max_nodes": 2},
    "chains above a floor": {"budget": 6, "width": 1, "max_nodes": 3, "floor": 0.2},
    "chains that cost": {"budget": 6, "width": 1, "rises": np.full(6, 0.08, np.float32)},
}


def grown(lookup, kind, name, seed):
    return draft_blended(lookup, kind, seed=seed, **(GROWTH | CHAINS)[name])


@pytest.fixture(scope="module")
def joint_growth(blended) -> Callable[[str, str], list[JointDraft]]:
    """(kind, name) -> all joint drafts of `GROWTH` and `CHAINS`, found once."""
    return cache(lambda kind, name: joint_drafts(partial(grown, blended[kind][0], kind, name)))


@pytest.mark.parametrize("kind", ["sampled", "mixed", "deterministic"])
@pytest.mark.parametrize("name", GROWTH)
def test_growth_under_one_budget_is_adapted(blended, joint_growth, kind, name):
    size, joint = blended[kind][1], joint_growth(kind, name)
    assert kind != "deterministic" or len(joint) == 1
    assert kind != "sampled" or len(joint) > 5
    assert_adapted(joint, worlds(size), RULES)


@pytest.mark.parametrize("kind", ["sampled", "deterministic"])
@pytest.mark.parametrize("name", CHAINS)
def test_grown_chains_are_adapted(blended, joint_growth, kind, name):
    """For the rules that take chains alone too; there is one child per node, and no other choice is hidden."""
    size, joint = blended[kind][1], joint_growth(kind, name)
    assert kind == "deterministic" or len(joint) > 5
    for each in joint:
        for draft in each.drafts:
            assert draft.parents.tolist() == list(range(-1, draft.num_nodes - 1))
    assert_adapted(joint, worlds(size), CHAIN_RULES if kind == "sampled" else ("traversal", "block", "match"))


def test_settings_matter(joint_growth):
    """Drafts of many sizes, kinds that draw: the enumeration above is of more than one tree."""
    sizes, counts = {}, {}
    for kind, name in product(["sampled", "mixed"], GROWTH):
        joint = joint_growth(kind, name)
        sizes[kind, name] = {tuple(draft.num_nodes for draft in each.drafts) for each in joint}
        counts[kind, name] = len(joint)
    plain = sizes["sampled", "budget 4"]
    assert len(plain) > 2  # what one row draws decides what the other one gets
    assert all(sizes["sampled", name] != plain for name in ("floor", "depths", "rises", "scopes", "budget 8"))
    for kind in ("sampled", "mixed"):
        assert sizes[kind, "caps below the budget"] == {(2, 4)} and sizes[kind, "a row without nodes"] == {(1, 4)}
    assert len(sizes["sampled", "one cap for all, rows compete"]) == 2  # who comes first has three
    assert len(sizes["sampled", "steeper rises"]) > 2 and counts["sampled", "budget 8"] > 200, counts
    assert sum(counts["mixed", name] > 5 for name in GROWTH) > 8


SHAPED = {  # kind, widths of the two rows' shapes, rules
    "sampled": ("sampled", ([2], [2]), BATCH_RULES),
    "sampled, more than there are": ("sampled", ([4], [1]), BATCH_RULES),
    "sampled, two levels": ("sampled", ([2, 1], [1]), BATCH_RULES),
    "sampled, three levels": ("sampled", ([1, 2, 1], []), BATCH_RULES),
    "chains": ("sampled", ([1, 1, 1], [1]), CHAIN_RULES),
    "mixed": ("mixed", ([2, 2], [3]), BATCH_RULES),
    "mixed chains": ("mixed", ([1, 1], [1, 1]), CHAIN_RULES),
    "independent": ("independent", ([2, 1], []), INDEPENDENT_RULES),
    "independent, one level": ("independent", ([2], [2]), INDEPENDENT_RULES),
    "deterministic": ("deterministic", ([2, 2], [1, 1]), BATCH_RULES),
}


def shaped_lookup() -> LookupTree:
    lookup = LookupTree(orders=(1,))
    for token in range(3):
        *_, best, probabilities = next(laws_of(lambda *_, token=token: np.roll([4.0, 3.0, 2.0], token), 3))
        lookup.learn([token], best[0, :1], top_ids=best, top_probs=probabilities)
    return lookup


@cache
def shapes_of(name: str) -> list[TreeShape]:
    return [TreeShape.from_branching(list(row)) for row in SHAPED[name][1]]


def shaped(lookup, name, histories, seed):
    kind, shapes = SHAPED[name][0], shapes_of(name)
    keys = {"rows": [0, 1], "steps": [2, 2]} if histories is HISTORIES else {"rows": [5, 5], "steps": [0, 1]}
    return lookup.draft(histories, shapes, seed=seed, kind=kind, **keys)


@pytest.fixture(scope="module")
def joint_shaped() -> Callable[[str, bool], list[JointDraft]]:
    """(name, whether both rows have one history) -> all joint drafts of `SHAPED`, found once."""
    lookup = shaped_lookup()
    return cache(lambda name, is_same: joint_drafts(partial(shaped, lookup, name, SAME if is_same else HISTORIES)))


@pytest.mark.parametrize("name", SHAPED)
@pytest.mark.parametrize("is_same", [False, True], ids=["two histories", "equal histories"])
def test_drafts_of_fixed_shapes_are_adapted(joint_shaped, name, is_same):
    assert_adapted(joint_shaped(name, is_same), worlds(3), SHAPED[name][-1])


# Builders that break the promise must be seen: by the sum of their drafts' probabilities, and by the law.


def shared_noise(lookup, seed):
    """One row's noise in both rows."""
    return draft_blended(lookup, "sampled", seed=seed, histories=SAME, rows=(0, 0))


def looks_ahead(lookup, seed):
    """Stops where the next node would be token 0."""
    settings = {"seed": seed, "max_depths": [1, 0]}
    longer = draft_blended(lookup, "sampled", budget=2, **settings)
    return draft_blended(lookup, "sampled", budget=1, **settings) if longer.token_ids[2] == 0 else longer


def drops_the_unlikely(lookup, seed):
    """The last drawn child goes unless its law makes it likely."""
    batch = draft_blended(lookup, "sampled", seed=seed, budget=2, max_depths=[1, 0])
    column = np.flatnonzero(batch.support_ids[0] == batch.token_ids[2])[0]
    shorter = draft_blended(lookup, "sampled", seed=seed, budget=1, max_depths=[1, 0])
    return shorter if batch.law[2, column] < 0.5 else batch


@pytest.mark.parametrize("builder", [shared_noise, looks_ahead, drops_the_unlikely])
def test_broken_promises_are_seen(blended, builder):
    lookup, size = blended["sampled"]
    joint = joint_drafts(partial(builder, lookup), most_seeds=3000)
    assert abs(sum(each.probability for each in joint) - 1.0) > 0.02
    assert distance_from_target(joint, worlds(size), get_verifier("traversal")) > 0.005


# Recorded laws are those that tokens are drawn from.

NUM_SEEDS = 8000


def is_likely(statistic: float, freedom: int) -> bool:
    """Below the chi-square's upper 1e-6, by Wilson and Hilferty's approximation."""
    return statistic < freedom * (1 - 2 / (9 * freedom) + 4.75 * (2 / (9 * freedom)) ** 0.5) ** 3


@pytest.mark.parametrize("case", [("sampled", "budget 8"), ("sampled", "steeper rises"), ("mixed", "budget 4")])
def test_grown_drafts_come_as_often_as_their_laws_say(blended, joint_growth, case):
    kind, name = case
    draft = partial(grown, blended[kind][0], kind, name)
    assert is_likely(*chi_square(draft, joint_growth(kind, name), num_seeds=NUM_SEEDS))


@pytest.mark.parametrize("name", ["sampled, two levels", "mixed", "independent"])
def test_shaped_drafts_come_as_often_as_their_laws_say(joint_shaped, name):
    draft = partial(shaped, shaped_lookup(), name, HISTORIES)
    assert is_likely(*chi_square(draft, joint_shaped(name, False), num_seeds=NUM_SEEDS))


def test_a_law_that_was_not_drawn_from_is_seen(blended):
    """A little flatter than the truth; the sum of products cannot tell."""

    def flatter(seed):
        batch = grown(blended["sampled"][0], "sampled", "budget 4", seed)
        law = np.where(batch.law > 0, batch.law**0.7, 0)
        return dataclasses.replace(batch, law=law / np.maximum(law.sum(axis=1, keepdims=True), 1e-9))

    joint = joint_drafts(flatter)
    assert sum(each.probability for each in joint) == pytest.approx(1.0, abs=ROUNDING)
    assert not is_likely(*chi_square(flatter, joint, num_seeds=NUM_SEEDS))
