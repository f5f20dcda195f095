"""Which models of llama.cpp are served."""

from __future__ import annotations

import llama_cpp
import numpy as np
import torch
from llama_cpp import Llama

from stand.forward.model import run_plan
from stand.forward.packed_plan import StepPlan
from stand.forward.self_check import UnsupportedModelError
from stand.plugins.foreign.tree_check import check_trees
from stand.plugins.llama_cpp.model import LlamaCppModel

TOLERANCE = 0.1  # of the logits' spread; quantised weights and keys in 16 bits are rounded by the size of a step


def refuse_by_kind(llm: object) -> None:
    """Raise UnsupportedModelError for what keeps other things than keys, or is no language model."""
    if not isinstance(llm, Llama):
        raise UnsupportedModelError(
            f"wrap needs a llama_cpp.Llama, got {type(llm).__name__}; for a transformers model call stand.wrap"
        )
    model = llm.model
    kinds = {
        "a recurrent state": llama_cpp.llama_model_is_recurrent(model) or llama_cpp.llama_model_is_hybrid(model),
        "an encoder": llama_cpp.llama_model_has_encoder(model),
        "diffusion": llama_cpp.llama_model_is_diffusion(model),
    }
    for kind, is_there in kinds.items():
        if is_there:
            raise UnsupportedModelError(
                f"every layer must keep keys and values, got a model with {kind}; load its "
                "transformers model and call stand.wrap"
            )


def check_forwards(model: LlamaCppModel) -> None:
    """Raise UnsupportedModelError where trees are scored otherwise than texts."""

    def text_logits(tokens: np.ndarray, count: int) -> torch.Tensor:
        plan = StepPlan.for_prompt(tokens, 0, row=0)
        return run_plan(model, model.new_cache(), plan, logits_to_keep=count)

    check_trees(model, text_logits, tolerance=TOLERANCE, runner="llama.cpp")
