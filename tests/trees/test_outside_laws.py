"""Laws from outside of a lookup: against a slow twin, where they are found, what they teach, what is refused."""

import numpy as np
import pytest
from noisy_walks import draft, stream
from outside_trees import law_at, outside_laws
from reference_blended import SlowBlend
from reference_outside import SlowOutside

from stand.trees import NO_TOKEN, BlendedLookup, DraftBatch, DraftTree, OutsideLaws

ANY = OutsideLaws.ANY_TOKEN
VOCABULARY = 9


def estimates_at_root(lookup, path, law, **settings) -> dict[int, float]:
    """The blended law after `path`, of the tokens that a large draft of depth 1 holds."""
    laws = outside_laws([[(-1, path[-1], law)]], **settings)
    batch = draft(lookup, [np.array(path, np.int32)], 500, max_depths=[1], outside=laws)
    return dict(zip(batch.token_ids[1:].tolist(), batch.path_estimates[1:].tolist(), strict=True))


def random_law(rng, size):
    tokens = rng.permutation(VOCABULARY)[:size]
    return list(zip(tokens.tolist(), np.sort(rng.dirichlet(np.full(size, 0.5)))[::-1].tolist(), strict=True))


def chain_of(tokens, laws) -> DraftBatch:
    """A chain that was drafted with laws from outside, or without (None)."""
    batch = DraftBatch.concatenate([DraftTree.chain(tokens)])
    batch.__dict__["outside_laws"] = laws
    return batch


def lessons(count: int, *, seed=0):
    """(path, chain of three tokens, laws of a head at its first two, the target's laws after all three).

    At the first token the head says what the target says, at the second one anything.
    """
    rng, text = np.random.default_rng(seed), stream(4 * count + 20, vocabulary=VOCABULARY, seed=seed).tolist()
    for start in range(0, 4 * count, 4):
        path, chain = text[max(0, start - 14) : start + 3], text[start + 3 : start + 6]
        targets = [random_law(rng, 4) for _ in chain]
        own = [targets[0][:3], random_law(rng, 3)]
        ids = np.array([[token for token, _ in law] for law in targets], np.int32)
        probs = np.array([[share for _, share in law] for law in targets], np.float32)
        yield path, chain, own, ids, probs


def taught(count: int, *, rate=0.05, with_laws=True) -> BlendedLookup:
    lookup = BlendedLookup(rate=rate)
    for path, chain, own, ids, probs in lessons(count):
        laws = outside_laws([[(-1, chain[0], own[0]), (0, chain[1], own[1])]]) if with_laws else None
        lookup.learn_batch(chain_of(chain, laws), [np.array(path, np.int32)], ids, probs)
    lookup.check()
    return lookup


def slow_twin(count: int, *, rate=0.05) -> SlowOutside:
    outside = SlowOutside(SlowBlend(rate=rate))
    for path, chain, own, ids, probs in lessons(count):
        here = [[*path, *chain[: depth + 1]] for depth in range(3)]
        rows = [list(zip(*law, strict=True)) for law in zip(ids.tolist(), probs.tolist(), strict=True)]
        for depth in range(2):
            outside.compare(here[depth], rows[depth], own[depth], depth)
        for depth in range(3):
            outside.slow.learn_row(here[depth], rows[depth])
    return outside


def largest_error(lookup, outside) -> float:
    rng, worst, compared = np.random.default_rng(7), 0.0, 0
    text = stream(500, vocabulary=VOCABULARY, seed=0).tolist()
    for end in range(20, len(text), 11):
        path, law = text[end - 14 : end], random_law(rng, 4)
        expected, found = outside.predict(path, law, 0), estimates_at_root(lookup, path, law)
        likely = {token for token, share in expected.items() if share > 0.03}
        assert likely <= set(found)
        worst = max([worst, *(abs(found[token] / expected[token] - 1) for token in likely)])
        compared += len(likely)
    assert compared > 50
    return worst


