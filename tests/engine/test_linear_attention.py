"""Linear attention over trees against states that are computed token by token."""

import numpy as np
import pytest
import torch

from stand.forward.recurrent.linear_attention import NORM_EPSILON, TreeChanges, gated_delta_rule, state_space

NUM_TREES, NUM_HEADS, KEY_SIZE, VALUE_SIZE = 3, 2, 4, 5
SIZES = [9, 1, 6]  # tokens of each tree
MOST = max(SIZES)


def random_trees(seed: int) -> tuple[list[list[int]], torch.Tensor]:
    """Parents of each tree's tokens, and which token sees which."""
    generator = np.random.default_rng(seed)
    trees = [[-1, *(int(generator.integers(0, token)) for token in range(1, size))] for size in SIZES]
    seen = torch.zeros(NUM_TREES, 1, MOST, MOST, dtype=torch.bool)
    for tree, parents in enumerate(trees):
        for token, parent in enumerate(parents):
            if parent >= 0:
                seen[tree, 0, token] = seen[tree, 0, parent]
            seen[tree, 0, token, token] = True
    return trees, seen


def random_operands(seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)

    def numbers(*shape: int) -> torch.Tensor:
        return torch.randn(NUM_TREES, NUM_HEADS, *shape, generator=generator, dtype=torch.float64)

    is_token = torch.arange(MOST) < torch.tensor(SIZES)[:, None, None]
    return {
        "query": numbers(MOST, KEY_SIZE),
        "key": numbers(MOST, KEY_SIZE),
        "value": numbers(MOST, VALUE_SIZE) * is_token[..., None],
        "log_decay": -numbers(MOST).exp() * is_token,
        "beta": torch.sigmoid(numbers(MOST)) * is_token,
        "states": numbers(KEY_SIZE, VALUE_SIZE),
    }


def unit(vectors: torch.Tensor) -> torch.Tensor:
    return vectors / ((vectors**2).sum(dim=-1, keepdim=True) + NORM_EPSILON).sqrt()


def token_by_token(trees: list[list[int]], operands: dict, *, is_delta_rule: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Outputs [A, H, T, V], and the state after every token [A, T, H, K, V]."""
    outputs = torch.zeros(NUM_TREES, NUM_HEADS, MOST, VALUE_SIZE, dtype=torch.float64)
    after = torch.zeros(NUM_TREES, MOST, NUM_HEADS, KEY_SIZE, VALUE_SIZE, dtype=torch.float64)
    for tree, parents in enumerate(trees):
        for token, parent in enumerate(parents):
            query, key, value = (operands[name][tree, :, token] for name in ("query", "key", "value"))
            before = operands["states"][tree] if parent < 0 else after[tree, parent]
            state = before * operands["log_decay"][tree, :, token].exp()[:, None, None]
            if is_delta_rule:
                query, key = unit(query) * KEY_SIZE**-0.5, unit(key)
                known = torch.einsum("hkv,hk->hv", state, key)
                value = operands["beta"][tree, :, token, None] * (value - known)
            after[tree, token] = state + torch.einsum("hk,hv->hkv", key, value)
            outputs[tree, :, token] = torch.einsum("hkv,hk->hv", after[tree, token], query)
    return outputs, after


def run(seed: int, *, is_delta_rule: bool, seen: torch.Tensor) -> tuple[torch.Tensor, TreeChanges]:
    operands = random_operands(seed)
    beta = operands.pop("beta")
    states = operands.pop("states")
    if is_delta_rule:
        return gated_delta_rule(*operands.values(), beta, states=states, seen=seen)
    return state_space(*operands.values(), states=states, seen=seen)


@pytest.mark.parametrize("is_delta_rule", [True, False])
@pytest.mark.parametrize("seed", range(5))
def test_trees_equal_states_token_by_token(seed, is_delta_rule):
    trees, seen = random_trees(seed)
    operands = random_operands(seed)
    outputs, changes = run(seed, is_delta_rule=is_delta_rule, seen=seen)
    expected, after = token_by_token(trees, operands, is_delta_rule=is_delta_rule)
    ends = np.random.default_rng(seed).integers(0, SIZES)
    kept = operands["states"].clone()
    changes.move(kept, torch.from_numpy(ends))
    for tree, size in enumerate(SIZES):
        assert torch.allclose(outputs[tree, :, :size], expected[tree, :, :size], rtol=0, atol=1e-10)
        assert torch.allclose(kept[tree], after[tree, ends[tree]], rtol=0, atol=1e-10)


@pytest.mark.parametrize("is_delta_rule", [True, False])
def test_a_token_that_sees_its_sibling_is_noticed(is_delta_rule):
    """Control: the mask of a chain over the same tokens."""
    trees, seen = random_trees(0)
    chain = torch.ones_like(seen).tril()
    outputs, _ = run(0, is_delta_rule=is_delta_rule, seen=chain)
    expected, _ = token_by_token(trees, random_operands(0), is_delta_rule=is_delta_rule)
    assert float((outputs[0] - expected[0]).abs().max()) > 1e-2


def test_large_decays_beside_a_path_do_not_overflow():
    """exp(G_i - G_j) of tokens that do not see each other is never computed."""
    trees, seen = random_trees(1)
    operands = random_operands(1)
    operands["log_decay"] *= 1e5
    expected, _ = token_by_token(trees, operands, is_delta_rule=True)
    beta, states = operands.pop("beta"), operands.pop("states")
    outputs, _ = gated_delta_rule(*operands.values(), beta, states=states, seen=seen)
    assert torch.isfinite(outputs).all()
    assert torch.allclose(outputs[0], expected[0], rtol=0, atol=1e-10)
