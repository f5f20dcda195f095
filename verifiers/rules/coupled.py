"""Coupled sampling: the drafter perturbs its laws with the target's own noise, the verifier only compares."""

from __future__ import annotations

import numpy as np

from stand.trees import DraftBatch
from stand.verifiers.draw import refuse_empty_rows
from stand.verifiers.noise import VerifierNoise
from stand.verifiers.requirements import Requirements
from stand.verifiers.rules.match import follow_drawn
from stand.verifiers.target import TargetRows
from stand.verifiers.verifier import Verdicts, Verifier


class CoupledVerifier(Verifier):
    """Shared Gumbel noise (Daliri et al., arXiv 2408.07978; Gumbel list sampling, arXiv 2506.05632):

        v = root
        loop: y = argmax_x p(x | v) / E(position of v's children, x);  c = first child of v with token y
              if there is none: return v, y
              v = c

    E = -log u is exponential noise keyed by (seed, row, absolute position, token); argmax p / E is the Gumbel draw
    argmax (log p + G). The output is a function of p and the key alone, so it equals plain sampling with the same seed
    token for token, whatever the draft. A drafter that ranks its candidates by q / E with the same E
    (`VerifierNoise.exponentials`) hits more often; any draft is allowed.
    """

    name = "coupled"
    device_rule = "stand.gpu.device_rule:CoupledRule"
    requires = Requirements(adapted=False, laws="ignored")

    def verify(self, batch: DraftBatch, target: TargetRows, noise: VerifierNoise) -> Verdicts:
        self.check_draft(batch)

        def draw(rows: np.ndarray, nodes: np.ndarray, depth: int) -> np.ndarray:
            races = target.rows(nodes).double()
            races /= noise.exponentials(rows, depth, vocabulary_size=target.vocabulary_size, device=target.device)
            best, winners = races.max(dim=1)
            refuse_empty_rows(best.cpu().numpy())
            return winners.cpu().numpy()

        return follow_drawn(batch, target, draw)
