"""What became of a draft: which nodes are right, which are wrong, which nobody knows, and what is learned from it."""

from dataclasses import replace

import numpy as np
import pytest
from noisy_walks import draft, odds_of, stream
from reference_blended import SlowCalibration

from stand.trees import NO_TOKEN, BlendedLookup, DraftBatch, DraftTree


def followed(one, run):
    """(accepted path, next token) where this run of tokens came after a draft."""
    path, node = [], 0
    for token in run.tolist():
        children = np.flatnonzero((one.parents == node) & (one.token_ids == token))
        if len(children) == 0:
            return np.array(path, np.int32), token
        node = int(children[0])
        path.append(node)
    return np.array(path, np.int32), NO_TOKEN


def record(lookup, batch, runs, kind="deterministic"):
    accepted, next_tokens = zip(*(followed(batch[row], run) for row, run in enumerate(runs)), strict=True)
    lookup.record_outcome(batch, accepted, next_tokens, kind=kind)


def factors_of(lookup, tmp_path, kind="deterministic"):
    """float32[6, 33]: by depth and probability."""
    place = ("sampled", "mixed", "deterministic").index(kind)
    return odds_of(lookup, tmp_path / "factors.blend")[-3 * 198 :].reshape(3, 6, 33)[place]


def twin_of(outcomes):
    """Factors that a slow twin learns from (estimate, depth, came true)."""
    slow = SlowCalibration()
    for estimate, depth, came_true in outcomes:
        slow.train(estimate, depth, came_true)
    return np.array(slow.factors)


def on_path(batch, run):
    """Per node of one row: does its path equal the beginning of the run?"""
    found = [True]
    for node in range(1, batch.num_nodes):
        is_next = batch.token_ids[node] == run[batch.depths[node] - 1]
        found.append(bool(found[batch.parents[node]] and is_next))
    return found


HAND_MADE = DraftTree(
    token_ids=np.array([5, 6, 7, 8, 9, 10, 11, 12], np.int32),
    parents=np.array([-1, 0, 0, 1, 1, 2, 3, 6], np.int32),
    support_ids=np.full((8, 1), -1, np.int32),
    law=np.zeros((8, 1), np.float32),
    path_estimates=np.array([1.0, 0.5, 0.4, 0.3, 0.2, 0.3, 0.25, 0.2], np.float32),
)


@pytest.mark.parametrize(
    ("accepted", "next_token", "fates"),
    [
        ([], 99, {1: False, 2: False, 3: False, 4: False, 5: False, 6: False, 7: False}),
        ([], 6, {1: True, 2: False, 5: False}),  # nothing is known of what follows node 1
        ([], NO_TOKEN, {}),
        ([1], 9, {1: True, 2: False, 3: False, 4: True, 5: False, 6: False, 7: False}),
        ([1], NO_TOKEN, {1: True, 2: False, 5: False}),
        ([1, 3], 11, {1: True, 2: False, 3: True, 4: False, 5: False, 6: True}),
        ([1, 3, 6, 7], 4, {1: True, 2: False, 3: True, 4: False, 5: False, 6: True, 7: True}),
    ],
)
@pytest.mark.parametrize("kind", ["deterministic", "mixed", "sampled"])
def test_who_is_right_follows_from_the_path_and_the_next_token(tmp_path, accepted, next_token, fates, kind):
    lookup, batch = BlendedLookup(), DraftBatch.concatenate([HAND_MADE])
    lookup.record_outcome(batch, [np.array(accepted, np.int32)], [next_token], kind=kind)
    estimates, depths = batch.path_estimates.tolist(), batch.depths.tolist()
    expected = twin_of((estimates[node], depths[node], fate) for node, fate in fates.items())
    assert factors_of(lookup, tmp_path, kind) == pytest.approx(expected, abs=1e-6)
    for other in {"deterministic", "mixed", "sampled"} - {kind}:
        assert (factors_of(lookup, tmp_path, other) == 1).all()


