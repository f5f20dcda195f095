"""Layers that keep a state instead of keys, scored over trees: the gated delta rule (Qwen3-Next, Qwen3.5, OLMo Hybrid),
Mamba-2 (Nemotron-H, Bamba, Granite 4, Falcon-H1, Zamba2) and short convolutions (LFM2).

Their forward is transformers' own. It calls the convolution and the rule by name, and gets those of this file instead,
which hand them to the `Scan` of the cache.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from types import FunctionType
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

import torch
from torch.nn import Module

from stand.forward.devices import brought_weights
from stand.forward.few_tokens.linear_layers import class_forward
from stand.forward.modules import modules_of
from stand.forward.packed_plan import plain_forward_error
from stand.forward.recurrent.gates import ComputedGates, StepSizes

if TYPE_CHECKING:
    from transformers.cache_utils import Cache

    from stand.forward.recurrent.tree_scan import Scan

CONVOLUTION, DELTA_RULE, STATE_SPACE = "causal_conv1d_fn", "torch_chunk_gated_delta_rule", "mamba2_chunk_scan"
BEHIND_HOOKS = "_old_forward"
STORES_A_STATE = "update_recurrent_state"  # what a forward calls that has more than a convolution


def with_names(function: FunctionType, given: Mapping[str, Callable]) -> FunctionType:
    """The function, which finds these objects where it looks for such names in its file."""
    names = {**function.__globals__, **given}
    run = FunctionType(function.__code__, names, function.__name__, function.__defaults__, function.__closure__)
    run.__kwdefaults__ = function.__kwdefaults__
    return run


def recurrent_layers(model: Module) -> list[Module]:
    """Those of the model whose forward can be given the functions of this file."""
    return [forward.layer for forward in _forwards(model)]


@contextmanager
def recurrent_forwards(model: Module) -> Iterator[None]:
    """Within it those layers score trees; then the model is as it was, also where an interrupt cuts the way out."""
    swapped: list[Module] = []
    try:
        for forward in _forwards(model):
            if _is_own(forward.layer):
                swapped.append(forward.layer)
                vars(forward.layer)[_name_of_own(forward.layer)] = forward
        yield
    finally:
        try:
            _restore(swapped)
        except BaseException:
            _restore(swapped)
            raise


class RecurrentForward:
    """Stands for the forward of `layer`."""

    def __init__(self, layer: Module):
        self.layer = layer
        own = inspect.unwrap(type(layer).forward)
        given = {CONVOLUTION: self._convolve, DELTA_RULE: self._delta_rule, STATE_SPACE: self._state_space}
        self._run = with_names(own, given)
        self._scan: Scan | None = None  # of the forward that is running

    def __call__(
        self,
        hidden_states: torch.Tensor,
        cache: Cache | None = None,  # called by the one name or another
        cache_params: Cache | None = None,
        past_key_values: Cache | None = None,
        **kwargs: object,
    ) -> torch.Tensor:
        """[1, M, D] of packed tokens."""
        taken = next((given for given in (cache, cache_params, past_key_values) if given is not None), None)
        if not hasattr(taken, "scan"):  # before anything is set: another thread's forward may be in its midst
            raise plain_forward_error(type(self.layer).__name__)
        self._scan = taken.scan()
        try:
            with brought_weights(self.layer):
                return self._run(self.layer, hidden_states, _NO_CACHE, None)
        finally:
            self._scan = None

    def __reduce__(self) -> tuple:
        """A copy of the layer runs its class's forward."""
        return class_forward, (self.layer,)

    def _convolve(
        self,
        hidden_states: torch.Tensor,  # [1, C, M]
        weight: torch.Tensor,  # [C, N + 1]
        bias: torch.Tensor | None = None,
        activation: str | None = None,
        **kwargs: object,
    ) -> torch.Tensor:
        """[1, C, M]: every token with the N before it on its path."""
        mixed = self._scan.convolve(self.layer.layer_idx, hidden_states[0].T, weight, bias, activation)
        return mixed.T[None].to(hidden_states.dtype)

    def _delta_rule(
        self,
        query: torch.Tensor,  # [1, M, Hk, K]
        key: torch.Tensor,
        value: torch.Tensor,  # [1, M, H, V]
        *,
        g: torch.Tensor,  # [1, M, H]
        beta: torch.Tensor,
        **kwargs: object,
    ) -> tuple[torch.Tensor, None]:
        """[1, M, H, V], and no state: it stays in the cache."""
        gates = ComputedGates(g[0], beta[0])
        return self._scan.delta_rule(self.layer.layer_idx, query[0], key[0], value[0], gates)[None], None

    def _state_space(
        self,
        hidden_states: torch.Tensor,  # [1, M, H, V]
        dt: torch.Tensor,  # [1, M, H]
        A: torch.Tensor,  # [H]
        B: torch.Tensor,  # [1, M, G, K]
        C: torch.Tensor,
        *,
        D: torch.Tensor | None = None,  # [H]
        dt_bias: torch.Tensor | None = None,
        dt_softplus: bool = False,
        dt_limit: tuple[float, float] = (0.0, float("inf")),
        return_final_states: bool = False,
        **kwargs: object,
    ) -> torch.Tensor | tuple[torch.Tensor, None]:
        """[1, M, H, V] float32, and no state where one is asked for."""
        steps = StepSizes(dt[0], dt_bias, dt_softplus, tuple(dt_limit), A)
        output = self._scan.state_space(self.layer.layer_idx, C[0], B[0], hidden_states[0], steps, D)[None]
        return (output, None) if return_final_states else output


