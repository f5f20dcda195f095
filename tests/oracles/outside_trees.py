"""Laws from outside of a lookup, written as trees."""

from collections.abc import Sequence

import numpy as np

from stand.trees import NO_PARENT, NO_TOKEN, OutsideLaws

Node = tuple[int, int, Sequence[tuple[int, float]]]  # parent, token, law: tokens and probabilities, likeliest first


def outside_laws(trees: Sequence[Sequence[Node]], *, source: int = 0) -> OutsideLaws:
    """One tree per row, its root first with parent -1."""
    nodes = [node for tree in trees for node in tree]
    width = max((len(law) for *_, law in nodes), default=0) or 1
    ids, probs = np.full((len(nodes), width), NO_TOKEN, np.int32), np.zeros((len(nodes), width), np.float32)
    for place, (*_, law) in enumerate(nodes):
        for column, (token, probability) in enumerate(law):
            ids[place, column], probs[place, column] = token, probability
    offsets = np.concatenate([[0], np.cumsum([len(tree) for tree in trees])]).astype(np.int32)
    parents, tokens = (np.array([node[field] for node in nodes], np.int32) for field in (0, 1))
    return OutsideLaws(offsets, parents, tokens, ids, probs, source=source)


def law_at(tree: Sequence[Node], path: Sequence[int]) -> Sequence[tuple[int, float]]:
    """The law behind these tokens below the pending one; none where they lead to no node."""
    node = 0 if tree else None
    for token in path:
        node = None if node is None else _child(tree, node, token)
    return [] if node is None else tree[node][2]


def _child(tree: Sequence[Node], node: int, token: int) -> int | None:
    """By its own token, or by any; a node without children goes on as its sibling of any token."""
    below = _below(tree, node)
    if not below and tree[node][0] != NO_PARENT:
        loose = _below(tree, tree[node][0]).get(OutsideLaws.ANY_TOKEN)
        below = {} if loose is None else _below(tree, loose)
    return below.get(token, below.get(OutsideLaws.ANY_TOKEN))


def _below(tree: Sequence[Node], node: int) -> dict[int, int]:
    """By token, the node's children."""
    return {token: place for place, (parent, token, _) in enumerate(tree) if parent == node}