@pytest.mark.parametrize("rate", [0.05, 0.0])
def test_the_slow_twin_blends_and_learns_the_same(rate):
    assert largest_error(taught(120, rate=rate), slow_twin(120, rate=rate)) < 0.05


def test_the_surer_a_head_is_the_less_contexts_count():
    """Of one text, laws of ever surer heads: the token that the head holds likeliest, against the twin."""
    lookup, outside, text = taught(120), slow_twin(120), stream(500, vocabulary=VOCABULARY, seed=0).tolist()
    others = []
    for top in (0.79, 0.9, 0.97, 0.995):
        path, law = text[3:17], [(2, top), (5, 0.004)]
        found, expected = estimates_at_root(lookup, path, law)[2], outside.predict(path, law, 0)[2]
        assert found == pytest.approx(expected, rel=0.03)
        others.append(1 - found)
    assert others[3] < 0.5 * others[1] and others[2] < 0.8 * others[1]


@pytest.mark.parametrize("name", ["trust", "escape", "entry", "evidence"])
def test_the_twin_sees_a_difference(name):
    outside = slow_twin(120)
    setattr(outside, name, 0.0 if name == "evidence" else {})
    assert largest_error(taught(120), outside) > 0.06


def test_depths_are_learned_apart():
    """The second node's law follows the twin's odds of depth 1, which are others than those of depth 0."""
    lookup, outside, text = taught(120), slow_twin(120), stream(500, vocabulary=VOCABULARY, seed=0).tolist()
    path, law = text[3:17], [(2, 0.6), (5, 0.2)]
    laws = outside_laws([[(-1, path[-2], []), (0, path[-1], law)]])
    batch = draft(lookup, [np.array(path[:-1], np.int32)], 500, max_depths=[2], outside=laws)
    (node,) = np.flatnonzero((batch.depths == 1) & (batch.token_ids == path[-1]))
    (below,) = np.flatnonzero((batch.parents == node) & (batch.token_ids == 2))
    found = batch.path_estimates[below] / batch.path_estimates[node]
    expected, elsewhere = outside.predict(path, law, 1)[2], outside.predict(path, law, 0)[2]
    assert found == pytest.approx(expected, rel=0.03)
    assert abs(elsewhere / expected - 1) > 0.2


# Where laws are found.


def tokens_below(batch, *path) -> set[int]:
    node = 0
    for token in path:
        (node,) = np.flatnonzero((batch.parents == node) & (batch.token_ids == token))
    return set(batch.token_ids[batch.parents == node].tolist())


def test_a_law_is_found_by_the_tokens_that_lead_to_it():
    """An empty lookup drafts what the laws say, along their tree; ANY_TOKEN is each token without a node of its own."""
    tree = [
        (-1, 4, [(7, 0.3), (8, 0.3), (9, 0.3)]),
        (0, 7, [(10, 0.3)]),
        (0, ANY, [(11, 0.3)]),
        (2, 11, [(12, 0.3)]),
        (0, 9, []),
    ]
    batch = draft(BlendedLookup(), [np.array([3, 4], np.int32)], 40, outside=outside_laws([tree]))
    assert tokens_below(batch) == {7, 8, 9}
    assert tokens_below(batch, 7) == {10} and tokens_below(batch, 8) == {11} and tokens_below(batch, 9) == set()
    assert tokens_below(batch, 7, 10) == set() and tokens_below(batch, 8, 11) == {12}


LEVELS = [
    (-1, 4, [(7, 0.3), (8, 0.3), (9, 0.3)]),
    (0, ANY, [(20, 0.3)]),
    (0, 7, [(10, 0.3)]),  # nothing below: goes on as the node of any token
    (0, 8, [(11, 0.3), (15, 0.3)]),  # goes on by its own
    (3, 11, [(12, 0.3)]),
    (1, ANY, [(13, 0.3)]),
    (1, 10, [(14, 0.3)]),
]


