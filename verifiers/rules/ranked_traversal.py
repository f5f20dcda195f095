"""Ranked traversal: siblings drawn in one batch are tested in the order that suits the target best."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from stand.trees import DraftBatch
from stand.verifiers.operands import HOST, Array, Operands
from stand.verifiers.requirements import Requirements, drawn_without_replacement
from stand.verifiers.rules.traversal import traverse
from stand.verifiers.schedule import Schedule, packed_parents, token_columns, token_laws
from stand.verifiers.set_law import MAX_SUPPORT, set_law, set_sizes
from stand.verifiers.target import TargetRows
from stand.verifiers.verifier import ThresholdVerifier
from stand.verifiers.walk import first_in_post_order


class RankedTraversalVerifier(ThresholdVerifier):
    """Traversal after re-ordering (this project's rule; its neighbours: arXiv 2602.16961, 2505.12398).

    Where K siblings were drawn without replacement from q at once, only their set A matters, and its law F is known.
    Tokens are ranked by p / q, highest first (ties: lowest id, since the support's
    order may tell which tokens were drawn); the best of A is revealed first, then the second:

        law of the j-th, given those before it: sum of F over sets whose j best are those and it, normalised

    is the law under which traversal tests it. Other nodes keep their order. It keeps more than traversal where the
    draft is poor and less where it is good. Runs on the host: 2^S columns per node.
    """

    name = "ranked_traversal"
    requires = Requirements(laws="one_batch", fixed_widths=True, most_candidates=MAX_SUPPORT)
    walk = first_in_post_order

    def thresholds(self, batch: DraftBatch, target: TargetRows, dtype: type = np.float64) -> tuple[Array, Array, Array]:
        ranks, law = self._reorder(batch, target)
        schedule = Schedule.by_depth_and_rank(batch, ranks=ranks)
        operands = Operands.gather(batch, target, dtype=dtype, schedule=schedule, device=HOST)
        token_law = token_laws(law, *token_columns(batch, packed_parents(batch)))
        return traverse(replace(operands, law=law.astype(dtype), token_law=token_law.astype(dtype)))

    def test_order(self, batch: DraftBatch, target: TargetRows) -> np.ndarray:
        ranks, _ = self._reorder(batch, target)
        return Schedule.by_depth_and_rank(batch, ranks=ranks).order

    def _reorder(self, batch: DraftBatch, target: TargetRows) -> tuple[np.ndarray, np.ndarray]:
        """(ranks [M], laws [M, S]) of siblings in the order in which they are tested."""
        ranks, law = batch.ranks.astype(np.int64), batch.law.astype(np.float64)
        nodes = np.flatnonzero(drawn_without_replacement(batch))
        if len(nodes) == 0:
            return ranks, law
        parents = packed_parents(batch)
        place = np.full(batch.num_nodes, -1, dtype=np.int64)
        place[nodes] = np.arange(len(nodes))
        children = np.flatnonzero((batch.depths > 0) & (place[parents] >= 0))
        owners = place[parents[children]]
        first_law = np.zeros((len(nodes), law.shape[1]))
        first_children = children[batch.ranks[children] == 0]
        first_law[place[parents[first_children]]] = law[first_children]
        probs = target.probs_at(batch.support_ids).double().cpu().numpy()[nodes]
        positions = _positions(probs, first_law, token_ids=batch.support_ids[nodes])
        columns, _ = token_columns(batch, parents)
        child_positions = positions[owners, columns[children]]
        sequence = np.lexsort((child_positions, owners))
        sizes = np.bincount(owners, minlength=len(nodes))
        ranks[children[sequence]] = np.arange(len(children)) - np.repeat(np.cumsum(sizes) - sizes, sizes)
        ranked = np.zeros_like(first_law)
        np.put_along_axis(ranked, positions, first_law, axis=1)
        laws = _revealed_laws(ranked, sizes, owners=owners, ranks=ranks[children], positions=child_positions)
        law[children] = np.take_along_axis(laws, positions[owners], axis=1)
        return ranks, law


def _positions(probs: np.ndarray, law: np.ndarray, *, token_ids: np.ndarray) -> np.ndarray:
    """[n, S]: each column's place when sorted by p / q, highest first, ties to the lowest id.

    Where q = 0 any place will do: no set that holds such a token is ever drawn.
    """
    ratio = probs / np.where(law > 0, law, 1.0)
    order = np.lexsort((token_ids, -ratio), axis=1)
    positions = np.empty_like(order)
    np.put_along_axis(positions, order, np.arange(law.shape[1])[None, :].repeat(len(law), axis=0), axis=1)
    return positions


def _revealed_laws(
    law: np.ndarray, sizes: np.ndarray, *, owners: np.ndarray, ranks: np.ndarray, positions: np.ndarray
) -> np.ndarray:
    """[C, S] float64 over ranked places: the law of each of C children given its siblings of lower rank.

    law: [n, S] over ranked places, what each node's batch was drawn from; sizes: [n] children of each node; owners [C],
    ranks [C], positions [C]: each child's node, rank, and place in the ranking.
    """
    num_columns = law.shape[1]
    table = set_law(law, int(sizes.max()))
    table = np.where(set_sizes(num_columns)[None, :] == sizes[:, None], table, 0.0)
    sets = np.arange(2**num_columns)
    result = np.zeros((len(owners), num_columns))
    prefix = np.zeros(len(law), dtype=np.int64)
    for rank in range(int(sizes.max())):
        children = np.flatnonzero(ranks == rank)
        nodes = owners[children]
        for place in range(num_columns):
            low = sets & ((2 << place) - 1)
            wanted = prefix[nodes] | 1 << place
            fits = (low[None, :] == wanted[:, None]) & (prefix[nodes] >> place == 0)[:, None]
            result[children, place] = np.where(fits, table[nodes], 0.0).sum(axis=1)
        prefix[nodes] |= 1 << positions[children]
    totals = result.sum(axis=1, keepdims=True)
    return result / np.where(totals > 0, totals, 1.0)
