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


def grown(row: Row, parents, choose) -> tuple[list[int], list[list[int]]]:
    """Tokens of a draft of the row, its pending one first, and the row's new tokens at every node. choose: a node's
    token by the new tokens before it."""
    tokens, paths = [int(row.history[-1])], [row.new_token_ids.tolist()]
    for parent in parents[1:]:
        tokens.append(choose(paths[parent]))
        paths.append([*paths[parent], tokens[-1]])
    return tokens, paths


def scored(chain, row: Row, tokens, parents, *, size: int, generator, plans: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Random logits [n, size] at a draft's nodes, and what a chain makes of them. plans: its grammar is asked for masks
    at these nodes before, where that is worth its time."""
    logits = torch.from_numpy(generator.normal(0, 1, (len(tokens), size))).float()
    batch = DraftBatch.concatenate([draft_of(tokens, parents)])
    if plans and chain.grammar.is_plannable([row]):
        chain.grammar.planned(batch, [row])
    return logits, chain(logits, batch, [row])


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
