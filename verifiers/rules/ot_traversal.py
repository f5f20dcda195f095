"""Optimal-transport traversal: at each node, the set of siblings as a whole is fitted to the mass owed."""

from __future__ import annotations

import numpy as np

from stand.trees import DraftBatch
from stand.verifiers.operands import HOST, Array, Operands
from stand.verifiers.requirements import Requirements, drawn_without_replacement
from stand.verifiers.rules.traversal import after_failure, pass_probability
from stand.verifiers.schedule import Schedule
from stand.verifiers.set_law import MAX_SUPPORT, set_law, set_sizes
from stand.verifiers.target import TargetRows
from stand.verifiers.transport import largest_transport
from stand.verifiers.verifier import ThresholdVerifier
from stand.verifiers.walk import first_in_post_order


class TransportTraversalVerifier(ThresholdVerifier):
    """Bottom-up acceptance with one transport plan per node (our reading of UniVer, arXiv 2605.04543; plans between
    sets and tokens: SpecTr, arXiv 2310.15141).

    m = a p is the mass owed at a node, F the law of its children's set A, f a largest plan with
    sum over A of f(A, x) <= m(x) and sum over x of f(A, x) <= F(A). With w(x) = f(A, x) / F(A) for the set that was
    drawn, children in reveal order inherit

        a_c = w(x_c) / (1 - sum of w over earlier siblings)
        m  <- (m - sum over A of f(A, .)) / (1 - sum f)           owed once all children failed

    Nodes with one drawn child (or none) are treated as in traversal, which is optimal there. Any plan is lossless; the
    largest keeps the most at its node. Of equally large plans token ids decide, never the support's order, which may
    tell which tokens were drawn. One flow problem per node, solved on the host: for research and for small drafts.
    """

    name = "ot_traversal"
    requires = Requirements(laws="one_batch", fixed_widths=True, most_candidates=MAX_SUPPORT)
    walk = first_in_post_order

    def thresholds(self, batch: DraftBatch, target: TargetRows, dtype: type = np.float64) -> tuple[Array, Array, Array]:
        schedule = Schedule.by_depth_and_rank(batch)
        operands = Operands.gather(batch, target, dtype=dtype, schedule=schedule, device=HOST)
        batched = drawn_without_replacement(batch)
        siblings = _siblings(operands, batched)
        owed, scale, mass = operands.ones(), operands.ones(), operands.fresh_mass()
        for depth, level in enumerate(schedule.levels):
            nodes = operands.order[level]
            scale[nodes] = owed[nodes]
            mass[nodes] = owed[nodes][:, None] * operands.target[nodes]
            for node in nodes[batched[nodes]].tolist():
                owed[siblings[node]], mass[node], scale[node] = _after_plan(
                    operands, mass[node], owed[node], siblings[node], token_ids=batch.support_ids[node]
                )
            for children, parents in operands.steps(depth):
                single = ~batched[parents]
                children, parents = children[single], parents[single]
                owed[children] = operands.ratio(operands.token_mass(mass, children), operands.token_law[children])
                mass[parents], scale[parents] = after_failure(
                    operands, mass[parents], scale[parents], operands.law[children]
                )
        return pass_probability(operands, mass, scale), mass, scale


def _siblings(operands: Operands, batched: np.ndarray) -> dict[int, np.ndarray]:
    """Children of each node that is set in `batched` [M], in reveal order."""
    children = operands.order[batched[operands.parents[operands.order]] & (operands.parents[operands.order] >= 0)]
    groups: dict[int, list[int]] = {}
    for child in children.tolist():
        groups.setdefault(int(operands.parents[child]), []).append(child)
    return {node: np.array(group) for node, group in groups.items()}


def _after_plan(
    operands: Operands, mass: np.ndarray, scale: float, children: np.ndarray, *, token_ids: np.ndarray
) -> tuple[np.ndarray, np.ndarray, float]:
    """(what the children inherit [K], mass still owed [S], scale) at one node; mass [S], over token_ids [S], is owed
    before."""
    law = operands.law[children[0]].astype(np.float64)
    drawn_columns = operands.token_cells[children] % len(law)
    support = np.union1d(np.flatnonzero(law), drawn_columns)
    support = support[np.argsort(token_ids[support])]
    columns = (support == drawn_columns[:, None]).argmax(axis=1)
    table = set_law(law[None, support], len(children))[0]
    sets = np.flatnonzero(set_sizes(len(support)) == len(children))
    members = (sets[:, None] >> np.arange(len(support)) & 1).astype(bool)
    plan = largest_transport(table[sets], members, mass[support].astype(np.float64))
    drawn = np.flatnonzero(sets == (1 << columns).sum())[0]
    weights = operands.ratio(plan[drawn, columns], table[sets[drawn]])
    left = 1.0 - np.concatenate([[0.0], np.cumsum(weights)[:-1]])
    inherited = operands.ratio(weights, np.where(left > operands.tiny, left, 0.0))
    rest = mass.copy()
    rest[support] = np.maximum(mass[support] - plan.sum(axis=0), 0.0)
    failure = 1.0 - plan.sum()
    if failure <= operands.tiny:
        return inherited, mass, scale  # some child always passes, and no row uses the mass
    return inherited, rest / failure, scale / failure
