"""How many drafted tokens a rule keeps of a given draft, on average over its own random numbers: no sampling."""

from __future__ import annotations

import numpy as np

from stand.trees import DraftBatch
from stand.verifiers import TargetRows, ThresholdVerifier
from stand.verifiers.schedule import packed_parents
from stand.verifiers.walk import first_in_post_order, last_from_top


def expected_kept(rule: ThresholdVerifier, batch: DraftBatch, target: TargetRows) -> np.ndarray:
    """[B] float64: mean number of drafted tokens that `rule` keeps of each row's draft.

    Thresholds are known before any uniform is drawn, so the chance of stopping at a node is a product of them.

    Raises ValueError where the draft does not meet the rule's requirements, or the rule walks in a way that has no such
    product (the lossy ones).
    """
    rule.check_draft(batch)
    thresholds, _, _ = rule.thresholds(batch, target)
    order = rule.test_order(batch, target)
    walk = type(rule).walk
    if walk is last_from_top:
        return _top_down(batch, np.asarray(thresholds), order)
    if walk is first_in_post_order:
        return _bottom_up(batch, np.asarray(thresholds), order)
    raise ValueError(f"rule must test nodes from the top or in post-order, got {rule.name!r}; use a lossless rule")


def _top_down(batch: DraftBatch, thresholds: np.ndarray, order: np.ndarray) -> np.ndarray:
    """A node is kept where its parent is, its earlier siblings fail and it passes; kept nodes are added up."""
    parents, rows = _parents_and_rows(batch)
    left = [1.0] * batch.num_nodes  # of a node that was reached: chance that none of its children so far passed
    reached = [1.0] * batch.num_nodes
    kept = np.zeros(len(batch))
    for node in order.tolist():
        parent = parents[node]
        if parent >= 0:
            reached[node] = reached[parent] * left[parent] * float(thresholds[node])
            left[parent] *= 1.0 - float(thresholds[node])
            kept[rows[node]] += reached[node]
    return kept


def _bottom_up(batch: DraftBatch, thresholds: np.ndarray, order: np.ndarray) -> np.ndarray:
    """The first passing node in post-order is where a row stops; all of the path to it is kept."""
    parents, rows = _parents_and_rows(batch)
    children: list[list[int]] = [[] for _ in parents]
    for node in order.tolist():
        if parents[node] >= 0:
            children[parents[node]].append(node)
    chances, depths = thresholds.tolist(), batch.depths.tolist()
    kept = np.zeros(len(batch))
    for root in batch.offsets[:-1].tolist():
        reach, stack = 1.0, [(root, iter(children[root]))]
        while stack:
            node, below = stack[-1]
            child = next(below, None)
            if child is not None:
                stack.append((child, iter(children[child])))
                continue
            stack.pop()
            kept[rows[node]] += reach * chances[node] * depths[node]
            reach *= 1.0 - chances[node]
    return kept


def _parents_and_rows(batch: DraftBatch) -> tuple[list[int], list[int]]:
    """Packed parents (negative at roots) and the row of each packed node."""
    return packed_parents(batch).tolist(), np.repeat(np.arange(len(batch)), batch.sizes).tolist()
