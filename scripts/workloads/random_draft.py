"""Drafts of random tokens and laws, for timing and checking whatever reads a draft."""

from __future__ import annotations

import numpy as np

from stand.trees import DraftTree

SUPPORT_SIZE = 10


def random_draft(parents: np.ndarray, vocabulary_size: int, generator: np.random.Generator) -> DraftTree:
    """Children drawn without replacement from random laws over SUPPORT_SIZE random tokens per node."""
    num_nodes = len(parents)
    token_ids = np.zeros(num_nodes, dtype=np.int32)
    support_ids = np.full((num_nodes, SUPPORT_SIZE), -1, dtype=np.int32)
    law = np.zeros((num_nodes, SUPPORT_SIZE), dtype=np.float32)
    for node in range(num_nodes):
        children = np.flatnonzero(parents == node)
        if len(children):
            support_ids[node] = generator.choice(vocabulary_size, SUPPORT_SIZE, replace=False)
            left = generator.dirichlet(np.full(SUPPORT_SIZE, 0.5))
            for child in children:
                law[child] = left / left.sum()
                column = generator.choice(SUPPORT_SIZE, p=left / left.sum())
                token_ids[child] = support_ids[node, column]
                left[column] = 0.0
    return DraftTree(token_ids=token_ids, parents=parents, support_ids=support_ids, law=law)