class _NoCache:
    """For a forward whose functions keep states by themselves."""

    def get_conv_state(self, *args: object, **kwargs: object) -> None:
        return None

    get_recurrent_state = update_recurrent_state = get_conv_state

    def has_previous_state(self, *args: object, **kwargs: object) -> bool:
        return False

    def update_conv_state(self, conv_states: torch.Tensor, *args: object, **kwargs: object) -> torch.Tensor:
        return conv_states


_NO_CACHE = _NoCache()
_KNOWN: WeakKeyDictionary[Module, list[RecurrentForward]] = WeakKeyDictionary()  # of models in use


def _forwards(model: Module) -> list[RecurrentForward]:
    """Made anew where the model has other layers by now."""
    layers = [layer for layer in modules_of(model) if is_recurrent(layer)]
    known = _KNOWN.get(model)
    if known is None or [forward.layer for forward in known] != layers:
        known = _KNOWN[model] = [RecurrentForward(layer) for layer in layers]
    return known


def is_recurrent(layer: Module) -> bool:
    """Whether its class's forward can be given the functions of this file."""
    return _is_served(type(layer).forward) and hasattr(layer, "layer_idx")


@cache
def _is_served(forward: Callable) -> bool:
    """Whether it calls a convolution, and a rule of this file or nothing else that stores a state."""
    code = getattr(inspect.unwrap(forward), "__code__", None)
    names = set() if code is None else set(code.co_names)
    is_known = bool(names & {DELTA_RULE, STATE_SPACE}) or STORES_A_STATE not in names
    return CONVOLUTION in names and is_known


def _is_own(layer: Module) -> bool:
    """Whether it runs its class's forward: nobody has put another one into its place."""
    forward = vars(layer).get(_name_of_own(layer))
    return forward is None or forward == class_forward(layer)


def _name_of_own(layer: Module) -> str:
    """Of the attribute that has its own forward, which accelerate's hooks call by another name."""
    return BEHIND_HOOKS if BEHIND_HOOKS in vars(layer) else "forward"


def _restore(layers: list[Module]) -> None:
    for layer in layers:
        name = _name_of_own(layer)
        if isinstance(vars(layer).get(name), RecurrentForward):
            if name == BEHIND_HOOKS:
                vars(layer)[name] = class_forward(layer)
            else:
                del vars(layer)[name]
