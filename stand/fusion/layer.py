"""The forward of a decoder layer whose residual additions are done by the norms that follow them."""

from __future__ import annotations

import torch
from torch import nn

from stand.fusion.norm import FusedNorm

PARTS = ("input_layernorm", "self_attn", "post_attention_layernorm", "mlp")


class FusedLayer:
    """Stands for `module.forward`: h + attention(norm(h)), then that + feed-forward(norm(that)).

    inner: of the norm between the two. following: of the norm that gets the layer's output, the next layer's first or
    the model's last; None where it is not known or not fused. Whatever it gets in truth, it norms right.
    """

    def __init__(self, module: nn.Module, inner: FusedNorm, following: FusedNorm | None):
        self.module, self.inner, self.following = module, inner, following

    def __call__(self, hidden_states: torch.Tensor, **kwargs: object) -> torch.Tensor:
        module = self.module
        mixed, *_ = module.self_attn(hidden_states=module.input_layernorm(hidden_states), **kwargs)
        states, normed = self.inner.after_adding(hidden_states, mixed)
        change = module.mlp(normed)
        return states + change if self.following is None else self.following.expect(states, change)


def is_layer(module: nn.Module) -> bool:
    """Whether the module has the parts of such a layer by their usual names, and no further norm."""
    children = dict(module.named_children())
    norms = [name for name, child in children.items() if type(child).__name__.endswith("RMSNorm")]
    return all(part in children for part in PARTS) and len(norms) == 2


def following_norm(name: str) -> tuple[str, str]:
    """Where the norm behind layer "...layers.7" may be: in the next layer, else beside the layers."""
    layers, _, number = name.rpartition(".")
    behind = f"{layers}.{int(number) + 1}.{PARTS[0]}" if number.isdigit() else ""
    return behind, f"{layers.rpartition('.')[0]}.norm"
