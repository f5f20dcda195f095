"""Best-first growth against its slow twin: the same nodes in the same order, their estimates, their laws."""

import numpy as np
import pytest
from noisy_walks import draft, stream
from planned_masks import planned_masks
from reference_blended import SlowBlend
from reference_growth import SlowGrowth

from stand.trees import BlendedLookup

TEXTS = [
    stream(400, vocabulary=12, seed=1, stay=0.7),
    stream(500, vocabulary=30, seed=2, stay=0.6),
    stream(300, vocabulary=9, seed=3, stay=0.0),  # anything may follow
]
# Rising prices: the first nodes are cheap.
RISES = np.linspace(0.0, 0.3, 40)
CASES = {
    "one row": {"budget": 12},
    "one row, many nodes": {"budget": 80},
    "one row, few nodes": {"budget": 2},
    "one row, no node": {"budget": 0},
    "three rows": {"num_rows": 3, "budget": 16},
    "one node": {"budget": 1},
    "a high floor": {"num_rows": 2, "budget": 30, "floor": 0.3},
    "a floor": {"num_rows": 2, "budget": 20, "floor": 0.06},
    "a floor above what is drawn": {"num_rows": 2, "budget": 20, "floor": 0.1},
    "at most two children": {"num_rows": 2, "budget": 14, "width": 2},
    "chains": {"num_rows": 3, "budget": 12, "width": 1},
    "chains below their caps": {"num_rows": 3, "budget": 40, "width": 1, "max_nodes": [3, 1, 11]},
    "depths": {"num_rows": 4, "budget": 12, "max_depths": [2, 0, 1, 9]},
    "caps below the budget": {"num_rows": 3, "budget": 40, "max_nodes": [3, 0, 11]},
    "caps above the budget": {"num_rows": 3, "budget": 10, "max_nodes": [3, 1, 11]},
    "caps that make up the budget": {"num_rows": 3, "budget": 15, "max_nodes": [3, 1, 11]},
    "prices": {"num_rows": 2, "budget": 40, "rises": RISES},
    "scopes": {"num_rows": 2, "budget": 9, "scopes": [1, 2]},
    "few candidates": {"num_rows": 2, "budget": 12, "num_candidates": 3},
    "masks of a few tokens": {"num_rows": 2, "budget": 30, "most_allowed": 9},
    "masks of many tokens": {"num_rows": 2, "budget": 30, "most_allowed": 40},
    "chains with masks": {"num_rows": 3, "budget": 12, "width": 1, "most_allowed": 20},
}


@pytest.fixture(scope="module")
def blends():
    """The lookup by number of candidates, and its twin. Odds stay as they begin, so that both have them to the bit."""
    slow = SlowBlend(rate=0.0)
    lookups = {count: BlendedLookup(rate=0.0, num_candidates=count) for count in (3, 10)}
    for scope, text in enumerate(TEXTS, start=1):
        slow.learn([], text.tolist(), scope=scope)
        for lookup in lookups.values():
            lookup.learn([], text, scope=scope)
    return lookups, slow


def end_of(length, rng):
    """Where learning ended, near the beginning, or anywhere."""
    return int([length, rng.integers(3, 9), rng.integers(9, length)][rng.integers(3)])


def allowed_at(most):
    """(row, path) -> up to `most` tokens, other ones for each."""

    def allowed(row, path):
        rng = np.random.default_rng([row, *path])
        return rng.permutation(40)[: rng.integers(most + 1)].tolist()

    return allowed


def compare(
    blends, kind, *, num_rows=1, budget, num_candidates=10, seed=7, most_allowed=None, twin=None, **settings
):  # fmt: skip
    """AssertionError where the draft is not the twin's. Returns the number of nodes."""
    lookups, slow = blends
    rng, count = np.random.default_rng(seed), 0
    for step in range(8):
        texts = [TEXTS[int(rng.integers(3))] for _ in range(num_rows)]
        histories = [text[int(rng.integers(3)) : end_of(len(text), rng)] for text in texts]
        place = {"seed": seed, "rows": np.arange(num_rows) + 3, "steps": np.full(num_rows, step)}
        masks, allowed = None, {}
        if most_allowed is not None:
            plan = draft(lookups[num_candidates], histories, budget, **place, **settings)
            masks, allowed = planned_masks(plan, allowed_at(most_allowed), num_words=2)
        batch = draft(lookups[num_candidates], histories, budget, kind=kind, masks=masks, **place, **settings)
        batch.check()
        growth = SlowGrowth(slow, num_candidates=num_candidates)
        nodes = growth.draft(histories, budget, kind=kind, **(place | settings | {"masks": allowed} | (twin or {})))
        assert batch.depths.tolist() == [node.depth for row in range(num_rows) for node in nodes if node.row == row]
        for row in range(num_rows):
            compare_row(batch[row], [node for node in nodes if node.row == row], nodes, kind)
        count += len(nodes)
    return count


