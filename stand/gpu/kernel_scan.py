"""The recurrent layers of a captured step: a `stand.forward.tree_scan.Scan` by kernels, at fixed addresses."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from stand.forward.recurrent_states import RecurrentStates
from stand.gpu.kernels.convolve import convolve, keep_tails
from stand.gpu.kernels.delta_updates import delta_updates
from stand.gpu.kernels.linear_attention import keep_states, linear_attention
from stand.gpu.kernels.path_decays import prepared


@dataclass(slots=True, eq=False)
class LayerChanges:
    """What a layer's tokens would make of its states."""

    inputs: torch.Tensor  # [M, C] of the convolution
    keys: torch.Tensor | None = None  # [M, Hk, K]; this and the following: None in a layer that is a convolution alone
    updates: torch.Tensor | None = None  # [M, H, V]
    sums: torch.Tensor | None = None  # [M, H]


class KernelScan:
    """Of one forward over a step's tokens; the states stay as they are until `keep`."""

    def __init__(self, step: Mapping[str, torch.Tensor], states: RecurrentStates):
        """step: see `StepPacket`; states: by cache row, of all layers that will ask."""
        self._states = states
        self._paths = step["parents"], step["depths"]
        self._ancestors = step["ancestors"]
        self._rows = step["offsets"], step["cache_rows"]
        self._changes: dict[int, LayerChanges] = {}  # by index of the layer

    def convolve(
        self, index: int, inputs: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
    ) -> torch.Tensor:
        self._changes[index] = LayerChanges(inputs)
        return convolve(inputs, self._states.layers[index].tails, weight.contiguous(), bias, *self._paths, *self._rows)

    def delta_rule(
        self,
        index: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        log_decay: torch.Tensor,
        beta: torch.Tensor,
    ) -> torch.Tensor:
        states = self._states.layers[index].states
        queries, keys, sums = prepared(query, key, log_decay, self._ancestors, self._rows[0], True)
        updates = delta_updates(keys, value, sums, beta, states, self._ancestors, *self._rows)
        return self._attend(index, queries, keys, updates, sums)

    def state_space(
        self, index: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, log_decay: torch.Tensor
    ) -> torch.Tensor:
        queries, keys, sums = prepared(query, key, log_decay, self._ancestors, self._rows[0], False)
        return self._attend(index, queries, keys, value, sums)

    def keep(self, path: torch.Tensor) -> None:
        """The path of each row stays: row-local nodes [B, L] at depths 1, 2, ..., then -1."""
        for index, changes in self._changes.items():
            layer = self._states.layers[index]
            keep_tails(changes.inputs, layer.tails, *self._rows, path)
            if changes.keys is not None:
                keep_states(changes.keys, changes.updates, changes.sums, layer.states, *self._rows, path)

    def _attend(
        self, index: int, queries: torch.Tensor, keys: torch.Tensor, updates: torch.Tensor, sums: torch.Tensor
    ) -> torch.Tensor:
        changes = self._changes[index]
        changes.keys, changes.updates, changes.sums = keys, updates, sums
        states = self._states.layers[index].states
        return linear_attention(queries, keys, updates, sums, states, self._ancestors, *self._rows)
