"""Traversal's kernel equals the host's compiled code: thresholds, masses, scales and stops."""

import numpy as np
import pytest
import torch

pytest.importorskip("triton")

from drafted_cases import agreeing_case, case
from exact import (
    EX2,
    EX3,
    deterministic,
    mixed_sampled_first,
    pack,
    shaped,
    target_rows,
    with_replacement,
    without_replacement,
)
from random_drafts import random_drafts
from traversal_arrays import traversal_arrays

from stand.gpu.kernels.verification.traverse import traverse
from stand.trees import DraftBatch, DraftTree, compiled
from stand.verifiers.schedule import packed_parents
from stand.verifiers.walk import first_in_post_order


def expect(batch: DraftBatch, probs: torch.Tensor, uniforms: np.ndarray) -> tuple[np.ndarray, ...]:
    """(stops, mass, scale, thresholds) by the host's code."""
    arrays = (batch.token_ids, batch.parents, batch.offsets, batch.support_ids, batch.law)
    thresholds, mass, scale = compiled.traversal_thresholds(*arrays, probs.numpy())
    stops = first_in_post_order(
        uniforms < thresholds,
        parents=packed_parents(batch),
        roots=batch.offsets[:-1],
        order=np.arange(batch.num_nodes),
    )
    return stops, mass, scale, thresholds


def assert_equal(batch: DraftBatch, probs: torch.Tensor, uniforms: np.ndarray) -> np.ndarray:
    stops, *numbers = traverse(probs, *traversal_arrays(batch, uniforms))
    expected_stops, *expected = expect(batch, probs, uniforms)
    for got, wanted in zip(numbers, expected, strict=True):
        np.testing.assert_allclose(got.numpy(), wanted, rtol=1e-12, atol=1e-12)
    assert stops.tolist() == expected_stops.tolist()
    return expected_stops


@pytest.mark.parametrize("kind", ["sampled", "mixed", "deterministic"])
@pytest.mark.parametrize("seed", range(2))
def test_lookup_drafts_over_laws_with_zeros(seed, kind):
    batch, probs, noise = agreeing_case(seed, kind)
    stops = assert_equal(batch, probs, noise.accept(batch))
    assert (stops > batch.offsets[:-1]).any()
    assert_equal(batch, probs.float(), 0.5 * noise.accept(batch))


@pytest.mark.parametrize("child_law", [with_replacement, without_replacement, deterministic, mixed_sampled_first])
@pytest.mark.parametrize("world", [EX2, EX3], ids=["EX2", "EX3"])
def test_exact_worlds(world, child_law):
    """Exact zeros, one-hot laws, repeated siblings, and as many children as the support holds."""
    drafts = random_drafts(world, shaped(child_law, 3, 2), 12)
    batch, probs = pack(world, drafts), target_rows(world, drafts).rows(np.arange(sum(map(len, drafts))))
    uniforms = np.random.default_rng(1).random(batch.num_nodes)
    assert_equal(batch, probs, uniforms)


def test_every_stop_of_a_draft_is_reached():
    """One node at a time may pass: the walk must find it wherever it stands, and a passing ancestor after it."""
    batch, probs, _ = agreeing_case(1, "sampled")
    _, _, _, thresholds = expect(batch, probs, np.ones(batch.num_nodes))
    reached = set()
    for node in np.flatnonzero(thresholds > 0)[::5]:
        uniforms = np.where(np.arange(batch.num_nodes) == node, 0.0, np.nextafter(1.0, 0.0))
        reached.update(assert_equal(batch, probs, uniforms).tolist())
    assert len(reached) > 5


def test_a_uniform_of_zero_does_not_pass_a_threshold_of_zero():
    batch, probs, _ = agreeing_case(0, "sampled")
    thresholds = expect(batch, probs, np.zeros(batch.num_nodes))[3]
    assert (thresholds == 0).any()
    assert_equal(batch, probs, np.where(thresholds == 0, 0.0, np.nextafter(1.0, 0.0)))


