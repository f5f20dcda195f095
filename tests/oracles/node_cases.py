"""Two rows with small drafts, the prefix of every node, and random logits."""

import numpy as np
import torch

from stand.row import Row
from stand.trees import DraftBatch, DraftTree

VOCABULARY_SIZE = 23


def draft_of(tokens, parents) -> DraftTree:
    """A draft of deterministic children, its pending token first."""
    empty = np.zeros((len(tokens), 1), dtype=np.int32)
    tokens, parents = np.array(tokens, dtype=np.int32), np.array(parents, dtype=np.int32)
    return DraftTree(tokens, parents, empty, empty.astype(np.float32))


def node_case(vocabulary_size: int = VOCABULARY_SIZE, *, seed: int = 5):
    """(packed drafts of 4 and 3 nodes, their rows, their prefixes per node, logits [7, vocabulary_size])."""
    generator = np.random.default_rng(seed)
    rows, drafts, prefixes = [], [], []
    for index, parents in enumerate(([-1, 0, 0, 1], [-1, 0, 1])):
        history = generator.integers(0, vocabulary_size, 6 + index).astype(np.int32)
        tokens = [int(history[-1]), *generator.integers(0, vocabulary_size, len(parents) - 1).tolist()]
        rows.append(Row(index, history, 8, request=index))
        drafts.append(draft_of(tokens, parents))
        for node in range(len(parents)):
            path, place = [], node
            while place > 0:
                path.insert(0, tokens[place])
                place = parents[place]
            prefixes.append([*history.tolist(), *path])
    logits = torch.from_numpy(generator.normal(0, 3, (7, vocabulary_size))).float()
    return DraftBatch.concatenate(drafts), rows, prefixes, logits
