"""What both lookups refuse, and what they can bear: ids that do not fit, huge laws, crowds of rows, waiting threads."""

import re
import threading
import time
from pathlib import Path

import numpy as np
import pytest
from noisy_walks import draft, stream

from stand.trees import BlendedLookup, DraftBatch, DraftTree, LookupTree, TreeShape
from stand.trees.arguments import int32_array
from stand.trees.kinds import KIND_NUMBERS, KINDS, NUM_GROWN_KINDS, SHAPED_KINDS
from stand.trees.sampling import draw_children

HEADER = Path(__file__).resolve().parents[2] / "trees" / "sampling.h"

LOOKUPS = (BlendedLookup, LookupTree)
WRONG_IDS = [
    np.array([2**32 + 5], np.int64),
    np.array([2**31], np.int64),
    np.array([2**32 - 1], np.uint32),
    np.array([2**64 - 1], np.uint64),
    np.array([-(2**32) + 5], np.int64),
    np.array([-1], np.int64),
    np.array([1.5]),
    [2**70],
]


@pytest.mark.parametrize("make", LOOKUPS)
@pytest.mark.parametrize("wrong", WRONG_IDS, ids=str)
def test_ids_that_do_not_fit_are_refused_wherever_they_enter(make, wrong):
    """Taken modulo 2**32 they would be other tokens."""
    lookup, batch = make(), DraftBatch.concatenate([DraftTree.pending(3)])
    law = {"top_probs": np.ones((1, 1), np.float32)}
    shape = {"shape": TreeShape.chain(1)} if make is LookupTree else {"budget": 2}
    ask = lookup.lookup if make is LookupTree else lookup.predict
    calls = [
        lambda: lookup.learn(wrong, [1]),
        lambda: lookup.learn([1], wrong),
        lambda: lookup.learn_batch(batch, [wrong], top_ids=[[1]], **law),
        lambda: ask(wrong),
        lambda: lookup.draft([wrong], seed=0, rows=[0], steps=[0], **shape),
    ]
    padding = isinstance(wrong, np.ndarray) and wrong[0] == -1
    if not padding:
        calls += [
            lambda: lookup.learn([1], [2], top_ids=np.reshape(wrong, (1, 1)), **law),
            lambda: lookup.learn_batch(batch, [[1]], top_ids=np.reshape(wrong, (1, 1)), **law),
        ]
    if make is BlendedLookup and not padding:
        grown = draft(lookup, [np.array([3], np.int32)], 2)
        calls += [
            lambda: lookup.record_outcome(grown, [[]], wrong, kind="sampled"),
            lambda: lookup.record_outcome(grown, [wrong], [5], kind="sampled"),
        ]
    for call in calls:
        with pytest.raises(ValueError, match="must"):
            call()
    assert len(lookup) == 0


def test_a_range_of_ids_names_the_id_beyond_it():
    """A negative one may be padding, so that the range has it."""
    for wrong, got in (([-1, 2**31], 2**31), ([-(2**31) - 1, 5], -(2**31) - 1)):
        with pytest.raises(ValueError, match=re.escape(f"must be in [-2**31, 2**31), got {got};")):
            int32_array(wrong, "ids")
    assert int32_array([-(2**31), -1, 2**31 - 1], "ids").tolist() == [-(2**31), -1, 2**31 - 1]


@pytest.mark.parametrize("make", LOOKUPS)
def test_a_fingerprint_that_no_file_could_hold_is_refused_at_once(make):
    assert make(fingerprint=bytes(64)).fingerprint == bytes(64)
    with pytest.raises(ValueError, match="at most 64 bytes, got 65"):
        make(fingerprint=bytes(65))


def test_kinds_have_the_numbers_of_the_core():
    """Each kind by name draws as it says, so names and numbers belong together."""
    assert KINDS == ("sampled", "mixed", "deterministic") == tuple(KIND_NUMBERS)[: len(KINDS)]
    assert SHAPED_KINDS == tuple(KIND_NUMBERS) and len(set(KIND_NUMBERS.values())) == len(SHAPED_KINDS)
    probabilities, uniforms = np.array([0.5, 0.3, 0.2], np.float32), np.array([0.01, 0.5, 0.99])
    picks = {kind: draw_children(kind, probabilities, uniforms, 2)[0].tolist() for kind in KINDS}
    assert picks == {"sampled": [2, 1], "mixed": [2, 0], "deterministic": [0, 1]}


