"""The forward of a layer by the gated delta rule, whose decays and rates are left to the kernels of the rule."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from types import SimpleNamespace

import torch
from torch import nn

from stand.forward.recurrent.gates import DeltaGates
from stand.forward.recurrent.layers import RecurrentForward, is_recurrent
from stand.forward.recurrent.tree_scan import Scan
from stand.fusion.forwards.merged_linear import MergedLinear
from stand.fusion.forwards.norm import norm_epsilon
from stand.fusion.kernels import Kernels

RATE_SCALES = (1.0, 2.0)  # of beta; 2 where updates may be negative


@dataclass(frozen=True, slots=True)
class DeltaParts:
    """Names of a layer's children. inputs: what they give side by side goes through the convolution.

    gate, rate, decay: None where `inputs` give these, too, key head by key head.
    """

    inputs: tuple[str, ...]
    gate: str | None
    rate: str | None
    decay: str | None
    norm: str
    output: str

    @property
    def names(self) -> set[str]:
        rest = (self.gate, self.rate, self.decay, self.norm, self.output)
        return {"conv1d", *self.inputs, *(name for name in rest if name is not None)}


SEPARATE = DeltaParts(("in_proj_qkv",), "in_proj_z", "in_proj_b", "in_proj_a", "norm", "out_proj")  # Qwen3.5
BY_KEY_HEAD = DeltaParts(("in_proj_qkvz", "in_proj_ba"), None, None, None, "norm", "out_proj")  # Qwen3-Next
SINGLE = DeltaParts(("q_proj", "k_proj", "v_proj"), "g_proj", "b_proj", "a_proj", "o_norm", "o_proj")  # OLMo Hybrid
KNOWN = (SEPARATE, BY_KEY_HEAD, SINGLE)
SIZES = ("num_v_heads", "head_k_dim", "head_v_dim", "key_dim", "value_dim")
NEEDED = ("A_log", "dt_bias", "activation", *SIZES)
ORDERS = "fix_query_key_value_ordering"  # the method that says how inputs by key head lie


class FusedDeltaLayer:
    """Stands for `module.forward` wherever the cache has a `scan`; any other cache gets the module's own forward.

    rate_scale: one of `RATE_SCALES`, found by trial. order: of the gated norm, one of `formulas.GATE_ORDERS`, None
    where that is not fused by itself. merged: of the module's linear layers, of use here where it has the inputs.
    """

    def __init__(
        self,
        module: nn.Module,
        rate_scale: float,
        kernels: Kernels,
        *,
        order: int | None,
        merged: MergedLinear | None,
    ):
        self.module, self.rate_scale, self.kernels, self.order = module, rate_scale, kernels, order
        self.parts = delta_parts(module)
        inputs = tuple(getattr(module, name) for name in self.parts.inputs)
        self.merged = merged if merged is not None and merged.parts == inputs else None
        self._columns = None if self.parts is not BY_KEY_HEAD else _column_order(module, inputs)

    def __call__(
        self,
        hidden_states: torch.Tensor,
        cache: object = None,  # called by the one name or another
        cache_params: object = None,
        past_key_values: object = None,
        **kwargs: object,
    ) -> torch.Tensor:
        """[1, M, D] of packed tokens."""
        taken = next((given for given in (cache, cache_params, past_key_values) if given is not None), None)
        if not hasattr(taken, "scan") or hidden_states.shape[0] != 1:
            return type(self.module).forward(self.module, hidden_states, taken, **kwargs)
        return self.mixed(hidden_states, taken.scan())

    def on_chain(self, hidden_states: torch.Tensor, **kwargs: object) -> torch.Tensor:
        """[1, M, D] of a row without a past whose M tokens follow each other, by the kernels."""
        return self.mixed(hidden_states, _chain(self.module, self.kernels, hidden_states))

    def mixed(self, hidden_states: torch.Tensor, scan: Scan) -> torch.Tensor:
        """[1, M, D] of packed tokens."""
        module, index, dtype = self.module, self.module.layer_idx, hidden_states.dtype
        inputs, gate, rate, decay = self._inputs(hidden_states)
        convolution = module.conv1d.weight.squeeze(1), module.conv1d.bias, module.activation
        states = scan.convolve(index, inputs, *convolution).to(dtype)
        parts = states.split([module.key_dim, module.key_dim, module.value_dim], dim=1)
        sizes = module.head_k_dim, module.head_k_dim, module.head_v_dim
        operands = [part.unflatten(1, (-1, size)) for part, size in zip(parts, sizes, strict=True)]
        gates = DeltaGates(decay, rate, module.A_log, module.dt_bias, self.rate_scale)
        output = scan.delta_rule(index, *operands, gates)
        return getattr(module, self.parts.output)(self._normed(output, gate)[None])

    @property
    def passed(self) -> tuple[str, ...]:
        """The children that are not called."""
        return (*(() if self.order is None else (self.parts.norm,)), *(self.parts.inputs if self.merged else ()))

    def _inputs(self, hidden_states: torch.Tensor) -> Sequence[torch.Tensor]:
        """What goes through the convolution [M, C], gates [M, H V], and what rates and decays come from, [M, H]."""
        module, parts = self.module, self.parts
        if self.merged is not None:
            inputs = self.merged(hidden_states)[0]
        else:
            several = [getattr(module, name)(hidden_states)[0] for name in parts.inputs]
            inputs = several[0] if len(several) == 1 else torch.cat(several, dim=1)
        if self._columns is None:
            rest = parts.gate, parts.rate, parts.decay
            return inputs, *(getattr(module, name)(hidden_states)[0] for name in rest)
        heads = module.num_v_heads
        sizes = [2 * module.key_dim + module.value_dim, module.value_dim, heads, heads]
        return inputs.index_select(1, self._columns).split(sizes, dim=1)

    def _normed(self, output: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
        """[M, H V] of [M, H, V]; heads are normed each by itself."""
        norm, size = getattr(self.module, self.parts.norm), output.shape[2]
        if self.order is None:
            return norm(output.flatten(0, 1), gate.reshape(-1, size)).view(len(output), -1)
        return self.kernels.gated_rms_norm(
            output.flatten(1), gate, norm.weight, norm_epsilon(norm), size, self.order
        )  # fmt: skip


def is_delta_layer(module: nn.Module) -> bool:
    """Whether the module has the parts of such a layer by their usual names."""
    return is_recurrent(module) and delta_parts(module) is not None


def delta_parts(module: nn.Module) -> DeltaParts | None:
    """Under which names it has them, or None."""
    if not all(hasattr(module, name) for name in NEEDED):
        return None
    children = module._modules.keys()
    found = next((parts for parts in KNOWN if parts.names <= children), None)
    return None if found is BY_KEY_HEAD and not hasattr(module, ORDERS) else found


def own_on_chain(module: nn.Module, kernels: Kernels, hidden_states: torch.Tensor, **kwargs: object) -> torch.Tensor:
    """What `FusedDeltaLayer.on_chain` should give: the module's own forward, with gates that it computes by itself."""
    scan = _chain(module, kernels, hidden_states)
    return RecurrentForward(module)(hidden_states, SimpleNamespace(scan=lambda: scan))


def _chain(module: nn.Module, kernels: Kernels, hidden_states: torch.Tensor) -> Scan:
    """For states [1, M, D]."""
    channels, size = module.conv1d.weight.shape[0], module.conv1d.weight.shape[-1]
    shape = (1, module.num_v_heads, module.head_k_dim, module.head_v_dim)
    states = hidden_states.new_zeros(shape, dtype=torch.float32)
    tails = hidden_states.new_zeros(1, size - 1, channels)
    return kernels.chain_scan(module.layer_idx, hidden_states.shape[1], tails, states)


def _column_order(module: nn.Module, inputs: Sequence[nn.Module]) -> torch.Tensor:
    """[sum of outputs] int64: columns of all inputs side by side in the order of queries, keys, values, gates, rates,
    decays, which the module's own method says."""
    sizes, device = [layer.out_features for layer in inputs], module.A_log.device
    columns = torch.arange(sum(sizes), device=device)[None, None].split(sizes, dim=2)
    return torch.cat([part.flatten() for part in getattr(module, ORDERS)(*columns)])
