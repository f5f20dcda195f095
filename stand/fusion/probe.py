"""What a module computes, recorded in full: the ground on which a fused forward is accepted or refused.

One forward of the model over a few random tokens records how every module is called. `Probe.outcome` then runs one
module again, with random hidden states of several magnitudes in place of the recorded ones, and keeps everything that
leaves it: its outputs, what it hands to the attention function, and what it writes to the cache.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

import torch
from torch import nn
from transformers import AttentionInterface, PreTrainedModel

from stand.forward.cache.cache_argument import cache_argument
from stand.forward.model import max_positions, moving_ropes, text_config
from stand.forward.recurrent.layers import is_recurrent
from stand.forward.tree_attention import tree_attention

PROBE_NAME = "stand_probe"
NUM_TOKENS = 5
NUM_ROWS, ROOM = 2, 8  # of the probe's cache
FEW_POSITIONS = 128
# Rows of ordinary, small, large and very large size: a wrong epsilon shows in the second only, a clamp in the last.
SCALES = (1.0, 1e-2, 4.0, 100.0)
# Largest difference, as a share of the largest value of its row, that rounding explains: two steps of the last place
# of the 16-bit types.
MODULE_TOLERANCES = {torch.float32: 1e-5, torch.bfloat16: 2.0**-6, torch.float16: 2.0**-9}


@dataclass
class Outcome:
    """Tensors by name, keyword arguments that the attention function got from the module itself, types of results."""

    tensors: dict[str, torch.Tensor] = field(default_factory=dict)
    constants: dict[str, object] = field(default_factory=dict)
    kinds: tuple[type, ...] = ()
    storages: tuple[torch.Tensor, torch.Tensor] | None = None  # of the cache, where something was written to it


class ProbeCache:
    """A cache of one layer with slots: what `DeviceCache` is to a model, in the smallest form."""

    def __init__(self, slots: torch.Tensor):
        self.slots = slots  # [M] int64
        self.storages: tuple[torch.Tensor, torch.Tensor] | None = None  # keys and values [R, Hkv, S, D]

    def allocate(self, key: torch.Tensor, value: torch.Tensor) -> None:
        """For keys and values [*, Hkv, *, D], whose sizes may differ."""
        self.storages = tuple(like.new_zeros(NUM_ROWS, like.shape[1], ROOM, like.shape[3]) for like in (key, value))

    def layer(self, layer_idx: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self.storages

    def seen(self, layer_idx: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self.layer(layer_idx)

    def update(
        self, key: torch.Tensor, value: torch.Tensor, layer_idx: int, *args: object, **kwargs: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if self.storages is None:
            self.allocate(key, value)
        for storage, states in zip(self.storages, (key, value), strict=True):
            storage[self.slots // ROOM, :, self.slots % ROOM] = states[0].transpose(0, 1)
        return self.layer(layer_idx)


class Probe:
    """Recorded calls of `modules` in one forward of the model; only modules that were called are in `calls`."""

    def __init__(self, model: PreTrainedModel, modules: Iterable[nn.Module]):
        self._model = model
        self._generator = torch.Generator().manual_seed(0)
        self.calls: dict[nn.Module, tuple[tuple, dict]] = {}
        places = torch.randperm(NUM_ROWS * ROOM, generator=self._generator, device="cpu")[:NUM_TOKENS]
        self._slots = places.to(model.device)
        self._noise: dict[tuple[int, ...], torch.Tensor] = {}
        self._record(list(modules))

    def outcome(self, module: nn.Module, forward: Callable, *, like: Outcome | None = None) -> Outcome:
        """Run `forward` as the model calls `module`, with the cache of the probe if it is an attention module.

        like: an outcome of the same module, for a forward that cannot make the cache itself.
        """
        arguments, keywords = self.calls[module]
        arguments, keywords = self._with_noise(arguments), self._with_noise_by_name(keywords)
        cache, seen = ProbeCache(self._slots), {}
        if like is not None and like.storages is not None:
            cache.allocate(*like.storages)
        has_states = any(map(is_recurrent, module.modules()))  # which this cache does not keep
        if (argument := cache_argument(module)) in keywords and not has_states:
            keywords |= {argument: cache, "stand_probe": seen}
        with tree_attention(self._model, PROBE_NAME), torch.inference_mode():
            result = forward(*arguments, **keywords)
        outcome = _outcome(result, seen, passed=keywords)
        outcome.storages = cache.storages
        return outcome

    def _record(self, modules: list[nn.Module]) -> None:
        def remember(module: nn.Module, arguments: tuple, keywords: dict) -> None:
            self.calls[module] = (arguments, {k: v for k, v in keywords.items() if k != "stand_probe"})

        vocabulary, reach = text_config(self._model).vocab_size, _reach(self._model)
        tokens = torch.randint(vocabulary, (1, NUM_TOKENS), generator=self._generator, device="cpu").to(
            self._model.device
        )
        positions = torch.linspace(0, reach - 1, NUM_TOKENS, device=self._model.device).long()[None]
        hooks = [module.register_forward_pre_hook(remember, with_kwargs=True) for module in modules]
        try:
            with tree_attention(self._model, PROBE_NAME), torch.inference_mode():
                self._model(input_ids=tokens, position_ids=positions, use_cache=False, stand_probe={})
        finally:
            for hook in hooks:
                hook.remove()

    def _with_noise(self, arguments: tuple) -> tuple:
        return (self._noise_like(arguments[0]), *arguments[1:]) if arguments else arguments

    def _with_noise_by_name(self, keywords: dict) -> dict:
        name = "hidden_states"
        return {**keywords, name: self._noise_like(keywords[name])} if name in keywords else dict(keywords)

    def _noise_like(self, states: torch.Tensor) -> torch.Tensor:
        """Normal values of the same shape and dtype; rows along the second last dimension differ in size."""
        shape = tuple(states.shape)
        if shape not in self._noise:
            values = torch.randn(shape, generator=self._generator, device="cpu")
            sizes = torch.tensor(SCALES, device="cpu").repeat(-(-shape[-2] // len(SCALES)))[: shape[-2], None]
            self._noise[shape] = (values * sizes).to(states.device, states.dtype)
        return self._noise[shape].clone()


def difference(reference: Outcome, outcome: Outcome) -> tuple[float, str | None]:
    """Largest difference relative to the largest value of its row, over all tensors; or what differs in kind.

    Rows where the reference itself overflows, as float16 may, say nothing.
    """
    if reference.tensors.keys() != outcome.tensors.keys() or reference.kinds != outcome.kinds:
        return float("inf"), "it computes other things"
    if not _same_constants(reference.constants, outcome.constants):
        return float("inf"), "it hands the attention function other arguments"
    largest = 0.0
    for name, expected in reference.tensors.items():
        got = outcome.tensors[name]
        if got.shape != expected.shape or got.dtype != expected.dtype:
            return float("inf"), f"its {name} has another shape or dtype"
        is_finite = expected.isfinite().all(dim=-1)
        if not is_finite.any():
            return float("inf"), f"its {name} is not finite"
        errors = (got.float() - expected.float()).abs().amax(dim=-1)
        sizes = expected.float().abs().amax(dim=-1).clamp_min(torch.finfo(torch.float32).tiny)
        largest = max(largest, float((errors / sizes)[is_finite].nan_to_num(nan=torch.inf).max()))
    return largest, None


def is_silent(outcome: Outcome) -> bool:
    """Whether all is zero that positions, or the module's formula, would show in: weights may be loaded later."""
    turned = [outcome.tensors[name] for name in ("query", "keys") if name in outcome.tensors]
    return not any(bool(tensor.any()) for tensor in turned or outcome.tensors.values())


