"""Traversal's kernel equals the host's compiled code: thresholds, masses, scales and stops."""

import numpy as np
import pytest
import torch

pytest.importorskip("triton")

from drafted_cases import agreeing_case, case  # noqa: E402
from exact import (  # noqa: E402
    EX2,
    EX3,
    deterministic,
    enumerate_drafts,
    mixed_sampled_first,
    pack,
    shaped,
    target_rows,
    with_replacement,
    without_replacement,
)

from stand.gpu.kernels.traverse import traverse  # noqa: E402
from stand.trees import DraftBatch, DraftTree  # noqa: E402
from stand.verifiers.rules import traversal_compiled  # noqa: E402
from stand.verifiers.schedule import packed_parents  # noqa: E402
from stand.verifiers.walk import first_in_post_order  # noqa: E402


def tensors_of(batch: DraftBatch) -> list[torch.Tensor]:
    arrays = (batch.token_ids, batch.parents, batch.offsets, batch.support_ids, batch.law)
    return [torch.tensor(array) for array in arrays]


def expect(batch: DraftBatch, probs: torch.Tensor, uniforms: np.ndarray) -> tuple[np.ndarray, ...]:
    """(stops, mass, scale, thresholds) by the host's code."""
    arrays = (batch.token_ids, batch.parents, batch.offsets, batch.support_ids, batch.law)
    thresholds, mass, scale = traversal_compiled.thresholds(*arrays, probs.numpy())
    stops = first_in_post_order(
        uniforms < thresholds,
        parents=packed_parents(batch),
        roots=batch.offsets[:-1],
        order=np.arange(batch.num_nodes),
    )
    return stops, mass, scale, thresholds


def assert_equal(batch: DraftBatch, probs: torch.Tensor, uniforms: np.ndarray) -> np.ndarray:
    stops, *numbers = traverse(probs, *tensors_of(batch), torch.from_numpy(uniforms))
    expected_stops, *expected = expect(batch, probs, uniforms)
    for got, wanted in zip(numbers, expected, strict=True):
        np.testing.assert_allclose(got.numpy(), wanted, rtol=1e-12, atol=1e-12)
    assert stops.tolist() == expected_stops.tolist()
    return expected_stops


def some_drafts(world, policy, number: int) -> list:
    drafts = [draft for _, draft in enumerate_drafts(world, policy)]
    return [drafts[place] for place in np.random.default_rng(5).permutation(len(drafts))[:number]]


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
    drafts = some_drafts(world, shaped(child_law, 3, 2), 12)
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
    probs, uniforms = target.rows(np.arange(batch.num_nodes)), torch.from_numpy(noise.accept(batch))
    token_ids, parents, offsets, support_ids, law = tensors_of(batch)
    alone = traverse(probs, token_ids, parents, offsets, support_ids, law, uniforms)

    def padded(tensor: torch.Tensor, fill: float) -> torch.Tensor:
        return torch.cat([tensor, torch.full_like(tensor[:6], fill)])

    more_rows = torch.cat([offsets, offsets[-1:], offsets[-1:]])
    bucket = traverse(
        padded(probs, 0.5), padded(token_ids, 3), padded(parents, 0), more_rows,
        padded(support_ids, 7), padded(law, 1.0), padded(uniforms, 0.0),
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
    token_ids, parents, offsets, support_ids, law = tensors_of(batch)
    law[siblings], law[siblings - 1] = law[siblings - 1].clone(), law[siblings].clone()
    _, mass, _, _ = traverse(
        probs, token_ids, parents, offsets, support_ids, law, torch.from_numpy(noise.accept(batch))
    )
    _, expected, _, _ = expect(batch, probs, noise.accept(batch))
    assert np.abs(mass.numpy() - expected).max() > 1e-3


def test_refuses_arrays_that_do_not_belong_together():
    batch, target, noise = case(0, "sampled")
    probs, uniforms = target.rows(np.arange(batch.num_nodes)), torch.from_numpy(noise.accept(batch))
    arrays = tensors_of(batch)
    for bad in (arrays[:1] + [arrays[1].long()] + arrays[2:], arrays[:1] + [arrays[1][1:]] + arrays[2:]):
        with pytest.raises(ValueError, match="one DraftBatch"):
            traverse(probs, *bad, uniforms)
    with pytest.raises(ValueError, match="one DraftBatch"):
        traverse(probs[1:], *arrays, uniforms)
