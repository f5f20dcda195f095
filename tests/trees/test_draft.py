"""Drafts: equal to the slow twin, with the laws that they were really drawn from, and adapted.

Statistical tests have a fixed seed; the stated odds are those of failing for correct code under a fresh seed.
"""

import collections
import dataclasses
import math

import numpy as np
import pytest
from reference import ReferenceLookup, chi_square_bound, drawn_children, path_tokens, sequence_law

from stand.trees import NO_PARENT, DraftBatch, DraftTree, LookupTree, TreeShape
from stand.trees.sampling import draw_children

FALSE_ALARM = 1e-6
KINDS = ["sampled", "mixed", "deterministic"]


def taught(seed=0, num_tokens=400, vocabulary=12, **parameters):
    rng = np.random.default_rng(seed)
    tokens = rng.integers(0, vocabulary, num_tokens) * rng.integers(0, 2, num_tokens)
    top_ids = np.array([rng.permutation(vocabulary)[:6] for _ in tokens], np.int32)
    top_probs = rng.dirichlet(0.5 * np.ones(6), num_tokens).astype(np.float32)
    lookup, twin = LookupTree(**parameters), ReferenceLookup(**parameters)
    lookup.learn([], tokens, top_ids=top_ids, top_probs=top_probs)
    twin.learn([], tokens.tolist(), top_ids=top_ids.tolist(), top_probs=top_probs.tolist())
    return lookup, twin


def random_parents(rng, num_slots):
    return TreeShape([NO_PARENT] + [int(rng.integers(0, slot)) for slot in range(1, num_slots)])


@pytest.mark.parametrize("kind", KINDS)
def test_equals_slow_twin(kind):
    rng = np.random.default_rng(5)
    lookup, twin = taught(num_candidates=6)
    for seed in range(40):
        shape = random_parents(rng, int(rng.integers(1, 25)))
        histories = [rng.integers(0, 14, rng.integers(1, 7)).astype(np.int32) for _ in range(3)]
        rows, steps, floor_order = np.array([4, 0, 9]), rng.integers(0, 1000, 3), int(rng.integers(1, 4))
        batch = lookup.draft(histories, shape, seed=seed, rows=rows, steps=steps, kind=kind, floor_order=floor_order)
        batch.check()
        for b, history in enumerate(histories):
            keys = {"seed": seed, "row": int(rows[b]), "step": int(steps[b]), "kind": kind, "floor_order": floor_order}
            expected = twin.draft(history.tolist(), shape.parents, **keys)
            assert_same_draft(batch[b], expected)


def assert_same_draft(draft, expected):
    assert draft.token_ids.tolist() == [node["token"] for node in expected]
    assert draft.parents.tolist() == [node["parent"] for node in expected]
    assert draft.slots.tolist() == [node["slot"] for node in expected]
    for node in range(1, draft.num_nodes):
        support = draft.support_ids[draft.parents[node]]
        law = {int(token): float(p) for token, p in zip(support, draft.law[node], strict=True) if p > 0.0}
        assert law == pytest.approx(expected[node]["law"], rel=1e-6)


@pytest.mark.parametrize("kind", KINDS)
def test_laws_sum_to_one_closely(kind):
    lookup, _ = taught(num_tokens=2_000, vocabulary=30)
    histories = [np.array([token], np.int32) for token in range(30)]
    numbers = np.arange(30)
    batch = lookup.draft(histories, TreeShape.paper(), seed=1, rows=numbers, steps=numbers, kind=kind)
    children = batch.depths > 0
    assert np.abs(batch.law[children].sum(axis=1, dtype=np.float64) - 1.0).max() < 1e-6
    assert not batch.law[~children].any()
    assert batch.adapted and batch.support_ids.shape == (batch.num_nodes, lookup.num_candidates)