def test_rows_with_equal_contexts_are_told_apart(tmp_path):
    """At a problem's first step all its samples have the same history; each is credited with its own outcome."""
    tokens = stream(3000, vocabulary=12)
    lookup = BlendedLookup()
    lookup.learn([], tokens)
    batch = draft(lookup, [tokens[:500], tokens[:500]], 20)
    first, second = batch[0], batch[1]
    right = first.token_ids[1], second.token_ids[2]
    assert right[0] == second.token_ids[1] != right[1]
    lookup.record_outcome(batch, [[1], []], [NO_TOKEN, 10**6], kind="deterministic")
    estimates, depths = batch.path_estimates.tolist(), batch.depths.tolist()
    below = {1}
    for node in range(2, first.num_nodes):
        below |= {node} if first.parents[node] in below else set()
    outcomes = [(estimates[1], 1, True)]
    outcomes += [(estimates[node], depths[node], False) for node in range(2, first.num_nodes) if node not in below]
    start = first.num_nodes
    outcomes += [(estimates[node], depths[node], False) for node in range(start + 1, batch.num_nodes)]
    assert factors_of(lookup, tmp_path) == pytest.approx(twin_of(outcomes), abs=1e-6)


def test_drafts_of_any_step_can_be_recorded(tmp_path):
    """The batch carries all that is needed: later drafts, learning and other lookups change nothing."""
    tokens = stream(2000, vocabulary=12)
    lookup, other = BlendedLookup(), BlendedLookup()
    lookup.learn([], tokens)
    batch = draft(lookup, [tokens[:500]], 20)
    draft(lookup, [tokens[:700]], 40)
    lookup.learn(tokens[:500], tokens[500:520])
    for one in (lookup, other):
        record(one, batch, [tokens[500:512]])
    assert np.array_equal(factors_of(lookup, tmp_path), factors_of(other, tmp_path))
    assert not (factors_of(other, tmp_path) == 1).all()


def test_recorded_drafts_are_counted_as_in_the_twin(tmp_path):
    tokens = stream(4000, vocabulary=12, stay=0.7)
    lookup, slow = BlendedLookup(), SlowCalibration()
    lookup.learn([], tokens[:2000])
    for end in range(2000, 2400, 3):
        batch = draft(lookup, [tokens[:end]], 10, scopes=[3])
        uncalibrated = slow.products(batch.depths, batch.path_probabilities)
        came_true = on_path(batch, tokens[end:])
        for node in range(1, batch.num_nodes):
            slow.train(uncalibrated[node], int(batch.depths[node]), came_true[node])
        record(lookup, batch, [tokens[end : end + 12]])
    factors = factors_of(lookup, tmp_path)
    assert np.abs(factors - 1).max() > 0.05
    assert factors == pytest.approx(np.array(slow.factors), abs=0.02)
    with pytest.raises(AssertionError):
        assert factors == pytest.approx(np.ones((6, 33)), abs=0.02)


def decode(lookup, tokens, ends, *, budget, recorded):
    """(path probability, came true) of every drafted node, decoding `tokens` from each end on."""
    expected, came_true = [], []
    for end in ends:
        batch = draft(lookup, [tokens[end - 20 : end]], budget)
        expected += batch.path_probabilities[1:].tolist()
        came_true += on_path(batch, tokens[end:])[1:]
        if recorded:
            record(lookup, batch, [tokens[end : end + 32]])
    return np.array(expected), np.array(came_true)


def test_recording_makes_path_probabilities_come_true():
    tokens = stream(24_000, vocabulary=40, stay=0.9)
    ends = list(range(2000, 23_000, 4))
    errors = {}
    for recorded in (False, True):
        lookup = BlendedLookup(rate=0.0)  # start values alone: far from calibrated here
        lookup.learn([], tokens)
        decode(lookup, tokens, ends[:1500], budget=8, recorded=recorded)
        expected, came_true = decode(lookup, tokens, ends[1500:3000], budget=8, recorded=recorded)
        bins = np.minimum(4, (expected * 5).astype(int))
        counts = np.bincount(bins, minlength=5)
        gaps = np.abs(np.bincount(bins, expected) - np.bincount(bins, came_true)) / np.maximum(1, counts)
        errors[recorded] = gaps[counts > 2000].max()
    assert errors[True] < 0.03 and errors[False] > 0.1


