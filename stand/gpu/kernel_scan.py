"""The recurrent layers of a captured step: `stand.forward.recurrent.tree_scan.Scan` by kernels, at fixed addresses."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from stand.forward.recurrent.gates import ComputedGates, DeltaGates, StepSizes
from stand.forward.recurrent.states import LayerStates, RecurrentStates
from stand.forward.recurrent.tree_scan import activated
from stand.gpu.kernels.recurrent.convolve import convolve, keep_tails
from stand.gpu.kernels.recurrent.delta_updates import delta_updates
from stand.gpu.kernels.recurrent.linear_attention import keep_states, linear_attention
from stand.gpu.kernels.recurrent.path_decays import prepared, prepared_gated, prepared_steps

SILU_NAMES = ("silu", "swish")  # as transformers calls what the kernel of convolutions applies by itself


@dataclass(slots=True, eq=False)
class LayerChanges:
    """What a layer's tokens would make of its states."""

    inputs: torch.Tensor  # [M, C] of the convolution
    keys: torch.Tensor | None = None  # [M, Hk, K]; this and the following: None in a layer that is a convolution alone
    updates: torch.Tensor | None = None  # [M, H, V]
    rates: torch.Tensor | None = None  # [M, H]: of updates; None: all 1
    sums: torch.Tensor | None = None  # [M, H]


def chain_scan(index: int, num_tokens: int, tails: torch.Tensor, states: torch.Tensor) -> KernelScan:
    """Over a row of at most 63 tokens that follow each other, for one layer; tails [1, N, C], states [1, H, K, V]."""
    kept = RecurrentStates(1)
    kept.layers[index] = LayerStates(tails, states)
    nodes = torch.arange(num_tokens, device=states.device)
    step = {
        "parents": (nodes - 1).clamp(min=0),
        "depths": nodes,
        "ancestors": torch.bitwise_left_shift(2, nodes)[:, None] - 1,
        "offsets": torch.tensor([0, num_tokens], dtype=torch.int32, device=states.device),
        "cache_rows": torch.zeros(1, dtype=torch.int64, device=states.device),
    }
    return KernelScan(step, kept)


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
        self,
        index: int,
        inputs: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        activation: str | None,
    ) -> torch.Tensor:
        self._changes[index] = LayerChanges(inputs)
        tails, is_silu = self._states.layers[index].tails, activation in SILU_NAMES
        mixed = convolve(inputs, tails, weight.contiguous(), bias, *self._paths, *self._rows, is_silu)
        return mixed if is_silu else activated(mixed, activation)

    def delta_rule(
        self, index: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, gates: DeltaGates | ComputedGates
    ) -> torch.Tensor:
        states, places = self._states.layers[index].states, (self._ancestors, self._rows[0])
        if isinstance(gates, ComputedGates):
            (queries, keys, sums), beta = prepared(query, key, gates.log_decays, *places), gates.rates
        else:
            given = gates.decay, gates.rate, gates.log_scale, gates.bias, gates.rate_scale
            queries, keys, sums, beta = prepared_gated(query, key, *given, *places)
        updates = delta_updates(keys, value, sums, beta, states, self._ancestors, *self._rows)
        return self._attend(index, queries, keys, updates, None, sums, None, value.dtype)

    def state_space(
        self,
        index: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        steps: StepSizes,
        skip: torch.Tensor | None,
    ) -> torch.Tensor:
        given = steps.raw, steps.bias, steps.is_softplus, *steps.limits, steps.decay
        queries, keys, sums, sizes = prepared_steps(query, key, *given, self._ancestors, self._rows[0])
        return self._attend(index, queries, keys, value, sizes, sums, skip, torch.float32)

    def keep(self, path: torch.Tensor) -> None:
        """The path of each row stays: row-local nodes [B, L] at depths 1, 2, ..., then -1."""
        for index, changes in self._changes.items():
            layer = self._states.layers[index]
            keep_tails(changes.inputs, layer.tails, *self._rows, path)
            if changes.keys is not None:
                rule = changes.keys, changes.updates, changes.rates, changes.sums
                keep_states(*rule, layer.states, *self._rows, path)

    def _attend(
        self,
        index: int,
        queries: torch.Tensor,
        keys: torch.Tensor,
        updates: torch.Tensor,
        rates: torch.Tensor | None,
        sums: torch.Tensor,
        skip: torch.Tensor | None,
        dtype: torch.dtype,
    ) -> torch.Tensor:
        changes, states = self._changes[index], self._states.layers[index].states
        changes.keys, changes.updates, changes.rates, changes.sums = keys, updates, rates, sums
        places = states, self._ancestors, *self._rows
        return linear_attention(queries, keys, updates, rates, sums, skip, *places, dtype)
