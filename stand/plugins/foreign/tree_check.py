"""Does a model that another library runs score trees as it scores texts, with the loaded weights?"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

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
from stand.plugins.foreign.model import ForeignModel
from stand.step import keep_paths
from stand.trees import DraftBatch

KEPT = ((KEPT_NODE, 1), (3, 0))  # ends of the two rows' paths, by step
LEAVES = sorted(set(range(len(CHECK_PARENTS))) - set(CHECK_PARENTS))


def check_trees(
    model: ForeignModel, text_logits: Callable[[np.ndarray, int], torch.Tensor], *, tolerance: float, runner: str
) -> None:
    """Raise UnsupportedModelError where trees, of two rows and after kept paths, are scored otherwise than texts.

    text_logits: [n, V] float32 of the last n tokens of a text, int32 [L]. tolerance: of the logits' spread, for
    rounding. runner: what runs the model, for the message."""
    difference = tree_difference(model, text_logits)
    if not difference <= tolerance:
        raise UnsupportedModelError(
            f"trees must be scored as texts are, up to rounding ({tolerance:g} of the logits' spread), got "
            f"{difference:.3g}; this model, or this build of {runner}, cannot be served"
        )


@torch.inference_mode()
def tree_difference(model: ForeignModel, text_logits: Callable[[np.ndarray, int], torch.Tensor]) -> float:
    """`relative_difference` of two steps over drafts of two rows to every path's whole text."""
    prompt, batch = check_case(model)
    keys, cache, texts = model.new_cache(), model.new_cache(2), [prompt, prompt]
    prefill(model, keys, prompt, row=0)
    for row in range(len(texts)):
        cache.enter(row, keys, len(prompt))
    differences = []
    for turn, ends in enumerate(KEPT):
        trees = [check_tree(np.roll(batch.token_ids, turn + 3 * row)) for row in range(len(texts))]
        lengths = np.array(list(map(len, texts)))
        plan = StepPlan.for_drafts(DraftBatch.concatenate(trees), lengths)
        logits = run_plan(model, cache, plan).split(len(batch.token_ids))
        paths = [np.array(path_to(end)) for end in ends]
        keep_paths(cache, lengths, [path[1:] for path in paths], range(len(texts)))
        for row, (tree, kept) in enumerate(zip(trees, paths, strict=True)):
            for path in map(path_to, LEAVES):
                expected = text_logits(np.concatenate([texts[row], tree.token_ids[path]]), len(path))
                differences.append(relative_difference(logits[row][path], expected))
            texts[row] = np.concatenate([texts[row], tree.token_ids[kept]])
    return max(differences)
