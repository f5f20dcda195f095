"""What recorded steps and kept keys take for granted of a model: its tensors, modules, their settings and their hooks.

A graph reads the addresses and runs the operations that were there when it was recorded. Whatever moves weights, swaps
a module, sets an adapter or adds a hook between two calls must be seen before the graph is replayed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import chain

import torch
from torch import nn
from torch.nn.modules import module as all_modules
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from transformers import PreTrainedModel

from stand.forward.few_tokens.product import ORDINARY
from stand.forward.module_code import PLAIN, code_of
from stand.forward.modules import modules_of

HOOKS = ("_forward_hooks", "_forward_pre_hooks")
PASSED_OVER = vars(nn.Module()).keys() - {"training"}  # what torch keeps in every module
OWN_HOOKS = ("stand.", "transformers.")  # modules of hooks that belong to this engine, or only collect outputs


def foreign_hook(model: nn.Module) -> str | None:
    """The name of a forward hook that somebody else has registered, or None."""
    of_modules = [list(getattr(module, kind).values()) for module in model.modules() for kind in HOOKS]
    for hook in chain(*of_modules, *_hooks_of_all_modules()):
        if not (getattr(hook, "__module__", None) or "").startswith(OWN_HOOKS):
            return getattr(hook, "__qualname__", type(hook).__name__)
    return None


@contextmanager
def unchanged(model: nn.Module) -> Iterator[None]:
    """Behind it tensors that are plain attributes of a model's parts are those of before: forwards may note something,
    as where rotary positions of their text go on (`rope_deltas`)."""
    parts = [part for part in modules_of(model) if isinstance(part, PreTrainedModel)]
    before = [(vars(part), dict(_noted(vars(part)))) for part in parts]
    try:
        yield
    finally:
        for attributes, noted in before:
            for name in [name for name, _ in _noted(attributes) if name not in noted]:
                del attributes[name]
            attributes.update(noted)


def _noted(attributes: dict[str, object]) -> Iterator[tuple[str, object]]:
    for name, value in attributes.items():
        if value is None or isinstance(value, torch.Tensor):
            yield name, value


class ModelState:
    """As it is now. Modules are told apart by `id`, functions are kept, so that no other one can get theirs."""

    def __init__(self, model: nn.Module):
        self._tensors = list(_tensors(model))
        self._places = [_place(tensor) for _, _, tensor in self._tensors]
        self._modules = {name: _module_state(module) for name, module in model.named_modules()}
        configs = {id(config): config for module in model.modules() if (config := getattr(module, "config", None))}
        self._configs = {name: _settings(config) for name, config in configs.items()}
        self._hooks_of_all = _hooks_of_all_modules()

    def holds_weights(self) -> bool:
        """Whether its modules still have the tensors that they had, where they lay; takes microseconds per tensor."""
        return all(
            held.get(name) is tensor and _place(tensor) == place
            for (held, name, tensor), place in zip(self._tensors, self._places, strict=True)
        )

    def change_since(self, earlier: ModelState) -> str | None:
        """What is not as it was in `earlier`, or None."""
        if self._modules.keys() != earlier._modules.keys():
            return "it has other modules"
        for name, state in self._modules.items():
            if state != earlier._modules[name]:
                return f"module {name or 'at the root'!r} has changed"
        if self._hooks_of_all != earlier._hooks_of_all:
            return "other hooks are registered for all modules"
        if self._configs != earlier._configs:
            return "its configuration has changed"
        return None if self._places == earlier._places else "its weights have moved"


def _hooks_of_all_modules() -> list[list[Callable]]:
    return [
        list(hooks.values()) for hooks in (all_modules._global_forward_hooks, all_modules._global_forward_pre_hooks)
    ]


def _tensors(model: nn.Module) -> Iterator[tuple[dict[str, torch.Tensor | None], str, torch.Tensor]]:
    """Parameters and buffers, each as (where a module keeps it, its name there, itself)."""
    for module in modules_of(model):
        for held in (module._parameters, module._buffers):
            yield from ((held, name, tensor) for name, tensor in held.items() if tensor is not None)


def _place(tensor: torch.Tensor) -> tuple:
    """Quantised weights are of classes whose tensors have no address: their parts have."""
    shape = tensor.dtype, tensor.shape, tensor.stride()
    if type(tensor) not in ORDINARY and is_traceable_wrapper_subclass(tensor):  # which takes longer than all else
        parts = [getattr(tensor, name) for name in tensor.__tensor_flatten__()[0]]
        return *shape, *(_place(part) for part in parts if isinstance(part, torch.Tensor))  # ranks' have a mesh, too
    return tensor.data_ptr(), *shape


def _module_state(module: nn.Module) -> tuple:
    values = vars(module)
    hooks = [list(values[kind].values()) for kind in HOOKS]
    return id(module), code_of(module), values.get("forward"), hooks, _settings(module)


def _settings(holder: object) -> dict[str, object]:
    """Plain values, and lists, tuples and dictionaries of plain values as text: an adapter's name is in a list."""
    return {
        name: value if isinstance(value, PLAIN) else repr(value)
        for name, value in (holder if isinstance(holder, dict) else getattr(holder, "__dict__", {})).items()
        if name not in PASSED_OVER and _is_plain(value)
    }


def _is_plain(value: object) -> bool:
    if isinstance(value, list | tuple):
        return all(isinstance(one, PLAIN) for one in value)
    if isinstance(value, dict):
        return all(isinstance(one, PLAIN) for one in value.values())
    return isinstance(value, PLAIN)
