"""Texts that outgrow the short factors of a LongRoPE model (arXiv 2402.13753).

transformers rotates all tokens of a forward by one set of factors, chosen by its largest position. When a text comes to
be longer than the model was first trained for, `generate` of the classes below drops its keys, so that all of them are
computed anew by the long factors. A text's law is then that of a plain forward over the whole of it, at every length.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn
from transformers import PreTrainedModel
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from stand.forward.model import chooses_on_device, longrope_border, max_positions, text_config

# By `prepare_inputs_for_generation`; others go on with the keys of short factors. In transformers 5.16.1, and for
# Phi-4-multimodal in 5.24 too, what follows the drop is the newest token alone, so that `generate` forgets the text.
COMPUTING_ANEW = ("phi3", "phi4_multimodal")
FROZEN = "longrope that does not look at positions"


def switching_length(model: PreTrainedModel) -> int | None:
    """The length behind which a text's keys are computed anew; None where they never are."""
    config, border = text_config(model), longrope_border(model)
    is_known = config.model_type in COMPUTING_ANEW and getattr(config, "original_max_position_embeddings", None)
    is_outgrown = border is not None and config.max_position_embeddings > border
    return border if is_known == border and is_outgrown else None


def served_positions(model: PreTrainedModel) -> int | None:
    """The longest context that is served: `max_positions`, or with a `switching_length` what the model was made for."""
    return max_positions(model) if switching_length(model) is None else text_config(model).max_position_embeddings


@contextmanager
def long_factors(model: PreTrainedModel) -> Iterator[None]:
    """Within it every token is rotated by the long factors, wherever it stands: for prompts that are computed chunk by
    chunk. A whole step needs nothing, for its own positions are beyond the border."""
    kept: list[tuple[nn.Module, object]] = []
    try:
        for module in model.modules():
            if getattr(module, "rope_type", None) == "longrope" and "inv_freq" in module._buffers:
                short = module._buffers["inv_freq"]
                seq_len = longrope_border(model) + 1
                factors, _ = ROPE_INIT_FUNCTIONS["longrope"](module.config, short.device, seq_len=seq_len)
                if chooses_on_device():  # into that buffer, in its type
                    factors = factors.to(short.dtype)
                kept.append((module, short))
                module._buffers["inv_freq"], module.rope_type = factors, FROZEN
        yield
    finally:
        for module, short in kept:
            module._buffers["inv_freq"], module.rope_type = short, "longrope"
