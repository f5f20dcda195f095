"""What a drafter may run on the model's own steps: hidden states as they pass, keys as they were just written."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Protocol

import numpy as np

from stand.forward.tree_cache import TreeCache
from stand.trees import DraftBatch

if TYPE_CHECKING:
    from stand.row import LiveRows


class Rider(Protocol):
    """`Drafter.rider`: asked in every eager step, in this order. Captured steps have none.

    It changes nothing of the model, of its outputs and of its keys. It may write slots behind the nodes of the drafts,
    which the next step overwrites. What it computes of a row serves the drafts of this row alone.
    """

    def watching(self) -> AbstractContextManager[None]:
        """Around the model's forward over the drafts."""

    def scored(self, cache: TreeCache, batch: DraftBatch, lengths: np.ndarray) -> None:
        """The forward is done: node i of row b lies in slot lengths[b] + i. Nothing is decided yet."""

    def kept(self, cache: TreeCache, batch: DraftBatch, live: LiveRows, accepted: Sequence[np.ndarray]) -> None:
        """The rows go on behind their nodes `accepted`; the keys still lie as the nodes do."""

    def num_slots(self, sizes: np.ndarray) -> np.ndarray:
        """[B]: the slots behind the nodes that a step takes whose drafts have `sizes` [B] nodes, roots included."""
