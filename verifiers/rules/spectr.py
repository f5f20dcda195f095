"""SpecTr's K-sequential selection, for siblings drawn independently from one law."""

from __future__ import annotations

import numpy as np

from stand.trees import DraftBatch
from stand.verifiers.operands import Array, Operands
from stand.verifiers.requirements import Requirements
from stand.verifiers.schedule import Schedule
from stand.verifiers.target import TargetRows
from stand.verifiers.verifier import ThresholdVerifier
from stand.verifiers.walk import last_from_top

BISECTIONS = 30


class SpecTrVerifier(ThresholdVerifier):
    """Sun et al. (arXiv 2310.15141 Algorithm 3, K-SEQ), at every node of a draft:

        beta(rho) = sum_x min(p(x) / rho, q(x)),   1 - (1 - beta)^K <= rho beta
        v = root
        loop: for the K children c of v, x ~ q:
                  if u_c < p(x) / (rho q(x)): v = c; continue loop
              return v, y ~ p - min(p / rho, q) (1 - (1 - beta)^K) / beta, normalised

    Any rho that meets the inequality is lossless; the smallest keeps the most. Bisection on [1, K] ends on the side
    that meets it. K must not depend on the children's tokens.
    """

    name = "spectr"
    requires = Requirements(laws="with_replacement", fixed_widths=True)
    walk = last_from_top

    def thresholds(self, batch: DraftBatch, target: TargetRows, dtype: type = np.float64) -> tuple[Array, Array, Array]:
        operands = Operands.gather(batch, target, dtype=dtype, schedule=Schedule.by_rank(batch))
        law = operands.module.zeros_like(operands.law)  # [M, S] per parent: what its children were drawn from
        num_children = operands.module.zeros_like(operands.tail)
        for children, parents in operands.steps(0):
            law[parents] = operands.law[children]
            num_children[parents] += 1.0
        rho = smallest_rho(operands, law, num_children)
        common = operands.module.minimum(operands.target / rho[:, None], law)
        accepted = common.sum(axis=1)
        kept = operands.ratio(1.0 - (1.0 - accepted) ** num_children, rho * accepted) * rho
        mass = (operands.target - common * kept[:, None]).clip(min=0.0)
        threshold = operands.ones()
        for children, parents in operands.steps(0):
            owed = operands.token_mass(operands.target, children)
            threshold[children] = operands.ratio(owed, rho[parents] * operands.token_law[children])
        return threshold, mass, operands.ones()


def smallest_rho(operands: Operands, law: Array, num_children: Array) -> Array:
    """[M]: the smallest rho with 1 - (1 - beta)^K <= rho beta, to the accuracy of BISECTIONS halvings, from above."""
    low, high = operands.ones(), num_children.clip(min=1.0)
    for _ in range(BISECTIONS):
        middle = (low + high) / 2.0
        accepted = operands.module.minimum(operands.target / middle[:, None], law).sum(axis=1)
        meets = 1.0 - (1.0 - accepted) ** num_children <= middle * accepted
        low, high = operands.module.where(meets, low, middle), operands.module.where(meets, middle, high)
    return high
