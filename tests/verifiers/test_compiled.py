"""The compiled host path of traversal equals the array code, node by node and token by token."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from drafted_cases import case

from stand.drafters.check import check_batch
from stand.trees import DraftBatch, DraftTree, compiled
from stand.verifiers import TargetRows, Verdicts, get_verifier, operands
from stand.verifiers.draw import draw_residuals, draw_tokens


def test_what_rows_gain_is_their_kept_nodes_and_the_next_token():
    drafts = [DraftTree.chain([4, 5, 6]), DraftTree.pending(7), DraftTree.chain([8, 9])]
    batch = DraftBatch.concatenate(drafts)
    paths = [np.array([1, 2], np.int32), np.zeros(0, np.int32), np.array([1], np.int32)]
    verdicts = Verdicts(paths, np.array([1, 2, 3]))
    assert verdicts.gained(batch) == [[5, 6, 1], [2], [9, 3]]
    assert Verdicts([path.tolist() for path in paths], np.array([1, 2, 3])).gained(batch) == [[5, 6, 1], [2], [9, 3]]


def test_pending_batches_are_those_of_empty_drafts():
    tokens = [3, 9, 4]
    built, packed = DraftBatch.pending(tokens), DraftBatch.concatenate([DraftTree.pending(one) for one in tokens])
    for name, value in vars(packed).items():
        other = getattr(built, name)
        assert np.array_equal(value, other) and getattr(value, "dtype", None) == getattr(other, "dtype", None), name


@pytest.mark.parametrize("fault", ["none", "root", "negative", "large", "support", "sum"])
def test_faults_of_a_draft_are_seen_in_one_pass(fault):
    batch = DraftBatch.concatenate([DraftTree.chain([4, 5, 6]), DraftTree.chain([8, 9])])
    request = SimpleNamespace(histories=[np.array([1, 4], np.int32), np.array([8], np.int32)])
    places = {"root": ("token_ids", 3, 7), "negative": ("token_ids", 1, -1), "large": ("token_ids", 4, 10)}
    places |= {"support": ("support_ids", (0, 0), 10), "sum": ("law", (2, 0), 0.9)}
    if fault == "none":
        check_batch(batch, request, vocabulary_size=10)
        return
    name, place, value = places[fault]
    getattr(batch, name)[place] = value
    with pytest.raises(ValueError, match=r"must (be|sum)"):
        check_batch(batch, request, vocabulary_size=10)


@pytest.mark.parametrize("kind", ["sampled", "mixed", "deterministic"])
@pytest.mark.parametrize("seed", range(8))
def test_thresholds_and_verdicts_equal_the_array_code(seed, kind, monkeypatch):
    batch, target, noise = case(seed, kind)
    rule = get_verifier("traversal")
    fast, kept = rule.thresholds(batch, target), rule.verify(batch, target, noise)
    assert operands.HOST.type == "cpu"
    monkeypatch.setattr(TargetRows, "on_host", lambda self: None)
    arrays, expected = rule.thresholds(batch, target), rule.verify(batch, target, noise)
    for left, right in zip(fast, arrays, strict=True):
        np.testing.assert_allclose(left, right, rtol=1e-9, atol=1e-12)
    assert fast[0].max() <= 1 and arrays[0].max() <= 1
    assert np.all(fast[0][batch.offsets[:-1]] == 1) and np.all(arrays[0][batch.offsets[:-1]] == 1)  # not rounded
    assert [path.tolist() for path in kept.accepted] == [path.tolist() for path in expected.accepted]
    assert kept.next_tokens.tolist() == expected.next_tokens.tolist()


def test_draws_over_a_grid_of_uniforms_equal_the_array_code():
    batch, target, _ = case(3, "sampled", peaked=0.5)
    _, mass, scale = get_verifier("traversal").thresholds(batch, target)
    for uniform in np.linspace(0, 1, 200, endpoint=False):
        nodes = np.arange(batch.num_nodes)
        uniforms = np.full(len(nodes), uniform)
        got = compiled.draw_residuals(target.on_host(), nodes, batch.support_ids, mass, scale, uniforms)
        expected = draw_residuals(
            target.rows(nodes),
            support_ids=batch.support_ids,
            mass=torch.from_numpy(mass),
            scale=torch.from_numpy(scale),
            uniforms=uniforms,
        )
        assert got.tolist() == expected.tolist()


def test_a_token_of_weight_zero_is_never_drawn():
    probs = np.zeros((1, 6))
    probs[0, [1, 4]] = 0.5
    support, mass = np.array([[2, 1, -1]], dtype=np.int32), np.array([[0.0, 0.25, 0.0]])
    for uniform in (0.0, 0.3333, 0.34, 1 - 2**-53):
        arguments = (probs, np.array([0]), support, mass, np.ones(1), np.array([uniform]))
        assert compiled.draw_residuals(*arguments).tolist() == [1 if uniform < 1 / 3 else 4]


@pytest.mark.parametrize("support", [[0, -1], [2, 0], [0, 2], [-1, 0], [-1, -1]])
def test_any_support_equals_the_array_code(support):
    """Token 0 among the candidates, padding before them, none at all; masses of zero, scales of zero."""
    probs = np.array([[0.6, 0.3, 0.1], [0.0, 0.5, 0.5]])
    count = 60
    nodes, uniforms = np.arange(count) % 2, (np.arange(count) + 0.5) / count
    for heavy, scale in ((0.0, 1.0), (0.5, 1.0), (0.5, 0.25), (0.5, 0.0)):
        mass = np.array([[heavy if token >= 0 else 0.0 for token in support]] * 2)
        supports = np.array([support] * 2, np.int32)
        got = compiled.draw_residuals(probs, nodes, supports, mass, np.full(2, scale), uniforms)
        expected = draw_residuals(
            torch.from_numpy(probs[nodes]),
            support_ids=np.array([support] * count, np.int32),
            mass=torch.from_numpy(mass[nodes]),
            scale=torch.full((count,), scale, dtype=torch.float64),
            uniforms=uniforms,
        )
        assert got.tolist() == expected.tolist(), (heavy, scale)


SUPPORTS = ([5, 7, -1], [255, 256, 1023], [1023, 300, 511], [-1, -1, -1], [0, 512, 513])


@pytest.mark.parametrize("support", SUPPORTS)
@pytest.mark.parametrize("size", [1024, 1025, 1279])
def test_many_blocks_equal_the_array_code(support, size):
    """Candidates in one block and in several, at their borders; blocks without weight, among them the last."""
    generator, count = np.random.default_rng(6), 400
    probs = generator.random((4, size)) * (generator.random((4, size)) < 0.5)
    probs[1, 256:768] = probs[2, :512] = probs[3, 768:] = 0.0
    nodes, uniforms = np.arange(count) % 4, (np.arange(count) + 0.5) / count
    mass = np.where(np.array(support) >= 0, [40.0, 0.0, 20.0], 0.0)
    for scale in (1.0, 0.25, 0.0 if mass.any() else 0.5):
        got = compiled.draw_residuals(
            probs, nodes, np.array([support] * 4, np.int32), np.tile(mass, (4, 1)), np.full(4, scale), uniforms
        )
        expected = draw_residuals(
            torch.from_numpy(probs[nodes]),
            support_ids=np.array([support] * count, np.int32),
            mass=torch.from_numpy(np.tile(mass, (count, 1))),
            scale=torch.full((count,), scale, dtype=torch.float64),
            uniforms=uniforms,
        )
        assert got.tolist() == expected.tolist(), scale
    drawn = compiled.draw_tokens(probs, nodes, uniforms)
    assert drawn.tolist() == draw_tokens(torch.from_numpy(probs[nodes]), uniforms).tolist()
    assert len(set(drawn.tolist())) > 300


def test_the_largest_uniform_stays_inside_the_weights():
    """Sums in another order than the total's: what rounding carries past the end goes to the last positive weight."""
    generator, count, size = np.random.default_rng(4), 3000, 40
    probs = generator.random((count, size)) * generator.choice([1e-9, 1.0, 1e5], (count, 1))
    probs[:, size // 2 :] = 0.0
    support = np.tile(np.array([[0, size - 1]], dtype=np.int32), (count, 1))
    mass = np.stack([generator.random(count), np.zeros(count)], axis=1)
    largest = np.full(count, np.nextafter(1.0, 0.0))
    tokens = compiled.draw_residuals(probs, np.arange(count), support, mass, generator.random(count), largest)
    assert np.all(compiled.draw_tokens(probs, np.arange(count), largest) < size // 2)
    assert np.all((tokens > 0) & (tokens < size // 2))
    support = np.tile(np.array([[7, 3, 5, 1, 2]], dtype=np.int32), (count, 1))
    mass = np.hstack([generator.random((count, 4)), np.zeros((count, 1))])
    on_support = compiled.draw_residuals(probs, np.arange(count), support, mass, np.zeros(count), largest)
    assert set(on_support.tolist()) == {1}  # the last one that has weight


def test_a_point_on_an_edge_belongs_to_the_token_after_it():
    """The first token whose cumulated weight exceeds the point; weights and points are exact here."""
    probs, support = np.array([[0.125, 0.5, 0.125, 0.25]]), np.array([[3, -1]], dtype=np.int32)
    mass = np.array([[0.25, 0.0]])
    for uniform, token in ((0.0, 3), (0.25, 0), (0.375, 1), (0.875, 2)):
        arguments = (probs, np.array([0]), support, mass, np.ones(1), np.array([uniform]))
        assert compiled.draw_residuals(*arguments).tolist() == [token]


def test_a_point_past_the_end_belongs_to_the_last_token_with_a_weight():
    """As rounding may carry it there; behind that token come blocks without any weight."""
    probs, support = np.zeros((1, 10_000)), np.array([[-1]], dtype=np.int32)
    probs[0, [1, 3]] = 0.5
    arguments = (probs, np.array([0]), support, np.zeros((1, 1)), np.ones(1), np.array([1.0]))
    assert compiled.draw_residuals(*arguments).tolist() == [3]


def test_supports_do_not_reach_into_later_rows():
    """Token 0 and others are candidates of the first node, not of the second."""
    probs = np.array([[0.25, 0.25, 0.5], [0.5, 0.25, 0.25]])
    support, mass = np.array([[0, 1], [-1, -1]], dtype=np.int32), np.array([[0.5, 0.5], [0.0, 0.0]])
    nodes, uniforms = np.array([0, 1, 1, 1]), np.array([0.1, 0.1, 0.6, 0.9])
    drawn = compiled.draw_residuals(probs, nodes, support, mass, np.ones(2), uniforms)
    assert drawn.tolist() == [0, 0, 1, 2]


def test_nothing_negative_is_left_outside_a_support_that_holds_everything():
    """Rounded laws may sum to more than 1: a child that is kept half of the time owes half of that sum."""
    token_ids, parents, offsets = np.array([0, 0], np.int32), np.array([-1, 0], np.int32), np.array([0, 2], np.int32)
    support = np.array([[0, 1, 2], [0, 1, 2]], dtype=np.int32)
    law, probs = np.array([[0, 0, 0], [0.6, 0.2, 0.2]]), np.array([[0.3, 0.6, 0.1], [0.3, 0.6, 0.1000003]])
    passing, _, _ = compiled.traversal_thresholds(token_ids, parents, offsets, support, law, probs)
    assert passing[1] == pytest.approx(0.5 * 1.0000003, abs=1e-9)


def test_rows_without_weight_are_refused_wherever_they_stand():
    probs, support = np.array([[0.5, 0.5], [0.0, 0.0], [1.0, 0.0]]), np.full((3, 1), -1, dtype=np.int32)
    arguments = (support, np.zeros((3, 1)), np.ones(3))
    for nodes in ([1], [0, 1], [1, 2], [2, 1, 0]):
        with pytest.raises(ValueError, match="positive sum, got none"):
            compiled.draw_residuals(probs, np.array(nodes), *arguments, np.full(len(nodes), 0.25))
        with pytest.raises(ValueError, match="positive sum, got none"):
            compiled.draw_tokens(probs, np.array(nodes), np.full(len(nodes), 0.25))
    assert compiled.draw_residuals(probs, np.array([0, 2]), *arguments, np.full(2, 0.25)).tolist() == [0, 0]


def test_what_the_law_cannot_have_drawn_inherits_nothing():
    """Token outside the support, or with law 0; and a child that is sure to pass leaves its parent as it was."""
    token_ids, parents = np.array([0, 1, 2], np.int32), np.array([-1, 0, 0], np.int32)
    offsets, probs = np.array([0, 3], np.int32), np.array([[0.25, 0.5, 0.25]] * 3)
    support = np.array([[0, 1, -1], [-1, -1, -1], [-1, -1, -1]], dtype=np.int32)
    law = np.array([[0, 0, 0], [1, 0, 0], [0.5, 0.5, 0]], dtype=np.float64)
    passing, _, _ = compiled.traversal_thresholds(token_ids, parents, offsets, support, law, probs)
    assert passing.tolist() == [1.0, 0.0, 0.0]
    law = np.array([[0, 0, 0], [0.25, 0.5, 0.25], [0, 0, 1]])
    support[0] = [0, 1, 2]
    passing, mass, scale = compiled.traversal_thresholds(token_ids, parents, offsets, support, law, probs)
    assert passing.tolist() == [1.0, 1.0, 0.25]
    assert mass[0].tolist() == pytest.approx([1 / 3, 2 / 3, 0]) and scale[0] == pytest.approx(4 / 3)


@pytest.mark.parametrize("path", ["compiled", "arrays"])
@pytest.mark.parametrize("failure", [1e-3, 1e-6, 1e-9])
def test_a_child_that_rarely_fails_leaves_what_its_law_lacks(path, failure, monkeypatch):
    """Kept with probability 1 - failure; after the failure only what the law gave too little of is owed, whole."""
    if path == "arrays":
        monkeypatch.setattr(TargetRows, "on_host", lambda self: None)
    draft = DraftTree(
        token_ids=np.array([0, 0, 1], dtype=np.int32),
        parents=np.array([-1, 0, 0], dtype=np.int32),
        support_ids=np.array([[0, 1, 2]] + [[-1] * 3] * 2, dtype=np.int32),
        law=np.array([[0, 0, 0], [1 - failure, failure, 0], [0.5, 0.25, 0.25]]),
    )
    target = TargetRows(torch.tensor([[1 - failure, 0, failure]] * 3, dtype=torch.float64))
    passing, mass, _ = get_verifier("traversal").thresholds(DraftBatch.concatenate([draft]), target)
    # After the first child all mass lies on token 2, which the second child (token 1) does not get.
    assert passing[2] == 0 and passing[1] == pytest.approx(1.0)
    assert mass[0].tolist() == pytest.approx([0, 0, 1], abs=1e-6)


@pytest.mark.parametrize("path", ["compiled", "arrays"])
def test_a_child_that_fails_by_rounding_alone_leaves_its_parent_as_it_was(path, monkeypatch):
    """Ten tenths sum to less than 1 by a rounding error, which is no chance of failing to divide by."""
    if path == "arrays":
        monkeypatch.setattr(TargetRows, "on_host", lambda self: None)
    law = np.full(10, 0.1)
    assert 0 < 1.0 - np.cumsum(law)[-1] < 1e-15  # Python's own sum makes up for rounding errors since 3.12
    draft = DraftTree(
        token_ids=np.array([0, 3, 4], dtype=np.int32),
        parents=np.array([-1, 0, 0], dtype=np.int32),
        support_ids=np.array([range(10)] + [[-1] * 10] * 2, dtype=np.int32),
        law=np.array([np.zeros(10), law, law]),
    )
    probs = np.zeros((3, 11))
    probs[:, :10], probs[:, 10] = law, 1.0 - law.sum()
    batch, target = DraftBatch.concatenate([draft]), TargetRows(torch.from_numpy(probs))
    passing, mass, scale = get_verifier("traversal").thresholds(batch, target)
    assert mass[0].tolist() == law.tolist() and scale[0] == 1.0
    assert passing.tolist() == pytest.approx([1.0, 1.0, 1.0])


def test_weights_that_underflowed_give_way_to_the_target():
    probs = np.array([[0.0, 0.75, 0.25]])
    support, mass = np.array([[1]], dtype=np.int32), np.zeros((1, 1))
    for uniform, token in ((0.5, 1), (0.8, 2)):
        arguments = (probs, np.array([0]), support, mass, np.zeros(1), np.array([uniform]))
        assert compiled.draw_residuals(*arguments).tolist() == [token]


def test_a_point_at_a_blocks_end_belongs_to_the_next_one():
    """The first token whose cumulated weight exceeds the point: half of the mass does not exceed a half."""
    probs = np.zeros((1, 512))
    probs[0, [0, 256]] = 0.5
    for uniform, token in [(0.5, 256), (np.nextafter(0.5, 0.0), 0)]:
        assert compiled.draw_tokens(probs, np.array([0]), np.array([uniform])).tolist() == [token]
        assert draw_tokens(torch.from_numpy(probs), np.array([uniform])).tolist() == [token]


def test_laws_that_are_not_row_by_row_draw_the_same_tokens():
    """They are none of the host's arrays, so torch draws from them."""
    batch, target, noise = case(3, "deterministic", peaked=0.5)
    rows = target.on_host()
    spread = torch.zeros((len(rows), 2 * rows.shape[1]), dtype=torch.from_numpy(rows).dtype)[:, ::2]
    spread.copy_(torch.from_numpy(rows))
    other = TargetRows(spread)
    assert other.on_host() is None
    for rule in ("match", "traversal"):
        found, expected = (get_verifier(rule).verify(batch, one, noise) for one in (other, target))
        assert [path.tolist() for path in found.accepted] == [path.tolist() for path in expected.accepted]
        assert found.next_tokens.tolist() == expected.next_tokens.tolist()


@pytest.mark.parametrize("path", [[5], [3], [-1], [0]])
def test_a_rule_that_keeps_nodes_of_other_rows_is_refused(path):
    """Row-local nodes of a row with a root and two children."""
    trees = [(7, 8, 9), (7, 4)]
    batch = DraftBatch.concatenate([draft_of(*tokens) for tokens in trees])
    next_tokens, none = np.array([1, 2]), np.empty(0, dtype=np.int32)
    assert Verdicts([np.array([2], dtype=np.int32), none], next_tokens).gained(batch) == [[9, 1], [2]]
    for accepted in ([np.array(path, dtype=np.int32), none], [path, []], [none, none, none], [none, [2]]):
        with pytest.raises(
            ValueError, match="a rule must keep nodes of each of 2 rows' own drafts, got .* number them"
        ):
            Verdicts(accepted, np.arange(len(accepted))).gained(batch)


def draft_of(root: int, *children: int) -> DraftTree:
    nodes = len(children) + 1
    parents = np.array([-1, *[0] * len(children)], dtype=np.int32)
    support = np.full((nodes, 1), -1, dtype=np.int32)
    return DraftTree(np.array([root, *children], dtype=np.int32), parents, support, np.zeros((nodes, 1), np.float32))
