"""Plain forwards over the paths of drafts, and caches that hold prompts, for tests of packed forwards."""

import numpy as np
import torch
from tiny_models import VOCABULARY_SIZE

from stand.forward.cache.tree_cache import TreeCache
from stand.forward.model import run_plan
from stand.forward.packed_plan import StepPlan
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


@torch.inference_mode()
def greedy_by_plain_forwards(model, prompt, count: int, *, end: int | None = None, processor=None) -> list[int]:
    """Each token by a forward over the whole text; up to `count` new ones, or to `end`."""
    tokens = list(prompt)
    while len(tokens) < len(prompt) + count and tokens[-1] != end:
        scores = plain_logits(model, tokens)[None]
        scores = scores if processor is None else processor(torch.tensor([tokens]), scores)
        tokens.append(int(scores.argmax()))
    return tokens[len(prompt) :]


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


def lengths_of(prompts) -> np.ndarray:
    return np.array([len(prompt) for prompt in prompts])


def keep(cache: TreeCache, prompts, paths) -> None:
    """Rows go on with these paths of the last forward's drafts, roots included."""
    cache.keep_states([path[-1] for path in paths])
    rows = np.repeat(np.arange(len(paths)), [len(path) for path in paths])
    starts = lengths_of(prompts)[rows]
    targets = np.concatenate([np.arange(len(path)) for path in paths])
    cache.compact(rows, starts + np.concatenate(paths), starts + targets)


def assert_equals_plain_forwards(model, prompts, drafts, logits: torch.Tensor, *, tolerance: float) -> None:
    """logits [M, V] of the drafts against a plain forward over the path to each node; tolerance: of their spread."""
    offsets = np.cumsum([0, *(draft.num_nodes for draft in drafts)])
    for row, (prompt, draft) in enumerate(zip(prompts, drafts, strict=True)):
        for node in range(draft.num_nodes):
            expected = plain_logits(model, [*prompt, *draft.token_ids[path_to(draft, node)]])
            got = logits[offsets[row] + node]
            assert float((got - expected).abs().max()) < tolerance * spread(expected), (row, node)
