"""The trial of every swap at load time: fused against own outcome on the loaded weights, kept or reverted."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial

import torch
from torch import nn
from transformers import PreTrainedModel

from stand.fusion.formulas import GATE_ORDERS, HALVES, NO_NORM, RULES
from stand.fusion.forwards.attention import (
    AttentionSettings,
    FusedAttention,
    has_head_norms,
    is_attention,
    may_be_gated,
    reuses_keys,
)
from stand.fusion.forwards.delta_layer import RATE_SCALES, FusedDeltaLayer, delta_parts, is_delta_layer, own_on_chain
from stand.fusion.forwards.experts import FusedExperts, expert_forms, is_experts
from stand.fusion.forwards.gated_norm import FusedGatedNorm, is_gated_norm
from stand.fusion.forwards.latent_rotation import FusedLatentRotation, is_latent_attention
from stand.fusion.forwards.layer import PARTS, FusedLayer, following_norm, is_layer
from stand.fusion.forwards.merged_linear import MergedLinear, is_bare, merge_refusal, tied_parameters
from stand.fusion.forwards.mlp import FusedMLP, find_activation, is_gated_mlp
from stand.fusion.forwards.norm import FusedNorm, norm_refusal
from stand.fusion.forwards.router import FusedRouter, is_router, router_forms, told_apart
from stand.fusion.kernels import Kernels
from stand.fusion.probe import MODULE_TOLERANCES, Outcome, Probe, difference, is_silent
from stand.fusion.recipe import Recipe, Swap

MERGEABLE = {
    "merged q/k/v": ("q_proj", "k_proj", "v_proj"),
    "merged gate/up": ("gate_proj", "up_proj"),
    "merged inputs of a recurrent layer": ("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a"),
    "merged inputs of a recurrent layer of Qwen3-Next": ("in_proj_qkvz", "in_proj_ba"),
}


def fused_delta_layer(
    name: str, module: nn.Module, rate_scale: float, recipe: Recipe, kernels: Kernels, merged: dict[str, MergedLinear]
) -> FusedDeltaLayer:
    """That of the module called `name`, with what the recipe has for its parts."""
    order = recipe.gated_norms.get(f"{name}.{delta_parts(module).norm}")
    return FusedDeltaLayer(module, rate_scale, kernels, order=order, merged=merged.get(name))


class Trial:
    """Tries swaps on one model and collects those that hold; `merged` lives on, everything else is given back.

    kernels: what they compute with; None where nothing but merging is tried.
    """

    def __init__(self, model: PreTrainedModel, kernels: Kernels | None):
        self.kernels = kernels
        self.recipe = Recipe()
        self.merged: dict[str, MergedLinear] = {}
        self._modules = dict(model.named_modules())
        self._names = {module: name for name, module in self._modules.items()}
        self._tied = tied_parameters(model)
        self._tolerance = MODULE_TOLERANCES[model.dtype]
        self._probe = Probe(model, [module for module in self._names if _is_candidate(module)])
        self._verdicts: list[tuple[str, nn.Module, float | None, str]] = []
        self._own: dict[nn.Module, Outcome] = {}  # what the modules themselves do, before anything changes
        self._refusals: dict[nn.Module, str] = {}
        for module in self._probe.calls:
            try:
                self._own[module] = self._probe.outcome(module, module.forward)
            except Exception as problem:  # it asks its cache or its caller for more than the probe has
                self._refusals[module] = f"cannot be tried alone ({type(problem).__name__}: {problem})"

    def merge(self) -> None:
        """q/k/v and gate/up projections, tried inside the owner's own forward."""
        for kind, parts in MERGEABLE.items():
            for owner, name in self._names.items():
                modules = [getattr(owner, part, None) for part in parts]
                if not all(isinstance(module, nn.Module) for module in modules):
                    continue
                refusal = merge_refusal(modules, self._tied) or self._untried(owner)
                if not refusal and self._try_merge(kind, owner, modules):
                    self.recipe.merged[name] = parts
                elif refusal:
                    self._verdicts.append((kind, owner, None, refusal))

    def try_kernels(self) -> None:
        """All swaps of modules, in the order that they need."""
        self.try_norms()
        if self.kernels.gated_rms_norm is not None:
            self.try_gated_norms()
        if self.kernels.chain_scan is not None:
            self.try_delta_layers()
        self.try_mlps()
        self.try_experts()
        if self.kernels.softmax_route is not None:
            self.try_routers()
        self.try_attentions()
        if self.kernels.rotate_pair is not None:
            self.try_latent_rotations()
        self.try_layers()

    def try_norms(self) -> None:
        """Every module is tried; the rule that came nearest for the first of a class is the only one for the others."""
        found: dict[type, int] = {}
        for module in filter(_is_norm, self._names):
            refusal = self._untried(module) or norm_refusal(module)
            rules = [found[type(module)]] if type(module) in found else RULES
            candidates = [] if refusal else [(rule, FusedNorm(module, rule, self.kernels)) for rule in rules]
            rule = self._best("RMSNorm", module, candidates, refusal)
            if rule is not None:
                self.recipe.norms[self._names[module]] = found[type(module)] = rule

    def try_gated_norms(self) -> None:
        for module in filter(is_gated_norm, self._names):
            refusal = self._untried(module) or norm_refusal(module)
            orders = () if refusal else GATE_ORDERS
            candidates = [(order, FusedGatedNorm(module, order, self.kernels)) for order in orders]
            order = self._best("RMSNorm with a gate", module, candidates, refusal)
            if order is not None:
                self.recipe.gated_norms[self._names[module]] = order

    def try_delta_layers(self) -> None:
        """After their norms: how those are fused is found. Compared with the module's own forward over the same kernels
        of the rule, which every model is checked with, fused or not: in float32 another order of sums would show where
        a norm follows heads that nearly cancel, and in decays of hundreds."""
        for module in filter(is_delta_layer, self._names):
            refusal, own, candidates = self._untried(module), None, []
            if not refusal:
                try:
                    own = self._probe.outcome(module, partial(own_on_chain, module, self.kernels))
                except Exception as problem:
                    refusal = f"cannot be tried over a chain ({type(problem).__name__}: {problem})"
                candidates = [(scale, partial(self._on_chain, module, scale)) for scale in RATE_SCALES]
            scale = self._best("gated delta rule", module, candidates, refusal, own=own)
            if scale is not None:
                self.recipe.delta_layers[self._names[module]] = scale

    def _on_chain(self, module: nn.Module, rate_scale: float, *given: torch.Tensor, **named: object) -> torch.Tensor:
        """What the fused layer makes of a plain forward's states."""
        layer = fused_delta_layer(self._names[module], module, rate_scale, self.recipe, self.kernels, self.merged)
        return layer.on_chain(*given, **named)

    def try_mlps(self) -> None:
        for module in filter(is_gated_mlp, self._names):
            activation = find_activation(module)
            refusal = self._untried(module) or ("no kernel for its activation" if activation is None else "")
            merged = self.merged.get(self._names[module])
            candidates = [] if refusal else [(activation, FusedMLP(module, activation, self.kernels, merged=merged))]
            if self._best("gated feed-forward", module, candidates, refusal) is not None:
                self.recipe.mlps[self._names[module]] = activation

    def try_experts(self) -> None:
        for module in filter(is_experts, self._names):
            refusal = self._untried(module)
            forms = [] if refusal else expert_forms(module)
            refusal = refusal or ("" if forms else "no kernel for what its experts compute")
            candidates = [(form, FusedExperts(module, form, self.kernels).mixed) for form in forms]
            form = self._best("mixture of experts", module, candidates, refusal)
            if form is not None:
                self.recipe.experts[self._names[module]] = form

    def try_routers(self) -> None:
        for module in filter(is_router, self._names):
            forms = router_forms(module)
            refusal, own = self._untried(module) or ("" if forms else "no kernel for its tensors and groups"), None
            if not refusal:
                try:
                    own = self._probe.outcome(module, partial(told_apart, module, module.forward))
                except Exception as problem:
                    refusal = f"does not return logits, shares and experts ({type(problem).__name__}: {problem})"
            routers = {form: FusedRouter(module, form, self.kernels).routed for form in forms}
            candidates = [(form, partial(told_apart, module, routed)) for form, routed in routers.items()]
            form = self._best("router of a mixture", module, candidates, refusal, own=own)
            if form is not None:
                self.recipe.routers[self._names[module]] = form

    def try_attentions(self) -> None:
        """After the norms: those of queries and keys are fused under the rule that was found for them."""
        for module in filter(is_attention, self._names):
            merged = self.merged.get(self._names[module])
            settings, refusal = self._attention_settings(module)
            candidates = [
                (setting, FusedAttention(module, setting, self.kernels, merged=merged)) for setting in settings
            ]
            setting = self._best("attention with rotary cache write", module, candidates, refusal)
            if setting is not None:
                self.recipe.attentions[self._names[module]] = setting

    def try_latent_rotations(self) -> None:
        for module in filter(is_latent_attention, self._names):
            refusal = self._untried(module)
            candidates = [] if refusal else [(True, FusedLatentRotation(module, self.kernels))]
            if self._best("rotation of latent attention", module, candidates, refusal):
                self.recipe.latent_rotations.append(self._names[module])

    def try_layers(self) -> None:
        """Last: their additions join norms that are fused by themselves."""
        for module in filter(is_layer, self._names):
            name, refusal = self._names[module], self._untried(module)
            inner = self._norm(f"{name}.{PARTS[1]}")
            refusal = refusal or ("" if inner else "the norm between its additions is not fused by itself")
            following = next(filter(self._norm, following_norm(name)), None)
            candidates = []
            if not refusal:
                candidates = [((following,), FusedLayer(module, inner, following and self._norm(following)))]
            setting = self._best("additions joined with norms", module, candidates, refusal)
            if setting is not None:
                (self.recipe.layers[name],) = setting

    def _norm(self, name: str) -> FusedNorm | None:
        """Of a norm that is fused by itself."""
        rule = self.recipe.norms.get(name)
        return None if rule is None else FusedNorm(self._modules[name], rule, self.kernels)

    def report(self) -> list[Swap]:
        """Verdicts of one kind, class and reason together, in the order of the trials."""
        groups: dict[tuple[str, str, str], list[float | None]] = {}
        for kind, module, error, reason in self._verdicts:
            groups.setdefault((kind, type(module).__name__, reason), []).append(error)
        return [
            Swap(kind, name, len(errors), not reason, max((e for e in errors if e is not None), default=None), reason)
            for (kind, name, reason), errors in groups.items()
        ]

    def _try_merge(self, kind: str, owner: nn.Module, parts: list[nn.Module]) -> bool:
        merged = MergedLinear(parts)
        with _swapped(merged.forwards()):
            error, reason = self._compare(owner, owner.forward)
        merged.clear()
        self._verdicts.append((kind, owner, error, reason))
        if reason:
            merged.separate()
            return False
        self.merged[self._names[owner]] = merged
        return True

    def _attention_settings(self, module: nn.Module) -> tuple[list[AttentionSettings], str]:
        """Candidates: tables as wide as the part that turns, or half as wide, components paired in any way that the
        kernels know, or a layer without positions."""
        refusal = self._untried(module)
        if refusal:
            return [], refusal
        if reuses_keys(module):
            return [], "its keys are another layer's"
        own = self._own[module]
        if "query" not in own.tensors:
            return [], "it does not pass keyword arguments on to the attention function"
        tables = self._probe.calls[module][1].get("position_embeddings")
        if not isinstance(tables, tuple) or tables[0].shape[-1] > module.head_dim:
            return [], "positions do not come as (cos, sin) of at most a head's size"
        rule = NO_NORM
        if has_head_norms(module):
            rule = self.recipe.norms.get(self._names[module.q_norm])
            if rule is None or rule != self.recipe.norms.get(self._names[module.k_norm]):
                return [], "norms of queries and keys that are not fused by themselves, or not alike"
        elif hasattr(module, "v_norm"):
            return [], "a norm of values without norms of queries and keys"
        names = {id(parameter): name for name, parameter in module.named_parameters()}
        parameters = {name: names[id(value)] for name, value in own.constants.items() if id(value) in names}
        constants = {name: value for name, value in own.constants.items() if name not in parameters}
        width = tables[0].shape[-1]
        turns = [(rotary, HALVES) for rotary in (width, 2 * width, 0) if rotary <= module.head_dim]
        turns += [(width, pairing) for pairing in self.kernels.pairings if pairing != HALVES]
        given = constants, parameters
        settings = {"rule": rule, "is_gated": may_be_gated(module)}
        return [AttentionSettings(*given, rotary, **settings, pairing=pairing) for rotary, pairing in turns], ""

    def _best(
        self,
        kind: str,
        module: nn.Module,
        candidates: Sequence[tuple[object, Callable]],
        refusal: str,
        *,
        own: Outcome | None = None,
    ) -> object | None:
        """The setting whose forward comes nearest, if rounding explains what is left. own: what it is compared with,
        default the outcome of a plain forward."""
        if not refusal and len(candidates) > 1 and is_silent(self._own[module] if own is None else own):
            refusal = "it gives zeros, which any of several forwards would"
        if refusal:
            self._verdicts.append((kind, module, None, refusal))
            return None
        trials = [(*self._compare(module, forward, own), setting) for setting, forward in candidates]
        error, reason, setting = min(trials, key=lambda trial: trial[0])
        self._verdicts.append((kind, module, error, reason))
        return None if reason else setting

    def _compare(self, module: nn.Module, forward: Callable, own: Outcome | None = None) -> tuple[float, str]:
        """Error of a forward, and why it is refused ("" if it holds)."""
        own = self._own[module] if own is None else own
        try:
            error, reason = difference(own, self._probe.outcome(module, forward, like=own))
        except Exception as problem:  # whatever a swap cannot do, the module itself can
            return float("inf"), f"{type(problem).__name__}: {problem}"
        if reason is None and not error <= self._tolerance:
            reason = f"differs by more than rounding ({self._tolerance:.1e})"
        return error, reason or ""

    def _untried(self, module: nn.Module) -> str:
        """Why there is no outcome of the module's own to compare with, "" if there is one."""
        if module in self._own:
            return ""
        if not is_bare(module):
            return "a hook or a replaced forward on the module"
        return self._refusals.get(module, "not called by a plain forward")


def _is_norm(module: nn.Module) -> bool:
    return type(module).__name__.endswith("RMSNorm")


def _is_candidate(module: nn.Module) -> bool:
    has_parts = any(all(hasattr(module, part) for part in parts) for parts in MERGEABLE.values())
    is_part = has_parts or _is_norm(module) or is_gated_norm(module) or is_gated_mlp(module) or is_attention(module)
    is_whole = is_layer(module) or is_delta_layer(module) or is_latent_attention(module)
    is_of_mixture = is_experts(module) or is_router(module)
    return (is_part or is_whole or is_of_mixture) and is_bare(module)


@contextmanager
def _swapped(forwards: list[tuple[nn.Module, Callable]]) -> Iterator[None]:
    for module, forward in forwards:
        module.forward = forward
    try:
        yield
    finally:
        for module, _ in forwards:
            del module.forward
