"""Who guesses: the protocol of a drafter."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np

from stand.trees import DraftBatch


class Drafter(Protocol):
    """Proposes drafts and learns from what the target said. Drafts must keep the promise of `DraftBatch.adapted`."""

    row_size: int  # top entries per scored node that `learn` wants; 0: it never learns

    def draft(
        self,
        histories: Sequence[np.ndarray],  # per row: int32 committed tokens, the pending one last
        *,
        seed: int,
        rows: np.ndarray,  # [B] int64: names the rows' random streams
        steps: np.ndarray,  # [B] int64: steps each row has made
        problems: np.ndarray,  # [B] int64: samples of one prompt share a number, which no other prompt has
        max_depths: np.ndarray,  # [B] int64: drafts deeper than this are of no use
        is_greedy: bool,  # the target's laws are one-hots
    ) -> DraftBatch: ...

    def learn_prompt(self, token_ids: np.ndarray, *, problem: int) -> None:
        """A prompt, int32 [L], before its rows start."""

    def learn(
        self,
        batch: DraftBatch,
        histories: Sequence[np.ndarray],  # per row: committed tokens before the pending one
        row_ids: np.ndarray,  # [M, row_size] int32: the target's best tokens after each node
        row_probabilities: np.ndarray,  # [M, row_size] float32
        *,
        problems: np.ndarray,  # [B] int64
    ) -> None:
        """Every scored node of a step, rejected ones too: each is a true observation of its context."""


def check_kind(kind: str, offered: tuple[str, ...], drafter: str) -> None:
    """Raise ValueError where `drafter` does not offer this kind of draft."""
    if kind not in offered:
        raise ValueError(f"{drafter} drafts one of {', '.join(offered)}, got {kind!r}; choose another draft kind")
