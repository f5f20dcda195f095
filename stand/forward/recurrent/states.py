"""What layers without keys keep of every row: a state, and the newest inputs of the short convolution before it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from stand.forward.packed_plan import StepPlan
from stand.forward.recurrent.linear_attention import TreeChanges


@dataclass(slots=True, eq=False)
class LayerStates:
    """Of R rows in one layer, and what the last forward over drafts would make of them."""

    tails: torch.Tensor  # [R, N, C]: inputs of the convolution at the N newest tokens, the oldest first
    states: torch.Tensor | None = None  # [R, H, K, V] float32; None in a layer that is a convolution alone
    inputs: torch.Tensor | None = None  # [A * N + M, C]: tails of the plan's rows, then the inputs of its tokens
    changes: TreeChanges | None = None

    @property
    def stored(self) -> list[torch.Tensor]:
        return [self.tails] if self.states is None else [self.tails, self.states]


class RecurrentStates:
    """By layer. A row's states are those after its committed tokens; a forward over drafts leaves them alone until
    `keep` says which path stays."""

    def __init__(self, num_rows: int):
        self.num_rows = num_rows
        self.layers: dict[int, LayerStates] = {}  # by index

    def layer(self, index: int, inputs: torch.Tensor, num_tails: int) -> LayerStates:
        """That of a layer whose convolution gets `inputs` [M, C] and looks back on `num_tails` more."""
        if index not in self.layers:
            self.layers[index] = LayerStates(inputs.new_zeros(self.num_rows, num_tails, inputs.shape[1]))
        return self.layers[index]

    def matrices(self, index: int, num_heads: int, key_size: int, value_size: int) -> torch.Tensor:
        """[R, H, K, V] float32: the states of a layer whose convolution has run."""
        layer = self.layers[index]
        if layer.states is None:
            shape = (self.num_rows, num_heads, key_size, value_size)
            layer.states = torch.zeros(shape, dtype=torch.float32, device=layer.tails.device)
        return layer.states

    def like(
        self, num_rows: int, *, dtype: torch.dtype | None = None, device: torch.device | None = None
    ) -> RecurrentStates:
        """Of so many rows that have seen no token, with the layers of this one. dtype: of a convolution's inputs."""
        states = RecurrentStates(num_rows)
        for index, layer in self.layers.items():
            stored = zip(layer.stored, (dtype, None), strict=False)  # a state is float32
            new = [one.new_zeros(num_rows, *one.shape[1:], dtype=kind, device=device) for one, kind in stored]
            states.layers[index] = LayerStates(*new)
        return states

    def copied(self) -> RecurrentStates:
        """What `keep` does to the copy leaves this one alone."""
        states = RecurrentStates(self.num_rows)
        for index, layer in self.layers.items():
            matrices = None if layer.states is None else layer.states.clone()
            states.layers[index] = replace(layer, tails=layer.tails.clone(), states=matrices)
        return states

    def keep(self, plan: StepPlan, ends: Sequence[int]) -> None:
        """Of the forward over `plan` the path to token ends[a], row-local, of each of its rows a stays."""
        rows = slice(plan.first_row, plan.first_row + plan.num_rows)
        local, packed = (torch.tensor(places, dtype=torch.int64) for places in (ends, plan.packed_places(ends)))
        known: dict[tuple[int, torch.device], tuple[torch.Tensor, torch.Tensor]] = {}  # layers are mostly alike
        for layer in self.layers.values():
            kind = layer.tails.shape[1], layer.tails.device
            if kind not in known:
                newest = plan.on(kind[1]).paths_back(kind[0] + 1)[packed.to(kind[1]), 1:]
                known[kind] = newest, local.to(kind[1])
            newest, own_ends = known[kind]
            layer.tails[rows] = layer.inputs[newest]
            if layer.changes is not None:
                layer.changes.move(layer.states[rows], own_ends)
            layer.inputs = layer.changes = None

    def enter(self, row: int, others: RecurrentStates, *, source: int = 0) -> None:
        """Row `row` begins with what row `source` of `others` has, or with nothing where that has seen no token."""
        if not self.layers:
            self.layers = others.like(self.num_rows).layers
        for index, layer in self.layers.items():
            begun = others.layers.get(index)
            for place, states in enumerate(layer.stored):
                states[row] = 0.0 if begun is None else begun.stored[place][source]

    def move(self, source: int, target: int) -> None:
        for layer in self.layers.values():
            for states in layer.stored:
                states[target] = states[source]

    def fan_out(self, sources: Sequence[int]) -> None:
        """Row i becomes a copy of today's row sources[i]."""
        self.num_rows = len(sources)
        for index, layer in self.layers.items():
            self.layers[index] = LayerStates(*[states[list(sources)] for states in layer.stored])

    @property
    def row_bytes(self) -> int:
        """Of one row in all layers."""
        return self.row_bytes_in(None)

    def row_bytes_in(self, dtype: torch.dtype | None) -> int:
        """Where a convolution's inputs are of this type, default: of theirs."""
        stored = [pair for layer in self.layers.values() for pair in zip(layer.stored, (dtype, None), strict=False)]
        return sum(one.shape[1:].numel() * (kind or one.dtype).itemsize for one, kind in stored)
