"""Training in few bits moves weights as training in float32 does."""

import copy

import pytest
import torch
from training.master_weights import MasterAdamW

STEPS = 200
SETTINGS = {"lr": 1e-4, "betas": (0.9, 0.95), "weight_decay": 0.01}


def losses(layer: torch.nn.Module, optimizer: torch.optim.Optimizer, *, steps: int = STEPS) -> list[float]:
    """Of a regression of one layer, whose weights have far to go at this rate."""
    generator, found = torch.Generator().manual_seed(2), []
    for _ in range(steps):
        x = torch.randn(64, 8, generator=generator)
        loss = (layer(x.to(layer.weight.dtype)).float() - x.sum(-1, keepdim=True)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.item())
    return found


def new_layer(dtype: torch.dtype) -> torch.nn.Linear:
    torch.manual_seed(1)
    layer = torch.nn.Linear(8, 1)
    torch.nn.init.constant_(layer.weight, 0.5)
    return layer.to(dtype)


def moved(layer: torch.nn.Linear) -> float:
    return float((layer.weight.detach().float() - 0.5).abs().mean())


def test_in_float32_it_is_adamw_to_the_bit():
    own, other = new_layer(torch.float32), new_layer(torch.float32)
    assert losses(own, MasterAdamW(own.parameters(), **SETTINGS)) == losses(
        other, torch.optim.AdamW(other.parameters(), **SETTINGS)
    )
    assert torch.equal(own.weight, other.weight)


def test_in_bfloat16_weights_move_as_in_float32():
    """AdamW on the weights themselves hardly moves them: a step is a twentieth of what the format can tell apart."""
    exact, own, rounded = new_layer(torch.float32), new_layer(torch.bfloat16), new_layer(torch.bfloat16)
    losses(exact, MasterAdamW(exact.parameters(), **SETTINGS))
    losses(own, MasterAdamW(own.parameters(), **SETTINGS))
    losses(rounded, torch.optim.AdamW(rounded.parameters(), **SETTINGS))
    assert own.weight.dtype == torch.bfloat16
    assert moved(own) == pytest.approx(moved(exact), rel=0.2)
    assert moved(rounded) < 0.2 * moved(exact)


def test_a_run_goes_on_with_its_copies():
    whole, parts = new_layer(torch.bfloat16), new_layer(torch.bfloat16)
    optimizer = MasterAdamW(whole.parameters(), **SETTINGS)
    losses(whole, optimizer)
    saved = copy.deepcopy((whole.state_dict(), optimizer.state_dict()))
    resumed = MasterAdamW(parts.parameters(), **SETTINGS)
    parts.load_state_dict(saved[0])
    resumed.load_state_dict(saved[1])
    assert losses(whole, optimizer, steps=40) == losses(parts, resumed, steps=40)
    assert torch.equal(whole.weight, parts.weight)


def test_a_state_without_copies_is_taken():
    """As runs before had it."""
    layer, other = new_layer(torch.bfloat16), new_layer(torch.bfloat16)
    before = torch.optim.AdamW(layer.parameters(), **SETTINGS)
    losses(layer, before)
    other.load_state_dict(layer.state_dict())
    resumed = MasterAdamW(other.parameters(), **SETTINGS)
    resumed.load_state_dict(before.state_dict())
    losses(other, resumed, steps=100)
    assert moved(other) > 2 * moved(layer)
