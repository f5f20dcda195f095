"""The forward of a mixture's router: a product, then scores and top k as one kernel."""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum
from typing import NamedTuple

import torch
from torch import nn
from torch.nn.functional import linear

from stand.fusion.kernels import Kernels

BIAS_OF_CHOICE = "e_score_correction_bias"
GROUP_SETTINGS = ("num_group", "topk_group", "norm_topk_prob", "routed_scaling_factor")
LOW = 2.0  # a sigmoid is at most one
NEXT_TO_NONE = 1e-6
NEXT_TO_EQUAL = 8 * torch.finfo(torch.float32).eps
Routes = tuple[torch.Tensor, torch.Tensor, torch.Tensor]  # logits [M, E], shares [M, k], experts [M, k]


class Score(Enum):
    """What a share is made of."""

    SOFTMAX = "softmax over all experts"
    SOFTMAX_OF_CHOSEN = "softmax over the chosen experts"
    SIGMOID = "sigmoid, chosen by groups and with a bias"


class Precision(Enum):
    """What is in float32, and not in the states' dtype."""

    STATES = "nothing"  # Qwen3, gpt-oss
    SHARES = "shares"  # Mixtral
    LOGITS = "logits, after the product"  # Granite
    ALL = "product, logits and shares"  # DeepSeek


class RouterForm(NamedTuple):
    """How a router routes."""

    score: Score
    precision: Precision


