"""Products of few tokens on a CPU: those of linear layers up to rounding, and a model given back as it was."""

import numpy as np
import pytest
import torch
from tiny_models import tiny_model
from torch import nn
from torch.nn.functional import linear

import stand
from stand.forward import products
from stand.forward.products import few_token_product, few_token_products

WIDE = (800, 700)  # columns and rows of a weight large enough for oneDNN


def operands(num_tokens: int, num_inputs: int, num_outputs: int, *, has_bias: bool) -> list[torch.Tensor | None]:
    generator = torch.Generator().manual_seed(num_tokens)
    shapes = (1, num_tokens, num_inputs), (num_outputs, num_inputs), (num_outputs,)
    states, weight, bias = (torch.randn(shape, generator=generator) for shape in shapes)
    return [states, weight, bias if has_bias else None]


@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("sizes", [(5, 3), (64, 192), WIDE, (1500, 400)])
@pytest.mark.parametrize("num_tokens", [1, 2, 3, 4, 5, 8, 31])
def test_products_are_those_of_double_precision(num_tokens, sizes, has_bias):
    states, weight, bias = operands(num_tokens, *sizes, has_bias=has_bias)
    found = few_token_product(states, weight, bias)
    expected = linear(*(part if part is None else part.double() for part in (states, weight, bias)))
    assert found.shape == expected.shape and found.is_contiguous()
    np.testing.assert_allclose(found.numpy(), expected.numpy(), atol=2e-6 * sizes[0] ** 0.5 * 5)


def test_leading_shapes_are_kept():
    states, weight, _ = operands(4, 16, 6, has_bias=False)
    for shape in ((4, 16), (2, 2, 16), (1, 1, 4, 16)):
        assert few_token_product(states.reshape(shape), weight).shape == (*shape[:-1], 6)


@pytest.fixture
def taken(monkeypatch) -> list[str]:
    """The products that are taken, by name, in their order."""
    names = []

    def watched(name, product):
        def call(*args):
            names.append(name)
            return product(*args)

        return call

    for name in ("_exchanged", "_onednn", "linear"):
        monkeypatch.setattr(products, name, watched(name, getattr(products, name)))
    return names


@pytest.mark.skipif(not products.is_available(), reason="this build of torch has one library for products")
def test_shapes_alone_choose_the_product(taken):
    for num_tokens, sizes in ((4, WIDE), (5, WIDE), (5, (64, 192)), (2, (1500, 400))):
        few_token_product(*operands(num_tokens, *sizes, has_bias=False))
    assert taken == ["_exchanged", "_onednn", "linear", "_onednn"]


class OwnLinear(nn.Linear):
    """A layer that may compute what it likes."""


class SomeLayers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.plain, self.own, self.replaced, self.transposed = nn.Linear(8, 8), OwnLinear(8, 8), nn.Linear(8, 8), None
        self.double, self.transposed = nn.Linear(8, 8).double(), nn.Linear(8, 8)
        self.transposed.weight = nn.Parameter(torch.randn(8, 8).t())
        self.replaced.forward = lambda states: states
        self.device = torch.device("cpu")


@pytest.mark.skipif(not products.is_available(), reason="this build of torch has one library for products")
def test_only_plain_layers_change_and_only_inside(taken):
    model, states = SomeLayers(), torch.randn(1, 8)
    before = {name: layer(states.to(layer.weight.dtype)) for name, layer in model.named_children()}
    forwards = {name: vars(layer).get("forward") for name, layer in model.named_children()}
    with few_token_products(model):
        for name, layer in model.named_children():
            taken.clear()
            found = layer(states.to(layer.weight.dtype))
            expected = {"plain": ["_exchanged"], "double": ["linear"], "transposed": ["linear"]}
            assert taken == expected.get(name, []), name
            torch.testing.assert_close(found, before[name])
        assert model.plain(torch.zeros(0, 8)).shape == (0, 8)
    assert {name: vars(layer).get("forward") for name, layer in model.named_children()} == forwards
    with torch.autocast("cpu", dtype=torch.bfloat16), few_token_products(model):
        assert model.plain(states).dtype == torch.bfloat16
    with pytest.raises(ZeroDivisionError), few_token_products(model):
        _ = 1 / 0
    assert "forward" not in vars(model.plain)


@pytest.mark.skipif(not products.is_available(), reason="this build of torch has one library for products")
def test_engines_steps_take_them(taken):
    output = stand.wrap(tiny_model("llama")).generate(input_ids=[[5, 9, 11, 4]], max_new_tokens=6, temperature=0.0)
    assert "_exchanged" in taken
    taken.clear()
    plain = tiny_model("llama").generate(torch.tensor([[5, 9, 11, 4]]), do_sample=False, max_new_tokens=6)
    assert output.token_ids[0] == plain[0, 4:].tolist() and taken == []
