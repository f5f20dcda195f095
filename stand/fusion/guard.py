"""What a swapped forward relies on: that modules are those of the proof, and run nothing but their own forward."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from torch import nn

from stand.fusion.merged_linear import is_bare


@dataclass(frozen=True, slots=True, eq=False)
class Guard:
    """A module in its place."""

    parent: nn.Module
    name: str
    module: nn.Module

    @classmethod
    def of(cls, model: nn.Module, name: str) -> Guard:
        parent, _, child = name.rpartition(".")
        owner = model.get_submodule(parent)
        return cls(owner, child, getattr(owner, child))

    def holds(self) -> bool:
        """Whether it is still there, without hooks and with its class's forward."""
        return self.parent._modules.get(self.name) is self.module and is_bare(self.module)


class Swapped(NamedTuple):
    """A module, the forward that stands for its own, and what this takes for granted."""

    module: nn.Module
    forward: Callable
    guards: tuple[Guard, ...] = ()
