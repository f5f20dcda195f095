"""The lookup tree: the paper's worked example, and the compiled core against its slow twin."""

import threading
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from reference import ReferenceLookup

from stand.trees import LookupTree, TreeShape

BOB, MARY, TOM, SUE = 10, 11, 12, 13


def known(lookup, context, floor_order=1):
    """(order, {token: probability}, count) or None."""
    found = lookup.lookup(context, floor_order=floor_order)
    if found is None:
        return None
    order, token_ids, probabilities, count = found
    return order, dict(zip(token_ids.tolist(), probabilities.tolist(), strict=True)), count


def law(*pairs):
    """As arguments of `learn`."""
    token_ids, probabilities = zip(*pairs, strict=True)
    return {"top_ids": np.array([token_ids], np.int32), "top_probs": np.array([probabilities], np.float32)}


def test_worked_example_of_the_paper():
    lookup = LookupTree(min_rate=0.0)
    lookup.learn([1, 2], [BOB], **law((BOB, 0.7), (MARY, 0.2), (TOM, 0.05)))
    lookup.learn([1, 2], [MARY], **law((BOB, 0.3), (MARY, 0.6), (SUE, 0.05)))
    for context in ([2], [1, 2]):
        order, probabilities, count = known(lookup, context)
        assert (order, count) == (len(context), 2)
        assert list(probabilities) == [BOB, MARY, TOM, SUE]
        assert probabilities == pytest.approx({BOB: 0.5, MARY: 0.4, TOM: 0.025, SUE: 0.025}, abs=1e-7)


def test_the_third_observation_weighs_a_third_or_the_floor():
    for min_rate, rate in ((0.0, 1 / 3), (0.4, 0.4), (1.0, 1.0)):
        lookup = LookupTree(orders=(1,), min_rate=min_rate)
        for token in (5, 5, 6):
            lookup.learn([1], [token])
        expected = {5: 1 - rate, 6: rate} if rate < 1.0 else {6: 1.0}
        assert known(lookup, [1])[1] == pytest.approx(expected, abs=1e-6)


def test_the_best_stay_and_ties_go_to_the_lowest_id():
    lookup = LookupTree(orders=(1,), num_candidates=3)
    lookup.learn([1], [9], **law((9, 0.2), (4, 0.2), (7, 0.2), (2, 0.2), (3, 0.1)))
    assert list(known(lookup, [1])[1]) == [2, 4, 7]


def test_longest_context_first_down_to_the_floor():
    lookup = LookupTree(orders=(1, 3))
    lookup.learn([], [1, 2, 3, 4])
    lookup.learn([9, 3], [5])
    assert known(lookup, [1, 2, 3])[:2] == (3, {4: 1.0})
    assert known(lookup, [0, 2, 3])[0] == 1
    assert known(lookup, [0, 2, 3], floor_order=2) is None
    assert known(lookup, []) is None and known(lookup, [77]) is None


def test_positions_see_the_tokens_before_them():
    lookup = LookupTree(orders=(1, 2))
    lookup.learn([7], [8, 9])
    assert len(lookup) == 3
    assert known(lookup, [7, 8])[1] == {9: 1.0}
    assert known(lookup, [7])[1] == {8: 1.0}


def test_laws_without_mass_say_nothing():
    lookup = LookupTree()
    lookup.learn([1], [2, 3], top_ids=[[-1, -1], [5, -1]], top_probs=np.zeros((2, 2)))
    assert len(lookup) == 0


def tokens_of(draw, size, largest=5):
    return draw(st.lists(st.integers(0, largest), min_size=size, max_size=size))


@st.composite
def taught_laws(draw, num_laws):
    width = draw(st.integers(1, 6))
    ids = [draw(st.permutations(range(8)))[:width] for _ in range(num_laws)]
    probs = np.array(
        draw(st.lists(st.integers(0, 9), min_size=num_laws * width, max_size=num_laws * width)), np.float32
    )
    probs = (probs / 60.0).reshape(num_laws, width)
    ids = np.where(probs == 0.0, -1, np.array(ids, np.int32).reshape(num_laws, width))
    return {"top_ids": ids.astype(np.int32), "top_probs": probs}


