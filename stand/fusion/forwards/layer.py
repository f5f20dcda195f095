"""The forward of a decoder layer whose residual additions are done by the norms that follow them."""

from __future__ import annotations

import inspect

import torch
from torch import nn

from stand.fusion.forwards.norm import FusedNorm

PARTS = ("input_layernorm", "post_attention_layernorm", "mlp")
ATTENTION, RECURRENT = "self_attn", "linear_attn"
HANDED_ON = ("use_cache",)  # to the attention, also where the layer was not given it (Qwen3-VL)
OF_POSITIONS = ("position_embeddings", "position_ids")  # which a layer hands to its attention alone


class FusedLayer:
    """Stands for `module.forward`: h + mixer(norm(h)), then that + feed-forward(norm(that)). A mixer is an attention or
    a layer with a recurrent state.

    inner: of the norm between the two. following: of the norm that gets the layer's output, the next layer's first or
    the model's last; None where it is not known or not fused. Whatever it gets in truth, it norms right.
    """

    def __init__(self, module: nn.Module, inner: FusedNorm, following: FusedNorm | None):
        self.module, self.inner, self.following = module, inner, following
        own = inspect.signature(inspect.unwrap(type(module).forward)).parameters
        self._handed_on = {name: own[name].default for name in HANDED_ON if name in own}

    def __call__(self, hidden_states: torch.Tensor, **kwargs: object) -> torch.Tensor:
        module = self.module
        states = module.input_layernorm(hidden_states)
        if hasattr(module, ATTENTION):
            mixed, *_ = module.self_attn(hidden_states=states, **{**self._handed_on, **kwargs})
        else:
            rest = {name: value for name, value in kwargs.items() if name not in OF_POSITIONS}
            mixed = module.linear_attn(hidden_states=states, **rest)
        states, normed = self.inner.after_adding(hidden_states, mixed)
        change = module.mlp(normed)
        change = change[0] if isinstance(change, tuple) else change  # gpt-oss: its router's scores beside it
        return states + change if self.following is None else self.following.expect(states, change)


def is_layer(module: nn.Module) -> bool:
    """Whether the module has the parts of such a layer by their usual names, and no further norm."""
    children = dict(module.named_children())
    norms = [name for name, child in children.items() if type(child).__name__.endswith("RMSNorm")]
    has_mixer = (ATTENTION in children) != (RECURRENT in children)
    return has_mixer and all(part in children for part in PARTS) and len(norms) == 2


def following_norm(name: str) -> tuple[str, str]:
    """Where the norm behind layer "...layers.7" may be: in the next layer, else beside the layers."""
    layers, _, number = name.rpartition(".")
    behind = f"{layers}.{int(number) + 1}.{PARTS[0]}" if number.isdigit() else ""
    return behind, f"{layers.rpartition('.')[0]}.norm"
