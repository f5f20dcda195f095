"""The uniforms a verifier uses: functions of a key, never of a generator's state.

Draft, acceptance and resampling noise lie in different streams: a ratio test is lossless only when the
three are independent. The target stream is keyed by the absolute position, so what `match` draws there does
not depend on the draft.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch

from stand.trees import DraftBatch
from stand.trees.noise import (
    ACCEPT,
    FIRST_FACTOR,
    GOLDEN_GAMMA,
    RESAMPLE,
    SECOND_FACTOR,
    TARGET,
    fill_tests,
    node_uniforms,
    step_keys,
    uniforms,
)


@dataclass(frozen=True, slots=True)
class VerifierNoise:
    """Keys of one step: the seeds, and per row its number, its step and the position of its next token.

    Tests of drafted tokens and draws from residuals must never use a number again in a later call whose drafts depend
    on what it decided, so `seed` differs from call to call while a drafter learns. The target's own draws of `match`
    and `coupled` do not see the drafts: `target_seed` is the user's, which makes their tokens a function of it.
    """

    seed: int  # of acceptance and resampling
    rows: np.ndarray  # [B] int64, the row's number within the call
    steps: np.ndarray  # [B] int64, decoding steps this row has done
    positions: np.ndarray  # [B] int64, absolute index of the row's first new token
    target_seed: int | None = None  # of the target's draws; None: `seed`
    prompt_words: np.ndarray | int = 0  # [B] int64 in [0, 2**32), of the rows' prompts: other prompts, other numbers
    keys: np.ndarray = field(init=False)  # [B] int64, rows ^ prompt_words: what numbers are keyed by as "row"

    def __post_init__(self) -> None:
        object.__setattr__(self, "keys", self.rows ^ self.prompt_words)

    @property
    def _target_seed(self) -> int:
        return self.seed if self.target_seed is None else self.target_seed

    def accept(self, batch: DraftBatch) -> np.ndarray:
        """[M] float64 in [0, 1): one per packed node, keyed (seed, row, step, row-local node)."""
        return node_uniforms(self.seed, ACCEPT, self.keys, self.steps, batch.offsets)

    def resample(self) -> np.ndarray:
        """[B] float64 in [0, 1): one per row, keyed (seed, row, step)."""
        return uniforms(self.seed, RESAMPLE, self.keys, self.steps, np.zeros_like(self.keys))

    def fill_tests(self, batch: DraftBatch, accept: np.ndarray, resample: np.ndarray) -> None:
        """Write `accept` and `resample` into arrays float64 that may be longer."""
        fill_tests(self.seed, self.keys, self.steps, batch.offsets, accept, resample)

    def target(self, rows: np.ndarray, depth: int) -> np.ndarray:
        """[n] float64 in [0, 1): for the token at positions[row] + depth of each of `rows` [n] (below B)."""
        zeros = np.zeros(len(rows), dtype=np.int64)
        return uniforms(self._target_seed, TARGET, self.keys[rows], self.positions[rows] + depth, zeros)

    def target_at_nodes(self, batch: DraftBatch, *, out: np.ndarray | None = None) -> np.ndarray:
        """[M] float64 in [0, 1): `target` for the token that follows each packed node.

        out: written to and returned, may be longer.
        """
        return node_uniforms(self._target_seed, TARGET, self.keys, self.positions, batch.offsets, batch.depths, out=out)

    def keys_at_nodes(self, batch: DraftBatch) -> np.ndarray:
        """[M] int64: `step_keys` for the token that follows each packed node, as the int64 with the same bits."""
        rows, positions = self._after_nodes(batch)
        return step_keys(self._target_seed, TARGET, rows, positions).view(np.int64)

    def _after_nodes(self, batch: DraftBatch) -> tuple[np.ndarray, np.ndarray]:
        """Rows' numbers [M] and positions [M] of the tokens that follow the packed nodes."""
        sizes = batch.sizes
        return np.repeat(self.keys, sizes), np.repeat(self.positions, sizes) + batch.depths

    def exponentials(self, rows: np.ndarray, depth: int, *, vocabulary_size: int, device: torch.device) -> torch.Tensor:
        """[len(rows), V] float64, positive: noise of the token at positions[row] + depth, one number per token id.

        Made on `device`; the uniforms behind it are the same bits everywhere.
        """
        if device.type != "cpu":
            return self.device_exponentials(rows, depth, vocabulary_size=vocabulary_size, device=device)
        positions, tokens = self.positions[rows] + depth, np.arange(vocabulary_size)
        keys = (self.keys[rows][:, None], positions[:, None], tokens[None, :])
        return torch.from_numpy(-np.log(uniforms(self._target_seed, TARGET, *keys)))

    def device_exponentials(
        self, rows: np.ndarray, depth: int, *, vocabulary_size: int, device: torch.device
    ) -> torch.Tensor:
        """`exponentials` by tensor operations, without the compiled core."""
        return -uniforms_on_device(self.step_keys(rows, depth), vocabulary_size, device=device).log()

    def step_keys(self, rows: np.ndarray, depth: int) -> list[int]:
        """Per row the 64-bit key of the target's noise at positions[row] + depth, before the token is mixed in."""
        return step_keys(self._target_seed, TARGET, self.keys[rows], self.positions[rows] + depth).tolist()


def uniforms_on_device(step_keys: list[int], num_nodes: int, *, device: torch.device) -> torch.Tensor:
    """[len(step_keys), num_nodes] float64: what `stand.trees.noise.uniforms` gives, made by `device` (noise.h)."""
    keys = torch.tensor([_signed(key) for key in step_keys], dtype=torch.int64, device=device)[:, None]
    words = torch.arange(num_nodes, dtype=torch.int64, device=device) << 32
    bits = keys + (words + 1) * _signed(GOLDEN_GAMMA)  # int64 products wrap like uint64 ones
    bits = (bits ^ _shifted(bits, 30)) * _signed(FIRST_FACTOR)
    bits = (bits ^ _shifted(bits, 27)) * _signed(SECOND_FACTOR)
    bits = bits ^ _shifted(bits, 31)
    return (_shifted(bits, 12).double() + 0.5) * 2.0**-52


def _signed(word: int) -> int:
    """The int64 with the same 64 bits."""
    return word - (1 << 64) if word >> 63 else word


def _shifted(bits: torch.Tensor, places: int) -> torch.Tensor:
    """int64 bits shifted right as unsigned ones."""
    return (bits >> places) & ((1 << (64 - places)) - 1)