def test_bad_outcomes_are_refused_and_teach_nothing(tmp_path):
    lookup, batch = BlendedLookup(), DraftBatch.concatenate([HAND_MADE])
    good = {"batch": batch, "accepted": [[1, 3]], "next_tokens": [4], "kind": "sampled"}
    bad = [
        ({"kind": "coupled"}, "kind must"),
        ({"batch": replace(batch, path_estimates=None)}, "must have path_estimates, got None"),
        ({"batch": replace(batch, path_estimates=batch.path_estimates[1:])}, "path_estimates must"),
        ({"batch": replace(batch, path_estimates=batch.path_estimates * np.nan)}, "path_estimates must"),
        ({"batch": replace(batch, path_estimates=batch.path_estimates + 1)}, "path_estimates must"),
        ({"batch": replace(batch, parents=batch.parents + 3)}, "sound DraftBatch"),
        ({"batch": replace(batch, parents=np.array([-1, 0, 0, -1, 1, 2, 3, 6], np.int32))}, "sound DraftBatch"),
        ({"accepted": []}, "one entry per row"),
        ({"next_tokens": [4, 5]}, "one entry per row"),
        ({"accepted": [[0, 1]]}, "leave out the root"),
        ({"accepted": [[3]]}, "must be a path"),
        ({"accepted": [[1, 5]]}, "must be a path"),
        ({"accepted": [[8]]}, "must be a path"),
        ({"accepted": [[-1]]}, "must be a path"),
        ({"accepted": [[[1]]]}, "one-dimensional"),
    ]
    for change, message in bad:
        with pytest.raises(ValueError, match=message):
            lookup.record_outcome(**(good | change))
        assert (factors_of(lookup, tmp_path, "sampled") == 1).all()
    lookup.record_outcome(**good)
    assert not (factors_of(lookup, tmp_path, "sampled") == 1).all()


def test_a_path_may_not_lead_into_the_next_row():
    """Its first child looks like one of this row's root: parents are local to their rows."""
    lookup, batch = BlendedLookup(), DraftBatch.concatenate([HAND_MADE] * 3)
    paths = [[], [HAND_MADE.num_nodes + 1], []]
    with pytest.raises(ValueError, match="must be a path"):
        lookup.record_outcome(batch, paths, [NO_TOKEN] * 3, kind="sampled")


def test_estimates_are_path_probabilities_before_calibration():
    tokens = stream(4000, vocabulary=12, stay=0.7)
    lookup = BlendedLookup()
    lookup.learn([], tokens)
    for kind in ("deterministic", "mixed", "sampled"):
        fresh = draft(lookup, [tokens[:300], tokens[:400]], 20, kind=kind)
        assert np.array_equal(np.minimum(1, fresh.path_estimates), fresh.path_probabilities)
        for _ in range(20):
            lookup.record_outcome(fresh, [[1], [1]], [NO_TOKEN, NO_TOKEN], kind=kind)
        taught = draft(lookup, [tokens[:300], tokens[:400]], 20, kind=kind)
        assert taught.path_probabilities[1] > 1.02 * taught.path_estimates[1] or fresh.path_probabilities[1] > 0.95
        assert taught.path_estimates[1] == pytest.approx(fresh.path_estimates[1], rel=1e-5)


def test_concatenated_batches_keep_their_estimates():
    batch = DraftBatch.concatenate([HAND_MADE, HAND_MADE])
    assert np.array_equal(batch.path_estimates, np.tile(HAND_MADE.path_estimates, 2))
    assert np.array_equal(batch[1].path_estimates, HAND_MADE.path_estimates)
    with pytest.raises(ValueError, match="path_estimates must be"):
        replace(HAND_MADE, path_estimates=HAND_MADE.path_estimates[1:]).check()
