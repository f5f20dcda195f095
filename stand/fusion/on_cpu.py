"""The fusion of a model on a CPU: compiled kernels, nothing merged, proven once per model object and remembered."""

from __future__ import annotations

from dataclasses import dataclass
from weakref import WeakKeyDictionary, ref

import torch
from torch import nn
from transformers import PreTrainedModel

from stand.forward.self_check import TOLERANCES, check_case, relative_difference, tree_logits
from stand.forward.tree_attention import exclusive
from stand.fusion.fusion import Fusion
from stand.fusion.kernels import cpu_kernels
from stand.fusion.merged_linear import is_bare
from stand.fusion.trial import Recipe, Swap, Trial


@dataclass(frozen=True, slots=True)
class Proof:
    """What was tried on a model, and which modules it had: their formulas were tried, not their weights."""

    modules: dict[str, tuple[ref[nn.Module], bool]]  # by name; whether it ran its class's forward and nothing else
    recipe: Recipe
    report: list[Swap]

    def holds(self, model: PreTrainedModel) -> bool:
        found = dict(model.named_modules())
        return found.keys() == self.modules.keys() and all(
            self.modules[name][0]() is module and self.modules[name][1] == is_bare(module)
            for name, module in found.items()
        )


_PROOFS: WeakKeyDictionary[PreTrainedModel, Proof] = WeakKeyDictionary()


def is_fusible(model: nn.Module) -> bool:
    """Whether there are kernels for it: all in float32 on a CPU."""
    return all(p.is_cpu and p.dtype is torch.float32 for p in model.parameters())


def fuse_on_cpu(model: PreTrainedModel) -> Fusion:
    """Prove fused forwards for the modules of a model in float32 on a CPU; nothing of it is changed.

    Merging projections saves nothing where a product starts in microseconds, and would move the weights.

    Raises ValueError for another model, and where all swaps together change what the model computes.
    """
    if not is_fusible(model):
        raise ValueError(
            f"a model that is fused on a CPU must be there in float32, got {model.dtype} on {model.device}; load it "
            "with dtype=torch.float32"
        )
    kernels = cpu_kernels()
    with exclusive(model), torch.inference_mode():
        proof = _PROOFS.get(model)
        if proof is None or not proof.holds(model):
            modules = {name: (ref(module), is_bare(module)) for name, module in model.named_modules()}
            trial = Trial(model, kernels)
            trial.try_kernels()
            proof = Proof(modules, trial.recipe, trial.report())
            _check_together(model, Fusion(model, proof.recipe, kernels, merged={}, report=proof.report))
            _PROOFS[model] = proof
    return Fusion(model, proof.recipe, kernels, merged={}, report=proof.report)


def fused_twin(model: PreTrainedModel, layer: nn.Module, owner: nn.Module, name: str) -> Fusion | None:
    """The swaps that were proven for a layer of `model`, for a layer of the same kind: `name` in `owner`.

    They are formulas of classes and settings, so they hold with other weights. Modules of another class run their own
    forward. None where nothing has been proven for this model as it is, or the owner is not in float32 on a CPU.
    """
    proof = _PROOFS.get(model)
    if proof is None or not proof.holds(model) or not is_fusible(owner):
        return None
    known, own = dict(model.named_modules()), dict(owner.named_modules())
    source = next(known_name for known_name, module in known.items() if module is layer)
    recipe = proof.recipe.of_layer(source, name, lambda old, new: type(known[old]) is type(own.get(new)))
    return Fusion(owner, recipe, cpu_kernels(), merged={}, report=[])


def _check_together(model: PreTrainedModel, fusion: Fusion) -> None:
    prompt, batch = check_case(model)
    difference = relative_difference(
        tree_logits(model, prompt, batch, fusion=fusion), tree_logits(model, prompt, batch)
    )
    if not difference <= TOLERANCES[torch.float32]:
        raise ValueError(
            f"fused forwards together must give the model's own logits, up to {TOLERANCES[torch.float32]:g} of their "
            f"spread, got {difference:.3g}; pass fuse=False"
        )
