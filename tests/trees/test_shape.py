"""Shapes, and that a fitted shape is an optimum."""

import itertools

import numpy as np
import pytest

from stand.trees import NO_PARENT, TreeShape, fit_shape


def test_paper_shape_has_the_papers_counts():
    shape = TreeShape.paper()
    assert shape.num_nodes == 80
    assert np.bincount(shape.depths).tolist() == [1, 8, 19, 16, 13, 8, 7, 2, 1, 1, 1, 1, 1, 1]


def test_start_shape_has_the_papers_size():
    shape = TreeShape.start()
    assert (shape.num_nodes, shape.max_depth) == (625, 20)


@pytest.mark.parametrize("shape", [TreeShape.paper(), TreeShape.start()])
def test_better_parents_have_more_children(shape):
    """In a hand-made shape, a slot never has more children than its earlier sibling."""
    for slot in range(1, shape.num_nodes):
        siblings = np.flatnonzero(shape.parents == shape.parents[slot])
        assert np.all(np.diff(shape.num_children[siblings]) <= 0)


def test_small_shapes():
    assert TreeShape.empty().parents.tolist() == [NO_PARENT]
    assert TreeShape.chain(3).parents.tolist() == [NO_PARENT, 0, 1, 2]
    assert TreeShape.chain(0) == TreeShape.empty()
    shape = TreeShape.from_branching([2, 2, 1])
    assert shape.parents.tolist() == [NO_PARENT, 0, 0, 1, 1, 2, 2, 3, 4, 5, 6]
    assert shape.num_children.tolist() == [2, 2, 2, 1, 1, 1, 1, 0, 0, 0, 0]
    assert shape.depths.tolist() == [0, 1, 1, 2, 2, 2, 2, 3, 3, 3, 3]
    assert shape.ranks.tolist() == [0, 0, 1, 0, 1, 0, 1, 0, 0, 0, 0]


def test_slots_are_numbered_by_depth_and_keep_their_ranks():
    shape = TreeShape([NO_PARENT, 0, 1, 0, 2, 1])
    assert shape.parents.tolist() == [NO_PARENT, 0, 0, 1, 1, 3]
    shape.check()


def test_truncated_keeps_numbers():
    shape = TreeShape.paper()
    for depth in range(shape.max_depth + 2):
        cut = shape.truncated(depth)
        assert cut.max_depth == min(depth, shape.max_depth)
        assert np.array_equal(cut.parents, shape.parents[: cut.num_nodes])


def test_shapes_are_values():
    shape = TreeShape([NO_PARENT, 0])
    assert shape == TreeShape.chain(1) and hash(shape) == hash(TreeShape.chain(1)) and shape != TreeShape.chain(2)
    with pytest.raises(ValueError, match="read-only"):
        shape.parents[1] = 5


@pytest.mark.parametrize("text", ["paper", "start", "empty", "chain:8", "branching:4,2,1", "parents:-1,0,0,1"])
def test_parse_and_text_agree(text):
    shape = TreeShape.parse(text)
    assert TreeShape.parse(str(shape)) == shape


@pytest.mark.parametrize("text", ["", "papers", "chain:", "chain:1,2", "chain:x", "branching:", "parents:", "paper:1"])
def test_parse_refuses(text):
    with pytest.raises(ValueError, match="a shape must be paper"):
        TreeShape.parse(text)


@pytest.mark.parametrize("parents", [[], [0], [NO_PARENT, 1], [NO_PARENT, -1], [NO_PARENT, 0, 2], [[NO_PARENT]]])
def test_unsound_parents_are_refused(parents):
    with pytest.raises(ValueError, match="parents"):
        TreeShape(np.array(parents))


def test_the_first_unsound_parent_is_named():
    with pytest.raises(ValueError, match=r"got parents\[2\] = 2; put parents first"):
        TreeShape(np.array([NO_PARENT, 0, 2, 9]))


def test_bad_numbers_are_refused():
    with pytest.raises(ValueError, match="length"):
        TreeShape.chain(-1)
    with pytest.raises(ValueError, match="branching"):
        TreeShape.from_branching([2, 0])
    with pytest.raises(ValueError, match="depth"):
        TreeShape.paper().truncated(-1)


