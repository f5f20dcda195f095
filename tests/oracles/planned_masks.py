"""Masks at the nodes of planned drafts, and what they allow by row and path."""

from collections.abc import Callable, Collection

import numpy as np

from stand.trees import DraftBatch, TokenMasks

Place = tuple[int, tuple[int, ...]]  # (row, tokens from below its root to the node)


def places_of(batch: DraftBatch) -> list[Place]:
    """Of every node."""
    places: list[Place] = []
    for row in range(len(batch)):
        paths: list[tuple[int, ...]] = []
        draft = batch[row]
        for token, parent in zip(draft.token_ids.tolist(), draft.parents.tolist(), strict=True):
            paths.append((*paths[parent], token) if parent >= 0 else ())
        places += [(row, path) for path in paths]
    return places


def planned_masks(
    plan: DraftBatch, allowed_at: Callable[[int, tuple[int, ...]], Collection[int]], *, num_words: int = 1
) -> tuple[TokenMasks, dict[Place, frozenset[int]]]:
    """The masks of a plan, and which tokens each of them allows."""
    allowed = {place: frozenset(allowed_at(*place)) for place in places_of(plan)}
    bits = np.zeros((plan.num_nodes, 32 * num_words), np.uint8)
    for node, tokens in enumerate(allowed.values()):
        bits[node, list(tokens)] = 1
    return TokenMasks(plan, np.packbits(bits, axis=1, bitorder="little").view(np.uint32)), allowed
