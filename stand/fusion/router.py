"""The forward of a mixture's router: a product, then softmax and top k as one kernel."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn
from torch.nn.functional import linear

from stand.fusion.kernels import Kernels

NEXT_TO_NONE = 1e-6
Routes = tuple[torch.Tensor, torch.Tensor, torch.Tensor]  # logits [M, E], shares [M, k], experts [M, k]


class FusedRouter:
    """Stands for `module.forward`. renormalises: whether shares are those among the chosen experts, found by trial."""

    def __init__(self, module: nn.Module, renormalises: bool, kernels: Kernels):
        self.module = module
        self.renormalises = renormalises
        self.kernels = kernels

    def __call__(self, hidden_states: torch.Tensor) -> Routes:
        module = self.module
        states = hidden_states.reshape(-1, module.weight.shape[1])
        logits = linear(states, module.weight, getattr(module, "bias", None))
        return logits, *self.kernels.softmax_route(logits, module.top_k, self.renormalises)


def is_router(module: nn.Module) -> bool:
    """Whether the module has what such a router needs, by the usual names."""
    weight = getattr(module, "weight", None)
    is_one = type(module).__name__.endswith("Router") and isinstance(getattr(module, "top_k", None), int)
    return is_one and isinstance(weight, nn.Parameter) and weight.dim() == 2


def told_by_logits(forward: Callable[..., Routes], *given: torch.Tensor, **named: torch.Tensor) -> Routes:
    """What it returns, but of the experts their logits, the largest first: of two with equal ones, either may come
    first, or alone. Those with next to no share are left out: where a softmax comes out as zero, any may be chosen."""
    logits, shares, experts = forward(*given, **named)
    chosen = logits.gather(1, experts).where(shares > NEXT_TO_NONE, -torch.inf)
    chosen, order = chosen.sort(dim=1, descending=True)
    return logits, shares.gather(1, order), chosen.where(chosen.isfinite(), 0.0)
