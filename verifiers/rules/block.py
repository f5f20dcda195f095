"""Block verification: the best lossless rule for a drafted chain."""

from __future__ import annotations

import numpy as np

from stand.trees import DraftBatch
from stand.verifiers.operands import Array, Operands
from stand.verifiers.requirements import Requirements
from stand.verifiers.schedule import Schedule
from stand.verifiers.target import TargetRows
from stand.verifiers.verifier import ThresholdVerifier
from stand.verifiers.walk import first_in_post_order


class BlockVerifier(ThresholdVerifier):
    """Sun et al. (arXiv 2403.10444 Algorithm 2, equations 4 and 5):

        p_0 = 1;  tau = 0
        for i = 1 .. gamma:
            p_i = min(1, p_{i-1} p(X_i | X^{i-1}) / q(X_i | X^{i-1}))
            S_i = sum_x (p_i p(x | X^i) - q(x | X^i))+
            h_i = S_i / (S_i + 1 - p_i) for i < gamma, p_gamma for i = gamma
            if u_i < h_i: tau = i                      no break: the last success counts
        y ~ p(.|X^gamma) if tau = gamma, else (p_tau p(.|X^tau) - q(.|X^tau))+ normalised

    The last success along a chain is the first in post-order.
    """

    name = "block"
    requires = Requirements(chain=True)
    walk = first_in_post_order

    def thresholds(self, batch: DraftBatch, target: TargetRows, dtype: type = np.float64) -> tuple[Array, Array, Array]:
        operands = Operands.gather(batch, target, dtype=dtype, schedule=Schedule.by_depth_and_rank(batch))
        prefix = operands.ones()  # p_i
        mass = operands.fresh_mass()
        scale = operands.ones()
        for depth in range(len(operands.schedule.levels)):
            for children, parents in operands.steps(depth):
                reached = prefix[parents] * operands.token_mass(operands.target, children)
                prefix[children] = operands.ratio(reached, operands.token_law[children])
                owed = prefix[parents][:, None] * operands.target[parents]
                mass[parents] = (owed - operands.law[children]).clip(min=0.0)
                scale[parents] = prefix[parents]
        residual = mass.sum(axis=1) + scale * operands.tail
        # where nothing is left and prefix = 1 the child always passes, and no row uses the mass
        inner = operands.ratio(residual, residual + 1.0 - prefix)
        threshold = operands.module.where(operands.leaves, prefix, inner)
        threshold[operands.roots] = 1.0
        return threshold, mass, scale