def test_a_node_without_children_goes_on_as_its_sibling_of_any_token():
    batch = draft(BlendedLookup(), [np.array([3, 4], np.int32)], 40, outside=outside_laws([LEVELS]))
    below = {
        (): {7, 8, 9}, (7,): {10}, (8,): {11, 15}, (9,): {20}, (7, 10): {14}, (8, 11): {12}, (8, 15): set(),
        (9, 20): {13}, (7, 10, 14): set(), (9, 20, 13): set(),
    }  # fmt: skip
    assert {path: tokens_below(batch, *path) for path in below} == below


def random_tree(rng) -> list:
    """Three levels below the root, the nodes of any token going on; of the others few have children of their own."""
    tree, ends = [(-1, 0, [(0, 0.4), (1, 0.3), (2, 0.2)])], [0]
    for _ in range(3):
        begun = []
        for node in ends:
            for token in (ANY, *rng.permutation(3)[: rng.integers(0, 4)].tolist()):
                law = [(int(one), 0.5 - 0.2 * place) for place, one in enumerate(rng.permutation(4)[:2])]
                tree.append((node, token, law if rng.random() < 0.8 else []))
                begun += [len(tree) - 1] if rng.random() < (0.8 if token == ANY else 0.2) else []
        ends = begun
    return tree


def laws_found(tree) -> dict[tuple[int, ...], tuple[set[int], set[int]]]:
    """By path: tokens drafted by an empty lookup below it, and those of the slow twin's law."""
    batch = draft(BlendedLookup(), [np.array([3, 0], np.int32)], 400, outside=outside_laws([tree]))
    paths = {0: ()}
    for node in range(1, batch.num_nodes):
        paths[node] = (*paths[int(batch.parents[node])], int(batch.token_ids[node]))
    return {
        path: (set(batch.token_ids[batch.parents == node].tolist()), {token for token, _ in law_at(tree, path)})
        for node, path in paths.items()
    }


def test_laws_are_found_as_the_slow_twin_finds_them():
    rng, deepest, gone_on = np.random.default_rng(3), 0, 0
    for _ in range(60):
        tree = random_tree(rng)
        found = laws_found(tree)
        assert all(drafted == expected for drafted, expected in found.values())
        deepest = max(deepest, *map(len, found))
        ends = set(range(len(tree))) - {parent for parent, *_ in tree}
        stopped = [*tree, *((node, 98, []) for node in ends)]  # with children of their own they go on by those alone
        gone_on += any(law_at(tree, path) != law_at(stopped, path) for path in found)
        assert all(drafted == expected for drafted, expected in laws_found(stopped).values())
    assert deepest >= 4 and gone_on > 20


def test_rows_have_laws_of_their_own_or_none():
    laws = outside_laws([[(-1, 4, [(7, 0.5)])], [], [(-1, 4, [(8, 0.9)])]])
    batch = draft(BlendedLookup(), [np.array([3, 4], np.int32)] * 3, 9, outside=laws)
    assert [tokens_below(batch[row]) for row in range(3)] == [{7}, set(), {8}]


def test_heads_guess_places_whatever_stands_before_them():
    ids = np.array([[[5, 6], [7, NO_TOKEN]], [[8, 9], [1, 2]]], np.int32)
    probs = np.array([[[0.5, 0.4], [0.9, 0.0]], [[0.5, 0.4], [0.5, 0.4]]], np.float32)
    laws = OutsideLaws.of_heads(ids, probs)
    assert len(laws) == 2 and laws.num_nodes == 4
    batch = draft(BlendedLookup(), [np.array([3], np.int32)] * 2, 30, outside=laws)
    assert tokens_below(batch[0]) == {5, 6} and tokens_below(batch[0], 5) == tokens_below(batch[0], 6) == {7}
    assert tokens_below(batch[1], 8) == tokens_below(batch[1], 9) == {1, 2}


def test_values_are_copied():
    ids, probs = np.array([[[5]]], np.int32), np.array([[[0.9]]], np.float32)
    laws = OutsideLaws.of_heads(ids, probs)
    ids[:], probs[:] = 6, 0.1
    assert tokens_below(draft(BlendedLookup(), [np.array([3], np.int32)], 3, outside=laws)) == {5}


