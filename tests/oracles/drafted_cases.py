"""Drafted steps and target laws of random worlds, for tests that compare two codes of one rule."""

import numpy as np
import torch

from stand.trees import LookupTree, TreeShape
from stand.verifiers import TargetRows, VerifierNoise
from stand.verifiers.schedule import packed_parents

VOCABULARY_SIZE = 300


def case(seed: int, kind: str, *, peaked: float = 3.0):
    """A drafted step of 5 rows, and target laws with exact zeros."""
    generator = np.random.default_rng(seed)
    tokens = generator.integers(0, 30, 800).astype(np.int32)
    ids = np.stack([generator.permutation(40)[:10] for _ in tokens[1:]]).astype(np.int32)
    lookup = LookupTree()
    laws = generator.dirichlet(np.ones(10), len(ids)).astype(np.float32)
    lookup.learn(tokens[:1], tokens[1:], top_ids=ids, top_probs=laws)
    rows = np.arange(5)
    histories = [tokens[place : place + 40] for place in range(0, 250, 50)]
    shape = TreeShape.from_branching([3, 2, 2])
    batch = lookup.draft(histories, shape, seed=seed, rows=rows, steps=rows, kind=kind)
    logits = torch.from_numpy(generator.normal(0, peaked, (batch.num_nodes, VOCABULARY_SIZE)))
    logits[:, generator.integers(0, 40, 10)] = float("-inf")
    noise = VerifierNoise(seed=seed, rows=rows, steps=rows, positions=rows)
    return batch, TargetRows(torch.softmax(logits, dim=-1)), noise


def agreeing_case(seed: int, kind: str):
    """A drafted step whose target leans towards the drafted laws, so that stops lie at all depths."""
    batch, target, noise = case(seed, kind)
    probs = target.rows(np.arange(batch.num_nodes))
    parents = packed_parents(batch)
    for child in np.flatnonzero((parents >= 0) & (batch.ranks == 0)):
        probs[parents[child]] *= 0.4
        ids, law = batch.support_ids[parents[child]], torch.from_numpy(batch.law[child].astype(np.float64))
        probs[parents[child]].index_add_(0, torch.from_numpy(ids[ids >= 0]).long(), 0.6 * law[ids >= 0])
    return batch, probs, noise
