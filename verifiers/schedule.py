"""In which order nodes can be worked on at once: by depth, and among siblings by rank."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from stand.trees import NO_PARENT, DraftBatch


def packed_parents(batch: DraftBatch) -> np.ndarray:
    """[M] int64: packed index of each node's parent; NO_PARENT at roots."""
    starts = np.repeat(batch.offsets[:-1], batch.sizes)
    return np.where(batch.parents == NO_PARENT, NO_PARENT, batch.parents + starts).astype(np.int64)


def token_columns(batch: DraftBatch, parents: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """([M] int64, [M] bool): column of each node's token in its parent's support, and whether it is there."""
    matches = batch.support_ids[parents] == batch.token_ids[:, None]
    columns = matches.argmax(axis=1)
    found = matches[np.arange(len(columns)), columns] & (parents != NO_PARENT)
    return columns, found


def token_laws(law: np.ndarray, columns: np.ndarray, found: np.ndarray) -> np.ndarray:
    """[M]: what each node's law [M, S] gives its own token; 0 where its parent's support does not hold the token."""
    return np.where(found, law[np.arange(len(columns)), columns], 0.0)


@dataclass(frozen=True, slots=True)
class Schedule:
    """Packed nodes sorted by (depth, rank), and where each group begins.

    levels[d] is the slice of `order` with depth d; steps[d] are the slices of `order` with depth d + 1 and
    rank 0, 1, ...: the children of the nodes in levels[d].
    """

    order: np.ndarray  # [M] int64
    levels: list[slice]
    steps: list[list[slice]]

    @classmethod
    def by_depth_and_rank(cls, batch: DraftBatch, *, ranks: np.ndarray | None = None) -> Schedule:
        """`ranks` [M] replaces the batch's where siblings are taken in another order than they were revealed."""
        ranks = batch.ranks if ranks is None else ranks
        num_ranks = int(ranks.max()) + 1
        keys = batch.depths.astype(np.int64) * num_ranks + ranks
        order = np.argsort(keys, kind="stable")
        keys = keys[order]
        firsts = np.concatenate([[0], np.flatnonzero(np.diff(keys)) + 1, [len(keys)]]).tolist()
        groups = [slice(first, end) for first, end in zip(firsts[:-1], firsts[1:], strict=True)]
        steps: list[list[slice]] = [[] for _ in range(int(batch.depths.max()) + 1)]
        for group in groups:
            steps[int(keys[group.start]) // num_ranks].append(group)
        levels = [slice(level[0].start, level[-1].stop) for level in steps]
        return cls(order=order, levels=levels, steps=steps[1:] + [[]])

    @classmethod
    def by_rank(cls, batch: DraftBatch) -> Schedule:
        """All depths together: for rules in which a node's test does not depend on its ancestors'."""
        children = np.flatnonzero(batch.depths)
        order = children[np.argsort(batch.ranks[children], kind="stable")]
        ranks = batch.ranks[order]
        firsts = np.concatenate([[0], np.flatnonzero(np.diff(ranks)) + 1, [len(ranks)]]).tolist()
        groups = [slice(first, end) for first, end in zip(firsts[:-1], firsts[1:], strict=True) if first < end]
        return cls(order=order, levels=[], steps=[groups])
