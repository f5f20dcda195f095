"""The blended lookup as a drafter: it learns what became of its drafts, and only where it is taught."""

import numpy as np
import pytest
from draft_requests import draft_request

from stand import BlendedDrafter, Lesson
from stand.trees import BlendedLookup


@pytest.fixture
def histories():
    return [np.arange(first, first + 20, dtype=np.int32) % 30 for first in (0, 5, 9)]


def drafter_of() -> BlendedDrafter:
    lookup = BlendedLookup()
    lookup.learn([], np.tile(np.arange(30, dtype=np.int32), 20))
    return BlendedDrafter(lookup, budget=12)


def taught(drafter: BlendedDrafter, histories, *, is_kept: bool) -> None:
    """One step whose drafts were kept whole, or not at all; the laws that are learned say nothing."""
    request = draft_request(histories)
    batch = drafter.draft(request)
    first_children = [np.array([1], dtype=np.int32) if is_kept else np.zeros(0, np.int32) for _ in histories]
    top_ids = np.full((batch.num_nodes, 1), 29, dtype=np.int32)
    top_probs = np.full((batch.num_nodes, 1), 1e-6, dtype=np.float32)
    next_tokens = np.full(len(histories), 28)
    drafter.learn(Lesson(request, batch, first_children, next_tokens, top_ids, top_probs))


def test_what_became_of_drafts_changes_their_odds(histories):
    """Drafts that are never kept are thought less likely than drafts that always are."""
    odds = {}
    for is_kept in (True, False):
        drafter = drafter_of()
        for _ in range(60):
            taught(drafter, histories, is_kept=is_kept)
        batch = drafter.draft(draft_request(histories))
        odds[is_kept] = float(batch.path_probabilities[batch.depths == 1].mean())
    assert odds[True] > odds[False] + 0.2


def test_who_does_not_teach_gets_the_same_drafts_again(histories):
    drafter = drafter_of()
    drafts = [drafter.draft(draft_request(histories)) for _ in range(3)]
    for batch in drafts[1:]:
        assert np.array_equal(batch.token_ids, drafts[0].token_ids)
        assert np.array_equal(batch.path_probabilities, drafts[0].path_probabilities)
