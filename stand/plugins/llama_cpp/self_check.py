"""Does this model score trees as it scores texts, with the loaded weights, as llama.cpp runs them here?"""

from __future__ import annotations

import llama_cpp
import numpy as np
import torch
from llama_cpp import Llama

from stand.forward.model import prefill, run_plan
from stand.forward.packed_plan import StepPlan
from stand.forward.self_check import (
    CHECK_PARENTS,
    KEPT_NODE,
    UnsupportedModelError,
    check_case,
    check_tree,
    path_to,
    relative_difference,
)
from stand.plugins.llama_cpp.model import LlamaCppModel
from stand.trees import DraftBatch, DraftTree

TOLERANCE = 0.1  # of the logits' spread; quantised weights and keys in 16 bits are rounded by the size of a step
KEPT = ((KEPT_NODE, 1), (3, 0))  # ends of the two rows' paths, by step
LEAVES = sorted(set(range(len(CHECK_PARENTS))) - set(CHECK_PARENTS))


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
    """Raise UnsupportedModelError where trees, of two rows and after kept paths, are scored otherwise than texts."""
    difference = tree_difference(model)
    if not difference <= TOLERANCE:
        raise UnsupportedModelError(
            f"trees must be scored as texts are, up to rounding ({TOLERANCE:g} of the logits' spread), got "
            f"{difference:.3g}; this model, or this build of llama.cpp, cannot be served"
        )


@torch.inference_mode()
def tree_difference(model: LlamaCppModel) -> float:
    """`relative_difference` of two steps over drafts of two rows to a decoding of every path's whole text."""
    prompt, batch = check_case(model)
    keys, cache, texts = model.new_cache(), model.new_cache(), [prompt, prompt]
    prefill(model, keys, prompt, row=0)
    for row in range(len(texts)):
        cache.enter(row, keys, len(prompt))
    differences = []
    for turn, ends in enumerate(KEPT):
        trees = [check_tree(np.roll(batch.token_ids, turn + 3 * row)) for row in range(len(texts))]
        plan = StepPlan.for_drafts(DraftBatch.concatenate(trees), np.array(list(map(len, texts))))
        logits = run_plan(model, cache, plan).split(len(batch.token_ids))
        cache.keep_states(ends)
        paths = [path_to(end) for end in ends]
        for row, (tree, path) in enumerate(zip(trees, paths, strict=True)):
            differences += [_path_difference(model, texts[row], tree, leaf, logits[row]) for leaf in LEAVES]
            texts[row] = np.concatenate([texts[row], tree.token_ids[path]])
    return max(differences)


def _path_difference(model: LlamaCppModel, text: np.ndarray, tree: DraftTree, leaf: int, logits: torch.Tensor) -> float:
    path = path_to(leaf)
    tokens = np.concatenate([text, tree.token_ids[path]])
    plan = StepPlan.for_prompt(tokens, 0, row=0)
    return relative_difference(logits[path], run_plan(model, model.new_cache(), plan, logits_to_keep=len(path)))