@pytest.mark.skipif(not HEADER.exists(), reason="runs beside the source")
def test_kinds_have_the_numbers_of_the_header():
    """All five, also those that no child is drawn by alone."""
    header = HEADER.read_text(encoding="utf-8")
    listed = re.search(r"enum class DraftKind : int32_t {([^}]*)}", header)[1]
    assert dict(re.findall(r"(\w+) = (\d)", listed)) == {kind: str(number) for kind, number in KIND_NUMBERS.items()}
    assert f"NUM_GROWN_KINDS = {NUM_GROWN_KINDS};" in header


@pytest.mark.parametrize("num_children", [0, -1, -(2**31), 2**31])
def test_as_many_children_as_one_must_be_wanted(num_children):
    for kind in KINDS:
        with pytest.raises(ValueError, match="num_children must be"):
            draw_children(kind, np.array([0.6, 0.4], np.float32), np.array([0.5, 0.5]), num_children)


WRONG_SETTINGS = [
    {"max_nodes": 2.5},
    {"max_nodes": [2.5]},
    {"max_nodes": [-1]},
    {"max_nodes": -1},
    {"max_nodes": [1, 2]},
    {"max_nodes": np.array(3.0)},
    {"max_nodes": [float("nan")]},
    {"max_nodes": "3"},
    {"max_depths": 3},
    {"max_depths": [2.5]},
    {"max_depths": [-1]},
    {"max_depths": [1, 2]},
    {"max_depths": {0: 1}},
    {"scopes": 3},
    {"scopes": [2.0]},
    {"width": 2.5},
    {"width": 0},
    {"width": float("nan")},
    {"width": "3"},
    {"width": 1, "kind": "mixed"},
    {"floor": None},
    {"floor": "0.5"},
    {"floor": float("nan")},
    {"floor": 1.5},
    {"budget": 2.5},
]


@pytest.mark.parametrize("change", WRONG_SETTINGS, ids=str)
def test_bounds_of_drafts_are_whole_numbers(change):
    lookup, history = BlendedLookup(), np.array([3], np.int32)
    with pytest.raises(ValueError, match="must .*got .*;"):
        draft(lookup, [history], **({"budget": 4} | change))


def test_bounds_of_drafts_may_be_numbers_of_numpy():
    lookup, tokens = BlendedLookup(), stream(400)
    lookup.learn([], tokens)
    one = {"width": np.int32(1), "max_depths": (3,)}
    for bounds in ({"max_nodes": np.int64(3)}, {"max_nodes": np.array([3])}, one):
        assert draft(lookup, [tokens[:50]], 40, floor=np.float32(0), **bounds).num_nodes == 4
    assert draft(lookup, [tokens[:50]], 3, max_nodes=2**40, width=2**40, max_depths=[2**40]).num_nodes == 4


@pytest.mark.parametrize(
    "change",
    [
        {"fade": "x"}, {"fade": None}, {"fade": 0}, {"fade": 1.5}, {"fade": float("nan")}, {"rate": "0.1"},
        {"rate": -0.1}, {"depth": 2.0}, {"depth": 13}, {"max_bytes": 1e9 + 0.5}, {"max_bytes": 1000},
        {"fade": True}, {"depth": np.True_}, {"max_bytes": 2**40}, {"num_candidates": 0}, {"fingerprint": "abc"},
    ],
    ids=str,
)  # fmt: skip
def test_settings_that_no_lookup_can_have(change):
    (name,) = change
    with pytest.raises(ValueError, match=f"{name} must .*got .*;"):
        BlendedLookup(**change)


def test_settings_may_be_numbers_of_numpy():
    lookup = BlendedLookup(fade=np.float32(0.5), rate=0, depth=np.int32(3), max_bytes=np.int64(1 << 20))
    assert (lookup.fade, lookup.rate, lookup.depth, lookup.max_bytes) == (0.5, 0.0, 3, 1 << 20)
    assert BlendedLookup(max_bytes=4e9).max_bytes == 4_000_000_000


@pytest.mark.parametrize(
    "probabilities", [[0.4, 0.6], [0.6, 0.0], [0.6, -0.1], [float("nan"), 0.1], [0.6, float("nan")]]
)
def test_candidates_are_likely_and_descend(probabilities):
    for kind in KINDS:
        with pytest.raises(ValueError, match="probabilities must be positive and descend, got .*;"):
            draw_children(kind, np.array(probabilities, np.float32), np.array([0.5, 0.5]), 2)


@pytest.mark.parametrize("make", LOOKUPS)
def test_readers_wait_for_the_lock(make):
    lookup = make()
    lookup.learn([], np.arange(100, dtype=np.int32))
    readers = [lambda: len(lookup), lambda: lookup.nbytes]
    readers += [lambda: lookup.num_evicted, lookup.check] if make is BlendedLookup else [lambda: lookup.lookup([5])]
    for read in readers:
        order, is_started = [], threading.Event()

        def ask(read=read, order=order, is_started=is_started):
            is_started.set()
            read()
            order.append("read")

        lookup._lock()
        thread = threading.Thread(target=ask)
        thread.start()
        assert is_started.wait(10)
        thread.join(0.05)  # a reader that does not wait is through by then
        order.append("unlocked")
        lookup._unlock()
        thread.join(10)
        assert order == ["unlocked", "read"]


