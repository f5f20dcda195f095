"""What a serving engine's mask of ancestors must be, node by node, and the links that such an engine derives from it."""

from __future__ import annotations

import numpy as np


def parents_of(mask: np.ndarray) -> list[int]:
    """The parent of a node is the last node above it; -1 at the root."""
    return [max((j for j in range(i) if mask[i, j]), default=-1) for i in range(len(mask))]


def links_of(mask: np.ndarray) -> tuple[list[int], list[int]]:
    """(first child, next sibling) of every node, -1 where there is none: what a walk along a draft needs."""
    parents = parents_of(mask)
    children = [[j for j in range(len(mask)) if parents[j] == i] for i in range(len(mask))]
    first = [own[0] if own else -1 for own in children]
    following = [-1] * len(mask)
    for own in children:
        for one, other in zip(own, own[1:], strict=False):
            following[one] = other
    return first, following


def reached(mask: np.ndarray) -> list[int]:
    """The nodes that a walk along the links comes to, in its order."""
    first, following = links_of(mask)
    found, waiting = [], [0]
    while waiting:
        node = waiting.pop()
        found.append(node)
        waiting += [other for other in (following[node], first[node]) if other >= 0]
    return found


def broken_rule(tokens: np.ndarray, mask: np.ndarray, draft=None) -> str | None:
    """The rule that [d] tokens and a [d, d] mask break, or None. draft: what the first nodes must be."""
    size = len(tokens)
    if mask.shape != (size, size) or not np.isin(mask, (0, 1)).all():
        return "a mask is [d, d] of 0 and 1"
    mask = mask.astype(bool)
    if not mask.diagonal().all() or not mask[:, 0].all():
        return "a node sees itself and the root"
    if np.triu(mask, 1).any():
        return "no node sees a later one"
    parents = parents_of(mask)
    for node in range(1, size):
        above = mask[parents[node]].copy()
        above[node] = True
        if not np.array_equal(mask[node], above):
            return "a node sees what its parent sees, and itself"
    if sorted(reached(mask)) != list(range(size)):
        return "a walk along the links comes to every node once"
    for node in range(size):
        below = [int(tokens[j]) for j in range(size) if parents[j] == node]
        if len(set(below)) != len(below):
            return "no node has two equal children"
    if draft is not None:
        count = draft.num_nodes
        if tokens[:count].tolist() != draft.token_ids.tolist() or parents[:count] != draft.parents.tolist():
            return "the first nodes are the draft's"
    return None
