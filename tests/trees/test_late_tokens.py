"""Tokens that come for the first time when a lookup is full: the table of single tokens has room for them."""

import numpy as np

from stand.trees import BlendedLookup

MB = 1 << 20


def test_tokens_that_come_late_are_learned_at_a_small_cap():
    """A cap of 2 MB leaves room for 32,768 ids."""
    rng, lookup = np.random.default_rng(0), BlendedLookup(max_bytes=2 * MB)
    lookup.learn([], rng.integers(0, 20_000, 100_000))
    assert lookup.num_evicted > 0
    fresh = (20_000 + rng.permutation(12_000)[:400]).astype(np.int32)
    for _ in range(20):
        lookup.learn([], fresh)
    ends = range(10, 399)
    found = [lookup.predict(fresh[end - 10 : end + 1], limit=1)[0].tolist() for end in ends]
    assert sum(tokens == [fresh[end + 1]] for tokens, end in zip(found, ends, strict=True)) > 0.95 * len(ends)
    assert lookup.nbytes <= 2 * MB
    lookup.check()
