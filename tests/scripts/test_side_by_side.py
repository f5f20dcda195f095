"""Recordings decoded side by side go on as recorded, to their ends, with drafts of one call a step."""

import numpy as np
import pytest
from replay_parts.side_by_side import SideBySide
from workloads.recordings import Recording

from stand.trees import BlendedLookup

PROMPT = np.arange(3, dtype=np.int32)
WALK = np.random.default_rng(1).integers(0, 50, 40).astype(np.int32)
RECORDINGS = [Recording(0, 0, PROMPT, WALK), Recording(0, 1, PROMPT, WALK[:20])]


def taught_lookup(scope=0):
    lookup = BlendedLookup()
    lookup.learn(WALK[:1], WALK[1:], scope=scope)
    return lookup


@pytest.mark.parametrize("kind", ["deterministic", "sampled"])
def test_rows_go_on_as_recorded_to_their_ends(kind):
    rows = SideBySide(taught_lookup(), RECORDINGS, kind=kind)
    assert rows.least_left == 19  # a sample's first token comes from the prompt
    num_tokens = 0
    while rows.live:
        num_tokens += rows.follow(rows.draft(budget=12))
    assert num_tokens == 39 + 19
    assert 4 < rows.num_steps < 30  # with drafts: the walk is known


def test_every_row_drafts_and_learns_in_its_scope():
    """What one problem has shown counts for its own rows more than for another problem's."""
    lookup = taught_lookup(scope=3)
    one, other = (SideBySide(lookup, RECORDINGS[:1], scopes=[scope]).draft(budget=12) for scope in (3, 4))
    assert one.path_probabilities[1] > other.path_probabilities[1]
    fresh = BlendedLookup()
    rows = SideBySide(fresh, RECORDINGS, scopes=[5, 6])
    while rows.live:
        rows.follow(rows.draft(budget=4))
    in_scope, elsewhere = (fresh.predict(WALK[:20], scope=scope)[1][0] for scope in (5, 7))
    assert in_scope > elsewhere
