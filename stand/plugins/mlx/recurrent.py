"""Layers of mlx-lm that keep a state and the newest inputs of a convolution: each token goes on from its predecessor on
the paths of a step.

The model's own convolution and rule compute. What they get is changed: the convolution the inputs on a token's path,
and the rule the tokens of one depth at a time, with the states of their predecessors.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import wraps
from threading import local

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx_lm.models import gated_delta, ssm

from stand.forward.packed_plan import StepPlan
from stand.plugins.mlx.attention import PackedStep, send_calls

RULES = {"gated_delta_update": gated_delta.gated_delta_update, "ssm_update": ssm.ssm_update}  # as models import them
_ASKED = local()  # of this thread: whose inputs the next convolutions get, in the order in which a layer asked


@dataclass(slots=True, eq=False)
class LayerStates:
    """Of R rows in one layer, and what the last forward over drafts would make of them."""

    num_tails: int  # convolutions; a state follows them unless there is only one
    stored: list[mx.array | None]  # [R, N, C] inputs of each convolution at the N newest tokens, and [R, ...] the state
    inputs: dict[int, mx.array] = field(default_factory=dict)  # [A * N + M, C] by convolution: tails, then tokens
    advance: Callable[[mx.array, mx.array], mx.array] | None = None  # states behind tokens [n, P] of rows [n]


class RoomStates:
    """By layer, as `stand.forward.recurrent.states.RecurrentStates`, in arrays of MLX."""

    def __init__(self, num_rows: int):
        self.num_rows = num_rows
        self.layers: dict[int, LayerStates] = {}

    def layer(self, index: int, size: int) -> LayerStates:
        if index not in self.layers:
            self.layers[index] = LayerStates(max(size - 1, 1), [None] * size)
        return self.layers[index]

    @property
    def arrays(self) -> list[mx.array]:
        return [array for layer in self.layers.values() for array in layer.stored if array is not None]

    @property
    def row_bytes(self) -> int:
        """Of one row in all layers."""
        return sum(array.nbytes for array in self.arrays) // max(self.num_rows, 1)

    def copied(self) -> RoomStates:
        states = RoomStates(self.num_rows)
        for index, layer in self.layers.items():
            stored = [None if array is None else array + 0 for array in layer.stored]
            states.layers[index] = LayerStates(layer.num_tails, stored)
        return states

    def enter(self, row: int, others: RoomStates, *, source: int = 0) -> None:
        """Row `row` begins with what row `source` of `others` has, or with nothing where that has seen no token."""
        for array in self.arrays:
            array[row] = 0
        for index, begun in others.layers.items():
            layer = self.layer(index, len(begun.stored))
            for place, array in enumerate(begun.stored):
                if array is not None:
                    self.put(layer, place, slice(row, row + 1), array[source : source + 1])

    def put(self, layer: LayerStates, place: int, rows: slice, new: mx.array) -> None:
        if layer.stored[place] is None:
            layer.stored[place] = mx.zeros((self.num_rows, *new.shape[1:]), dtype=new.dtype)
        layer.stored[place][rows] = new

    def move(self, source: int, target: int) -> None:
        for array in self.arrays:
            array[target] = array[source]

    def keep(self, plan: StepPlan, ends: Sequence[int]) -> None:
        """Of the forward over drafts `plan`, which are those of the first rows, the path to token ends[a], row-local,
        of each row a stays."""
        packed = plan.packed_places(ends)
        groups = _paths_of_a_length(plan, packed)
        known: dict[int, mx.array] = {}  # layers are mostly alike
        for layer in self.layers.values():
            for place, inputs in layer.inputs.items():
                count = layer.stored[place].shape[1] + 1
                if count not in known:
                    known[count] = mx.array(plan.paths_back(count)[packed, 1:].numpy())
                layer.stored[place][: plan.num_rows] = inputs[known[count]]
            if layer.advance is not None:
                for rows, tokens in groups:
                    layer.stored[-1][rows] = layer.advance(rows, tokens)
            layer.inputs, layer.advance = {}, None


def _paths_of_a_length(plan: StepPlan, ends: np.ndarray) -> list[tuple[mx.array, mx.array]]:
    """(rows [n], their packed tokens [n, P] from the root to ends[row]), rows whose paths are as long together."""
    lengths, groups = plan.depths[ends] + 1, []
    for count in np.unique(lengths).tolist():
        (rows,) = np.nonzero(lengths == count)
        paths = plan.paths_back(count)[ends[rows]].numpy() - (count - 1) * plan.num_rows
        groups.append((mx.array(rows), mx.array(paths)))
    return groups


class RecurrentLayer:
    """What a layer of the model takes for its own `ArraysCache` in a forward over packed tokens."""

    lengths = left_padding = None

    def __init__(self, states: RoomStates, layer: LayerStates, step: PackedStep):
        self._states, self._layer, self._step = states, layer, step

    def __getitem__(self, place: int) -> SeenState | None:
        """The state's handle; None for a convolution's inputs, which then begins with zeros and is given its own."""
        if place >= self._layer.num_tails:
            return SeenState(self)
        asked = [one for one in _asked() if one[0] is self]
        _ASKED.places = asked if (self, place) in asked else [*asked, (self, place)]
        return None

    def __iter__(self) -> Iterator[SeenState | None]:
        return map(self.__getitem__, range(len(self._layer.stored)))

    def __setitem__(self, place: int, new: object) -> None:
        """What the layer would keep is that of single tokens."""

    def advance(self, num_tokens: int) -> None:
        """Rows know their lengths."""

    def make_mask(self, num_tokens: int) -> None:
        """Every packed token is one."""

    def windows(self, place: int, padded: mx.array) -> mx.array:
        """[M, N + 1, C]: inputs on the way to each token, the last of which each has in `padded` [M, N + 1, C]."""
        plan, inputs, count = self._step.plan, padded[:, -1], padded.shape[1]
        rows = slice(plan.first_row, plan.first_row + plan.num_rows)
        layer = self._layer
        if layer.stored[place] is None:
            self._states.put(layer, place, rows, mx.zeros((plan.num_rows, count - 1, inputs.shape[1]), inputs.dtype))
        known = mx.concatenate([layer.stored[place][rows].flatten(0, 1), inputs])
        on_paths = known[self._step.paths_back(count)]
        if plan.is_prompt:
            layer.stored[place][rows] = on_paths[-1:, 1:]
        else:
            layer.inputs[place] = known
        return on_paths

    def follow(self, rule: Callable[..., tuple[mx.array, mx.array]]) -> mx.array:
        """[M, 1, ...] of all tokens. rule: output [n, T, ...] and state [n, ...] of packed tokens [n, T] that begin in
        states [n, ...] or, for None, in those of no token."""
        step, plan, layer = self._step, self._step.plan, self._layer
        if plan.is_prompt:
            rows = slice(plan.first_row, plan.first_row + 1)
            begun = None if layer.stored[-1] is None else layer.stored[-1][rows]
            output, state = rule(step.chain, begun)
            self._states.put(layer, len(layer.stored) - 1, rows, state)
            return output.swapaxes(0, 1)
        if layer.stored[-1] is None:
            state = rule(step.levels[0][0], None)[1]
            self._states.put(layer, len(layer.stored) - 1, slice(plan.num_rows), mx.zeros_like(state))
        stored = layer.stored[-1]
        layer.advance = lambda rows, tokens: rule(tokens, stored[rows])[1]
        outputs, state = [], stored[: plan.num_rows]
        for tokens, above in step.levels:
            output, state = rule(tokens, state if above is None else state[above])
            outputs.append(output)
        if len(outputs) == 1:  # no drafts: the states are those behind what is kept
            layer.advance = lambda rows, tokens: state[rows]
        return mx.concatenate(outputs)[step.from_levels]


class SeenState:
    """What a layer gets for its state: its rule alone can use it."""

    def __init__(self, layer: RecurrentLayer):
        self.layer = layer


class SendingConv1d(nn.Conv1d):
    """The class of a model's convolutions from `send_states` on; apart from packed tokens as before."""

    def __call__(self, padded: mx.array) -> mx.array:
        if asked := _asked():
            layer, place = asked.pop(0)
            padded = layer.windows(place, padded)
        return super().__call__(padded)


