"""The compiled host path of traversal equals the array code, node by node and token by token."""

import numpy as np
import pytest
import torch

from stand.trees import LookupTree, TreeShape
from stand.verifiers import TargetRows, VerifierNoise, get_verifier, host, operands
from stand.verifiers.draw import draw_residuals

VOCABULARY_SIZE = 300


def case(seed: int, kind: str, *, peaked: float = 3.0):
    """A drafted step of 5 rows, and target laws with exact zeros."""
    generator = np.random.default_rng(seed)
    tokens = generator.integers(0, 30, 800).astype(np.int32)
    ids = np.stack([generator.permutation(40)[:10] for _ in tokens[1:]]).astype(np.int32)
    lookup = LookupTree()
    lookup.learn(tokens[:1], tokens[1:], (ids, generator.dirichlet(np.ones(10), len(ids)).astype(np.float32)))
    rows = np.arange(5)
    histories = [tokens[place : place + 40] for place in range(0, 250, 50)]
    shape = TreeShape.from_branching([3, 2, 2])
    batch = lookup.draft(histories, shape, seed=seed, rows=rows, steps=rows, kind=kind)
    logits = torch.from_numpy(generator.normal(0, peaked, (batch.num_nodes, VOCABULARY_SIZE)))
    logits[:, generator.integers(0, 40, 10)] = float("-inf")
    noise = VerifierNoise(seed=seed, rows=rows, steps=rows, positions=rows)
    return batch, TargetRows(torch.softmax(logits, dim=-1)), noise


@pytest.mark.parametrize("kind", ["sampled", "mixed", "deterministic"])
@pytest.mark.parametrize("seed", range(8))
def test_thresholds_and_verdicts_equal_the_array_code(seed, kind, monkeypatch):
    batch, target, noise = case(seed, kind)
    rule = get_verifier("traversal")
    compiled, kept = rule.thresholds(batch, target), rule.verify(batch, target, noise)
    assert operands.HOST.type == "cpu"
    monkeypatch.setattr(TargetRows, "on_host", lambda self: None)
    arrays, expected = rule.thresholds(batch, target), rule.verify(batch, target, noise)
    for left, right in zip(compiled, arrays, strict=True):
        np.testing.assert_allclose(left, right, rtol=1e-9, atol=1e-12)
    assert [path.tolist() for path in kept.accepted] == [path.tolist() for path in expected.accepted]
    assert kept.next_tokens.tolist() == expected.next_tokens.tolist()


def test_draws_over_a_grid_of_uniforms_equal_the_array_code():
    batch, target, _ = case(3, "sampled", peaked=0.5)
    _, mass, scale = get_verifier("traversal").thresholds(batch, target)
    for uniform in np.linspace(0, 1, 200, endpoint=False):
        nodes = np.arange(batch.num_nodes)
        uniforms = np.full(len(nodes), uniform)
        got = host.draw_residuals(target.on_host(), nodes, batch.support_ids, mass, scale, uniforms)
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
        assert host.draw_residuals(*arguments).tolist() == [1 if uniform < 1 / 3 else 4]


def test_weights_that_underflowed_give_way_to_the_target():
    probs = np.array([[0.0, 0.75, 0.25]])
    support, mass = np.array([[1]], dtype=np.int32), np.zeros((1, 1))
    for uniform, token in ((0.5, 1), (0.8, 2)):
        arguments = (probs, np.array([0]), support, mass, np.zeros(1), np.array([uniform]))
        assert host.draw_residuals(*arguments).tolist() == [token]