@st.composite
def operations(draw):
    """A list of ("learn", ...), ("learn_batch", ...) and ("clear",) with small vocabularies, so that contexts meet."""
    chosen = []
    for _ in range(draw(st.integers(1, 8))):
        name = draw(st.sampled_from(["learn", "learn", "learn_laws", "learn_batch", "learn_batch", "clear"]))
        context, following = tokens_of(draw, draw(st.integers(0, 5))), tokens_of(draw, draw(st.integers(0, 6)))
        if name == "learn_laws":
            chosen.append(("learn", context, following, draw(taught_laws(len(following)))))
        elif name == "learn":
            chosen.append(("learn", context, following, {}))
        elif name == "learn_batch":
            chosen.append(("learn_batch", draw(st.integers(0, 2**20))))
        elif len(chosen) > 4:
            chosen.append(("clear",))
    return chosen


PARAMETERS = st.fixed_dictionaries(
    {
        "orders": st.sampled_from([(1,), (1, 2), (2, 4), (1, 2, 3, 4), (1, 3, 16)]),
        "num_candidates": st.integers(1, 5),
        "min_rate": st.sampled_from([0.0, 0.1, 0.7, 1.0]),
    }
)


@settings(max_examples=120, deadline=None, derandomize=True)
@given(PARAMETERS, operations())
def test_equals_slow_twin_after_any_operations(parameters, chosen):
    lookup, twin = LookupTree(**parameters), ReferenceLookup(**parameters)
    for name, *arguments in chosen:
        if name == "learn":
            context, following, laws = arguments
            lookup.learn(context, following, **laws)
            twin.learn(context, following, **laws)
        elif name == "learn_batch":
            arguments = random_step(lookup, arguments[0])
            lookup.learn_batch(*arguments)
            twin.learn_batch(*arguments)
        else:
            lookup.clear()
            twin.contexts.clear()
    assert_same(lookup, twin)


def random_step(lookup, seed):
    """Arguments of learn_batch: drafts of this lookup tree, or a made-up one where it knows nothing, with rows."""
    rng = np.random.default_rng(seed)
    num_rows = int(rng.integers(1, 4))
    histories = [rng.integers(0, 6, rng.integers(1, 9)).astype(np.int32) for _ in range(num_rows)]
    numbers = np.arange(num_rows)
    batch = lookup.draft(histories, TreeShape.from_branching([2, 2]), seed=seed, rows=numbers, steps=numbers)
    width = 3
    top_ids = np.array([rng.permutation(8)[:width] for _ in range(batch.num_nodes)], np.int32)
    top_probs = rng.dirichlet(np.ones(width), batch.num_nodes).astype(np.float32)
    nodes = None if seed % 2 else rng.permutation(batch.num_nodes)[: batch.num_nodes // 2 + 1]
    return batch, [history[:-1] for history in histories], top_ids, top_probs, nodes


def assert_same(lookup, twin):
    assert len(lookup) == len(twin.contexts)
    for context, (expected, count) in twin.contexts.items():
        found = lookup.lookup(np.array(context, np.int32), floor_order=len(context))
        if not expected:
            assert found is None
            continue
        order, token_ids, probabilities, found_count = found
        assert (order, found_count) == (len(context), count)
        assert token_ids.tolist() == [token for token, _ in expected]
        assert probabilities.tolist() == pytest.approx([probability for _, probability in expected], rel=1e-6)


def test_many_contexts_survive_growth():
    """Tables double many times; every context stays what it was."""
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, 300, 5_000).astype(np.int32)
    lookup, twin = LookupTree(orders=(1, 2, 3)), ReferenceLookup(orders=(1, 2, 3))
    lookup.learn([], tokens)
    twin.learn([], tokens.tolist())
    assert_same(lookup, twin)


