"""KL threshold: keep a draft where drafter and target nearly agree. Changes the output's law."""

from __future__ import annotations

import numpy as np

from stand.trees import DraftBatch
from stand.verifiers.operands import Array, Operands
from stand.verifiers.requirements import Requirements
from stand.verifiers.schedule import Schedule
from stand.verifiers.target import TargetRows
from stand.verifiers.verifier import ThresholdVerifier
from stand.verifiers.walk import deepest_passing


class KLThresholdVerifier(ThresholdVerifier):
    """The "refined" rule reported for Speculative Streaming (arXiv 2402.11131), as this project reads it:

        keep x ~ q after v if KL(q || p(. | v)) = sum_x q(x) log(q(x) / p(x | v)) <= limit  (nats)
        take the longest path that is kept throughout, then y ~ p

    Not lossless: where the two laws are near each other, tokens follow q. A deterministic child has a one-hot q, and
    the rule reads p(x) >= exp(-limit).
    """

    name = "kl_threshold"
    lossless = False
    requires = Requirements()
    walk = deepest_passing

    def __init__(self, *, limit: float = 0.5) -> None:
        if not limit > 0:
            raise ValueError(f"limit must be positive (nats), got {limit}; try 0.5")
        self.limit = limit

    def thresholds(self, batch: DraftBatch, target: TargetRows, dtype: type = np.float64) -> tuple[Array, Array, Array]:
        operands = Operands.gather(batch, target, dtype=dtype, schedule=Schedule.by_rank(batch))
        module, threshold = operands.module, operands.ones()
        for children, parents in operands.steps(0):
            law, probs = operands.law[children], operands.target[parents]
            drawn = law > 0
            impossible = (drawn & (probs <= 0)).any(axis=1)
            ratio = module.where(drawn, law / module.where(probs > 0, probs, 1.0), 1.0)
            divergence = (law * module.log(ratio)).sum(axis=1)
            threshold[children] *= (divergence <= self.limit) & ~impossible
        return threshold, operands.fresh_mass(), operands.ones()