def test_rows_without_nodes_and_padding_tokens_change_nothing():
    batch, target, noise = case(2, "sampled")
    probs = target.rows(np.arange(batch.num_nodes))
    arrays = traversal_arrays(batch, noise.accept(batch))
    token_ids, parents, offsets, support_ids, law, uniforms, turns, ancestors = arrays
    alone = traverse(probs, *arrays)

    def padded(tensor: torch.Tensor, fill: float) -> torch.Tensor:
        return torch.cat([tensor, torch.full_like(tensor[:6], fill)])

    more_rows = torch.cat([offsets, offsets[-1:], offsets[-1:]])
    bucket = traverse(
        padded(probs, 0.5), padded(token_ids, 3), padded(parents, 0), more_rows,
        padded(support_ids, 7), padded(law, 1.0), padded(uniforms, 0.0), padded(turns, 513), padded(ancestors, -1),
    )  # fmt: skip
    assert bucket[0].tolist() == [*alone[0].tolist(), 0, 0]
    for wide, narrow in zip(bucket[1:], alone[1:], strict=True):
        assert torch.equal(wide[: batch.num_nodes], narrow)


def test_pending_tokens_and_chains():
    drafts = [DraftTree.pending(4), DraftTree.chain([1, 2, 3, 4, 5, 6, 7]), DraftTree.chain([2, 0])]
    batch = DraftBatch.concatenate(drafts)
    probs = torch.softmax(torch.randn(batch.num_nodes, 20, generator=torch.Generator().manual_seed(0)).double(), dim=1)
    probs[1] = 0
    probs[1, 2] = 1.0  # node 1's child is certain
    probs[2] *= 1e-6 / probs[2].sum()
    probs[2, 3] += 1.0 - 1e-6  # node 2's child is nearly so
    stops = assert_equal(batch, probs, np.full(batch.num_nodes, 0.02))
    assert stops[0] == 0 and stops[1] > 1


def test_siblings_in_another_order_are_noticed():
    """Control: reveal order is the order of nodes, so laws exchanged between siblings change what is owed."""
    batch, probs, noise = agreeing_case(0, "sampled")
    siblings = np.flatnonzero(batch.ranks == 1)
    arrays = traversal_arrays(batch, noise.accept(batch))
    law = arrays[4]
    law[siblings], law[siblings - 1] = law[siblings - 1].clone(), law[siblings].clone()
    _, mass, _, _ = traverse(probs, *arrays)
    _, expected, _, _ = expect(batch, probs, noise.accept(batch))
    assert np.abs(mass.numpy() - expected).max() > 1e-3


def test_refuses_arrays_that_do_not_belong_together():
    batch, target, noise = case(0, "sampled")
    probs, arrays = target.rows(np.arange(batch.num_nodes)), traversal_arrays(batch, noise.accept(batch))
    worse = [(1, arrays[1].long()), (1, arrays[1][1:]), (6, arrays[6].int()), (7, arrays[7][:, 0]), (7, arrays[7][1:])]
    for place, bad in worse:
        with pytest.raises(ValueError, match="one DraftBatch"):
            traverse(probs, *arrays[:place], bad, *arrays[place + 1 :])
    with pytest.raises(ValueError, match="one DraftBatch"):
        traverse(probs[1:], *arrays)


def test_rows_of_more_than_one_word():
    """200 nodes: bytes above 127, several words of ancestors, stops beyond the first of them.

    Two children per node: more, or a chain of them, would take more turns, each of which is interpreted.
    """
    parents = ((np.arange(200) + 1) // 2 - 1).astype(np.int32)
    support, tokens = np.tile(np.arange(12, dtype=np.int32), (200, 1)), (np.arange(200) % 11).astype(np.int32)
    law = np.where((tokens[:, None] == support) | (support == 11), 0.5, 0.0).astype(np.float32)
    batch = DraftBatch.concatenate([DraftTree(tokens, parents, support, law), DraftTree.pending(1)])
    probs = torch.full((201, 13), 0.7 / 12)
    probs[:, 12] = 0.3  # outside all supports: always owed
    for node in (1, 2, 61, 64, 127, 130, 199):  # all others are owed nothing
        uniforms = np.where(np.arange(201) == node, 0.0, np.nextafter(1.0, 0.0))
        assert assert_equal(batch, probs, uniforms).tolist() == [node, 200]


def test_nodes_of_one_turn_that_depend_on_each_other_are_noticed():
    """Control: the turns are what orders siblings."""
    batch, probs, noise = agreeing_case(0, "sampled")
    arrays = traversal_arrays(batch, noise.accept(batch))
    first, end = batch.offsets[:2]
    number = int(arrays[6][end - 1])
    arrays[6][first : first + number] = arrays[6][first : first + number].flip(0)
    _, mass, _, _ = traverse(probs, *arrays)
    assert np.abs(mass.numpy() - expect(batch, probs, noise.accept(batch))[1]).max() > 1e-3
