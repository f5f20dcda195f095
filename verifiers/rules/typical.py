"""Typical acceptance: keep what the target finds plausible. Changes the output's law."""

from __future__ import annotations

import numpy as np

from stand.trees import DraftBatch
from stand.verifiers.operands import Array, Operands
from stand.verifiers.requirements import Requirements
from stand.verifiers.schedule import Schedule
from stand.verifiers.target import TargetRows
from stand.verifiers.verifier import ThresholdVerifier
from stand.verifiers.walk import deepest_passing


class TypicalVerifier(ThresholdVerifier):
    """Medusa (arXiv 2401.10774, section 2.3.1), with H the entropy in nats:

        keep x after v if p(x | v) > min(epsilon, delta exp(-H(p(. | v))))
        take the longest path that is kept throughout, then y ~ p

    Not lossless: a kept token was not drawn from the target. No uniform is used but for y. One more pass over the rows.
    """

    name = "typical"
    lossless = False
    requires = Requirements(adapted=False, laws="ignored")
    walk = deepest_passing

    def __init__(self, *, epsilon: float = 0.09, delta: float = 0.3) -> None:
        """The paper's code suggests delta = sqrt(epsilon)."""
        if not (0 < epsilon <= 1 and delta > 0):
            raise ValueError(f"epsilon must be in (0, 1], delta positive, got {epsilon}, {delta}; try 0.09 and 0.3")
        self.epsilon = epsilon
        self.delta = delta

    def thresholds(self, batch: DraftBatch, target: TargetRows, dtype: type = np.float64) -> tuple[Array, Array, Array]:
        operands = Operands.gather(batch, target, dtype=dtype, schedule=Schedule.by_rank(batch))
        entropies = target.entropies(np.arange(batch.num_nodes))
        bars = (self.delta * (-entropies).exp()).clip(max=self.epsilon)
        bars = bars.numpy() if operands.module is np else bars
        threshold = operands.ones()
        for children, parents in operands.steps(0):
            plausible = operands.token_mass(operands.target, children) > bars[parents]
            threshold[children] *= plausible
        return threshold, operands.fresh_mass(), operands.ones()