def send_states(model: nn.Module) -> None:
    """From now on the recurrent layers of the model follow paths where they get a `RecurrentLayer`; else all is as
    before."""
    for module in model.modules():
        if type(module) is nn.Conv1d:
            module.__class__ = SendingConv1d
    for name, rule in RULES.items():
        send_calls(model, name, rule, _sending)


def forget_asked() -> None:
    """A forward is over: no convolution belongs to it any more."""
    _ASKED.places = []


def _asked() -> list[tuple[RecurrentLayer, int]]:
    return getattr(_ASKED, "places", [])


def _sending(rule: Callable[..., tuple[mx.array, mx.array]]) -> Callable[..., tuple[mx.array, mx.array | None]]:
    @wraps(rule)
    def sent(*given: object, **named: object) -> tuple[mx.array, mx.array | None]:
        seen = next((one for one in (*given, *named.values()) if isinstance(one, SeenState)), None)
        if seen is None:
            return rule(*given, **named)

        def of(tokens: mx.array, state: mx.array | None) -> tuple[mx.array, mx.array]:
            def chosen(one: object) -> object:
                if one is seen:
                    return state
                is_of_tokens = isinstance(one, mx.array) and one.ndim > 2
                return one[:, 0][tokens] if is_of_tokens else one

            return rule(*map(chosen, given), **{name: chosen(one) for name, one in named.items()})

        return seen.layer.follow(of), None

    return sent
