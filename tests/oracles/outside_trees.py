"""Laws from outside of a lookup, written as trees."""

from collections.abc import Sequence

import numpy as np

from stand.trees import NO_TOKEN, OutsideLaws

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
