"""Sample and match: draw the target's token, follow it if it was drafted."""

from __future__ import annotations

import numpy as np

from stand.trees import DraftBatch
from stand.verifiers.draw import draw_tokens
from stand.verifiers.noise import VerifierNoise
from stand.verifiers.operands import Array, Operands
from stand.verifiers.schedule import Schedule, packed_parents
from stand.verifiers.target import TargetRows
from stand.verifiers.verifier import Requirements, ThresholdVerifier, Verdicts
from stand.verifiers.walk import last_from_top, path_to


class MatchVerifier(ThresholdVerifier):
    """Lossless for any draft however built or pruned, and optimal for deterministic ones:

        v = root
        loop: y ~ p(.|v);  c = first child of v with token y;  if there is none: return v, y;  v = c

    The draw at a position is keyed by (seed, row, absolute position): a row's tokens are those that
    sampling without a draft gives for the same seed. `thresholds` states the same law child by child: c
    passes with p(x) / (1 - p of its earlier siblings), and y has p restricted to tokens that were not
    drafted.
    """

    name = "match"
    requires = Requirements(adapted=False, laws="ignored")
    walk = last_from_top

    def thresholds(self, batch: DraftBatch, target: TargetRows, dtype: type = np.float64) -> tuple[Array, Array, Array]:
        operands = Operands.gather(batch, target, dtype=dtype, schedule=Schedule.by_rank(batch))
        mass = operands.target * 1.0
        threshold = operands.module.ones_like(operands.tail)
        for children, parents in operands.steps(0):
            left = mass[parents].sum(axis=1) + operands.tail[parents]
            threshold[children] = operands.ratio(operands.token_mass(mass, children), left)
            mass.reshape(-1)[operands.token_cells[children]] = 0.0
        return threshold, mass, operands.module.ones_like(operands.tail)

    def verify(self, batch: DraftBatch, target: TargetRows, noise: VerifierNoise) -> Verdicts:
        """See `Verifier.verify`; level by level, only rows still on a drafted path are drawn."""
        self.check_draft(batch)
        target.check(batch)
        parents = packed_parents(batch)
        schedule = Schedule.by_depth_and_rank(batch)
        row_of = np.repeat(np.arange(len(batch)), np.diff(batch.offsets))
        stops = batch.offsets[:-1].astype(np.int64)
        next_tokens = np.zeros(len(batch), dtype=np.int64)
        walking = np.arange(len(batch))
        wanted = np.full(batch.num_nodes, -1, dtype=np.int64)
        for depth, steps in enumerate(schedule.steps):
            drawn = draw_tokens(target.rows(stops[walking]), noise.target(walking, depth))
            next_tokens[walking] = drawn
            wanted[stops[walking]] = drawn
            below = [schedule.order[step] for step in steps]
            nodes = np.concatenate(below)[::-1] if below else np.zeros(0, dtype=np.int64)
            nodes = nodes[batch.token_ids[nodes] == wanted[parents[nodes]]]
            stops[row_of[nodes]] = nodes  # lowest rank last, so it stays
            walking = np.unique(row_of[nodes])
            if len(walking) == 0:
                break
        accepted = [
            np.array(path_to(stop, parents), dtype=np.int32) - batch.offsets[row]
            for row, stop in enumerate(stops.tolist())
        ]
        return Verdicts(accepted=accepted, next_tokens=next_tokens)
