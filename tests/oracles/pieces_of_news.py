"""News as processes tell each other, at random."""

import numpy as np

from stand.sharing.news import StepNews, TextNews
from stand.trees import DraftBatch, DraftTree

NUM_TOKENS = 2  # so few that only long contexts tell texts apart


def step_news(seed: int = 0, *, lengths=(0, 1, 40), width: int = 4) -> StepNews:
    """Three rows of a step, 16 nodes, with as many tokens before their pending ones; `width` entries per law."""
    random = np.random.default_rng(seed)
    trees = [DraftTree.branching(np.arange(nodes, dtype=np.int32) % 2, 2) for nodes in (1, 6, 9)]
    batch = DraftBatch.concatenate(trees)
    befores = [random.integers(0, NUM_TOKENS, length).astype(np.int32) for length in lengths]
    laws = np.sort(random.dirichlet(np.ones(width), batch.num_nodes).astype(np.float32))[:, ::-1]
    ids = np.stack([random.permutation(5)[:width] for _ in range(batch.num_nodes)]).astype(np.int32)
    return StepNews(batch, befores, ids, laws)


def text_news(seed: int = 0) -> TextNews:
    """Three of four rows of an engine's array; the second text has nothing that is new, the third nothing else."""
    tokens = np.random.default_rng(seed).integers(0, NUM_TOKENS, (4, 60)).astype(np.int32)
    lengths, num_new = np.array([60, 7, 3], dtype=np.int64), np.array([3, 0, 3], dtype=np.int64)
    return TextNews(tokens, lengths, num_new, np.array([3, 0, 1], dtype=np.int64))
