"""A draft that is revealed node by node: which tokens the random numbers name, at the ends of their range too."""

import numpy as np
import pytest

from stand.drafters.eagle.growth import BestFirstGrowth, FixedGrowth
from stand.drafters.growing_draft import HEAD_OVERLAP, GrowingDraft, typical_tree
from stand.trees import ROOT, TreeShape

LARGEST = np.nextafter(1.0, 0.0)  # of random numbers in [0, 1)


def opened(law, *, uniform=0.5, is_greedy=False):
    """A draft whose root is followed by tokens 1, 2, ... with these probabilities."""
    draft = GrowingDraft(np.full(len(law) + 1, uniform), max_depth=1, is_greedy=is_greedy, token_ids=[0])
    draft.open(ROOT, np.arange(1, len(law) + 1, dtype=np.int32), law)
    return draft


def revealed(uniform, law):
    draft = opened(law, uniform=uniform)
    return draft.token_ids[draft.reveal(ROOT)]


def test_the_largest_random_number_names_the_last_possible_token():
    """Also where the law's running sum ends below or above 1, which is its rounding."""
    ends = set()
    for num_tokens in range(2, 200):
        law = np.append(np.full(num_tokens, 1.0 / num_tokens), 0.0)
        ends.add(np.sign((law / law.sum()).cumsum()[-1] - 1.0))
        assert revealed(LARGEST, law) == num_tokens
    assert ends == {-1.0, 0.0, 1.0}


@pytest.mark.parametrize(("uniform", "token"), [(0.0, 2), (0.2499, 2), (0.2501, 3), (0.74, 3), (0.76, 5)])
def test_a_random_number_names_the_token_in_whose_share_it_lies(uniform, token):
    assert revealed(uniform, np.array([0.0, 0.25, 0.5, 0.0, 0.25])) == token


def test_chances_of_children():
    """The first one overlaps with the target's token or is equal to it by chance, the others by chance alone."""
    law = np.array([0.5, 0.3, 0.2])
    draft = opened(law)
    first = HEAD_OVERLAP + (1 - HEAD_OVERLAP) * (0.25 + 0.09 + 0.04)
    assert draft.next_chance(ROOT) == pytest.approx(first)
    draft.reveal(ROOT)  # token 2: its share begins at 0.5
    assert draft.token_ids == [0, 2]
    second = (1 - first) * (25 + 4) / 49
    assert draft.next_chance(ROOT) == pytest.approx(second)
    draft.reveal(ROOT)
    draft.reveal(ROOT)
    assert draft.chances == pytest.approx([1.0, first, second, (1 - first) * (1 - 29 / 49)])
    assert draft.next_chance(ROOT) == 0.0  # no token is left


def test_chances_of_greedy_children_are_the_probabilities_that_are_left():
    draft = opened(np.array([0.2, 0.5, 0.3]), is_greedy=True)
    assert draft.next_chance(ROOT) == pytest.approx(0.5)
    draft.reveal(ROOT)
    assert draft.next_chance(ROOT) == pytest.approx(0.5 * 3 / 5)
    draft.reveal(ROOT)
    assert draft.token_ids == [0, 2, 3]


@pytest.mark.parametrize(
    ("law", "asked"),
    [([0.5, 0.25, 0.25], [1, 2, 3]), ([0.4, 0.3, 0.15, 0.15], [1, 2]), ([0.3, 0.3, 0.3, 0.1], [1, 2, 3])],
)
def test_a_round_reveals_what_is_at_least_half_as_likely_as_its_best_node(law, asked):
    """However unlikely that one is; the last round reveals all."""
    draft, growth = opened(np.array(law), is_greedy=True), BestFirstGrowth(8)
    draft.max_depth = 2
    assert growth.grow([draft], is_last=False) == [(0, node) for node in asked]
    growth.grow([draft], is_last=True)
    assert draft.token_ids == [0, *range(1, len(law) + 1)]


@pytest.mark.parametrize(("max_depth", "asked"), [(1, []), (2, [(0, 1)])])
def test_the_head_is_run_where_a_shape_goes_on_and_the_draft_may(max_depth, asked):
    """The first of two children has a slot below it, the second one has none."""
    draft, growth = opened(np.array([0.5, 0.5])), FixedGrowth(TreeShape.parse("parents:-1,0,0,1"))
    draft.max_depth = max_depth
    assert growth.grow([draft], is_last=False) == asked and draft.slots == [0, 1, 2]


@pytest.mark.parametrize(
    ("width", "is_chain", "parents"), [(3, True, [-1, 0, 1]), (20, False, [-1, 0, 0]), (1, False, [-1, 0, 1])]
)
def test_typical_trees(width, is_chain, parents):
    tree = typical_tree(width, is_chain=is_chain, follows_shape=True)
    assert tree.parents.tolist() == parents and tree.slots.tolist() == [0, 1, 2]
    assert tree.support_ids.shape == (3, width)
    assert typical_tree(width, is_chain=is_chain).slots is None
