"""Masks at planned nodes: what they leave out, what follows where few tokens may, and what is refused."""

import pickle

import numpy as np
import pytest
from noisy_walks import draft, stream
from planned_masks import places_of, planned_masks

from stand.trees import BlendedLookup, DraftBatch, DraftTree, TokenMasks

TEXT = stream(3000, vocabulary=30, seed=4, stay=0.5)
HISTORIES = [TEXT[:900], TEXT[:1234]]
KINDS = ["deterministic", "mixed", "sampled"]


@pytest.fixture(scope="module")
def lookup():
    lookup = BlendedLookup()
    lookup.learn([], TEXT)
    return lookup


def odd_below(row, path):
    """Of 32 tokens the odd ones, at nodes of odd depth the even ones."""
    return range((len(path) + 1) % 2, 32, 2)


@pytest.mark.parametrize("kind", KINDS)
def test_no_node_is_drafted_that_a_mask_forbids(lookup, kind):
    settings = {"budget": 60, "histories": HISTORIES}
    plan = draft(lookup, **settings)
    masks, allowed = planned_masks(plan, odd_below)
    for step in range(20):
        batch = draft(lookup, **settings, kind=kind, masks=masks, steps=np.full(2, step))
        batch.check()
        checked = [
            path[-1] in allowed[row, path[:-1]]
            for row, path in places_of(batch)
            if path and (row, path[:-1]) in allowed
        ]
        assert all(checked) and len(checked) > 20
    free = draft(lookup, **settings)
    assert any(path and path[-1] not in odd_below(row, path[:-1]) for row, path in places_of(free))


@pytest.mark.parametrize("kind", KINDS)
def test_masks_that_allow_everything_change_nothing(lookup, kind):
    plan = draft(lookup, HISTORIES, 40)
    masks, _ = planned_masks(plan, lambda row, path: range(32))
    drafts = [draft(lookup, HISTORIES, 40, kind=kind, masks=one, steps=np.full(2, 3)) for one in (masks, None)]
    for name in ("token_ids", "parents", "offsets", "support_ids", "law", "path_estimates"):
        assert np.array_equal(*(getattr(one, name) for one in drafts))


@pytest.mark.parametrize("kind", KINDS)
def test_where_one_token_may_follow_it_is_drafted_whatever_was_learned(kind):
    """Nothing was: each plan reaches one token further, as far as masks are known."""
    lookup, masks = BlendedLookup(), None
    for depth in range(5):
        batch = draft(lookup, [np.array([7], np.int32)], 4, kind=kind, masks=masks)
        assert batch.token_ids.tolist() == [7, 10, 11, 12, 13][: depth + 1]
        assert (batch.path_estimates == 1.0).all()
        masks, _ = planned_masks(batch, lambda row, path: [10 + len(path)])


def shares_of(lookup, allowed=None, *, num_words=1) -> dict[int, float]:
    """Estimates of the tokens after the first history, of which these alone are allowed; None: all."""
    masks = None
    if allowed is not None:
        plan = draft(lookup, HISTORIES[:1], 0)
        masks, _ = planned_masks(plan, lambda row, path: allowed, num_words=num_words)
    batch = draft(lookup, HISTORIES[:1], 200, max_depths=[1], masks=masks)
    return dict(zip(batch.token_ids[1:].tolist(), batch.path_estimates[1:].tolist(), strict=True))


def test_what_may_follow_shares_what_others_had(lookup):
    law = shares_of(lookup)
    kept = [token for token in range(0, 30, 2) if token in law]
    left = sum(law[token] for token in kept) + 1 - sum(law.values())
    found = shares_of(lookup, range(0, 32, 2))
    assert found.keys() == set(kept) and len(kept) > 8
    for token in kept:
        assert found[token] == pytest.approx(law[token] / left, rel=1e-3)


def test_few_tokens_that_nothing_speaks_for_share_what_is_left(lookup):
    """Tokens 40 and 41 were never seen."""
    law = shares_of(lookup)
    best, unknown = max(law, key=law.__getitem__), max(1 - sum(law.values()), 1e-3)
    found = shares_of(lookup, [best, 40, 41], num_words=2)
    assert found[40] == found[41] == pytest.approx(unknown / 2 / (law[best] + unknown), rel=0.02)
    assert sum(found.values()) == pytest.approx(1.0)
    many = shares_of(lookup, [best, *range(40, 48)], num_words=2)  # more than eight
    assert many.keys() == {best}


