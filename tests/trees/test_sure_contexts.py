"""Contexts so sure of what follows that an unknown token's chance would be 0 as a float: a surprise still teaches."""

import numpy as np
import pytest
from noisy_walks import NUM_ODDS, draft, odds_of
from outside_trees import outside_laws

from stand.trees import NO_TOKEN, BlendedLookup
from stand.trees.blended.file import read_blended_lookup, write_blended_lookup

TEXT = np.arange(100, 114, dtype=np.int32)
NUM_ORDERS, ENTRY_BUCKETS, ESCAPE_BUCKETS = 14, 144, 576
UNKNOWN = 80_000


@pytest.fixture
def lookup(tmp_path):
    """One text, and odds as texts leave them that go on in one way after every context: at their bounds."""
    taught, path = BlendedLookup(), tmp_path / "sure.blend"
    for _ in range(300):
        taught.learn([], TEXT)
    taught.save(path)
    parameters, arrays, _ = read_blended_lookup(path, num_odds=NUM_ODDS)
    arrays["odds"][: NUM_ORDERS * ENTRY_BUCKETS] = 1e4
    arrays["odds"][NUM_ORDERS * ENTRY_BUCKETS : NUM_ORDERS * (ENTRY_BUCKETS + ESCAPE_BUCKETS)] = 1e-4
    write_blended_lookup(path, parameters, arrays)
    return BlendedLookup.load(path)


def test_a_surprise_raises_the_escape_odds_of_every_context(lookup, tmp_path):
    before = odds_of(lookup, tmp_path / "before.blend")
    lookup.learn(TEXT[:13], [UNKNOWN])
    change = odds_of(lookup, tmp_path / "after.blend") / before
    escapes = change[NUM_ORDERS * ENTRY_BUCKETS :][: NUM_ORDERS * ESCAPE_BUCKETS].reshape(NUM_ORDERS, -1)
    assert (escapes.max(1) > 1.05).all() and escapes.min() == 1.0
    assert change[: NUM_ORDERS * ENTRY_BUCKETS].min() < 1.0


def test_a_surprise_does_not_silence_a_head(lookup):
    def num_nodes():
        laws = outside_laws([[(-1, int(TEXT[3]), [(70_000, 0.9)])]])
        return draft(lookup, [TEXT[:4]], 8, kind="sampled", outside=laws).num_nodes

    before = num_nodes()
    laws = outside_laws([[(-1, int(TEXT[12]), [(70_000, 0.9)])]])
    batch = draft(lookup, [TEXT[:13]], 8, kind="sampled", outside=laws)
    ids = np.full((batch.num_nodes, 1), NO_TOKEN, np.int32)
    ids[0] = UNKNOWN
    lookup.learn_batch(batch, [TEXT[:12]], ids, np.where(ids >= 0, 0.9, 0.0).astype(np.float32))
    assert num_nodes() == before > 4
