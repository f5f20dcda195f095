"""The first forward of a prompt that shows something: the model's own, over this project's cache."""

from __future__ import annotations

import numpy as np
import torch
from transformers import PreTrainedModel
from transformers.cache_utils import Cache

from stand.forward.cache.cache_argument import cache_argument
from stand.forward.cache.tree_cache import TreeCache
from stand.forward.devices import input_device
from stand.forward.model_state import unchanged
from stand.forward.packed_plan import StepPlan, running
from stand.forward.recurrent.layers import recurrent_forwards
from stand.forward.recurrent.tree_scan import TreeScan
from stand.forward.tree_attention import is_swapped
from stand.media.media import Media, MediaError, misfits_refused


class _EmptyCache(Cache):
    """A `TreeCache` as transformers' masks see it before a text's first forward: nothing is in it."""

    def __init__(self, cache: TreeCache):
        super().__init__(layers=[])
        self._cache = cache

    def update(self, *args: object, **kwargs: object) -> tuple[torch.Tensor, torch.Tensor]:
        return self._cache.update(*args, **kwargs)

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return 0

    def scan(self) -> TreeScan:
        return self._cache.scan()


def refuse_midst(model: PreTrainedModel, media: Media) -> None:
    """Raise MediaError amid a step: towers and masks need the model's own attention."""
    if is_swapped(model):
        raise MediaError(
            f"a prompt with {', '.join(media.inputs)} must begin between steps, got one in the midst of another call's "
            "step (on_step, a criterion); begin it between trajectories, or after the call"
        )


def prefill_media(model: PreTrainedModel, cache: TreeCache, token_ids: np.ndarray, media: Media) -> int:
    """Write the keys of a text, int32 [L], into the empty row 0 of `cache`, up to where it is text alone; returns how
    many tokens that are.

    Attention, masks, positions and towers are the model's own: tokens of an image may see each other (Gemma 3), places
    in it may count (M-RoPE, arXiv 2409.12191), and layers may be given further features of it (arXiv 2406.04334). So
    all is one forward, not chunks.

    Raises MediaError for what does not fit, and amid another call's step, where the attention is not the model's own.
    """
    refuse_midst(model, media)
    end = media.text_start
    plan = StepPlan.for_prompt(token_ids[:end], 0, row=0, device=input_device(model))
    cache.begin(plan)
    with misfits_refused(model, media.inputs), unchanged(model), recurrent_forwards(model), running(plan):
        model(
            input_ids=plan.input_ids,
            position_ids=media.positions[..., :end],
            use_cache=True,
            logits_to_keep=torch.tensor([end - 1], device=plan.device),
            **media.inputs,
            **{name: types[:, :end] for name, types in media.types.items()},
            **{cache_argument(model): _EmptyCache(cache)},
        )
    return end
