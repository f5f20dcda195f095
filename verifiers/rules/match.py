"""Sample and match: draw the target's token, follow it if it was drafted."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from stand.trees import DraftBatch, compiled
from stand.verifiers.draw import draw_tokens
from stand.verifiers.noise import VerifierNoise
from stand.verifiers.operands import Array, Operands
from stand.verifiers.requirements import Requirements
from stand.verifiers.schedule import Schedule, packed_parents
from stand.verifiers.target import TargetRows
from stand.verifiers.verifier import ThresholdVerifier, Verdicts
from stand.verifiers.walk import last_from_top

Draw = Callable[[np.ndarray, np.ndarray, int], np.ndarray]  # (rows [n], packed nodes [n], depth) -> token ids [n]


class MatchVerifier(ThresholdVerifier):
    """Lossless for any draft however built or pruned, and optimal for deterministic ones:

        v = root
        loop: y ~ p(.|v);  c = first child of v with token y;  if there is none: return v, y;  v = c

    The draw at a position is keyed by (seed, row, absolute position): a row's tokens are those that sampling without a
    draft gives for the same seed. `thresholds` states the same law child by child: c passes with
    p(x) / (1 - p of its earlier siblings), and y has p restricted to tokens that were not drafted.
    """

    name = "match"
    device_rule = "stand.gpu.device_rule:MatchRule"
    requires = Requirements(adapted=False, laws="ignored")
    walk = last_from_top

    def thresholds(self, batch: DraftBatch, target: TargetRows, dtype: type = np.float64) -> tuple[Array, Array, Array]:
        operands = Operands.gather(batch, target, dtype=dtype, schedule=Schedule.by_rank(batch))
        mass, threshold = operands.fresh_mass(), operands.ones()
        for children, parents in operands.steps(0):
            left = mass[parents].sum(axis=1) + operands.tail[parents]
            threshold[children] = operands.ratio(operands.token_mass(mass, children), left)
            mass.reshape(-1)[operands.token_cells[children]] = 0.0
        return threshold, mass, operands.ones()

    def verify(self, batch: DraftBatch, target: TargetRows, noise: VerifierNoise) -> Verdicts:
        """See `Verifier.verify`; level by level, only rows still on a drafted path are drawn."""
        self.check_draft(batch)
        return follow_drawn(batch, target, lambda rows, nodes, depth: _draw(target, nodes, noise.target(rows, depth)))


def _draw(target: TargetRows, nodes: np.ndarray, uniforms: np.ndarray) -> np.ndarray:
    """[B] int64: the target's tokens at packed nodes [B]."""
    probs = target.on_host()
    if probs is None:
        return draw_tokens(target.rows(nodes), uniforms)
    return compiled.draw_tokens(probs, nodes, uniforms)


def follow_drawn(batch: DraftBatch, target: TargetRows, draw: Draw) -> Verdicts:
    """From every root, draw the target's token and step to the first child that has it, until none has."""
    target.check(batch)
    parents = packed_parents(batch)
    schedule = Schedule.by_depth_and_rank(batch)
    row_of = np.repeat(np.arange(len(batch)), batch.sizes)
    stops = batch.offsets[:-1].astype(np.int64)
    next_tokens = np.zeros(len(batch), dtype=np.int64)
    drawn_at = np.full(batch.num_nodes, -1, dtype=np.int64)
    walking = np.arange(len(batch))
    for depth in range(len(schedule.levels)):
        next_tokens[walking] = drawn_at[stops[walking]] = draw(walking, stops[walking], depth)
        if depth + 1 == len(schedule.levels):
            break
        nodes = schedule.order[schedule.levels[depth + 1]][::-1]
        nodes = nodes[batch.token_ids[nodes] == drawn_at[parents[nodes]]]
        stops[row_of[nodes]] = nodes  # of a row's equal siblings the lowest rank comes last and stays
        walking = np.unique(row_of[nodes])
        if len(walking) == 0:
            break
    return Verdicts.stopping_at(stops, next_tokens, batch)
