"""What a serving engine's mask of ancestors must be, and the links that such an engine derives from it."""

from __future__ import annotations

import numpy as np


def parents_of(mask: np.ndarray) -> np.ndarray:
    """[d]: the parent of a node is the last node above it; -1 at the root."""
    above = np.tril(mask != 0, -1)
    last = len(mask) - 1 - above[:, ::-1].argmax(axis=1)
    return np.where(above.any(axis=1), last, -1)


def links_of(parents: list[int]) -> tuple[list[int], list[int]]:
    """(first child, next sibling) of every node, -1 where there is none: what a walk along a draft needs."""
    first, following = [-1] * len(parents), [-1] * len(parents)
    for node in range(len(parents) - 1, 0, -1):
        following[node], first[parents[node]] = first[parents[node]], node
    return first, following


def reached(parents: list[int]) -> list[int]:
    """The nodes that a walk along the links comes to, in its order."""
    first, following = links_of(parents)
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
    above = np.where((parents >= 0)[:, None], mask[parents], False)
    if (parents[1:] < 0).any() or not np.array_equal(mask, above | np.eye(size, dtype=bool)):
        return "a node sees what its parent sees, and itself"
    parents = parents.tolist()
    if sorted(reached(parents)) != list(range(size)):
        return "a walk along the links comes to every node once"
    if len(set(zip(parents, tokens.tolist(), strict=True))) != size:
        return "no node has two equal children"
    if draft is not None:
        count = draft.num_nodes
        if tokens[:count].tolist() != draft.token_ids.tolist() or parents[:count] != draft.parents.tolist():
            return "the first nodes are the draft's"
    return None
