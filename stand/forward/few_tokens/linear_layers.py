"""A model's linear layers in the forwards of an engine on a CPU: few tokens take this project's own product."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import MethodType
from weakref import WeakKeyDictionary

import torch
from torch.nn import Linear, Module
from torch.nn.functional import linear

from stand.forward.few_tokens.dot_products import IS_INTEL
from stand.forward.few_tokens.product import IS_FASTER, FewTokenProduct, are_weights, few_token_products, is_plain
from stand.forward.modules import modules_of
from stand.laws.filters import VECTORS

LINEAR_FORWARD = Linear.forward  # unless somebody replaces it
IS_AHEAD_OF_MKL = torch.backends.mkl.is_available() and VECTORS[-1] == "avx512" and not IS_INTEL
# Up to so many tokens a product of our own is taken: beyond, torch's is as fast. In float32 torch's is MKL's: on a
# processor with AVX-512 that is not Intel's it takes twice the time of ours, for a whole chunk of a prompt too.
MOST_TOKENS = {torch.float32: 512 if IS_AHEAD_OF_MKL else 64, torch.bfloat16: 64}


@contextmanager
def few_token_layers(model: Module) -> Iterator[None]:
    """Within it the linear layers of a model, or of a part of one, take `FewTokenProduct` on a CPU for up to as many
    tokens as MOST_TOKENS says of their dtype.

    Only exact `torch.nn.Linear` with plain parameters in float32 or bfloat16 whose forward nobody else has replaced,
    and which no hook comes before; others compute as before, and all of them on a processor without AVX2, or where
    gradients are kept. Weights that are replaced within it count from the next time on. The model is given back as it
    was.
    """
    layers = _KNOWN.setdefault(model, _Layers())
    layers.depth += 1
    try:
        if layers.depth == 1 and IS_FASTER and Linear.forward is LINEAR_FORWARD and next(model.parameters()).is_cpu:
            layers.swap(model)
        yield
    finally:
        layers.depth -= 1
        if layers.depth == 0:
            try:
                layers.restore()
            except BaseException:  # an interrupt has cut it; a function for this could be cut before its own try
                layers.restore()
                raise


class FewTokenForward:
    """Stands for the forward of `layer`, whose weights `are_weights`."""

    __slots__ = ("layer", "most_numbers", "product")

    def __init__(self, layer: Linear):
        self.layer, self.most_numbers = layer, MOST_TOKENS[layer.weight.dtype] * layer.in_features
        self.product = FewTokenProduct(layer.weight, layer.bias)

    def is_current(self) -> bool:
        """Whether the layer still has the weights that the product reads."""
        own = self.layer._parameters
        return self.product.reads(own.get("weight"), own.get("bias"))

    def __call__(self, input: torch.Tensor) -> torch.Tensor:
        if self.serves(input):
            return self.product(input)
        return linear(input, self.layer.weight, self.layer.bias)

    def __reduce__(self) -> tuple:
        """A copy of the layer has weights of its own, and runs its class's forward."""
        return class_forward, (self.layer,)

    def serves(self, states: torch.Tensor) -> bool:
        """Whether these take the product."""
        if not 0 < states.numel() <= self.most_numbers or states.shape[-1] != self.product.depth:
            return False
        is_inference = not (torch.is_grad_enabled() or torch.is_autocast_enabled("cpu"))
        return is_inference and is_plain(states) and self.product.weight.dtype is states.dtype


def class_forward(layer: Module) -> MethodType:
    """The forward of its class: a copy of a layer with another one is made with this."""
    return MethodType(type(layer).forward, layer)


def outputs(layers: Sequence[Linear], states: torch.Tensor) -> Sequence[torch.Tensor]:
    """What up to four layers make of the same states: `few_token_products` where all of them have a FewTokenForward."""
    forwards = [vars(layer).get("forward") for layer in layers]
    if all(type(forward) is FewTokenForward and forward.serves(states) for forward in forwards):
        return few_token_products(tuple([forward.product for forward in forwards]), states)
    return [layer(states) for layer in layers]


def _has_own_weights(layer: Linear) -> bool:
    """Whether they are parameters that the product takes, and not computed from others before each forward."""
    weight, bias = layer._parameters.get("weight"), layer._parameters.get("bias")
    return weight is layer.weight and bias is layer.bias and are_weights(weight, bias)


class _Layers:
    """Those of one model that are swapped, in how many blocks at once."""

    def __init__(self) -> None:
        self.depth = 0
        self._forwards: list[FewTokenForward] = []

    def swap(self, model: Module) -> None:
        """Forwards are made anew where a layer has other weights by now; layers that came in between are left alone
        until then."""
        if not self._forwards or not all(forward.is_current() for forward in self._forwards):
            self.restore()
            with torch.no_grad():
                self._forwards = [
                    FewTokenForward(layer)
                    for layer in modules_of(model)
                    if type(layer) is Linear and _has_own_weights(layer)
                ]
        for forward in self._forwards:
            if not forward.layer._forward_pre_hooks:  # one may compute the weights
                vars(forward.layer).setdefault("forward", forward)

    def restore(self) -> None:
        for forward in self._forwards:
            attributes = vars(forward.layer)
            if attributes.get("forward") is forward:
                del attributes["forward"]


_KNOWN: WeakKeyDictionary[Module, _Layers] = WeakKeyDictionary()  # of models in use
