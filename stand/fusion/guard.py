"""What a swapped forward relies on: that modules are those of the proof with its settings, and run nothing but their
own forward."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from torch import nn

from stand.forward.module_code import PLAIN, code_of
from stand.fusion.forwards.merged_linear import is_bare


def kinds_of_weights(module: nn.Module) -> tuple[object, ...]:
    """Class, dtype and layout of its own parameters: kernels take no others, whose values may change."""
    weights = module._parameters.values()
    return tuple(
        [weight if weight is None else (type(weight), weight.dtype, weight.is_contiguous()) for weight in weights]
    )


@dataclass(frozen=True, slots=True, eq=False)
class Guard:
    """A module in its place."""

    parent: nn.Module
    name: str
    module: nn.Module
    code: tuple[object, ...]
    weights: tuple[object, ...]

    @classmethod
    def of(cls, model: nn.Module, name: str) -> Guard:
        parent, _, child = name.rpartition(".")
        owner = model.get_submodule(parent)
        module = getattr(owner, child)
        return cls(owner, child, module, code_of(module), kinds_of_weights(module))

    def holds(self) -> bool:
        """Whether it is still there, without hooks, with its class's forward, which nobody has replaced, and with
        weights of the same kind."""
        is_there = self.parent._modules.get(self.name) is self.module
        is_alike = is_there and self.weights == kinds_of_weights(self.module)
        return is_alike and is_bare(self.module) and self.code == code_of(self.module)


@dataclass(frozen=True, slots=True, eq=False)
class Settings:
    """Of a module or a configuration, as they were: a proven forward may have taken their values in."""

    holder: object
    values: dict[str, object]

    @classmethod
    def of(cls, holder: object) -> Settings:
        return cls(holder, plain_values(holder))

    def holds(self) -> bool:
        """Whether all are the same by now."""
        return self.values.items() <= vars(self.holder).items()


def plain_values(holder: object) -> dict[str, object]:
    """Numbers, flags and names that a module or a configuration has, but for its mode and for token ids."""
    return {
        name: value
        for name, value in vars(holder).items()
        if isinstance(value, PLAIN) and not name.startswith("_") and name != "training" and "token_id" not in name
    }


class Swapped(NamedTuple):
    """A module, the forward that stands for its own, and what this takes for granted."""

    module: nn.Module
    forward: Callable
    guards: tuple[Guard | Settings, ...] = ()
