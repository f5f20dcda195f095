"""Traversal: block verification along every path of a draft at once (default where children were sampled)."""

from __future__ import annotations

import numpy as np

from stand.trees import DraftBatch, compiled
from stand.verifiers.operands import Array, Operands
from stand.verifiers.requirements import Requirements
from stand.verifiers.schedule import Schedule
from stand.verifiers.target import TargetRows
from stand.verifiers.verifier import ThresholdVerifier
from stand.verifiers.walk import first_in_post_order


class TraversalVerifier(ThresholdVerifier):
    """Bottom-up acceptance (arXiv 2505.12398; on a chain it is block verification, arXiv 2403.10444 Algorithm 2).

    a = 1 at the root; m = a p is the mass owed at a node, and for its children c in reveal order, x ~ q:

        a_c = min(1, m(x) / q(x))                                     what c inherits
        m   <- (m - q)+ / (R + 1 - sum m),  R = sum (m - q)+          owed once c and all below it failed

    then h = sum m, and the stopping node is the first in post-order with u < h (the root if none); the next token is
    drawn from its m. All of it is known before any uniform is drawn: when a node is tested, all before it in post-order
    have failed. Outside the support m is always s p, so only s is kept there.
    """

    name = "traversal"
    device_rule = "stand.gpu.device_rule:TraversalRule"
    requires = Requirements()
    walk = first_in_post_order

    def thresholds(self, batch: DraftBatch, target: TargetRows, dtype: type = np.float64) -> tuple[Array, Array, Array]:
        probs = target.on_host()
        if probs is not None and np.dtype(dtype) == np.float64:
            target.check(batch)
            return compiled.traversal_thresholds(
                batch.token_ids, batch.parents, batch.offsets, batch.support_ids, batch.law, probs
            )
        schedule = Schedule.by_depth_and_rank(batch)
        return traverse(Operands.gather(batch, target, dtype=dtype, schedule=schedule))


def traverse(operands: Operands) -> tuple[Array, Array, Array]:
    """(h, m, s) of traversal verification; siblings are taken by the schedule's ranks."""
    owed, scale, mass = operands.ones(), operands.ones(), operands.fresh_mass()
    for depth, level in enumerate(operands.schedule.levels):
        nodes = operands.order[level]
        scale[nodes] = owed[nodes]
        mass[nodes] = owed[nodes][:, None] * operands.target[nodes]
        for children, parents in operands.steps(depth):
            owed[children] = operands.ratio(operands.token_mass(mass, children), operands.token_law[children])
            mass[parents], scale[parents] = after_failure(
                operands, mass[parents], scale[parents], operands.law[children]
            )
    return pass_probability(operands, mass, scale), mass, scale


def pass_probability(operands: Operands, mass: Array, scale: Array) -> Array:
    """[M]: the mass still owed at each node, at most 1; 1 at roots, where a row stops if nowhere else."""
    threshold = (mass.sum(axis=1) + scale * operands.tail).clip(max=1.0)
    threshold[operands.roots] = 1.0
    return threshold


def after_failure(operands: Operands, mass: Array, scale: Array, law: Array) -> tuple[Array, Array]:
    """The mass still owed [n, S] and its scale [n] once a child drawn from `law` [n, S] and its subtree failed.

    The denominator R + 1 - sum m = 1 - sum min(m, q) is the probability of that failure. Where it is 0 the child always
    passes (sum m = 1 and m = q): nothing is divided, and no row uses the result.
    """
    rest = (mass - law).clip(min=0.0)
    failure = 1.0 - operands.module.minimum(mass, law).sum(axis=1)
    possible = failure > operands.tiny
    divisor = operands.module.where(possible, failure, 1.0)
    return operands.module.where(possible[:, None], rest / divisor[:, None], mass), scale / divisor
