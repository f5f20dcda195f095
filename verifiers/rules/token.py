"""Token verification: the classic rule for a drafted chain."""

from __future__ import annotations

import numpy as np

from stand.trees import DraftBatch
from stand.verifiers.operands import Array, Operands
from stand.verifiers.requirements import Requirements
from stand.verifiers.schedule import Schedule
from stand.verifiers.target import TargetRows
from stand.verifiers.verifier import ThresholdVerifier
from stand.verifiers.walk import last_from_top


class TokenVerifier(ThresholdVerifier):
    """Leviathan et al. (arXiv 2211.17192 Algorithm 1), Chen et al. (arXiv 2302.01318 Algorithm 2):

    for i = 1 .. gamma, X_i ~ q:  keep X_i if u_i < p(X_i) / q(X_i), else stop
    y ~ (p - q)+ / sum (p - q)+ where a token was refused, p(.|X^gamma) where all were kept
    """

    name = "token"
    requires = Requirements(chain=True)
    walk = last_from_top

    def thresholds(self, batch: DraftBatch, target: TargetRows, dtype: type = np.float64) -> tuple[Array, Array, Array]:
        operands = Operands.gather(batch, target, dtype=dtype, schedule=Schedule.by_rank(batch))
        threshold = operands.ones()
        mass = operands.fresh_mass()
        for children, parents in operands.steps(0):
            target_of_token = operands.token_mass(operands.target, children)
            threshold[children] = operands.ratio(target_of_token, operands.token_law[children])
            mass[parents] = (operands.target[parents] - operands.law[children]).clip(min=0.0)
        return threshold, mass, operands.ones()
