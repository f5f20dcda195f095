"""What a drafter may run on the model's own steps: hidden states as they pass, keys as they were just written."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Protocol

import numpy as np
import torch
from transformers.cache_utils import Cache

from stand.forward.cache.tree_cache import TreeCache
from stand.trees import ROOT, DraftBatch

if TYPE_CHECKING:
    from stand.row import LiveRows

Guesses = tuple[np.ndarray, np.ndarray]  # best tokens [B, G, K] int32 of each row's tail, their probabilities float32


class Rider(Protocol):
    """`Drafter.rider`: every step asks `watching`, then `scored` if it is an eager one, and `kept`, which asks the step
    for the guesses of its rows' tails.

    It changes nothing of the model, of its outputs and of its keys. It may write slots behind the nodes of the drafts,
    and behind the kept paths, which the next step overwrites. What it computes of a row serves the drafts of this row
    alone.
    """

    is_capturable: bool  # whether captured steps can carry it: all that it runs are tails
    tail_length: int  # G, tokens of its own behind the end of a kept path
    law_size: int  # K, tokens that it guesses at each of them
    hidden: torch.Tensor | None  # [M, D]: of the last forward that was watched

    def watching(self) -> AbstractContextManager[None]:
        """Around the model's forward over the drafts."""

    def scored(self, cache: TreeCache, batch: DraftBatch, lengths: np.ndarray) -> None:
        """The forward is done: node i of row b lies in slot lengths[b] + i. Nothing is decided yet."""

    def kept(
        self,
        batch: DraftBatch,
        live: LiveRows,
        accepted: Sequence[np.ndarray],
        guesses: Callable[[], Guesses],
    ) -> None:
        """The rows go on behind their nodes `accepted`; guesses: makes those of their tails."""

    def guesses(self, cache: TreeCache, batch: DraftBatch, lengths: np.ndarray, ends: np.ndarray) -> Guesses:
        """Of an eager step, behind packed nodes `ends` [B], ascending; keys still lie as the nodes do."""

    def guess(
        self, hidden: torch.Tensor, position_ids: torch.Tensor, *, attention: str, cache: Cache, plan: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The same computation as one body: from `hidden` [R, D] of the ends, the first T of R tails of tokens at
        positions [1, T]: ids [T, K] int32, probabilities [T, K] float32. It never waits for the device.

        attention: a name that transformers knows; plan: what that one takes as `stand_plan`.
        """

    def num_slots(self, sizes: np.ndarray) -> np.ndarray:
        """[B]: the slots behind the nodes that a step takes whose drafts have `sizes` [B] nodes, roots included."""


def path_ends(batch: DraftBatch, accepted: Sequence[np.ndarray]) -> np.ndarray:
    """[B] int64: packed nodes where the kept paths end."""
    return batch.offsets[:-1].astype(np.int64) + [path[-1] if len(path) else ROOT for path in accepted]
