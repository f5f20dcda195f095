"""Drafts in the layouts of serving engines: chains, and equally many nodes per row with their ancestors."""

import numpy as np
import pytest
from ancestor_rules import broken_rule

from stand.trees import BlendedLookup, DraftBatch, DraftTree


def random_draft(generator, num_nodes: int) -> DraftTree:
    """Any order of growth; siblings have distinct tokens."""
    parents = np.array([-1, *(generator.integers(0, node) for node in range(1, num_nodes))], dtype=np.int32)
    probabilities = np.ones(num_nodes, dtype=np.float32)
    for node in range(1, num_nodes):
        probabilities[node] = probabilities[parents[node]] * generator.random()
    width = num_nodes + 1
    return DraftTree(
        token_ids=np.arange(num_nodes, dtype=np.int32),
        parents=parents,
        support_ids=np.tile(np.arange(width, dtype=np.int32), (num_nodes, 1)),
        law=np.eye(num_nodes, width, dtype=np.float32) * (parents >= 0)[:, None],
        path_probabilities=probabilities,
        path_estimates=probabilities,
    )


def random_batch(generator, *, most_nodes: int, num_rows: int) -> DraftBatch:
    sizes = generator.integers(1, most_nodes + 1, num_rows)
    return DraftBatch.concatenate([random_draft(generator, size) for size in sizes])


def paths_of(draft: DraftTree) -> dict[int, list[int]]:
    """By node, the nodes from the root's child down to it."""
    paths: dict[int, list[int]] = {0: []}
    for node in range(1, draft.num_nodes):
        paths[node] = [*paths[int(draft.parents[node])], node]
    return paths


def test_masks_keep_their_rules_on_many_random_drafts():
    generator = np.random.default_rng(0)
    num_padded = 0
    for _ in range(40):
        batch = random_batch(generator, most_nodes=8, num_rows=50)
        tokens, masks = batch.ancestor_masks(8, pad_id=7)
        assert tokens.dtype == np.int32 and masks.dtype == np.bool_
        for row in range(len(batch)):
            assert broken_rule(tokens[row], masks[row], batch[row]) is None
            num_padded += batch[row].num_nodes < 7
    assert num_padded > 500


@pytest.mark.parametrize(
    "break_it",
    [
        lambda tokens, mask: mask.__setitem__((3, 3), False),
        lambda tokens, mask: mask.__setitem__((1, 2), True),
        lambda tokens, mask: mask.__setitem__((2, 0), False),
        lambda tokens, mask: mask.__setitem__((5, slice(0, 5)), mask[3, :5]),  # a sibling of the pad before it
        lambda tokens, mask: tokens.__setitem__(1, 99),
    ],
)
def test_the_oracle_sees_broken_masks(break_it):
    draft = DraftTree.chain([5, 6, 7])
    tokens, masks = (array.copy() for array in DraftBatch.concatenate([draft]).ancestor_masks(6))
    assert broken_rule(tokens[0], masks[0], draft) is None
    break_it(tokens[0], masks[0])
    assert broken_rule(tokens[0], masks[0], draft) is not None


def test_chains_are_the_paths_with_the_largest_sum():
    generator = np.random.default_rng(1)
    for _ in range(20):
        batch = random_batch(generator, most_nodes=10, num_rows=5)
        for most in (0, 1, 3, 20):
            chains = batch.chains(most)
            for row, chain in enumerate(chains):
                draft = batch[row]
                sums = {
                    tuple(path): draft.path_probabilities[path].sum()
                    for path in paths_of(draft).values()
                    if len(path) <= most
                }
                best = max(sums.values())
                assert sums[tuple(chain)] == pytest.approx(best, abs=1e-6)  # tokens are the nodes' numbers
                assert all(type(token) is int for token in chain)


def test_without_probabilities_the_longest_path_is_the_chain():
    draft = DraftTree(
        token_ids=np.array([9, 1, 2, 3, 4], np.int32),
        parents=np.array([-1, 0, 0, 2, 0], np.int32),
        support_ids=np.tile(np.array([1, 2, 3, 4], np.int32), (5, 1)),
        law=np.vstack([np.zeros(4), np.eye(4)]).astype(np.float32),
    )
    batch = DraftBatch.concatenate([draft, DraftTree.pending(8, support_size=4)])
    assert batch.chains(8) == [[2, 3], []]
    assert batch.chains(1) == [[1], []]


def test_a_draft_with_one_child_per_node_is_its_chain():
    lookup = BlendedLookup()
    text = np.random.default_rng(2).integers(0, 5, 400).astype(np.int32)
    lookup.learn(text[:1], text[1:])
    keys = {"seed": 0, "rows": [0, 1], "steps": [0, 0]}
    batch = lookup.draft([text[:50], text[:90]], 14, max_nodes=7, width=1, **keys)
    assert batch.chains(7) == [batch[row].token_ids[1:].tolist() for row in range(2)]
    assert batch.sizes.tolist() == [8, 8]


@pytest.mark.parametrize(
    "call",
    [
        lambda batch: batch.ancestor_masks(2),
        lambda batch: batch.ancestor_masks(0),
        lambda batch: batch.ancestor_masks(4, pad_id=-1),
        lambda batch: batch.chains(-1),
    ],
)
def test_what_does_not_fit_is_refused(call):
    batch = DraftBatch.concatenate([DraftTree.chain([1, 2, 3])])
    batch.ancestor_masks(3)
    with pytest.raises(ValueError, match="got"):
        call(batch)


def test_an_unsound_batch_is_refused():
    batch = DraftBatch.concatenate([DraftTree.chain([1, 2, 3])])
    batch.parents[2] = 2
    with pytest.raises(ValueError, match="sound DraftBatch"):
        batch.chains(2)
    with pytest.raises(ValueError, match="sound DraftBatch"):
        batch.ancestor_masks(3)


def test_masks_are_written_where_they_are_wanted():
    batch = random_batch(np.random.default_rng(5), most_nodes=6, num_rows=4)
    tokens, masks = batch.ancestor_masks(6)
    out = np.full((4, 6, 6), 9, dtype=np.int64)
    same_tokens, same = batch.ancestor_masks(6, out=out)
    assert same is out and np.array_equal(out, masks) and np.array_equal(tokens, same_tokens)
    for wrong in (out[:3], out.astype(np.int32), out.transpose(0, 2, 1), np.zeros((4, 6, 6), dtype=np.bool_)):
        with pytest.raises(ValueError, match="out must be"):
            batch.ancestor_masks(6, out=wrong)
