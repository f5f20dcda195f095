"""SpecInfer's multi-round rejection, for siblings drawn independently from one law."""

from __future__ import annotations

import numpy as np

from stand.trees import DraftBatch
from stand.verifiers.operands import Array, Operands
from stand.verifiers.requirements import Requirements
from stand.verifiers.rules.rrs import recursive_rejection
from stand.verifiers.schedule import Schedule
from stand.verifiers.target import TargetRows
from stand.verifiers.verifier import ThresholdVerifier
from stand.verifiers.walk import last_from_top


class SpecInferVerifier(ThresholdVerifier):
    """Miao et al. (arXiv 2305.09781 Algorithm 2):

        v = root
        loop: P = p(.|v), q the law of all children of v
              for children c of v, x ~ q:
                  if u_c < P(x) / q(x): v = c; continue loop
                  P = (P - q)+ / sum (P - q)+
              return v, y ~ P

    The paper tries the children in random order; independent draws may as well be tried as they come. Each round is
    one of recursive rejection in which q stays the same.
    """

    name = "specinfer"
    requires = Requirements(laws="with_replacement")
    walk = last_from_top

    def thresholds(self, batch: DraftBatch, target: TargetRows, dtype: type = np.float64) -> tuple[Array, Array, Array]:
        return recursive_rejection(Operands.gather(batch, target, dtype=dtype, schedule=Schedule.by_rank(batch)))
