"""Linear layers of captured steps whose product is chosen by measurement: which they are, and their forwards."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

import torch
from torch import nn

from stand.fusion.forwards.merged_linear import MergedLinear, Product, is_bare
from stand.fusion.recipe import Recipe, Swap

SINGLE = ("o_proj", "down_proj", "qkv_proj", "gate_up_proj")  # by the usual names, of attentions and gated blocks
COLD_BYTES = 1 << 28  # of weights of one shape: several times a GPU's cache, so that a timing reads memory


Shape = tuple[int, int]  # of a weight: [N, K]
Weights = dict[Shape, list[torch.Tensor]]


class ChosenProduct(Protocol):
    """A product that knows, by shape, which ways are not torch's; `stand.gpu.tuning.products.Products`."""

    choices: Mapping[Shape, Sequence[int | None]]

    def __call__(self, states: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor: ...


Choose = Callable[[nn.Module, Weights], ChosenProduct | None]


class ChosenLinear:
    """Stands for the forward of `layer`."""

    def __init__(self, layer: nn.Linear, product: Product):
        self.layer, self.product = layer, product

    def __call__(self, states: torch.Tensor) -> torch.Tensor:
        return self.product(states, self.layer.weight, self.layer.bias)


def choose_products(
    model: nn.Module, recipe: Recipe, merged: Mapping[str, MergedLinear], choose: Choose
) -> tuple[ChosenProduct | None, list[Swap]]:
    """What `choose` says of the linear layers of attentions and gated blocks that are swapped, and a verdict per shape;
    none where nothing was measured.

    Those that are merged with no other are named in the recipe. Where `choose` fails, products are torch's.
    """
    singles = _single_layers(model, [*recipe.attentions, *recipe.mlps])
    layers = [*merged.values(), *map(model.get_submodule, singles)]
    try:
        product, reason = choose(model, _weights(layers)), "torch's product is as fast"
    except Exception as problem:  # Triton's errors derive from Exception alone
        return None, [_verdict(layers, shape, f"{type(problem).__name__}: {problem}") for shape in _weights(layers)]
    if product is None:
        return None, []
    recipe.singles.extend(singles)
    kept = {shape for shape, ways in product.choices.items() if any(way is not None for way in ways)}
    return product, [_verdict(layers, shape, "" if shape in kept else reason) for shape in product.choices]


def _verdict(layers: Sequence[MergedLinear | nn.Linear], shape: Shape, reason: str) -> Swap:
    count = sum(tuple(layer.weight.shape) == shape for layer in layers)
    return Swap("product of few tokens", f"weight {list(shape)}", count, not reason, None, reason)


def _single_layers(model: nn.Module, owners: Sequence[str]) -> list[str]:
    """Names of the plain linear layers of these modules that are merged with no other."""
    names = [f"{owner}.{part}" for owner in owners for part in SINGLE]
    modules = dict(model.named_modules())
    return [name for name in names if name in modules and _is_plain(modules[name])]


def _weights(layers: Sequence[MergedLinear | nn.Linear]) -> Weights:
    """Those of each shape that a timing goes through: all, or as many as no cache holds."""
    found: Weights = {}
    for weight in (layer.weight.detach() for layer in layers):
        same = found.setdefault(tuple(weight.shape), [])
        if sum(other.nbytes for other in same) < COLD_BYTES:
            same.append(weight)
    return found


def _is_plain(module: nn.Module) -> bool:
    """Whether kernels can read its weight: a quantised one may be a tensor of another class."""
    return type(module) is nn.Linear and is_bare(module) and _is_readable(module.weight)


def _is_readable(weight: torch.Tensor) -> bool:
    return type(weight) is nn.Parameter and weight.is_contiguous()