class FusedRouter:
    """Stands for `module.forward`; `form` was found by trial."""

    def __init__(self, module: nn.Module, form: RouterForm, kernels: Kernels):
        self.module = module
        self.form = form
        self.kernels = kernels

    def __call__(self, hidden_states: torch.Tensor) -> Routes:
        try:
            return self.routed(hidden_states)
        except ValueError:  # what the kernel refuses
            return type(self.module).forward(self.module, hidden_states)

    def routed(self, hidden_states: torch.Tensor) -> Routes:
        """The same by the kernel. Raises ValueError as it does."""
        module, precision = self.module, self.form.precision
        states, weight, bias = hidden_states, module.weight, getattr(module, "bias", None)
        if precision is Precision.ALL:
            states, weight, bias = states.float(), weight.float(), None if bias is None else bias.float()
        logits = linear(states.reshape(-1, weight.shape[1]), weight, bias)
        routes = self._routes(logits)
        return logits.float() if precision is Precision.LOGITS else logits, *routes

    def _routes(self, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        module, (score, precision), kernels = self.module, self.form, self.kernels
        if score is Score.SIGMOID:
            settings = module.top_k, *_group_settings(module)
            return kernels.sigmoid_route(logits, module.e_score_correction_bias, *settings)
        is_of_chosen = score is Score.SOFTMAX_OF_CHOSEN
        return kernels.softmax_route(logits, module.top_k, is_of_chosen, precision is Precision.SHARES)


def is_router(module: nn.Module) -> bool:
    """Whether the module has what such a router needs, by the usual names."""
    weight = getattr(module, "weight", None)
    is_one = type(module).__name__.endswith("Router") and isinstance(getattr(module, "top_k", None), int)
    return is_one and isinstance(weight, nn.Parameter) and weight.dim() == 2


def router_forms(module: nn.Module) -> list[RouterForm]:
    """What such a module may compute, by its attributes. One that has other tensors, or leaves out groups, makes some
    use of that, though a trial may not show it: a bias may be zero, the best experts may lie in the best groups."""
    names = {name for name, _ in (*module.named_parameters(), *module.named_buffers())} - {"weight", "bias"}
    if names == {BIAS_OF_CHOICE} and _has_biased_groups(module):
        return [RouterForm(Score.SIGMOID, Precision.ALL)]
    groups, chosen_groups, *_ = _group_settings(module)
    if names or groups != chosen_groups:
        return []
    precisions = Precision if module.weight.dtype != torch.float32 else (Precision.STATES, Precision.ALL)
    return [RouterForm(score, one) for one in precisions for score in (Score.SOFTMAX, Score.SOFTMAX_OF_CHOSEN)]


def told_apart(module: nn.Module, forward: Callable[..., Routes], *given: object, **named: object) -> Routes:
    """What `forward`, which stands for the module's, returns, but of the experts their logits, the largest first: of
    two with equal ones, either may come first, or alone. Those with next to no share are left out: where a softmax
    comes out as zero, any may be chosen. So are all of a token whose choice by bias and groups hangs on a rounding.

    Choices by a bias are asked for a second time with one so low that all of them are negative: it would show whether
    experts of other groups count as zero. Raises ValueError where the choice of every token hangs on a rounding."""
    told = _told(module, forward, *given, **named)
    if not _has_biased_groups(module):
        return told
    bias = getattr(module, BIAS_OF_CHOICE)
    holder = module._buffers if BIAS_OF_CHOICE in module._buffers else module._parameters
    low = bias.detach() - bias.abs().max() - LOW
    try:
        holder[BIAS_OF_CHOICE] = low if holder is module._buffers else nn.Parameter(low, requires_grad=False)
        again = _told(module, forward, *given, **named)
    finally:
        holder[BIAS_OF_CHOICE] = bias
    return tuple(torch.cat(parts) for parts in zip(told, again, strict=True))


def _told(module: nn.Module, forward: Callable[..., Routes], *given: object, **named: object) -> Routes:
    logits, shares, experts = forward(*given, **named)
    chosen = logits.gather(1, experts).where(shares > NEXT_TO_NONE, -torch.inf)
    chosen, order = chosen.sort(dim=1, descending=True)
    shares = shares.gather(1, order)
    if _has_biased_groups(module):
        is_clear = _is_clear(module, logits)[:, None]
        if not is_clear.any():
            raise ValueError("roundings decide which experts are chosen")
        shares, chosen = shares.where(is_clear, 0.0), chosen.where(is_clear, 0.0)
    return logits, shares, chosen.where(chosen.isfinite(), 0.0)


def _has_biased_groups(module: nn.Module) -> bool:
    """Whether it has all that a choice by bias and groups needs."""
    bias, (groups, *rest) = getattr(module, BIAS_OF_CHOICE, None), _group_settings(module)
    has_bias = isinstance(bias, torch.Tensor) and bias.shape == module.weight.shape[:1]
    is_set = all(isinstance(value, int) for value in (groups, *rest[:2])) and isinstance(rest[2], (int, float))
    return has_bias and is_set and groups >= 1 and len(bias) % groups == 0


def _group_settings(module: nn.Module) -> list[object]:
    return [getattr(module, name, None) for name in GROUP_SETTINGS]


def _is_clear(module: nn.Module, logits: torch.Tensor) -> torch.Tensor:
    """[M]: whether a token's groups and experts are chosen by more than a rounding. Sigmoids of large logits are one:
    there may be more equal ones than are chosen."""
    groups, chosen_groups, *_ = _group_settings(module)
    choices = (logits.float().sigmoid() + module.e_score_correction_bias).unflatten(1, (groups, -1))
    ranks = choices.topk(min(2, choices.shape[2]), dim=2).values.sum(dim=2)
    is_allowed = ranks >= ranks.topk(chosen_groups, dim=1).values[:, -1:]
    allowed = choices.where(is_allowed[:, :, None], -torch.inf).flatten(1)
    return _has_gap(ranks, chosen_groups) & _has_gap(allowed, module.top_k)


def _has_gap(values: torch.Tensor, count: int) -> torch.Tensor:
    """[M]: whether the `count` largest of a row of values [M, N] are larger than the others by more than a rounding."""
    if count >= values.shape[1]:
        return torch.ones(len(values), dtype=torch.bool, device=values.device)
    last, following = values.topk(count + 1, dim=1).values[:, -2:].unbind(1)
    return last - following > NEXT_TO_EQUAL * last.abs()