def test_few_tokens_that_are_all_known_share_everything(lookup):
    """One of them, though seldom seen, is sure."""
    law = shares_of(lookup)
    rare, best = min(law, key=law.__getitem__), max(law, key=law.__getitem__)
    assert law[rare] < 0.05
    assert shares_of(lookup, [rare]) == {rare: 1.0}
    found = shares_of(lookup, [rare, best])
    assert sum(found.values()) == pytest.approx(1.0)
    assert found[rare] / found[best] == pytest.approx(law[rare] / law[best], rel=1e-3)


def test_tokens_beyond_a_mask_are_none_of_the_few():
    """Three tokens may follow that nothing speaks for, and those beyond the mask as before."""
    lookup = BlendedLookup()
    lookup.learn([], np.array([40, 41] * 200, np.int32))
    history = [np.array([41, 40], np.int32)]
    plan = draft(lookup, history, 0)
    masks = TokenMasks(plan, np.full((1, 1), 7, np.uint32), allows_beyond=True)
    batch = draft(lookup, history, 60, max_depths=[1], masks=masks)
    found = dict(zip(batch.token_ids[1:].tolist(), batch.path_estimates[1:].tolist(), strict=True))
    assert found.keys() >= {0, 1, 2, 41} and found[41] > 0.9
    assert sum(found.values()) == pytest.approx(1.0, abs=0.01)


@pytest.mark.parametrize("allows_beyond", [False, True])
def test_tokens_beyond_a_mask(lookup, allows_beyond):
    text = TEXT + 20  # up to 49
    lookup = BlendedLookup()
    lookup.learn([], text)
    plan = draft(lookup, [text[:900]], 30)
    masks = TokenMasks(plan, np.zeros((plan.num_nodes, 1), np.uint32), allows_beyond=allows_beyond)
    firsts = [token for row, path in places_of(draft(lookup, [text[:900]], 30, masks=masks)) for token in path[:1]]
    assert bool(firsts) == allows_beyond and all(token >= 32 for token in firsts)


def test_words_are_read_where_they_lie(lookup):
    plan = draft(lookup, HISTORIES, 5)
    words = np.zeros((plan.num_nodes, 1), np.int32)
    masks = TokenMasks(plan, words)
    assert len(masks) == 2 and draft(lookup, HISTORIES, 5, masks=masks).num_nodes == 2
    words[:] = -1
    assert draft(lookup, HISTORIES, 5, masks=masks).num_nodes == plan.num_nodes


@pytest.mark.parametrize(
    "words",
    [
        np.zeros((2, 1), np.int32), np.zeros((3, 1), np.int64), np.zeros(3, np.int32), np.zeros((3, 0), np.int32),
        np.zeros((3, 4), np.int32)[:, ::2], [[0], [0], [0]],
        np.frombuffer(bytes(13), np.int32, count=3, offset=1).reshape(3, 1),
    ],
)  # fmt: skip
def test_other_words_are_refused(words):
    plan = DraftBatch.pending([4, 5, 6])
    with pytest.raises(
        ValueError, match=r"words must be .* array of int32 or uint32 \[3, W\], got .*; give each planned node"
    ):
        TokenMasks(plan, words)


def test_unsound_plans_and_other_rows_are_refused(lookup):
    plan = DraftBatch.concatenate([DraftTree.pending(4), DraftTree.pending(5)])
    with pytest.raises(TypeError, match="batch must be a DraftBatch, got list"):
        TokenMasks([4, 5], np.zeros((2, 1), np.int32))
    plan.parents[1] = 0
    with pytest.raises(ValueError, match="batch must be a sound DraftBatch"):
        TokenMasks(plan, np.zeros((2, 1), np.int32))
    plan.parents[1] = -1
    masks = TokenMasks(plan, np.zeros((2, 1), np.int32))
    for wrong, got in ((masks, "2 rows"), (np.zeros((3, 1)), "ndarray")):
        with pytest.raises(
            ValueError, match=f"masks must be TokenMasks of 3 rows, got {got}; plan drafts for the same"
        ):
            draft(lookup, [TEXT[:9]] * 3, 4, masks=wrong)
    with pytest.raises(TypeError, match="cannot be pickled"):
        pickle.dumps(masks)
