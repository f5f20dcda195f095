"""A transformers model as the engine runs it: its decoder's configuration, and one packed forward."""

from __future__ import annotations

import torch
from transformers import PreTrainedModel

from stand.forward.packed_plan import StepPlan
from stand.forward.tree_cache import TreeCache


def text_config(model: PreTrainedModel):
    """The decoder's own configuration, also inside a multimodal one."""
    return model.config.get_text_config(decoder=True)


def max_positions(model: PreTrainedModel) -> int | None:
    """The longest context that the model was made for, or None when its configuration does not say."""
    return getattr(text_config(model), "max_position_embeddings", None)


def run_plan(model: PreTrainedModel, cache: TreeCache, plan: StepPlan, *, logits_to_keep: int = 0) -> torch.Tensor:
    """One packed forward under `tree_attention`: logits [M, V], or of the last `logits_to_keep` tokens only."""
    cache.begin(plan)
    output = model(
        input_ids=plan.input_ids,
        position_ids=plan.position_ids,
        past_key_values=cache,
        use_cache=True,
        logits_to_keep=logits_to_keep,
        stand_plan=plan,
    )
    return output.logits[0]