@pytest.mark.parametrize(
    "make",
    [
        lambda: TreeShape([NO_PARENT, 2**32]),
        lambda: TreeShape([NO_PARENT, 0.9]),
        lambda: TreeShape(5),
        lambda: TreeShape.parse("parents:-1,4294967296"),
        lambda: TreeShape.chain(1.5),
        lambda: TreeShape.from_branching([1.5]),
        lambda: fit_shape(np.array([1.9, 0.9]), TreeShape.chain(1), 2),
        lambda: fit_shape(np.array([2, 1]), TreeShape.chain(1), 1.5),
    ],
)
def test_fractions_and_numbers_that_wrap_are_refused(make):
    with pytest.raises(ValueError, match="must .*got .*;|one-dimensional"):
        make()


def random_shape(rng, num_nodes):
    return TreeShape(np.array([NO_PARENT] + [rng.integers(0, slot) for slot in range(1, num_nodes)]))


def allowed_sets(shape, num_nodes):
    """Every set of slots that is closed under parent and earlier sibling, and holds the root."""
    ranks = shape.ranks
    for rest in itertools.combinations(range(1, shape.num_nodes), num_nodes - 1):
        chosen = {0, *rest}
        parents_stay = all(shape.parents[slot] in chosen for slot in rest)
        siblings_stay = all(
            other in chosen
            for slot in rest
            for other in range(1, shape.num_nodes)
            if shape.parents[other] == shape.parents[slot] and ranks[other] < ranks[slot]
        )
        if parents_stay and siblings_stay:
            yield sorted(chosen)


def test_fit_is_an_optimum_by_brute_force():
    rng = np.random.default_rng(7)
    for _ in range(60):
        shape = random_shape(rng, int(rng.integers(1, 11)))
        num_nodes = int(rng.integers(1, shape.num_nodes + 1))
        counts = rng.integers(0, 6, shape.num_nodes) * rng.integers(0, 2, shape.num_nodes)
        best = max(counts[chosen].sum() for chosen in allowed_sets(shape, num_nodes))
        assert weight_of(fit_shape(counts, shape, num_nodes), shape, counts) == best


def weight_of(fitted, shape, counts):
    """The largest weight with which a fitted shape can be placed in the shape it came from, rank by rank."""
    place = {0: 0}
    ranks = fitted.ranks
    for slot in range(1, fitted.num_nodes):
        siblings = np.flatnonzero(shape.parents == place[int(fitted.parents[slot])])
        place[slot] = int(siblings[ranks[slot]])
    assert len(set(place.values())) == fitted.num_nodes
    return sum(int(counts[slot]) for slot in place.values())


def test_a_greedy_cut_is_not_an_optimum():
    """Control: the best slots by count would orphan the deep one; taking best-first misses it too."""
    shape = TreeShape([NO_PARENT, 0, 0, 0, 3])
    counts = np.array([9, 2, 1, 0, 5])
    assert weight_of(fit_shape(counts, shape, 5), shape, counts) == 17
    shape = TreeShape([NO_PARENT, 0, 1, 1, 3])  # parent 1 with children 2 and 3; 4 hangs below 3
    counts = np.array([0, 1, 0, 0, 50])
    fitted = fit_shape(counts, shape, 5)
    assert fitted == shape
    assert weight_of(fit_shape(counts, shape, 3), shape, counts) == 1


def test_fit_of_the_start_shape_has_the_wanted_size():
    shape = TreeShape.start()
    counts = np.random.default_rng(0).poisson(1000.0 * 0.6**shape.depths)
    fitted = fit_shape(counts, shape, 80)
    assert fitted.num_nodes == 80
    assert weight_of(fitted, shape, counts) > weight_of(TreeShape(shape.parents[:80]), shape, counts)
    assert fit_shape(counts, shape, 625) == shape
    assert fit_shape(counts, shape, 1) == TreeShape.empty()


def test_fit_refuses_bad_arguments():
    shape = TreeShape.chain(3)
    for counts, num_nodes in [([1, 2], 2), ([1, 2, 3, -4], 2), ([1, 2, 3, 4], 0), ([1, 2, 3, 4], 5)]:
        with pytest.raises(ValueError, match="must be"):
            fit_shape(np.array(counts), shape, num_nodes)
