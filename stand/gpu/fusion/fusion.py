"""Fewer and larger kernels in an unmodified model: which forwards are swapped, on what proof, and the way back.

Nothing is assumed of a model class. A swap is tried on the loaded weights, its outcome is compared with the module's
own (see `probe`), and only one that rounding explains is kept. Nothing uses TF32: no kernel here has a matrix product,
products stay torch's own, and TF32 in torch's settings is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import nn
from transformers import PreTrainedModel

from stand.gpu.fusion.attention import FusedAttention
from stand.gpu.fusion.layer import PARTS, FusedLayer
from stand.gpu.fusion.merged_linear import MergedLinear
from stand.gpu.fusion.mlp import FusedMLP
from stand.gpu.fusion.norm import FusedNorm
from stand.gpu.fusion.probe import TOLERANCES
from stand.gpu.fusion.trial import Recipe, Swap, Trial
from stand.gpu.kernels.launch import is_interpreted
from stand.gpu.kernels.rope import _rope_and_store


def fuse(model: PreTrainedModel, *, kernels: bool = True) -> Fusion:
    """Merge the model's projections and prove fused forwards for its modules; nothing is swapped yet.

    kernels: also replace norms, feed-forward blocks and attentions by Triton kernels, which need a GPU (or Triton's
    interpreter). Without, only q/k/v and gate/up projections become one product each.

    The parameters become slices of merged tensors (same objects, same values, other addresses) until `Fusion.undo`.
    Not to be called inside `tree_attention`. Raises ValueError for kernels on a CPU, and where torch may use TF32.
    """
    if model.dtype not in TOLERANCES:
        raise ValueError(f"a fused model must be float32, bfloat16 or float16, got {model.dtype}; load it with dtype=")
    if torch.backends.cuda.matmul.fp32_precision not in {"none", "ieee"}:
        raise ValueError(
            "float32 products must be computed in float32 (TF32 moves rotary angles and logits), got precision "
            f"{torch.backends.cuda.matmul.fp32_precision!r}; call torch.set_float32_matmul_precision('highest')"
        )
    if kernels and model.device.type == "cpu" and not is_interpreted(_rope_and_store):
        raise ValueError(
            "fused kernels need a model on a GPU, got one on the CPU; move it, pass kernels=False, or set "
            "TRITON_INTERPRET=1 before the first import to try them in the interpreter"
        )
    trial = Trial(model)
    trial.merge()
    if kernels:
        trial.try_norms()
        trial.try_mlps()
        trial.try_attentions()
        trial.try_layers()
    if model.device.type == "cuda":
        torch.cuda.empty_cache()  # the parts' former memory: freed in pieces that the cache cannot use whole
    return Fusion(model, trial.recipe, merged=trial.merged, report=trial.report())


class Fusion:
    """Proven swaps of one model. Forwards are swapped inside `active` only; merged memory lasts until `undo`.

    report: one entry per kind of swap, class and verdict.
    """

    def __init__(self, model: PreTrainedModel, recipe: Recipe, *, merged: dict[str, MergedLinear], report: list[Swap]):
        self.model = model
        self.recipe = recipe
        self.report = report
        self._merged = merged  # by the name of the owner
        self._norms = {name: FusedNorm(model.get_submodule(name), rule) for name, rule in recipe.norms.items()}
        self._forwards = self._make_forwards()
        self._depth = 0
        self._saved: list[tuple[nn.Module, Callable | None]] = []

    @contextmanager
    def active(self) -> Iterator[None]:
        """Swap the forwards inside the block; may be nested. A graph captured inside may be replayed outside.

        For inference: no gradient reaches merged weights.

        Raises RuntimeError when the model's weights have moved since `fuse`.
        """
        self._check_linked()
        if self._depth == 0:
            self._swap()
        self._depth += 1
        try:
            yield
        finally:
            self._depth -= 1
            if self._depth == 0:
                self._restore()

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
        self._forwards.clear()

    def mirrored(self, model: PreTrainedModel) -> Fusion:
        """The same swaps, without proof, for a model of the same configuration (one of fake tensors, say)."""
        merged = {
            owner: MergedLinear([model.get_submodule(f"{owner}.{part}") for part in parts])
            for owner, parts in self.recipe.merged.items()
        }
        return Fusion(model, self.recipe, merged=merged, report=self.report)

    def _make_forwards(self) -> list[tuple[nn.Module, Callable]]:
        module, merged = self.model.get_submodule, self._merged.get
        forwards = [pair for joined in self._merged.values() for pair in joined.forwards()]
        forwards += [(module(name), norm) for name, norm in self._norms.items()]
        for name, activation in self.recipe.mlps.items():
            forwards.append((module(name), FusedMLP(module(name), activation, merged=merged(name))))
        for name, settings in self.recipe.attentions.items():
            forwards.append((module(name), FusedAttention(module(name), settings, merged=merged(name))))
        for name, following in self.recipe.layers.items():
            inner = self._norms[f"{name}.{PARTS[2]}"]
            forwards.append((module(name), FusedLayer(module(name), inner, self._norms.get(following))))
        return forwards

    def _swap(self) -> None:
        for module, forward in self._forwards:
            self._saved.append((module, vars(module).get("forward")))
            module.forward = forward

    def _restore(self) -> None:
        for module, forward in self._saved:
            if forward is None:
                del module.forward
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
