"""What recorded runs take for granted of a head's modules, seen in microseconds before every run."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain

from torch import nn
from torch.nn.modules import module as all_modules

from stand.forward.model_state import HOOKS, ModelState, foreign_hook

OF_ALL = (all_modules._global_forward_hooks, all_modules._global_forward_pre_hooks)


class WatchedModules:
    """As they are now."""

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        self.modules = modules
        self._states = [ModelState(module) for module in modules]
        parts = list(dict.fromkeys(chain.from_iterable(module.modules() for module in modules)))
        self._hooks = [getattr(part, kind) for part in parts for kind in HOOKS]
        held = (where for part in parts for where in (part._parameters, part._buffers))
        self._tensors = [
            (where, name, tensor, tensor.data_ptr())
            for where in held
            for name, tensor in where.items()
            if tensor is not None
        ]

    def is_as(self, earlier: WatchedModules) -> bool:
        """Whether nothing has changed since `earlier`: modules, their settings and hooks, places of weights."""
        return len(self._states) == len(earlier._states) and not any(
            now.change_since(before) for now, before in zip(self._states, earlier._states, strict=True)
        )

    def hold_weights(self) -> bool:
        """Whether the weights are still these, where they lay."""
        return all(
            where.get(name) is tensor and tensor.data_ptr() == place for where, name, tensor, place in self._tensors
        )

    def have_hooks(self) -> bool:
        """Whether somebody else's hook would have to run."""
        return any(chain(self._hooks, OF_ALL)) and any(map(foreign_hook, self.modules))