# What odds learn.


def shares_of_two_heads(right_source: int) -> list[float]:
    """By source, the share of a law's token after 60 steps in which this source alone was right."""
    lookup, rng, text = BlendedLookup(), np.random.default_rng(1), stream(2000, vocabulary=30, seed=2)
    lookup.learn([], text[:1000])
    for end in range(1000, 1060):
        right = int(rng.integers(50, 80))
        for source in (0, 1):
            guess = right if source == right_source else right + 100
            laws = outside_laws([[(-1, int(text[end - 1]), [(guess, 0.8)])]], source=source)
            batch = draft(lookup, [text[:end]], 4, outside=laws)
            assert batch.outside_laws is laws
            ids = np.full((batch.num_nodes, 1), NO_TOKEN, np.int32)
            probs = np.zeros((batch.num_nodes, 1), np.float32)
            ids[0], probs[0] = right, 0.9
            lookup.learn_batch(batch, [text[: end - 1]], ids, probs)
    path = text[:1500].tolist()
    return [estimates_at_root(lookup, path, [(200, 0.8)], source=source).get(200, 0.0) for source in (0, 1)]


@pytest.mark.parametrize("right", [0, 1])
def test_a_good_head_leads_and_a_bad_one_costs_nothing(right):
    start = estimates_at_root(BlendedLookup(), [1, 2], [(200, 0.8)])[200]
    shares = shares_of_two_heads(right)
    assert shares[right] > 0.8 > start > 0.02 > shares[1 - right]


def test_contexts_learn_as_if_there_were_no_laws(tmp_path):
    """Same file and digest: a head that goes away leaves nothing behind."""
    with_laws, without = taught(40), taught(40, with_laws=False)
    for name, lookup in (("with", with_laws), ("without", without)):
        lookup.save(tmp_path / name)
    assert (tmp_path / "with").read_bytes() == (tmp_path / "without").read_bytes()
    assert with_laws.digest == without.digest
    law = [(4, 0.7), (5, 0.1)]
    assert estimates_at_root(with_laws, [1, 2], law) != estimates_at_root(without, [1, 2], law)


def test_equal_rows_do_not_teach_each_other_that_contexts_suffice():
    """Four equal rows speak for a head four times: what one of them has just taught says nothing about it."""
    shares = {}
    for num_rows in (1, 4):
        lookup, text = BlendedLookup(), stream(400, vocabulary=200, seed=4, stay=0.0)
        for end in range(20, 100):
            right = int(text[end])
            laws = outside_laws([[(-1, int(text[end - 1]), [(right, 0.8)])]] * num_rows)
            batch = draft(lookup, [text[:end]] * num_rows, 4 * num_rows, outside=laws)
            ids = np.full((batch.num_nodes, 1), NO_TOKEN, np.int32)
            ids[batch.offsets[:-1]] = right
            probs = np.where(ids >= 0, 0.9, 0.0).astype(np.float32)
            lookup.learn_batch(batch, [text[: end - 1]] * num_rows, ids, probs)
        shares[num_rows] = estimates_at_root(lookup, text[:14].tolist(), [(999, 0.8)]).get(999, 0.0)
    assert shares[4] > shares[1] + 0.03 > 0.8


def learned_from(tree_of) -> list[float]:
    """Estimates of one and the same draft, after lessons whose third token has a law that `tree_of` may lead to."""
    lookup = BlendedLookup()
    for path, chain, own, ids, probs in lessons(60):
        third = list(zip(ids[2].tolist(), probs[2].tolist(), strict=True))[:3]
        laws = outside_laws([tree_of(chain, own, third)])
        lookup.learn_batch(chain_of(chain, laws), [np.array(path, np.int32)], ids, probs)
    lookup.check()
    law = [(4, 0.5), (5, 0.3)]
    asked = outside_laws([[(-1, 2, law), (0, ANY, law), (1, ANY, law)]])
    return draft(lookup, [np.array([1, 2], np.int32)], 12, outside=asked).path_estimates.tolist()