def test_mass_that_almost_vanishes_is_summed_not_subtracted():
    """After the certain token, two rare ones remain; 1 - 1 would leave nothing of them."""
    probabilities = np.array([1.0, 3e-12, 1e-12], np.float32)
    picks, laws = draw_children("sampled", probabilities, np.array([0.5, 0.5, 0.5]), 3)
    assert picks.tolist() == [0, 1, 2]
    assert laws[1].tolist() == pytest.approx([0.0, 0.75, 0.25], rel=1e-6)
    assert laws[2].tolist() == [0.0, 0.0, 1.0]


def test_equal_noise_gives_the_top_k():
    rng = np.random.default_rng(3)
    for size in range(1, 11):
        probabilities = np.sort(rng.dirichlet(np.ones(size)).astype(np.float32))[::-1].copy()
        probabilities[size // 2 :] = probabilities[size // 2]  # ties
        for num_children in range(1, 12):
            noise = np.full(size, 0.4)
            picks, _ = draw_children("sampled", probabilities, noise, num_children)
            expected, _ = draw_children("deterministic", probabilities, noise, num_children)
            assert picks.tolist() == expected.tolist() == list(range(min(size, num_children)))


PROBABILITIES = np.array([0.4, 0.3, 0.15, 0.1, 0.03], np.float32)


def sequences(kind, num_children, num_draws, seed=2):
    rng = np.random.default_rng(seed)
    drawn = collections.Counter()
    for uniforms in rng.random((num_draws, len(PROBABILITIES))):
        picks, _ = draw_children(kind, PROBABILITIES, uniforms, num_children)
        drawn[tuple(picks.tolist())] += 1
    return drawn


@pytest.mark.parametrize("num_children", [1, 2, 3])
def test_draw_order_follows_the_law_without_replacement(num_children):
    """Chi-square over all sequences, against enumeration; odds of a false alarm below 1e-6."""
    num_draws = 20_000
    law = sequence_law(PROBABILITIES.astype(float).tolist(), num_children)
    assert math.fsum(law.values()) == pytest.approx(1.0)
    drawn = sequences("sampled", num_children, num_draws)
    common = {picks: chance for picks, chance in law.items() if chance * num_draws >= 5.0}
    rest = 1.0 - math.fsum(common.values())
    cells = [(drawn[picks], chance * num_draws) for picks, chance in common.items()]
    cells.append((num_draws - sum(drawn[picks] for picks in common), rest * num_draws))
    statistic = sum((got - expected) ** 2 / expected for got, expected in cells if expected > 1e-9)
    assert statistic < chi_square_bound(len(cells) - 1, FALSE_ALARM)


def test_draws_with_plain_probabilities_would_be_caught():
    """Control: the law of independent draws does not fit the second child."""
    num_draws = 20_000
    drawn = sequences("sampled", 2, num_draws)
    second = collections.Counter()
    for picks, number in drawn.items():
        second[picks[1]] += number
    plain = PROBABILITIES.astype(float) / PROBABILITIES.sum(dtype=float)
    statistic = sum((second[pick] - num_draws * p) ** 2 / (num_draws * p) for pick, p in enumerate(plain))
    assert statistic > chi_square_bound(4, FALSE_ALARM)


def test_recorded_laws_are_the_conditional_laws():
    """The product of the recorded laws along the siblings is the enumerated chance of the sequence."""
    law = sequence_law(PROBABILITIES.astype(float).tolist(), 3)
    for uniforms in np.random.default_rng(4).random((200, 5)):
        picks, laws = draw_children("sampled", PROBABILITIES, uniforms, 3)
        chance = math.prod(float(laws[rank, pick]) for rank, pick in enumerate(picks))
        assert chance == pytest.approx(law[tuple(picks.tolist())], rel=1e-5)


def test_mixed_samples_one_outside_the_top_first():
    num_draws = 10_000
    drawn = sequences("mixed", 3, num_draws)
    assert all(picks[1:] == (0, 1) and picks[0] >= 2 for picks in drawn)
    outside = PROBABILITIES[2:].astype(float) / PROBABILITIES[2:].sum(dtype=float)
    statistic = sum((drawn[(pick + 2, 0, 1)] - num_draws * p) ** 2 / (num_draws * p) for pick, p in enumerate(outside))
    assert statistic < chi_square_bound(2, FALSE_ALARM)
    _, laws = draw_children("mixed", PROBABILITIES, np.full(5, 0.5), 3)
    assert laws[0].tolist() == pytest.approx([0.0, 0.0, *outside], rel=1e-6)
    assert laws[1:].tolist() == [[1, 0, 0, 0, 0], [0, 1, 0, 0, 0]]


def test_mixed_is_deterministic_where_nothing_is_outside():
    for num_children in (6, 7, 50):
        picks, laws = draw_children("mixed", PROBABILITIES, np.full(5, 0.5), num_children)
        assert picks.tolist() == [0, 1, 2, 3, 4] and np.array_equal(laws, np.eye(5))
    picks, _ = draw_children("mixed", PROBABILITIES, np.full(5, 0.5), 5)
    assert picks.tolist() == [4, 0, 1, 2, 3]


def test_core_children_equal_the_textbook_form():
    rng = np.random.default_rng(9)
    for _ in range(300):
        size, num_children = int(rng.integers(1, 9)), int(rng.integers(1, 9))
        probabilities = np.sort(rng.dirichlet(0.3 * np.ones(size)).astype(np.float32) + 1e-6)[::-1].copy()
        uniforms = rng.random(size)
        for kind in KINDS:
            picks, laws = draw_children(kind, probabilities, uniforms, num_children)
            expected = drawn_children(list(enumerate(probabilities.tolist())), uniforms, num_children, kind)
            assert picks.tolist() == [pick for pick, _ in expected]
            for law, (_, expected_law) in zip(laws, expected, strict=True):
                assert law.tolist() == pytest.approx([expected_law.get(j, 0.0) for j in range(size)], rel=1e-6)


def test_noise_does_not_depend_on_the_context():
    """A context that returns at many nodes is drawn anew each time; a hash of the context would repeat itself."""
    lookup = LookupTree(orders=(1,))
    lookup.learn([1], [1], top_ids=[[1, 2]], top_probs=[[0.5, 0.5]])
    lookup.learn([2], [1], top_ids=[[1, 2]], top_probs=[[0.5, 0.5]])
    batch = lookup.draft([np.array([1], np.int32)], TreeShape.chain(64), seed=0, rows=[0], steps=[0])
    after_one = [batch.token_ids[node + 1] for node in range(64) if batch.token_ids[node] == 1]
    assert len(set(after_one)) == 2
    same = [np.array([1], np.int32)] * 64
    for varied in ("rows", "steps"):
        numbers = {"rows": np.zeros(64, np.int64), "steps": np.zeros(64, np.int64), varied: np.arange(64)}
        firsts = lookup.draft(same, TreeShape.chain(1), seed=0, **numbers).token_ids[1::2]
        assert 10 < (firsts == 1).sum() < 54  # odds of a false alarm below 1e-7


def test_a_row_does_not_depend_on_its_batch_mates():
    lookup, _ = taught()
    histories = [np.array([token, 0], np.int32) for token in range(5)]
    shapes = [
        TreeShape.chain(2),
        TreeShape.paper(),
        TreeShape.empty(),
        TreeShape.from_branching([3, 2]),
        TreeShape.paper(),
    ]
    numbers = np.arange(5)
    together = lookup.draft(histories, shapes, seed=3, rows=numbers, steps=numbers + 7)
    for b in range(5):
        alone = lookup.draft([histories[b]], shapes[b], seed=3, rows=[b], steps=[b + 7])
        for name in ("token_ids", "parents", "support_ids", "law", "slots"):
            assert np.array_equal(getattr(alone[0], name), getattr(together[b], name))


def test_growth_is_adapted():
    """What a node draws depends on its own path and its own noise alone: cutting all other slots changes nothing, and
    neither does teaching contexts that end in tokens off its path."""
    lookup, _ = taught(orders=(1, 2))
    shape = TreeShape.from_branching([3, 2, 2])
    history, keys = np.array([3, 0], np.int32), {"seed": 8, "rows": [1], "steps": [2]}
    full = lookup.draft([history], shape, **keys)[0]
    for node in range(full.num_nodes):
        path = path_tokens(full, node)
        disturbed = lookup.copy()
        for token in set(range(12)) - set(path):
            disturbed.learn([token], [11] * 3)
        again = disturbed.draft([history], shape, **keys)[0]
        twin_nodes = [other for other in range(again.num_nodes) if again.slots[other] == full.slots[node]]
        assert [path_tokens(again, other) for other in twin_nodes] == [path]
        assert np.array_equal(again.law[twin_nodes[0]], full.law[node])


def test_long_histories_are_read_at_their_end_only():
    lookup, _ = taught()
    tail = np.array([5, 0, 3, 0], np.int32)
    long = np.concatenate([np.full(100_000, 7, np.int32), tail])
    keys = {"seed": 1, "rows": [0], "steps": [0]}
    first, second = (lookup.draft([h], TreeShape.paper(), **keys) for h in (tail, long))
    assert np.array_equal(first.token_ids, second.token_ids)


def test_an_empty_lookup_drafts_the_pending_token_alone():
    batch = LookupTree().draft(
        [np.array([4, 9], np.int32), np.array([5], np.int32)], TreeShape.paper(), seed=0, rows=[0, 1], steps=[0, 0]
    )
    batch.check()
    assert batch.token_ids.tolist() == [9, 5] and batch.offsets.tolist() == [0, 1, 2]


def test_bad_arguments_are_refused():
    lookup, _ = taught()
    good = {"histories": [np.array([1])], "shape": TreeShape.chain(1), "seed": 0, "rows": [0], "steps": [0]}
    lookup.draft(**good)
    bad = [
        {"histories": []},
        {"histories": [np.array([], np.int32)]},
        {"histories": [np.array([-1])]},
        {"histories": [np.array([[1]])]},
        {"shape": [TreeShape.chain(1)] * 2},
        {"seed": -1},
        {"seed": 2**64},
        {"rows": [0, 1]},
        {"rows": [-1]},
        {"steps": [2**32]},
        {"kind": "greedy"},
        {"floor_order": 0},
    ]
    for change in bad:
        with pytest.raises(ValueError, match="must|needs"):
            lookup.draft(**(good | change))


class UnsoundShape:
    def __init__(self, parents):
        self.parents = np.array(parents, np.int32)


@pytest.mark.parametrize("parents", [[], [0], [-1, 1], [-1, -1], [-1, 0, 7]])
def test_unsound_shapes_are_refused(parents):
    lookup, _ = taught()
    with pytest.raises(ValueError, match="shape must"):
        lookup.draft([np.array([1])], UnsoundShape(parents), seed=0, rows=[0], steps=[0])


def test_concatenate_and_index_are_inverse():
    chain = DraftTree.chain([1, 2, 3])
    alone = DraftTree.pending(7, support_size=3)
    batch = DraftBatch.concatenate([chain, alone])
    batch.check()
    assert batch.depths.tolist() == [0, 1, 2, 0] and batch.ranks.tolist() == [0, 0, 0, 0]
    assert batch[0].token_ids.tolist() == [1, 2, 3] and batch[1].token_ids.tolist() == [7]
    assert batch.slots is None and batch.support_ids.shape == (4, 3) and len(batch) == 2
    lookup, _ = taught()
    drafted = lookup.draft([np.array([0])] * 2, TreeShape.paper(), seed=0, rows=[0, 1], steps=[0, 0])
    again = DraftBatch.concatenate([drafted[0], drafted[1]])
    for name in ("token_ids", "parents", "offsets", "depths", "ranks", "support_ids", "law", "slots"):
        assert np.array_equal(getattr(again, name), getattr(drafted, name))
    with pytest.raises(IndexError, match="row must"):
        batch[2]


def test_a_branching_draft_is_filled_level_by_level():
    draft = DraftTree.branching([5, 3, 1, 4, 7, 9], 2)
    draft.check()
    assert draft.parents.tolist() == [-1, 0, 0, 1, 1, 2]
    assert draft.support_ids.tolist() == [[3, 1], [4, 7], [9, -1], [-1, -1], [-1, -1], [-1, -1]]
    assert draft.law.tolist() == [[0, 0], [1, 0], [0, 1], [1, 0], [0, 1], [1, 0]]
    same = [
        (DraftTree.branching([5, 3, 3], 1), DraftTree.chain([5, 3, 3])),
        (DraftTree.branching([5], 3), DraftTree.pending(5, support_size=3)),
    ]
    for one, other in same:
        for name in ("token_ids", "parents", "support_ids", "law"):
            np.testing.assert_array_equal(getattr(one, name), getattr(other, name), strict=True)
    with pytest.raises(ValueError, match="branches must be at least 1, got 0"):
        DraftTree.branching([5, 3], 0)


def test_chains_of_one_token_and_drafts_of_neighbouring_widths():
    chain = DraftTree.chain([5])
    assert chain.token_ids.tolist() == [5] and DraftTree.chain([5, 6]).law.tolist() == [[0.0], [1.0]]
    batch = DraftBatch.concatenate([DraftTree.chain([5, 6]), DraftTree.pending(7, support_size=2)])
    assert batch.support_ids.tolist() == [[6, -1], [-1, -1], [-1, -1]]
    assert batch.law.tolist() == [[0.0, 0.0], [1.0, 0.0], [0.0, 0.0]]
    for bad in ([], [[5, 6]]):
        with pytest.raises(ValueError, match="token_ids must be a non-empty list, got shape"):
            DraftTree.chain(bad)


def test_empty_drafts_are_pending_tokens_beside_each_other():
    """Also of another number of rows, and of one that was asked for before: they share arrays."""
    for token_ids in ([4], [7, 0, 9], [3, 3, 3]):
        batch = DraftBatch.pending(token_ids)
        batch.check()
        alone = DraftBatch.concatenate([DraftTree.pending(token) for token in token_ids])
        for name in ("token_ids", "parents", "offsets", "depths", "ranks", "support_ids", "law"):
            one, other = getattr(batch, name), getattr(alone, name)
            assert np.array_equal(one, other) and one.dtype == other.dtype, name


def test_what_empty_drafts_share_cannot_be_written():
    """Else one batch would change the others."""
    batch = DraftBatch.pending([1])
    for name in ("parents", "offsets", "depths", "ranks", "support_ids", "law"):
        with pytest.raises(ValueError, match="read-only"):
            getattr(batch, name)[...] = 9
    batch.token_ids[0] = 2  # its own
    assert DraftBatch.pending([2]).law.tolist() == [[0.0]]


@pytest.mark.parametrize("name", ["depths", "ranks"])
def test_check_finds_depths_or_ranks_that_do_not_follow(name):
    batch = DraftBatch.concatenate([DraftTree.chain([1, 2, 3])])
    with pytest.raises(ValueError, match="must follow from parents"):
        dataclasses.replace(batch, **{name: getattr(batch, name) + 1}).check()


PACKED = DraftBatch.concatenate([DraftTree.chain([1, 2, 3]), DraftTree.pending(7)])
PACKED_BREAKS = [
    {"offsets": np.array([0, 1], np.int32)},
    {"offsets": np.array([0, 3], np.int32)},
    {"offsets": np.array([0], np.int32)},
    {"offsets": np.array([1, 3, 4], np.int32)},
    {"offsets": np.array([0, 4, 4], np.int32)},
    {"offsets": np.array([0, 9, 4], np.int32)},
    {"offsets": np.zeros(0, np.int32)},
    {"token_ids": np.array([1, 2, -5, 7], np.int32)},
    {"token_ids": np.array([1, 2, 3, -1], np.int32)},
    {"parents": np.array([-1, 0, 1, 3], np.int32)},
    {"parents": PACKED.parents[:3]},
    {"law": PACKED.law[:3]},
    {"support_ids": PACKED.support_ids[:3], "law": PACKED.law[:3]},
    {"depths": PACKED.depths[:3]},
    {"path_probabilities": np.ones(3, np.float32)},
    {"path_probabilities": np.ones(5, np.float32)},
]


@pytest.mark.parametrize("changes", PACKED_BREAKS, ids=lambda changes: " ".join(changes))
def test_check_finds_what_others_refuse_a_batch_for(changes):
    PACKED.check()
    broken = dataclasses.replace(PACKED, **changes)
    with pytest.raises(ValueError, match=f"({'|'.join(changes)}|parents).* must .*got .*;"):
        broken.check()


def test_short_path_probabilities_are_not_read():
    with pytest.raises(ValueError, match="path_probabilities must hold one number per node"):
        dataclasses.replace(PACKED, path_probabilities=np.ones(1, np.float32)).chains(5)


@pytest.mark.parametrize("wrong", [2**32 + 5, 2**31, 1.7, np.int64(2**32 + 5), np.float32(2)])
def test_tokens_of_drafts_are_whole_numbers_of_32_bits(wrong):
    """Taken modulo 2**32 they would be other tokens."""
    for make, tokens in ((DraftTree.chain, [wrong]), (DraftTree.pending, wrong), (DraftBatch.pending, [wrong])):
        with pytest.raises(ValueError, match="token_ids? must .*got .*;"):
            make(tokens)


def test_a_batch_of_pending_tokens_has_an_array_of_its_own():
    tokens = np.array([4, 5], np.int32)
    batch = DraftBatch.pending(tokens)
    tokens[0] = 9
    assert batch.token_ids.tolist() == [4, 5] and batch.token_ids.dtype == np.int32


BREAKS = [
    ("law", slice(0, 2), None, "law \\[N, S\\]"),
    ("token_ids", 2, -5, "token_ids must not be negative, got -5"),
    ("parents", slice(0, 2), None, "parents must be \\[N\\]"),
    ("parents", 1, 1, "parents"),
    ("parents", 0, 0, "parents"),
    ("law", (1, 0), 0.5, "sum to 1"),
    ("law", (1, 0), np.nan, "finite"),
    ("law", (1, 0), -1.0, "not negative"),
    ("token_ids", 1, 9, "positive mass"),
    ("support_ids", (0, 0), -1, "padding"),
    ("slots", slice(0, 1), None, "slots"),
]


@pytest.mark.parametrize(("name", "index", "value", "message"), BREAKS)
def test_check_finds_what_is_broken(name, index, value, message):
    sound = DraftTree.chain([1, 2, 3])
    fields = {field: np.copy(getattr(sound, field)) for field in ("token_ids", "parents", "support_ids", "law")}
    fields["slots"] = np.arange(3, dtype=np.int32)
    DraftTree(**fields).check()
    if value is None:
        fields[name] = fields[name][index]
    else:
        fields[name][index] = value
    with pytest.raises(ValueError, match=message):
        DraftTree(**fields).check()


@pytest.mark.parametrize("offsets", [[0, 0, 3], [0, 2, 1, 3], [0, 2], [1, 3], [0, 3, 3], []])
def test_offsets_that_do_not_rise_to_the_number_of_nodes_are_refused(offsets):
    batch = DraftBatch.concatenate([DraftTree.chain([4, 5, 6])])
    batch = dataclasses.replace(batch, offsets=np.array(offsets, dtype=np.int32))
    with pytest.raises(ValueError, match="offsets must rise from 0 to the number of nodes, 3, got"):
        batch.check()


def test_a_batch_without_rows_is_sound():
    batch = DraftBatch.concatenate([DraftTree.chain([4, 5, 6])])
    arrays = {field.name: getattr(batch, field.name) for field in dataclasses.fields(batch)}
    none = {name: array[:0] for name, array in arrays.items() if isinstance(array, np.ndarray)}
    dataclasses.replace(batch, **{**none, "offsets": np.zeros(1, dtype=np.int32)}).check()


def test_the_parent_that_comes_too_late_is_named():
    with pytest.raises(ValueError, match=r"got parents\[3\] = 4; put parents first"):
        TreeShape(np.array([-1, 0, 1, 4, 2]))
