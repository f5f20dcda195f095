"""Where a source is asked again in a step: below the nodes that it knows, and only where that can matter."""

import numpy as np
import pytest

from stand.drafters.law_trees import LawTrees, roots
from stand.trees import NO_PARENT, NO_TOKEN, ROOT, DraftBatch, DraftTree


def planned(*rows) -> DraftBatch:
    """Of (tokens, parents, path probabilities) per row."""
    return DraftBatch.concatenate([
        DraftTree(
            np.array(tokens, np.int32),
            np.array(parents, np.int32),
            np.full((len(tokens), 1), NO_TOKEN, np.int32),
            np.zeros((len(tokens), 1), np.float32),
            path_probabilities=np.array(paths, np.float32),
        )
        for tokens, parents, paths in rows
    ])  # fmt: skip


def asked_at(num_rows, *calls) -> LawTrees:
    trees = LawTrees(num_rows)
    for places in calls:
        law = np.ones((len(places), 1), np.float32)
        trees.add(places, range(len(places)), law.astype(np.int32), law)
    return trees


@pytest.mark.parametrize(
    ("max_depths", "expected"),
    [
        ([3, 2, 9], [(0, 1, 6), (1, 0, 5), (1, 0, 6)]),
        ([2, 2, 9], [(1, 0, 5), (1, 0, 6)]),  # a child of token 6 would lie too deep
        ([3, 1, 9], [(0, 1, 6)]),
    ],
)
def test_a_plan_is_asked_for_just_below_what_is_known(max_depths, expected):
    """Not at token 7 of row 0, the last node of the plan: no child of it is likelier. Row 2 has no law at all."""
    batch = planned(
        ([9, 5, 6, 7, 8], [NO_PARENT, 0, 1, 0, 2], [1.0, 0.9, 0.5, 0.1, 0.4]),
        ([4, 5, 6, 7], [NO_PARENT, 0, 0, 1], [1.0, 0.8, 0.3, 0.2]),
        ([3, 5], [NO_PARENT, 0], [1.0, 0.7]),
    )
    trees = asked_at(3, [(0, NO_PARENT, 9), (1, NO_PARENT, 4)], [(0, ROOT, 5)])
    assert trees.frontier(batch, np.array(max_depths)) == expected


def test_a_tree_begins_at_the_last_token_of_its_row():
    histories = [np.array(tokens, np.int32) for tokens in ([5, 6], [7], [8, 9, 4])]
    assert roots([0, 2], histories) == [(0, NO_PARENT, 6), (2, NO_PARENT, 4)]
