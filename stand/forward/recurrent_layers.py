"""Layers that keep a state instead of keys, scored over trees: Qwen3-Next, Qwen3.5, OLMo Hybrid.

Their forward is transformers' own. It calls a short convolution and the gated delta rule by name, and gets those of
this file instead, which follow the paths of a `StepPlan` and the rows of a `TreeCache`.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from types import FunctionType, MethodType
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

import torch
from torch.nn import Module
from torch.nn.functional import conv1d
from transformers.activations import ACT2FN

from stand.forward.delta_rule import tree_delta_rule
from stand.forward.packed_plan import StepPlan
from stand.forward.recurrent_states import LayerStates

if TYPE_CHECKING:
    from stand.forward.tree_cache import TreeCache

CONVOLUTION, DELTA_RULE = "causal_conv1d_fn", "torch_chunk_gated_delta_rule"
CHUNK = 64  # tokens of a prompt that one triangular system takes


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
                vars(forward.layer)["forward"] = forward
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
        names = {**own.__globals__, CONVOLUTION: self._convolve, DELTA_RULE: self._mix}
        self._run = FunctionType(own.__code__, names, own.__name__, own.__defaults__, own.__closure__)
        self._plan: StepPlan | None = None
        self._cache: TreeCache | None = None
        self._states: LayerStates | None = None

    def __call__(self, hidden_states: torch.Tensor, cache_params: TreeCache, **kwargs: object) -> torch.Tensor:
        """[1, M, D] of packed tokens."""
        self._cache, self._plan = cache_params, cache_params.plan
        try:
            return self._run(self.layer, hidden_states, _NO_CACHE, None)
        finally:
            self._cache = self._plan = self._states = None

    def __reduce__(self) -> tuple:
        """A copy of the layer runs its class's forward."""
        return _own_forward, (self.layer,)

    def _convolve(
        self,
        hidden_states: torch.Tensor,  # [1, C, M]
        weight: torch.Tensor,  # [C, N + 1]
        bias: torch.Tensor | None = None,
        activation: str | None = None,
        **kwargs: object,
    ) -> torch.Tensor:
        """[1, C, M]: every token with the N before it on its path."""
        plan, inputs, size = self._plan, hidden_states[0].T, weight.shape[1]
        layer = self._states = self._cache.recurrent.layer(self.layer.layer_idx, inputs, size - 1)
        tails = layer.tails[plan.first_row : plan.first_row + plan.num_rows].flatten(0, 1)
        layer.inputs = torch.cat([tails, inputs])
        if plan.is_prompt:
            mixed = conv1d(layer.inputs.T[None].to(weight.dtype), weight[:, None], bias, groups=len(weight))
            layer.tails[plan.first_row] = layer.inputs[len(layer.inputs) - size + 1 :]
        else:
            windows = layer.inputs[plan.paths_back(size).to(inputs.device)].float()  # [M, N + 1, C]
            mixed = (windows * weight.T.float()).sum(dim=1)
            mixed = (mixed if bias is None else mixed + bias.float()).to(weight.dtype).T[None]
        mixed = mixed if activation is None else ACT2FN[activation](mixed)
        return mixed.to(hidden_states.dtype)

    def _mix(
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
        plan, layer, heads = self._plan, self._states, value.shape[2]
        if layer.states is None:
            shape = (self._cache.num_rows, heads, key.shape[3], value.shape[3])
            layer.states = torch.zeros(shape, dtype=torch.float32, device=value.device)
        query, key = (_widened(states, heads) for states in (query, key))
        trees = [plan.pad_rows(states[0].float()).transpose(1, 2) for states in (query, key, value, g, beta)]
        output = self._over_prompt(*trees) if plan.is_prompt else self._over_drafts(*trees)
        return plan.unpad_rows(output.transpose(1, 2)).to(value.dtype)[None], None

    def _over_drafts(self, query, key, value, log_decay, beta) -> torch.Tensor:  # [A, H, T, ...]
        plan = self._plan
        states = self._states.states[plan.first_row : plan.first_row + plan.num_rows]
        output, self._states.changes = tree_delta_rule(
            query, key, value, log_decay=log_decay, beta=beta, states=states, seen=plan.seen.to(value.device)
        )
        return output

    def _over_prompt(self, query, key, value, log_decay, beta) -> torch.Tensor:  # [1, H, M, ...]
        """Chunk by chunk; all tokens stay."""
        row, outputs = self._plan.first_row, []
        states = self._states.states[row : row + 1]
        for first in range(0, query.shape[2], CHUNK):
            part = slice(first, first + CHUNK)
            num_tokens = query[:, :, part].shape[2]
            output, changes = tree_delta_rule(
                query[:, :, part],
                key[:, :, part],
                value[:, :, part],
                log_decay=log_decay[:, :, part],
                beta=beta[:, :, part],
                states=states,
                seen=torch.ones(1, 1, num_tokens, num_tokens, dtype=torch.bool, device=query.device).tril(),
            )
            outputs.append(output)
            states = changes.states_after(states, torch.tensor([num_tokens - 1], device=query.device))
        self._states.states[row] = states[0]
        self._states.inputs = None
        return torch.cat(outputs, dim=2)


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
    if model not in _KNOWN:
        _KNOWN[model] = [RecurrentForward(layer) for layer in model.modules() if _is_recurrent(layer)]
    return _KNOWN[model]


def _is_recurrent(layer: Module) -> bool:
    code = getattr(inspect.unwrap(type(layer).forward), "__code__", None)
    return code is not None and {CONVOLUTION, DELTA_RULE} <= set(code.co_names) and hasattr(layer, "layer_idx")


def _is_own(layer: Module) -> bool:
    """Whether it runs its class's forward: nobody has put another one into its place."""
    forward = vars(layer).get("forward")
    return forward is None or (isinstance(forward, MethodType) and forward.__func__ is type(layer).forward)


def _own_forward(layer: Module) -> MethodType:
    return MethodType(type(layer).forward, layer)


def _restore(layers: list[Module]) -> None:
    for layer in layers:
        if isinstance(vars(layer).get("forward"), RecurrentForward):
            del vars(layer)["forward"]


def _widened(states: torch.Tensor, num_heads: int) -> torch.Tensor:
    """[1, M, Hk, K] -> [1, M, H, K]: every key head serves as many heads that follow each other."""
    return states.repeat_interleave(num_heads // states.shape[2], dim=2)
