"""The forward of a layer of latent attention with one kernel for its rotary positions.

The rest is transformers' own code, which calls the rotation by name and gets ours instead.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import partial

import torch
from torch import nn

from stand.forward.latent_keys import NAME
from stand.forward.recurrent.layers import with_names
from stand.fusion.kernels import Kernels

ROTATIONS = {"apply_rotary_pos_emb": False, "apply_rotary_pos_emb_interleave": True}  # whether pairs are side by side


class FusedLatentRotation:
    """Stands for `module.forward`."""

    def __init__(self, module: nn.Module, kernels: Kernels):
        self.module = module
        own = inspect.unwrap(type(module).forward)
        names = own.__globals__
        found = {name: is_interleaved for name, is_interleaved in ROTATIONS.items() if name in names}
        given = {
            name: partial(_rotated, kernels, names[name], is_interleaved) for name, is_interleaved in found.items()
        }
        self._run = with_names(own, given)

    def __call__(self, *given: object, **named: object) -> tuple[torch.Tensor, torch.Tensor | None]:
        return self._run(self.module, *given, **named)


def _rotated(
    kernels: Kernels,
    own: Callable,
    is_interleaved: bool,
    query: torch.Tensor,
    key: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    **named: object,
) -> tuple[torch.Tensor, torch.Tensor]:
    """query [1, H, M, T], key [1, K, M, T], cos and sin [1, M, T]; others turn by the function that stood there."""
    if named or len(query) != 1 or query.ndim != 4 or cos.shape != (1, query.shape[2], query.shape[3]):
        return own(query, key, cos, sin, **named)
    turned, turned_key = kernels.rotate_pair(query[0], key[0], cos[0], sin[0], is_interleaved)
    return turned[None], turned_key[None]


def is_latent_attention(module: nn.Module) -> bool:
    """Whether the module keeps latents and turns by a function of a known name."""
    if not hasattr(type(module), NAME):
        return False
    code = getattr(inspect.unwrap(type(module).forward), "__code__", None)
    return code is not None and not ROTATIONS.keys().isdisjoint(code.co_names)