def _reach(model: PreTrainedModel) -> int:
    """Positions to try: all that the model was made for, because an attention may treat far ones differently.

    Rotary embeddings that adapt to the longest position seen would be changed by a far one: few positions there.
    """
    limit = max_positions(model) or FEW_POSITIONS
    return min(limit, FEW_POSITIONS) if moving_ropes(model) else limit


def _outcome(result: object, seen: dict, *, passed: Mapping[str, object]) -> Outcome:
    parts = result if isinstance(result, tuple) else (result,)
    outcome = Outcome(kinds=(type(result), *map(type, parts)))
    outcome.tensors = {f"output {index}": part for index, part in enumerate(parts) if isinstance(part, torch.Tensor)}
    if seen:
        outcome.tensors |= {name: seen[name] for name in ("query", "keys", "values")}
        outcome.constants = {name: value for name, value in seen["keywords"].items() if name not in passed}
    return outcome


def _attend(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    stand_probe: dict | None = None,
    **keywords: object,
) -> tuple[torch.Tensor, None]:
    """Gives queries in place of mixed values, and zeros where values are longer."""
    if stand_probe is None:
        raise ValueError(
            f"layers that are fused must hand on to their attention what the model is called with, got "
            f"{type(module).__name__} without; pass fuse=False, which is the same here"
        )
    stand_probe |= {"query": query, "keys": key, "values": value, "keywords": keywords}
    mixed = query.new_zeros(*query.shape[:3], value.shape[3])
    size = min(query.shape[3], value.shape[3])
    mixed[..., :size] = query[..., :size]
    return mixed.transpose(1, 2).contiguous(), None


AttentionInterface.register(PROBE_NAME, _attend)


def _same_constants(first: Mapping[str, object], second: Mapping[str, object]) -> bool:
    return first.keys() == second.keys() and all(_same(first[name], second[name]) for name in first)


def _same(first: object, second: object) -> bool:
    if isinstance(first, torch.Tensor) or isinstance(second, torch.Tensor):
        return first is second
    return first == second
