"""The fusion of a model on a CPU: compiled kernels, nothing merged, proven once per model object and remembered."""

from __future__ import annotations

from dataclasses import dataclass
from weakref import WeakKeyDictionary, ref

import torch
from torch import nn
from transformers import PreTrainedModel

from stand.forward.few_tokens.product import DTYPE_NAMES, DTYPES
from stand.forward.model import text_config
from stand.forward.module_code import code_of
from stand.forward.self_check import LOGIT_TOLERANCES, check_case, relative_difference, tree_logits
from stand.forward.tree_attention import exclusive
from stand.fusion.forwards.merged_linear import is_bare
from stand.fusion.fusion import Fusion
from stand.fusion.guard import kinds_of_weights, plain_values
from stand.fusion.kernels import cpu_kernels
from stand.fusion.recipe import Recipe, Swap
from stand.fusion.trial import Trial

State = tuple[bool, dict[str, object], tuple, tuple]  # of a module: see `_state`


@dataclass(frozen=True, slots=True)
class Proof:
    """What was tried on a model, and which modules and settings it had: formulas were tried, not weights."""

    modules: dict[str, tuple[ref[nn.Module], State]]  # by name
    settings: dict[str, object]  # of the model's configuration
    dtype: torch.dtype
    recipe: Recipe
    report: list[Swap]

    def holds(self, model: PreTrainedModel) -> bool:
        found = dict(model.named_modules())
        is_set_alike = model.dtype is self.dtype and plain_values(text_config(model)) == self.settings
        if not is_set_alike or found.keys() != self.modules.keys():
            return False
        return all(
            self.modules[name][0]() is module and self.modules[name][1] == _state(module)
            for name, module in found.items()
        )


_PROOFS: WeakKeyDictionary[PreTrainedModel, Proof] = WeakKeyDictionary()


def is_fusible(model: nn.Module) -> bool:
    """Whether there are kernels for it: all on a CPU, in float32 or all in bfloat16."""
    dtypes = {parameter.dtype for parameter in model.parameters()}
    return len(dtypes) == 1 and dtypes.issubset(DTYPES) and all(parameter.is_cpu for parameter in model.parameters())


def fuse_on_cpu(model: PreTrainedModel) -> Fusion:
    """Prove fused forwards for the modules of a model in float32 or bfloat16 on a CPU; nothing of it is changed.

    Merging projections saves nothing where a product starts in microseconds, and would move the weights.

    Raises ValueError for another model, and where all swaps together change what the model computes.
    """
    if not is_fusible(model):
        raise ValueError(
            f"a model that is fused on a CPU must be there in {DTYPE_NAMES}, all of it, got "
            f"{', '.join(sorted({f'{each.dtype} on {each.device}' for each in model.parameters()}))}; load it with "
            "dtype=torch.float32"
        )
    kernels = cpu_kernels()
    with exclusive(model), torch.inference_mode():
        proof = _PROOFS.get(model)
        if proof is None or not proof.holds(model):
            modules = {name: (ref(module), _state(module)) for name, module in model.named_modules()}
            settings = plain_values(text_config(model))
            trial = Trial(model, kernels)
            trial.try_kernels()
            proof = Proof(modules, settings, model.dtype, trial.recipe, trial.report())
            _check_together(model, Fusion(model, proof.recipe, kernels, merged={}, report=proof.report))
            _PROOFS[model] = proof
    return Fusion(model, proof.recipe, kernels, merged={}, report=proof.report)


def fused_twin(model: PreTrainedModel, layer: nn.Module, owner: nn.Module, name: str) -> Fusion | None:
    """The swaps that were proven for a layer of `model`, for a layer of the same kind: `name` in `owner`.

    They are formulas of classes and settings, so they hold with other weights. Modules of another class run their own
    forward. None where nothing has been proven for this model as it is, or there are no kernels for the owner.
    """
    proof = _PROOFS.get(model)
    dtype = next(owner.parameters()).dtype
    if proof is None or not proof.holds(model) or not is_fusible(owner) or dtype is not proof.dtype:
        return None
    known, own = dict(model.named_modules()), dict(owner.named_modules())
    source = next(known_name for known_name, module in known.items() if module is layer)
    recipe = proof.recipe.of_layer(source, name, lambda old, new: type(known[old]) is type(own.get(new)))
    return Fusion(owner, recipe, cpu_kernels(), merged={}, report=[])


def _state(module: nn.Module) -> State:
    return is_bare(module), plain_values(module), code_of(module), kinds_of_weights(module)


def _check_together(model: PreTrainedModel, fusion: Fusion) -> None:
    prompt, batch = check_case(model)
    difference = relative_difference(
        tree_logits(model, prompt, batch, fusion=fusion), tree_logits(model, prompt, batch)
    )
    tolerance = LOGIT_TOLERANCES[model.dtype]
    if not difference <= tolerance:
        raise ValueError(
            f"fused forwards together must give the model's own logits, up to {tolerance:g} of their "
            f"spread, got {difference:.3g}; pass fuse=False"
        )
