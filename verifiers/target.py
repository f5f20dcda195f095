"""The target's processed laws, one row per node of the step's drafts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from stand.trees import DraftBatch
from stand.trees.compiled import check_batch
from stand.verifiers.doubles import where_doubles_are

PAD = -1


@dataclass(frozen=True, slots=True)
class Debt:
    """What greedy block verification owes: the next `positions` tokens follow (ratio p - q)+ instead of p."""

    ratio: float
    positions: int


RowDebts = tuple[Debt, ...]  # oldest first: each alters the law that the earlier ones left


class TargetRows:
    """Row i is the law of the children of packed node i, after temperature, filters and penalties.

    Rules read laws through four methods only (`probs_at`, `rows`, `on_host`, `entropies`), so a version that processes
    its logits lazily can stand in its place.
    """

    __slots__ = ("_probs", "debts")

    def __init__(self, probs: torch.Tensor, *, debts: Sequence[RowDebts] | None = None) -> None:
        """`probs` is [M, V] float32 or float64 on any device, rows sum to 1; it is kept, not copied, but for one on a
        device without 64-bit floats, which is brought to the host.

        `debts`, one per row of the batch, is for rules that carry them: the last `Verdicts.debts`, or () for new rows.
        """
        if probs.ndim != 2 or probs.dtype not in (torch.float32, torch.float64):
            raise ValueError(
                f"probs must be [M, V] in float32 or float64, got {list(probs.shape)} in {probs.dtype}; "
                "take the softmax in float32"
            )
        self._probs = where_doubles_are(probs)
        self.debts = debts

    @property
    def device(self) -> torch.device:
        return self._probs.device

    @property
    def num_nodes(self) -> int:
        """M, the number of rows."""
        return self._probs.shape[0]

    @property
    def vocabulary_size(self) -> int:
        return self._probs.shape[1]

    def probs_at(self, support_ids: np.ndarray) -> torch.Tensor:
        """[M, S]: row i at token ids support_ids[i]; padding (negative ids) gives 0."""
        own = support_ids.astype(np.int64)  # torch warns of read-only arrays, such as those of empty drafts
        token_ids = torch.from_numpy(own).to(self.device, non_blocking=self.device.type == "cuda")
        return self._probs.gather(1, token_ids.clip(min=0)).masked_fill_(token_ids < 0, 0.0)

    def rows(self, nodes: np.ndarray) -> torch.Tensor:
        """[B, V]: a fresh copy of the rows of packed nodes [B], which the caller may write to."""
        index = torch.from_numpy(np.asarray(nodes, dtype=np.int64)).to(self.device)
        return self._probs.index_select(0, index)

    def on_host(self) -> np.ndarray | None:
        """[M, V] without a copy where it lies in this process's memory, row by row; None elsewhere."""
        if self.device.type != "cpu" or not self._probs.is_contiguous():
            return None
        return self._probs.numpy()

    def entropies(self, nodes: np.ndarray) -> torch.Tensor:
        """[n] float64, in nats: one pass over the rows of packed nodes [n]."""
        return torch.special.entr(self.rows(nodes)).sum(1, dtype=torch.float64)

    def check(self, batch: DraftBatch) -> None:
        """Raise ValueError where the rows do not belong to `batch`, or it is unsound: compiled rules trust it."""
        check_batch(batch)
        laws, supports = batch.law.shape, batch.support_ids.shape
        if laws != supports or laws[0] != batch.num_nodes:
            raise ValueError(
                f"law and support_ids must be [M, S] with one row per node ({batch.num_nodes}), got {laws} and "
                f"{supports}; see batch.check()"
            )
        if self.num_nodes != batch.num_nodes:
            raise ValueError(
                f"target must hold one row per packed node ({batch.num_nodes}), got {self.num_nodes}; "
                "pass the laws of every node, in the batch's order"
            )
        largest = max(int(batch.support_ids.max(initial=PAD)), int(batch.token_ids.max(initial=PAD)))
        if largest >= self.vocabulary_size:
            raise ValueError(
                f"draft token ids must be below the target's vocabulary size {self.vocabulary_size}, got {largest}; "
                "draft with the target's tokenizer"
            )