def test_lessons_find_the_law_that_a_node_went_on_to():
    """Through its sibling of any token where it has no children of its own, as the draft did."""
    other = [(99, 0.5)]

    def levels(chain, own, third):
        return [(-1, chain[0], own[0]), (0, ANY, other), (0, chain[1], own[1]), (1, chain[2], third)]

    def explicit(chain, own, third):
        return [(-1, chain[0], own[0]), (0, chain[1], own[1]), (1, chain[2], third)]

    def own_children(chain, own, third):
        return [*levels(chain, own, third), (2, 98, other)]

    def without(chain, own, third):
        return [(-1, chain[0], own[0]), (0, chain[1], own[1])]

    assert learned_from(levels) == learned_from(explicit)
    assert learned_from(own_children) == learned_from(without) != learned_from(levels)


def test_clear_forgets_what_laws_are_worth():
    lookup, law = taught(120), [(4, 0.7), (5, 0.1)]
    lookup.clear()
    assert estimates_at_root(lookup, [1, 2], law) == estimates_at_root(BlendedLookup(), [1, 2], law)


# What is refused.


SOUND = {
    "offsets": [0, 2, 2],
    "parents": [-1, 0],
    "token_ids": [4, 5],
    "top_ids": [[1, 2], [3, NO_TOKEN]],
    "top_probs": [[0.5, 0.4], [1.0, 0.0]],
}


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"offsets": [0, 1, 2]}, "one tree per row"),
        ({"offsets": [0, 2, 1]}, "one tree per row"),
        ({"offsets": [1, 2, 2]}, "one tree per row"),
        ({"offsets": np.zeros(0, np.int32)}, "one tree per row"),
        ({"parents": [-1, 1]}, "one tree per row"),
        ({"parents": [0, 0]}, "one tree per row"),
        ({"parents": [-1, -1]}, "one tree per row"),
        ({"token_ids": [4, -1]}, "one tree per row"),
        ({"token_ids": [4]}, "one tree per row"),
        ({"top_ids": [[1, 2]]}, "top_ids and top_probs"),
        ({"top_ids": [[1, 1], [3, NO_TOKEN]]}, "distinct tokens"),
        ({"top_probs": [[0.4, 0.5], [1.0, 0.0]]}, "likeliest first"),
        ({"top_probs": [[1.5, 0.5], [1.0, 0.0]]}, "top_probs in"),
        ({"top_probs": [[np.nan, 0.5], [1.0, 0.0]]}, "top_probs in"),
        ({"source": 4}, "source must be"),
        ({"source": -1}, "source must be"),
    ],
)
def test_unsound_laws_are_refused(change, complaint):
    assert OutsideLaws(**SOUND).num_nodes == 2
    with pytest.raises(ValueError, match=complaint):
        OutsideLaws(**(SOUND | change))


def test_equal_siblings_and_wide_laws_are_refused():
    with pytest.raises(ValueError, match="siblings"):
        outside_laws([[(-1, 1, []), (0, 5, []), (0, 5, [])]])
    wide = [(token, 0.01) for token in range(65)]
    with pytest.raises(ValueError, match="at most 64"):
        outside_laws([[(-1, 1, wide)]])
    outside_laws([[(-1, 1, wide[:64])]])


def test_laws_of_other_rows_are_refused():
    laws, histories = outside_laws([[(-1, 1, [(2, 0.5)])]]), [np.array([1], np.int32)]
    with pytest.raises(ValueError, match="2 rows, got 1 rows"):
        draft(BlendedLookup(), histories * 2, 3, outside=laws)
    with pytest.raises(ValueError, match="got list"):
        draft(BlendedLookup(), histories, 3, outside=[laws])
    with pytest.raises(ValueError, match="H is the number of heads"):
        OutsideLaws.of_heads(np.zeros((1, 2), np.int32), np.zeros((1, 2), np.float32))
