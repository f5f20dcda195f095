"""A transformers model as the engine runs it: its decoder's configuration, one packed forward, and prompts."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import numpy as np
import torch
import transformers
from transformers import PreTrainedModel

from stand.forward.cache.cache_argument import cache_argument
from stand.forward.cache.tree_cache import TreeCache
from stand.forward.devices import input_device, off_one_device
from stand.forward.packed_plan import StepPlan, running

CHOSEN = ("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_k", "moe_top_k")  # of them by a token
EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")  # their number, by configurations
MOVING_ROPES = frozenset({"dynamic", "longrope"})
CHOOSING_ON_DEVICE = (5, 22)
# Largest logit difference, as a share of the logits' spread, that rounding explains (measured: fp32 1e-6, bf16 1e-2).
LOGIT_TOLERANCES = {torch.float32: 1e-3, torch.float64: 1e-6, torch.bfloat16: 0.15, torch.float16: 0.05}
PROMPT_CHUNK = 512  # prompt tokens per forward; bounds the mask to [512, L]


@torch.inference_mode()
def cast_dtype(model: PreTrainedModel) -> torch.dtype:
    """What a forward's LM head gives: `model.dtype`, or what the forward casts to by itself (autocast)."""
    seen = [model.dtype]
    hook = model.get_output_embeddings().register_forward_hook(lambda _, args, output: seen.append(output.dtype))
    try:
        model(input_ids=torch.zeros(1, 1, dtype=torch.int64, device=input_device(model)), use_cache=False)
    finally:
        hook.remove()
    return seen[-1]


def text_config(model: PreTrainedModel):
    """The decoder's own configuration, also inside a multimodal one."""
    return model.config.get_text_config(decoder=True)


def size_name(model: PreTrainedModel) -> str:
    """Type, sizes, bytes, and where it lies if not on one device: what the time of its steps depends on, for a file."""
    config = text_config(model)
    sizes = f"{config.num_hidden_layers}x{config.hidden_size}-{config.vocab_size}"
    if is_mixture(model):
        of_mixture = (getattr(config, name, None) for name in (*EXPERTS, *CHOSEN))
        sizes += "-" + "x".join(str(number) for number in of_mixture if number is not None)
    place = f" {off_one_device(model)}".rstrip().replace(" ", "-")
    return f"{config.model_type}-{sizes}-{model.get_memory_footprint()}{place}"


def is_mixture(model: PreTrainedModel) -> bool:
    """Whether tokens go to experts of their own, so that a step with more tokens reads more weights."""
    config = text_config(model)
    holders = config, getattr(config, "ffn_config", None)  # DBRX
    return any((getattr(holder, name, None) or 0) > 1 for holder in holders for name in EXPERTS)


def longrope_border(model: PreTrainedModel) -> int | None:
    """The length up to which a LongRoPE model rotates every token by its short factors; None for other models.

    One forward rotates all of its tokens by one set of factors, chosen by its largest position (transformers'
    `longrope_frequency_update`; arXiv 2402.13753). Up to the border there is one set, whatever shares the forward.
    """
    config = text_config(model)
    borders = [
        rope.get("original_max_position_embeddings") or getattr(config, "original_max_position_embeddings", None)
        for rope in _ropes(model)
        if rope.get("rope_type") == "longrope"
    ]
    return min((border for border in borders if border is not None), default=None)


def moving_ropes(model: PreTrainedModel) -> list[str]:
    """Its kinds of rotary positions whose frequencies depend on the longest position of a forward, by name."""
    return sorted({rope.get("rope_type") for rope in _ropes(model)} & MOVING_ROPES)


def waiting_ropes(model: PreTrainedModel) -> list[str]:
    """Those of `moving_ropes` for which the host waits to choose frequencies."""
    return [kind for kind in moving_ropes(model) if kind != "longrope" or not chooses_on_device()]


def chooses_on_device() -> bool:
    """Whether LongRoPE chooses its frequencies on the device, into a buffer that stays where it is: from transformers
    5.22 on."""
    release = tuple(int(part) for part in transformers.__version__.split(".")[:2])
    return release >= CHOOSING_ON_DEVICE


def _ropes(model: PreTrainedModel) -> list[dict]:
    """Parameters of its rotary positions; where layers differ, those of each kind of layer too."""
    ropes = getattr(text_config(model), "rope_parameters", None) or {}
    return [ropes, *(part for part in ropes.values() if isinstance(part, dict))]


def max_positions(model: PreTrainedModel) -> int | None:
    """The longest context with one set of rotary factors: what the model was made for, of a LongRoPE model no more than
    `longrope_border`; None when its configuration does not say. What is served: `long_factors.served_positions`."""
    limits = [getattr(text_config(model), "max_position_embeddings", None), longrope_border(model)]
    return min((limit for limit in limits if limit is not None), default=None)


def run_plan(
    model: PreTrainedModel, cache: TreeCache, plan: StepPlan, *, logits_to_keep: int | torch.Tensor = 0
) -> torch.Tensor:
    """One packed forward under `tree_attention`: logits [M, V], or of the last `logits_to_keep` tokens only, or of
    those of these indices."""
    cache.begin(plan)
    with fused(model, cache), running(plan):
        output = model(
            input_ids=plan.input_ids,
            position_ids=plan.position_ids,
            use_cache=True,
            logits_to_keep=logits_to_keep,
            stand_plan=plan,
            **{cache_argument(model): cache},
        )
    return output.logits[0].to(plan.device)  # of a model on several devices they lie on the last one


def fused(model: PreTrainedModel, cache: TreeCache) -> AbstractContextManager[None]:
    """The cache's fusion, where what it computes with serves the model as it is now."""
    fusion = getattr(cache, "fusion", None)
    if fusion is None or torch.is_grad_enabled() or torch.is_autocast_enabled("cpu") or model.dtype != fusion.dtype:
        return nullcontext()
    return fusion.active()


def prefill(
    model: PreTrainedModel,
    cache: TreeCache,
    token_ids: np.ndarray,
    done: int = 0,
    *,
    row: int,
    takes_features: bool = False,
    rotary_offset: int = 0,
) -> None:
    """Write the keys of `token_ids`, int32 [L], whose first `done` keys cache row `row` holds, chunk by chunk; the
    others are as in `prefill_chunk`."""
    asked = {"row": row, "takes_features": takes_features, "rotary_offset": rotary_offset}
    while done < len(token_ids):
        done = prefill_chunk(model, cache, token_ids, done, **asked)


def prefill_chunk(
    model: PreTrainedModel,
    cache: TreeCache,
    token_ids: np.ndarray,
    done: int,
    *,
    row: int,
    takes_features: bool = False,
    rotary_offset: int = 0,
) -> int:
    """The next chunk of `token_ids`, int32 [L], whose first `done` keys cache row `row` holds; how many it holds now.

    The chunks of a prompt are the same whenever they are run, and so are its keys. takes_features: whether somebody
    takes all tokens' last hidden states, so that no layer may leave tokens out. rotary_offset: as of a `Row`.
    """
    chunk = token_ids[done : done + PROMPT_CHUNK]
    if len(chunk):
        place = {"row": row, "rotary_offset": rotary_offset, "device": input_device(model)}
        plan = StepPlan.for_prompt(chunk, done, **place)
        leaves_out = getattr(text_config(model), "num_kv_shared_layers", 0) > 0  # tokens, where a number is kept
        is_whole = takes_features and leaves_out
        kept = torch.tensor([plan.num_tokens - 1], device=plan.device) if is_whole else 1
        run_plan(model, cache, plan, logits_to_keep=kept)
    return done + len(chunk)
