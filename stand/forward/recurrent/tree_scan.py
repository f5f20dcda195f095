"""The recurrent layers of an eager forward: each token goes on from its predecessor on the paths of a `StepPlan`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch
from torch.nn.functional import conv1d
from transformers.activations import ACT2FN

from stand.forward.packed_plan import StepPlan
from stand.forward.recurrent.gates import ComputedGates, DeltaGates, StepSizes
from stand.forward.recurrent.linear_attention import TreeChanges, gated_delta_rule, state_space
from stand.forward.recurrent.states import RecurrentStates

CHUNK = 64  # tokens of a prompt that a rule takes at once


class Scan(Protocol):
    """What layers with a recurrent state ask of a cache during a forward over M packed tokens: first the convolution,
    then a rule where they have one. index: of the layer; Hk key heads serve as many of H heads each that follow each
    other: query and key [M, Hk, K], value [M, H, V]."""

    def convolve(
        self,
        index: int,
        inputs: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        activation: str | None,
    ) -> torch.Tensor:
        """[M, C] in the weight's type, of inputs [M, C] and weight [C, N + 1]: every token with the N before it on its
        path, then the activation that transformers calls so."""

    def delta_rule(
        self, index: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, gates: DeltaGates | ComputedGates
    ) -> torch.Tensor:
        """[M, H, V] in the value's type by `gated_delta_rule`."""

    def state_space(
        self,
        index: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        steps: StepSizes,
        skip: torch.Tensor | None,
    ) -> torch.Tensor:
        """[M, H, V] float32 by `state_space` of values times steps, plus skip [H] times the values."""


def activated(states: torch.Tensor, activation: str | None) -> torch.Tensor:
    """What transformers' function of this name makes of them."""
    return states if activation is None else ACT2FN[activation](states)


class TreeScan:
    """A `Scan` operation by operation, over the rows of a cache that `plan` names."""

    def __init__(self, plan: StepPlan, states: RecurrentStates):
        self._plan, self._states = plan, states
        self._rows = slice(plan.first_row, plan.first_row + plan.num_rows)

    def convolve(
        self,
        index: int,
        inputs: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        activation: str | None,
    ) -> torch.Tensor:
        plan, size = self._plan.on(inputs.device), weight.shape[1]
        layer = self._states.layer(index, inputs, size - 1)
        layer.inputs = torch.cat([layer.tails[self._rows].flatten(0, 1), inputs])
        if plan.is_prompt:
            mixed = conv1d(layer.inputs.T[None].to(weight.dtype), weight[:, None], bias, groups=len(weight))
            layer.tails[plan.first_row] = layer.inputs[len(layer.inputs) - size + 1 :]
            layer.inputs = None
            return activated(mixed[0].T, activation)
        places, taps = plan.paths_back(size), weight.T.float()
        mixed = inputs.new_zeros(inputs.shape, dtype=torch.float32)
        mixed = mixed if bias is None else mixed + bias.float()
        for place, tap in zip(places.T, taps, strict=True):
            mixed.addcmul_(layer.inputs[place].float(), tap)
        return activated(mixed.to(weight.dtype), activation)

    def delta_rule(
        self, index: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, gates: DeltaGates | ComputedGates
    ) -> torch.Tensor:
        output = self._apply(gated_delta_rule, index, query, key, value, gates.log_decay(), gates.beta())
        return output.to(value.dtype)

    def state_space(
        self,
        index: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        steps: StepSizes,
        skip: torch.Tensor | None,
    ) -> torch.Tensor:
        inputs, sizes = value.float(), steps.values()
        written, log_decay = inputs * sizes[..., None], steps.decay.float() * sizes
        output = self._apply(state_space, index, query, key, written, log_decay)
        return output if skip is None else output + skip[:, None] * inputs

    def _apply(
        self,
        rule: Callable[..., tuple[torch.Tensor, TreeChanges]],
        index: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        *rest: torch.Tensor,
    ) -> torch.Tensor:
        """[M, H, V] float32; rest: what else the rule takes, [M, H]."""
        plan, heads = self._plan.on(value.device), value.shape[1]
        states = self._states.matrices(index, heads, key.shape[2], value.shape[2])
        operands = _widened(query, heads), _widened(key, heads), value, *rest
        trees = [plan.pad_rows(operand.float()).transpose(1, 2) for operand in operands]
        with torch.autocast(value.device.type, enabled=False):  # it would round sums of decays, and states as read
            if plan.is_prompt:
                output = self._over_prompt(rule, trees, states[plan.first_row : plan.first_row + 1])
            else:
                output, changes = rule(*trees, states=states[self._rows], seen=plan.seen)
                self._states.layers[index].changes = changes
        return plan.unpad_rows(output.transpose(1, 2)).contiguous()  # models take views of it

    def _over_prompt(
        self,
        rule: Callable[..., tuple[torch.Tensor, TreeChanges]],
        chain: list[torch.Tensor],
        states: torch.Tensor,
    ) -> torch.Tensor:
        """[1, H, M, V] of operands [1, H, M, ...], chunk by chunk. All tokens stay: each chunk moves `states`
        [1, H, K, V]."""
        outputs = []
        for first in range(0, self._plan.num_tokens, CHUNK):
            chunk = [operand[:, :, first : first + CHUNK] for operand in chain]
            size = chunk[0].shape[2]
            seen = torch.ones(1, 1, size, size, dtype=torch.bool, device=states.device).tril()
            output, changes = rule(*chunk, states=states, seen=seen)
            changes.move(states, torch.tensor([size - 1], device=states.device))
            outputs.append(output)
        return torch.cat(outputs, dim=2)


def _widened(states: torch.Tensor, num_heads: int) -> torch.Tensor:
    """[M, Hk, K] -> [M, H, K]."""
    return states.repeat_interleave(num_heads // states.shape[1], dim=1)
