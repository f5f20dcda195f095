"""Contexts of a blended lookup that nothing leads to any more: they wait to be freed, and they are freed."""

import numpy as np
import pytest
from noisy_walks import NUM_ODDS

from stand.trees import BlendedLookup
from stand.trees.blended.file import read_blended_lookup

MB = 1 << 20


def num_unreachable(lookup, folder) -> int:
    """Contexts in memory that are not among those that a file holds, which are found from the roots."""
    lookup.check()
    lookup.save(folder / "reachable.blend")
    arrays = read_blended_lookup(folder / "reachable.blend", num_odds=NUM_ODDS)[1]
    return len(lookup) - len(arrays["sizes"])


@pytest.mark.parametrize("vocabulary", [60, 400, 3000])
def test_random_tokens_leave_no_unreachable_contexts_behind(vocabulary, tmp_path):
    """Random tokens replace successors all the time. Below the cap; a share of one in two hundred may wait."""
    lookup = BlendedLookup()
    rng = np.random.default_rng(vocabulary)
    for _ in range(5):
        lookup.learn([], rng.integers(0, vocabulary, 6000))
        assert num_unreachable(lookup, tmp_path) <= len(lookup) / 200
    assert lookup.num_evicted == 0


def test_a_branch_that_was_cut_off_waits_and_is_freed_a_few_contexts_a_token(tmp_path):
    """Control for `num_unreachable`: right after a wide branch was cut off it counts thousands, then ever fewer."""
    lookup = BlendedLookup()
    rng = np.random.default_rng(1)
    hub, second = 1, 2
    for _ in range(500):
        lookup.learn([], np.concatenate([[hub, second], rng.integers(100, 130, 6)]))
    for first in range(1000, 1032):  # as many successors as the hub has room for, each now heavier than the second
        for _ in range(60):
            lookup.learn([], [hub, first])
    counts = [num_unreachable(lookup, tmp_path)]
    for _ in range(40):
        lookup.learn([], [7])
        counts.append(num_unreachable(lookup, tmp_path))
    assert counts == sorted(counts, reverse=True)
    lookup.learn([], [7] * 2000)
    assert num_unreachable(lookup, tmp_path) == 0


def test_at_the_cap_what_nothing_leads_to_goes_first(tmp_path):
    lookup = BlendedLookup(max_bytes=MB)
    rng = np.random.default_rng(3)
    for _ in range(4):
        lookup.learn([], rng.integers(0, 300, 10_000))
        assert lookup.nbytes <= MB
        assert num_unreachable(lookup, tmp_path) <= len(lookup) / 100
    assert lookup.num_evicted > 0