@pytest.mark.parametrize("make", LOOKUPS)
def test_laws_of_a_whole_vocabulary_take_their_size_not_its_square(make):
    lookup, width = make(), 200_000
    ids = np.random.default_rng(0).permutation(width).astype(np.int32)[None]
    probs = np.full((1, width), 1e-6, np.float32)
    probs[0, 7] = 0.5
    start = time.process_time()
    lookup.learn([1], [2], top_ids=ids, top_probs=probs)
    lookup.learn([1], [2], top_ids=ids, top_probs=probs)
    assert time.process_time() - start < 5
    best = lookup.predict([1], limit=1)[0] if make is BlendedLookup else lookup.lookup([1])[1]
    assert best[0] == ids[0, 7]


def test_wide_laws_are_averaged_like_narrow_ones():
    """Of the same entries, padded or not."""
    rng = np.random.default_rng(1)
    narrow, wide = LookupTree(min_rate=0.0), LookupTree(min_rate=0.0)
    for _ in range(30):
        ids = rng.permutation(60)[:20][None].astype(np.int32)
        ids[0, 1] = ids[0, 0]  # adds up
        probs = rng.dirichlet(np.ones(20)).astype(np.float32)[None]
        narrow.learn([1, 2], [3], top_ids=ids, top_probs=probs)
        padded = np.pad(ids, ((0, 0), (0, 100)), constant_values=-1)
        wide.learn([1, 2], [3], top_ids=padded, top_probs=np.pad(probs, ((0, 0), (0, 100))))
    for one, two in zip(narrow.lookup([1, 2]), wide.lookup([1, 2]), strict=True):
        assert np.array_equal(one, two)


def test_a_crowd_of_rows_takes_its_size_not_its_square():
    lookup, num_rows = BlendedLookup(), 60_000
    lookup.learn([], stream(2000))
    start = time.process_time()
    batch = draft(lookup, [np.array([3], np.int32)] * num_rows, 2 * num_rows)
    assert time.process_time() - start < 5
    assert batch.num_nodes == 3 * num_rows


@pytest.mark.parametrize("kind", KINDS)
def test_a_crowd_of_rows_gets_the_same_drafts(kind):
    """One row more, which may not grow, and another queue is in use."""
    tokens = stream(6000, vocabulary=60, stay=0.6)
    lookup = BlendedLookup()
    lookup.learn([], tokens)
    histories = [tokens[: 100 + 5 * row] for row in range(1024)]
    few = draft(lookup, histories, 6000, kind=kind)
    many = draft(lookup, [*histories, histories[0]], 6000, kind=kind, max_depths=[99] * 1024 + [0])
    same = [np.array_equal(few[row].token_ids, many[row].token_ids) for row in range(1024)]
    assert np.mean(same) > 0.99 and len(many[1024].token_ids) == 1


def test_a_sampled_child_of_a_mixed_draft_keeps_to_the_floor():
    lookup, num_sampled = BlendedLookup(num_candidates=32), 0
    lookup.learn([], stream(4000, vocabulary=200, stay=0.2))
    for floor in (0.02, 0.05, 0.08, 0.1):
        for token in range(200):
            batch = draft(lookup, [np.array([token], np.int32)], 30, kind="mixed", floor=floor)
            assert batch.path_probabilities.min() >= floor
            num_sampled += int(((batch.law > 0).sum(1) > 1).sum())
    assert num_sampled > 0


def test_grown_drafts_and_others_make_no_batch():
    lookup = BlendedLookup()
    lookup.learn([], stream(400))
    grown, other = draft(lookup, [stream(100)], 4)[0], DraftTree.pending(3)
    with pytest.raises(ValueError, match="must all have path_probabilities or none of them, got None in 1"):
        DraftBatch.concatenate([grown, other])
    assert DraftBatch.concatenate([grown, grown]).path_probabilities is not None
    assert DraftBatch.concatenate([other, other]).path_probabilities is None


def test_candidates_that_are_no_arrays_are_converted_or_refused():
    picks, _ = draw_children("deterministic", [0.6, 0.4], [0.5, 0.5], 2)
    assert picks.tolist() == [0, 1]
    for wrong in ({"a": 1.0}, "ab", [[0.6, 0.4]], 0.5, [None]):
        with pytest.raises((ValueError, TypeError)):
            draw_children("sampled", wrong, [0.5], 1)
