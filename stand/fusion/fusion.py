"""Fewer and larger kernels in an unmodified model: which forwards are swapped, on what proof, and the way back.

Nothing is assumed of a model class. A swap is tried on the loaded weights, its outcome is compared with the module's
own (see `probe`), and only one that rounding explains is kept. Nothing uses TF32: no kernel here has a matrix product,
products on a GPU stay torch's own, and TF32 in torch's settings is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import nn
from transformers import PreTrainedModel

from stand.fusion.formulas import NO_NORM
from stand.fusion.forwards.attention import FusedAttention, head_norms
from stand.fusion.forwards.chosen_products import ChosenLinear, ChosenProduct, Weights, choose_products
from stand.fusion.forwards.experts import FusedExperts
from stand.fusion.forwards.gated_norm import FusedGatedNorm
from stand.fusion.forwards.latent_rotation import FusedLatentRotation
from stand.fusion.forwards.layer import PARTS, FusedLayer
from stand.fusion.forwards.merged_linear import MergedLinear
from stand.fusion.forwards.mlp import FusedMLP, activation_name
from stand.fusion.forwards.norm import FusedNorm
from stand.fusion.forwards.router import FusedRouter
from stand.fusion.guard import Guard, Settings, Swapped
from stand.fusion.kernels import Kernels, triton_kernels
from stand.fusion.probe import MODULE_TOLERANCES
from stand.fusion.recipe import Recipe, Swap
from stand.fusion.trial import Trial, fused_delta_layer


def fuse(model: PreTrainedModel, *, kernels: bool = True) -> Fusion:
    """Merge the model's projections and prove fused forwards for its modules; nothing is swapped yet.

    kernels: also replace norms, feed-forward blocks and attentions by Triton kernels, which need a GPU (or Triton's
    interpreter), and products of few tokens where that was measured to be faster (`stand.gpu.tuning.known_products`).
    Without, only q/k/v and gate/up projections become one product each.

    The parameters become slices of merged tensors (same objects, same values, other addresses) until `Fusion.undo`.
    Not to be called inside `tree_attention`. Raises ValueError for kernels on a CPU, and where torch may use TF32.
    """
    if model.dtype not in MODULE_TOLERANCES:
        raise ValueError(f"a fused model must be float32, bfloat16 or float16, got {model.dtype}; load it with dtype=")
    if torch.backends.cuda.matmul.fp32_precision not in {"none", "ieee"}:
        raise ValueError(
            "float32 products must be computed in float32 (TF32 moves rotary angles and logits), got precision "
            f"{torch.backends.cuda.matmul.fp32_precision!r}; call torch.set_float32_matmul_precision('highest')"
        )
    if kernels and model.device.type == "cpu" and not _interprets():
        raise ValueError(
            "Triton's kernels need a model on a GPU, got one on the CPU; move it, pass kernels=False, set "
            "TRITON_INTERPRET=1 before the first import to try them in the interpreter, or take fuse_on_cpu"
        )
    trial = Trial(model, triton_kernels() if kernels else None)
    trial.merge()
    product, verdicts = None, []
    if kernels:
        trial.try_kernels()
        product, verdicts = choose_products(model, trial.recipe, trial.merged, _known_products)
    if model.device.type == "cuda":
        _empty_cache()  # the parts' former memory: freed in pieces that the cache cannot use whole
    report = trial.report() + verdicts
    return Fusion(model, trial.recipe, trial.kernels, merged=trial.merged, product=product, report=report)


def _known_products(model: PreTrainedModel, weights: Weights) -> ChosenProduct | None:
    from stand.gpu.tuning.known_products import known_products

    return known_products(model, weights)


def _empty_cache() -> None:
    from stand.gpu.runner import CAPTURING

    with CAPTURING:
        torch.cuda.empty_cache()


def _interprets() -> bool:
    from stand.gpu.kernels.launch import is_interpreted
    from stand.gpu.kernels.rope import _rope_and_store

    return is_interpreted(_rope_and_store)


class Fusion:
    """Proven swaps of one model. Forwards are swapped inside `active` only; merged memory lasts until `undo`.

    A module that has been replaced since, or has other settings, a hook or another forward now, is left alone, and so
    is every forward that would go past it. Changed settings of a configuration leave all modules alone that have it,
    and another forward of the model itself, which may cast what modules get, leaves all alone.

    report: one entry per kind of swap, class and verdict.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        recipe: Recipe,
        kernels: Kernels | None,
        *,
        merged: dict[str, MergedLinear],
        report: list[Swap],
        product: ChosenProduct | None = None,
    ):
        self.model = model
        self.dtype = next(model.parameters()).dtype  # in which the swaps were proven: rounding is a part of them
        self.recipe = recipe
        self.kernels = kernels
        self.report = report
        self._product = product
        self._merged = merged  # by the name of the owner
        self._norms = {name: FusedNorm(model.get_submodule(name), rule, kernels) for name, rule in recipe.norms.items()}
        self._guards: dict[str | int, Guard | Settings] = {}  # by the name of the module; by the id of who has settings
        self._swaps = self._make_swaps()
        self._forward = vars(model).get("forward")
        self._depth = 0
        self._saved: list[tuple[nn.Module, Callable | None]] = []

    @contextmanager
    def active(self) -> Iterator[None]:
        """Swap the forwards inside the block; may be nested. A graph captured inside may be replayed outside.

        For inference: no gradient reaches merged weights.

        Raises RuntimeError when the model's weights have moved since `fuse`.
        """
        self._check_linked()
        self._depth += 1
        try:
            if self._depth == 1:
                self._swap()
            yield
        finally:
            self._depth -= 1
            if self._depth == 0:
                try:
                    self._restore()
                except BaseException:  # an interrupt has cut it
                    self._restore()
                    raise

    def undo(self) -> None:
        """Give every merged parameter memory of its own again; the fusion is of no use afterwards.

        Module and parameter objects, names and values are those that `fuse` found; addresses are new ones.
        """
        if self._depth:
            raise RuntimeError("a fusion must not be undone while it is active, got undo() inside active(); leave it")
        for merged in self._merged.values():
            merged.separate()
        self._merged.clear()
        self._norms.clear()
        self._swaps.clear()
        self._guards.clear()

    def _make_swaps(self) -> list[Swapped]:
        module, merged, recipe, kernels = self.model.get_submodule, self._merged.get, self.recipe, self.kernels
        swaps: list[Swapped] = []
        for owner, joined in self._merged.items():
            forwards = zip(recipe.merged[owner], joined.forwards(), strict=True)
            swaps += [self._swapped(f"{owner}.{part}", forward) for part, (_, forward) in forwards]
        swaps += [self._swapped(name, norm) for name, norm in self._norms.items()]
        for name, order in recipe.gated_norms.items():
            swaps.append(self._swapped(name, FusedGatedNorm(module(name), order, kernels)))
        for name, scale in recipe.delta_layers.items():
            delta = fused_delta_layer(name, module(name), scale, recipe, kernels, self._merged)
            swaps.append(self._swapped(name, delta, *delta.passed))
        if self._product is not None:
            for joined in self._merged.values():
                joined.product = self._product
            swaps += [self._swapped(name, ChosenLinear(module(name), self._product)) for name in recipe.singles]
        for name, activation in recipe.mlps.items():
            mlp = FusedMLP(module(name), activation, kernels, merged=merged(name))
            passed = (activation_name(mlp.module), *recipe.merged.get(name, ()), *_names(mlp))
            swaps.append(self._swapped(name, mlp, *passed))
        for name, form in recipe.experts.items():
            act = activation_name(module(name))
            of_act = () if act is None else (act,)
            swaps.append(self._swapped(name, FusedExperts(module(name), form, kernels), *of_act, settings_of=of_act))
        for name, form in recipe.routers.items():
            swaps.append(self._swapped(name, FusedRouter(module(name), form, kernels)))
        for name, settings in recipe.attentions.items():
            attention = FusedAttention(module(name), settings, kernels, merged=merged(name))
            norms = () if settings.rule == NO_NORM else head_norms(module(name))
            passed = (*norms, *recipe.merged.get(name, ()), *_names(attention))
            swaps.append(self._swapped(name, attention, *passed, settings_of=norms))
        for name in recipe.latent_rotations:
            swaps.append(self._swapped(name, FusedLatentRotation(module(name), kernels)))
        for name, following in recipe.layers.items():
            layer = FusedLayer(module(name), self._norms[f"{name}.{PARTS[1]}"], self._norms.get(following))
            swaps.append(self._swapped(name, layer, PARTS[1], behind=following))
        return swaps

    def _swapped(
        self,
        name: str,
        forward: Callable,
        *passed: str | None,
        settings_of: Sequence[str] = (),
        behind: str | None = None,
    ) -> Swapped:
        """passed: the module's children that the forward does not call. settings_of: those among them whose settings it
        takes for granted. behind: the norm whose outcome it foretells, which what stands between them could change."""
        names = [name, *(f"{name}.{child}" for child in passed if child is not None)]
        if behind is not None:
            names += [behind, behind.removesuffix(f".{PARTS[0]}")]
        module = self.model.get_submodule(name)
        holders = [module] if getattr(module, "config", None) is None else [module, module.config]
        holders += [getattr(module, child) for child in settings_of]
        return Swapped(module, forward, (*map(self._guard, names), *map(self._settings, holders)))

    def _guard(self, name: str) -> Guard:
        """One per module."""
        if name not in self._guards:
            self._guards[name] = Guard.of(self.model, name)
        return self._guards[name]

    def _settings(self, holder: object) -> Settings:
        """One per module or configuration."""
        if id(holder) not in self._guards:
            self._guards[id(holder)] = Settings.of(holder)
        return self._guards[id(holder)]

    def _swap(self) -> None:
        if vars(self.model).get("forward") is not self._forward:
            return
        changed = {guard for guard in self._guards.values() if not guard.holds()}
        for swap in self._swaps:
            if changed and not changed.isdisjoint(swap.guards):
                continue
            attributes = vars(swap.module)
            self._saved.append((swap.module, attributes.get("forward")))
            attributes["forward"] = swap.forward

    def _restore(self) -> None:
        for module, forward in self._saved:
            if forward is None:
                vars(module).pop("forward", None)
            else:
                module.forward = forward
        self._saved.clear()
        for holder in (*self._merged.values(), *self._norms.values()):
            holder.clear()

    def _check_linked(self) -> None:
        for owner, merged in self._merged.items():
            if not merged.is_linked():
                raise RuntimeError(
                    f"a fused model's weights must stay where fuse() put them, got other memory in {owner} (the model "
                    "was moved, cast or reloaded, or another engine's fusion of it was undone); wrap the model again"
                )


def _names(forward: FusedMLP | FusedAttention) -> list[str]:
    """Of the linear layers that the forward does not call."""
    return [name for name, child in forward.module.named_children() if child in forward.direct]
