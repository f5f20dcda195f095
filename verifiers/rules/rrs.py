"""Recursive rejection sampling, top-down: token-level verification of trees drawn without replacement."""

from __future__ import annotations

import numpy as np

from stand.trees import DraftBatch
from stand.verifiers.operands import Array, Operands
from stand.verifiers.requirements import Requirements
from stand.verifiers.schedule import Schedule
from stand.verifiers.target import TargetRows
from stand.verifiers.verifier import ThresholdVerifier
from stand.verifiers.walk import last_from_top


class RecursiveRejectionVerifier(ThresholdVerifier):
    """RSD (arXiv 2402.14160 Algorithm 2), Sequoia (arXiv 2402.12374 Algorithm 2):

        v = root
        loop: P = p(.|v)
              for children c of v in reveal order, x ~ q:
                  if u_c < P(x) / q(x): v = c; continue loop
                  P = (P - q)+ / sum (P - q)+
              return v, y ~ P

    A child's test does not depend on its ancestors', so all depths are worked on together, rank by rank.
    """

    name = "rrs"
    requires = Requirements()
    walk = last_from_top

    def thresholds(self, batch: DraftBatch, target: TargetRows, dtype: type = np.float64) -> tuple[Array, Array, Array]:
        return recursive_rejection(Operands.gather(batch, target, dtype=dtype, schedule=Schedule.by_rank(batch)))


def recursive_rejection(operands: Operands) -> tuple[Array, Array, Array]:
    """(h, m, s) of recursive rejection sampling; the schedule is by rank."""
    module = operands.module
    mass = operands.fresh_mass()
    scale = operands.ones()
    threshold = operands.ones()
    for children, parents in operands.steps(0):
        threshold[children] = operands.ratio(operands.token_mass(mass, children), operands.token_law[children])
        rest = (mass[parents] - operands.law[children]).clip(min=0.0)
        total = rest.sum(axis=1) + scale[parents] * operands.tail[parents]
        possible = total > operands.tiny  # else the child always passes, and no row uses the mass
        divisor = module.where(possible, total, 1.0)
        mass[parents] = module.where(possible[:, None], rest / divisor[:, None], mass[parents])
        scale[parents] = scale[parents] / divisor
    return threshold, mass, scale