def compare_row(one, own, nodes, kind):
    assert one.token_ids.tolist() == [node.token for node in own]
    assert one.parents.tolist() == [-1 if node.parent < 0 else nodes[node.parent].local for node in own]
    np.testing.assert_allclose(one.path_probabilities, [node.path for node in own], rtol=1e-5)
    np.testing.assert_allclose(one.path_estimates, [node.product for node in own], rtol=1e-5)
    if kind == "deterministic":
        return  # what their laws must be is the draft's own check
    for place, node in enumerate(own):
        support = one.support_ids[place]
        assert support[support >= 0].tolist() == ([] if node.candidates is None else node.candidates.tokens)
        if node.parent < 0:
            continue
        tokens = nodes[node.parent].candidates.tokens
        law = [float(token == node.token) for token in tokens] if node.law is None else node.law
        np.testing.assert_allclose(one.law[place][: len(law)], law, rtol=1e-5, atol=1e-9)


@pytest.mark.parametrize("kind", ["deterministic", "mixed", "sampled"])
@pytest.mark.parametrize("name", CASES)
def test_drafts_are_the_twins(blends, name, kind):
    settings = dict(CASES[name])
    if settings.get("width") == 1 and kind == "mixed":
        pytest.skip("chains are sampled or deterministic")
    count = compare(blends, kind, **settings)
    assert count > 8 * settings.get("num_rows", 1) or settings["budget"] == 0


@pytest.mark.parametrize(
    "change", [{"floor": 0.3}, {"width": 2}, {"seed": 8}, {"scopes": [0, 0]}, {"rises": RISES / 9}, {"masks": {}}]
)
def test_the_twin_sees_a_difference(blends, change):
    settings = {"rises": RISES, "scopes": [1, 2], "most_allowed": 30 if "masks" in change else None}
    with pytest.raises(AssertionError):
        compare(blends, "sampled", num_rows=2, budget=40, **settings, twin=change)


@pytest.mark.parametrize("kind", ["deterministic", "mixed", "sampled"])
def test_every_node_pays(kind):
    """A node adds a larger share to the step's tokens than to its cost, also the one that mixed drafts draw."""
    lookup, count = BlendedLookup(num_candidates=32), 0
    lookup.learn([], stream(4000, vocabulary=20, stay=0.2))
    for step in range(100):
        place = {"seed": 7, "rows": [0], "steps": [step]}
        batch = draft(lookup, [stream(20, seed=step, vocabulary=20)], 20, kind=kind, rises=[0.1] * 20, **place)
        paths = batch.path_probabilities  # in the order in which they were revealed
        assert (paths[1:] >= 0.1 * np.cumsum(paths)[:-1] * (1 - 1e-6)).all()
        count += batch.num_nodes - 1
    assert count > 50


@pytest.mark.parametrize("kind", ["deterministic", "mixed", "sampled"])
def test_no_node_has_more_children_than_its_width(kind):
    """Laws so flat that mixed drafts draw a child where no other is sure: the likeliest token is drawn now and then."""
    lookup = BlendedLookup(rate=0.0)
    texts = [stream(2000, vocabulary=size, seed=size, stay=0.0) for size in (5, 7, 10)]
    for scope, text in enumerate(texts, start=1):
        lookup.learn([], text, scope=scope)
    widest = []
    for step in range(20):
        place = {"seed": 7, "rows": np.arange(3), "steps": np.full(3, step)}
        batch = draft(lookup, [text[: 900 + step] for text in texts], 300, kind=kind, width=3, **place)
        widest.append(1 + batch.ranks.max())
    assert max(widest) == 3


@pytest.mark.parametrize("width", [1, None])
def test_nothing_grows_from_nothing(width):
    """Whatever was drafted before. The arrays stay as wide as a law of one child."""
    lookup = BlendedLookup()
    lookup.learn([], TEXTS[0])
    draft(lookup, [TEXTS[0]], 6, width=width)
    lookup.clear()
    batch = draft(lookup, [TEXTS[0], TEXTS[1]], 6, width=width)
    assert batch.num_nodes == 2 and batch.law.shape == (2, 1)


def test_drafts_are_sound_far_below_what_a_budget_reaches_otherwise():
    """Paths less likely than 2 ** -16, which share one list of the queue."""
    lookup = BlendedLookup()
    lookup.learn([], np.random.default_rng(1).integers(0, 300, 3000).astype(np.int32))
    batch = draft(lookup, [np.array([7], np.int32)], 8000)
    batch.check()
    paths = batch.path_probabilities[1:]
    assert paths.min() < 2**-16 and batch.num_nodes > 5000
    assert (paths <= batch.path_probabilities[batch.parents[1:]]).all()
