"""Plain forwards over the paths of drafts, and caches that hold prompts, for tests of packed forwards."""

import numpy as np
import torch
from tiny_models import VOCABULARY_SIZE

from stand.forward.model import run_plan
from stand.forward.packed_plan import StepPlan
from stand.forward.tree_cache import TreeCache
from stand.trees import DraftTree


def random_draft(generator: np.random.Generator, num_nodes: int) -> DraftTree:
    parents = np.array([-1] + [generator.integers(0, node) for node in range(1, num_nodes)], dtype=np.int32)
    tokens = generator.integers(3, VOCABULARY_SIZE, num_nodes).astype(np.int32)
    empty = np.zeros((num_nodes, 1), dtype=np.int32)
    return DraftTree(token_ids=tokens, parents=parents, support_ids=empty, law=empty.astype(np.float32))


def path_to(draft: DraftTree, node: int) -> list[int]:
    path = []
    while node >= 0:
        path.insert(0, node)
        node = int(draft.parents[node])
    return path


def plain_logits(model, token_ids) -> torch.Tensor:
    return model(input_ids=torch.tensor([list(map(int, token_ids))]), use_cache=False).logits[0, -1]


def prefilled(model, prompts, *, chunk=512) -> TreeCache:
    cache = TreeCache(num_rows=len(prompts), room=1)
    for row, prompt in enumerate(prompts):
        for start in range(0, len(prompt), chunk):
            run_plan(model, cache, StepPlan.for_prompt(prompt[start : start + chunk], start, row=row))
    return cache


def ragged_case(seed: int):
    """Three rows: prompts longer and shorter than the window, trees of 12, 1 and 5 nodes."""
    generator = np.random.default_rng(seed)
    prompts = [generator.integers(3, VOCABULARY_SIZE, n).astype(np.int32) for n in (5, 19, 12)]
    drafts = [random_draft(generator, n) for n in (12, 1, 5)]
    return prompts, drafts


def spread(logits: torch.Tensor) -> float:
    return float(logits.max() - logits.min())