def test_learning_from_threads_loses_nothing():
    """Every thread teaches the same 500 contexts, long enough to overlap; a lost update shows in the counts."""
    num_threads, num_rounds = 4, 200
    run = np.tile(np.arange(500, dtype=np.int32), num_rounds)
    lookup = LookupTree(orders=(1, 2))
    barrier = threading.Barrier(num_threads)

    def teach():
        barrier.wait()
        lookup.learn([499], run)

    threads = [threading.Thread(target=teach) for _ in range(num_threads)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert {lookup.lookup([token])[3] for token in range(500)} == {num_threads * num_rounds}
    assert len(lookup) == 1000


def test_copy_is_independent_and_clear_forgets():
    lookup = LookupTree(orders=(1, 2), num_candidates=4, min_rate=0.3, fingerprint=b"abc")
    lookup.learn([], [1, 2, 3])
    twin = lookup.copy()
    twin.learn([], [3, 1])
    assert (len(lookup), len(twin)) == (3, 4)
    assert (twin.orders, twin.num_candidates, twin.min_rate, twin.fingerprint) == ((1, 2), 4, 0.3, b"abc")
    lookup.clear()
    assert len(lookup) == 0 and lookup.lookup([1]) is None and len(twin) == 4
    lookup.learn([], [1, 2])
    assert len(lookup) == 1


def test_says_what_it_is():
    lookup = LookupTree()
    lookup.learn([], range(100))
    assert repr(lookup).startswith("LookupTree(orders=(1, 2, 3, 4), num_candidates=10, min_rate=0.1, contexts=390,")
    assert lookup.nbytes > 390 * 80


@pytest.mark.parametrize(
    "bad",
    [
        {"orders": ()},
        {"orders": (2, 1)},
        {"orders": (1, 1)},
        {"orders": (0, 1)},
        {"orders": (17,)},
        {"num_candidates": 0},
        {"num_candidates": 257},
        {"min_rate": -0.1},
        {"min_rate": 1.1},
        {"min_rate": float("nan")},
        {"fingerprint": "text"},
    ],
)
def test_bad_parameters_are_refused(bad):
    with pytest.raises(ValueError, match=f"{next(iter(bad))} must"):
        LookupTree(**bad)


BAD_LAWS = [
    (np.array([[1]]), np.array([[0.5, 0.5]])),
    (np.array([[1], [2]]), np.array([[0.5], [0.5]])),
    (np.array([[-2]]), np.array([[0.5]])),
    (np.array([[1]]), np.array([[-0.5]])),
    (np.array([[1]]), np.array([[np.nan]])),
    (np.array([[1]]), np.array([[np.inf]])),
    (np.array([[1]]), np.array([[1.5]])),
    (np.zeros((1, 0), np.int32), np.zeros((1, 0), np.float32)),
]


@pytest.mark.parametrize(("top_ids", "top_probs"), BAD_LAWS)
def test_bad_laws_are_refused_and_teach_nothing(top_ids, top_probs):
    lookup = LookupTree()
    with pytest.raises(ValueError, match="top_ids"):
        lookup.learn([1], [2], top_ids=top_ids, top_probs=top_probs)
    assert len(lookup) == 0


def test_bad_tokens_are_refused():
    lookup = LookupTree()
    for context, token_ids in [([-1], [2]), ([1], [-1]), ([1], [[2]])]:
        with pytest.raises(ValueError, match="token"):
            lookup.learn(context, token_ids)
    with pytest.raises(ValueError, match="floor_order"):
        lookup.lookup([1], floor_order=0)
    assert len(lookup) == 0


def test_bad_steps_are_refused():
    lookup = LookupTree()
    batch, histories, top_ids, top_probs, _ = random_step(lookup, 1)
    with pytest.raises(ValueError, match="histories"):
        lookup.learn_batch(batch, histories[1:], top_ids, top_probs)
    with pytest.raises(ValueError, match="top_ids and top_probs must"):
        lookup.learn_batch(batch, histories, top_ids[1:], top_probs)
    for nodes in ([batch.num_nodes], [-1]):
        with pytest.raises(ValueError, match="nodes must"):
            lookup.learn_batch(batch, histories, top_ids, top_probs, nodes)
    broken = replace(batch, parents=batch.parents + 9)
    with pytest.raises(ValueError, match="sound DraftBatch"):
        lookup.learn_batch(broken, histories, top_ids, top_probs)
    assert len(lookup) == 0
