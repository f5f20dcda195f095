"""The uniforms a verifier uses: functions of a key, never of a generator's state.

Draft, acceptance and resampling noise lie in different streams: a ratio test is lossless only when the
three are independent. The target stream is keyed by the absolute position, so what `match` draws there does
not depend on the draft.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from stand.trees import DraftBatch
from stand.trees.noise import ACCEPT, RESAMPLE, TARGET, uniforms


@dataclass(frozen=True, slots=True)
class VerifierNoise:
    """Keys of one step: the seed, and per row its number, its step and where it stands."""

    seed: int
    rows: np.ndarray  # [B] int64, the row's number within the call
    steps: np.ndarray  # [B] int64, decoding steps this row has done
    positions: np.ndarray  # [B] int64, absolute index of the row's first new token

    def accept(self, batch: DraftBatch) -> np.ndarray:
        """[M] float64 in [0, 1): one per packed node, keyed (seed, row, step, row-local node)."""
        sizes = np.diff(batch.offsets)
        nodes = np.arange(batch.num_nodes) - np.repeat(batch.offsets[:-1], sizes)
        return uniforms(self.seed, ACCEPT, np.repeat(self.rows, sizes), np.repeat(self.steps, sizes), nodes)

    def resample(self) -> np.ndarray:
        """[B] float64 in [0, 1): one per row, keyed (seed, row, step)."""
        return uniforms(self.seed, RESAMPLE, self.rows, self.steps, np.zeros_like(self.rows))

    def target(self, rows: np.ndarray, depth: int) -> np.ndarray:
        """[n] float64 in [0, 1): for the token at positions[row] + depth of each of `rows` [n] (below B)."""
        zeros = np.zeros(len(rows), dtype=np.int64)
        return uniforms(self.seed, TARGET, self.rows[rows], self.positions[rows] + depth, zeros)
