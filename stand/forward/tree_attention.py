"""Tree attention as a transformers attention function, on any device torch runs on.

Registered in `AttentionInterface` only: without a mask function of the same name transformers builds no mask at all,
and this function makes its own from the step's plan. It never leaves a model switched over: see `tree_attention`.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from weakref import WeakKeyDictionary

import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, PreTrainedConfig, PreTrainedModel

from stand.forward.attention_shape import AttentionShape
from stand.forward.few_tokens.attention import is_supported, supported_attention
from stand.forward.few_tokens.linear_layers import few_token_layers
from stand.forward.latent_keys import latent_keys_of, unexpanded_keys
from stand.forward.model import text_config
from stand.forward.modules import modules_of
from stand.forward.packed_plan import StepPlan, plain_forward_error, running_plan
from stand.forward.recurrent.layers import recurrent_forwards

PREFIX = "stand_"  # of every attention that this project registers
ATTENTION_NAME = "stand_tree"
_WARNINGS = logging.getLogger("transformers.modeling_utils")  # getting it takes a lock that an interrupt could keep


class OwnMaskError(ValueError):
    """A model masks tokens by itself."""


def attend(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    stand_plan: StepPlan | None = None,
    **kwargs: object,
) -> tuple[torch.Tensor, None]:
    """Attention of packed tokens over their own rows.

    query [1, H, M, D] packed and rotated; key, value [A, Hkv, L, D] as `TreeCache.update` returned them;
    result [1, M, H, D]. `attention_mask` is None unless a model makes one of its own, which is refused; further keyword
    arguments of other back ends (dropout, is_causal, ...) mean nothing here.
    """
    if attention_mask is not None:
        raise OwnMaskError(
            f"attention must get no mask but that of the tree, got one of shape {list(attention_mask.shape)} that "
            f"{type(module).__name__} makes itself; it counts cache slots, which a tree does not follow"
        )
    stand_plan = _fitting(stand_plan, module, query, key)
    latent = latent_keys_of(module)
    if stand_plan.attentions is not None:
        shape = AttentionShape.seen(query, key, value, sliding_window, is_latent=latent is not None)
        stand_plan.attentions.append(shape)
    scale = scaling if scaling is not None else query.shape[3] ** -0.5
    if latent is not None:
        query, key, value = latent.absorbed(query), torch.cat((key, value), dim=-1), key
    if softcap is None and s_aux is None and stand_plan.has_few_tokens and is_supported(query, key, value):
        few = supported_attention(query, key, value, stand_plan.paths, scale=scale, window=sliding_window or 0)
        return few, None
    groups = query.shape[1] // key.shape[1]
    kind = {"window": sliding_window, "groups": groups, "dtype": query.dtype}

    def mix(queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        """[A, H, T, D] queries over [A, Hkv, L, D], heads of one key head folded into the query axis."""
        rows, heads, width, size = queries.shape
        folded = queries.reshape(rows, keys.shape[1], groups * width, size)
        if softcap is None and s_aux is None:
            mixed = scaled_dot_product_attention(folded, keys, values, attn_mask=mask, scale=scale)
        else:
            mixed = _explicit_attention(folded, keys, values, mask, scale=scale, softcap=softcap, sinks=s_aux)
        return mixed.reshape(rows, heads, width, values.shape[3])

    packed = stand_plan.unpad(mix(stand_plan.pad(query[0]), key, value, stand_plan.mask(**kind)))
    if stand_plan.overflow:
        for (row, first, end), mask in zip(stand_plan.overflow, stand_plan.overflow_masks(**kind), strict=True):
            rest = mix(query[:, :, first:end], key[row : row + 1], value[row : row + 1], mask)
            packed[:, first:end] = rest.transpose(1, 2)
    packed = packed if latent is None else latent.expanded(packed)
    return packed.contiguous(), None  # as transformers' own functions give it: models take views of it


def _fitting(plan: StepPlan | None, module: torch.nn.Module, query: torch.Tensor, key: torch.Tensor) -> StepPlan:
    """The plan of these queries and keys, where they are, from the one that attention was called with, if any."""
    plan = running_plan(query, key) if plan is None else plan
    if plan is None:
        raise plain_forward_error(f"the {ATTENTION_NAME} attention")
    plan = plan.on(query.device)
    if query.shape[2] != plan.num_tokens:
        plan = plan.last(query.shape[2])
    if not plan.fits(query, key):  # compiled attention would read behind the keys
        raise ValueError(
            f"attention must get the keys of all {plan.num_rows} rows of a step, {plan.kv_length} slots of each, got "
            f"{list(key.shape)} from {type(module).__name__}; this model class cannot be served"
        )
    return plan


def _explicit_attention(
    query: torch.Tensor,  # [A, Hkv, G * T, D]
    key: torch.Tensor,  # [A, Hkv, L, D]
    value: torch.Tensor,
    mask: torch.Tensor,  # [A, 1, G * T, L]
    *,
    scale: float,
    softcap: float | None,
    sinks: torch.Tensor | None,  # [H]
) -> torch.Tensor:
    """Soft-capped scores (Gemma 2) and attention sinks (gpt-oss: one extra logit per head that takes mass)."""
    scores = torch.matmul(query, key.transpose(2, 3)) * scale
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    scores = (scores + mask).float()
    if sinks is not None:
        groups = sinks.numel() // key.shape[1]
        column = sinks.float().view(1, key.shape[1], groups, 1, 1)
        column = column.expand(query.shape[0], -1, -1, query.shape[2] // groups, 1)
        scores = torch.cat([scores, column.reshape(query.shape[0], key.shape[1], query.shape[2], 1)], dim=-1)
    weights = torch.softmax(scores, dim=-1)[..., : key.shape[2]]
    return torch.matmul(weights.to(value.dtype), value)


AttentionInterface.register(ATTENTION_NAME, attend)


@contextmanager
def tree_attention(model: PreTrainedModel, name: str = ATTENTION_NAME) -> Iterator[None]:
    """Run the block with tree attention, `few_token_layers`, `recurrent_forwards` and `unexpanded_keys`, or with the
    attention registered as `name` alone; then give the model back as it was, also where an interrupt cuts the way in or
    out."""
    is_whole = name == ATTENTION_NAME
    with (
        exclusive(model),
        few_token_layers(model) if is_whole else nullcontext(),
        recurrent_forwards(model) if is_whole else nullcontext(),
        unexpanded_keys(model) if is_whole else nullcontext(),
    ):
        reached, own = _configs(model)
        before = [(config, config._attn_implementation) for config in [*own, *reversed(reached)]]
        if not is_swapped(model):
            _TURNS[model].own = before
        try:
            with _without_warnings():
                model.set_attn_implementation(name)
            for config in own:
                config._attn_implementation_internal = name
            yield
        finally:
            try:
                _restore(before)
            except BaseException:
                _restore(before)
                raise


@contextmanager
def exclusive(model: PreTrainedModel) -> Iterator[None]:
    """Keep other threads from running this model, and models that share its configuration, in the block: they wait, and
    get their turn in the order in which they came. Within one thread blocks may nest."""
    turns = _TURNS.get(model) or _turns_of(model)
    if turns.thread == threading.get_ident():
        yield
        return
    if turns.process != os.getpid() and (turns.line.locked() or turns.turn.locked()):
        raise ValueError(
            "a process must be forked while no thread runs the model, got one forked amid a call, which goes on in its "
            "parent alone; fork earlier, or start processes by 'spawn'"
        )
    with turns.line, turns.turn:
        pass  # who gives the turn back and wants it again comes behind those who wait
    with turns.turn:
        try:
            turns.thread, turns.process = threading.get_ident(), os.getpid()
            if is_swapped(model):  # an interrupt has left it there
                _restore(turns.own)
            yield
        finally:
            turns.thread = None


def is_awaited(model: PreTrainedModel) -> bool:
    """Whether another thread waits for the model, which this one runs."""
    return _TURNS[model].line.locked()


class _Turns:
    """Who runs a model."""

    def __init__(self) -> None:
        self.line, self.turn = threading.Lock(), threading.Lock()
        self.thread: int | None = None  # whose turn it is
        self.process = os.getpid()  # of the thread that had the last turn
        self.own: list[tuple[PreTrainedConfig, str | None]] = []  # the attention that the user has chosen


_TURNS: WeakKeyDictionary[PreTrainedModel, _Turns] = WeakKeyDictionary()  # of models in use
_NEW_TURNS = threading.Lock()


def _turns_of(model: PreTrainedModel) -> _Turns:
    """Models that share a configuration, in which attention is chosen, take turns with each other."""
    with _NEW_TURNS:
        own = _config_numbers(model)
        for other, turns in list(_TURNS.items()):
            if own & _config_numbers(other):
                return _TURNS.setdefault(model, turns)
        return _TURNS.setdefault(model, _Turns())


def _config_numbers(model: PreTrainedModel) -> set[int]:
    return {id(config) for configs in _configs(model) for config in configs}


def is_swapped(model: PreTrainedModel) -> bool:
    """Whether an attention of this project runs the model, by the text model's configuration: one around it may not let
    its attention be set (GOT-OCR2)."""
    return str(text_config(model)._attn_implementation).startswith(PREFIX)


def _configs(model: PreTrainedModel) -> tuple[list[PreTrainedConfig], list[PreTrainedConfig]]:
    """Where attention is looked up: in those that `set_attn_implementation` reaches, the model's own one first, and in
    those that layers have for themselves, as copies of layers do."""
    reached = [model.config]
    for config in reached:  # which grows
        reached += [part for key in config.sub_configs if (part := getattr(config, key, None)) is not None]
    own: dict[int, PreTrainedConfig] = {}
    for part in modules_of(model):
        config = vars(part).get("config")
        if isinstance(part, PreTrainedModel):
            reached.append(config)
        elif isinstance(config, PreTrainedConfig):
            own[id(config)] = config
    for config in reached:
        own.pop(id(config), None)
    return reached, list(own.values())


def _restore(implementations: list[tuple[PreTrainedConfig, str | None]]) -> None:
    for config, name in implementations:
        config._attn_implementation_internal = name  # the property would set inner configurations, too


@contextmanager
def _without_warnings() -> Iterator[None]:
    """transformers warns each time of parts whose attention it cannot set, as towers of images; text does not run
    them."""
    thread = threading.get_ident()

    def is_of_others(record: logging.LogRecord) -> bool:
        return record.thread != thread

    _WARNINGS.addFilter(is_of_others)
    try:
        yield
    finally:
        _WARNINGS.removeFilter(is_of_others)
