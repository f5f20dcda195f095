"""The target's processed laws, one row per node of the step's drafts."""

from __future__ import annotations

import numpy as np
import torch

from stand.trees import DraftBatch

PAD = -1


class TargetRows:
    """Row i is the law of the children of packed node i, after temperature, filters and penalties.

    Rules read it through three gathers only (`probs_at`, `rows`, `row`), so a version that processes its
    logits lazily can stand in its place.
    """

    __slots__ = ("_probs",)

    def __init__(self, probs: torch.Tensor) -> None:
        """`probs` is [M, V] float32 or float64 on any device, rows sum to 1; it is kept, not copied."""
        if probs.ndim != 2 or probs.dtype not in (torch.float32, torch.float64):
            raise ValueError(
                "probs must be [M, V] in float32 or float64, "
                f"got {list(probs.shape)} in {probs.dtype}; take the softmax in float32"
            )
        self._probs = probs

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
        token_ids = torch.from_numpy(support_ids).to(self.device, torch.int64, non_blocking=True)
        return self._probs.gather(1, token_ids.clip(min=0)).masked_fill_(token_ids < 0, 0.0)

    def rows(self, nodes: np.ndarray) -> torch.Tensor:
        """[B, V]: a fresh copy of the rows of packed nodes [B], which the caller may write to."""
        index = torch.from_numpy(np.asarray(nodes, dtype=np.int64)).to(self.device)
        return self._probs.index_select(0, index)

    def row(self, node: int) -> torch.Tensor:
        """[V]: the law of one packed node's children, not a copy."""
        return self._probs[node]

    def check(self, batch: DraftBatch) -> None:
        """Raise ValueError where the rows do not belong to `batch`."""
        if self.num_nodes != batch.num_nodes:
            raise ValueError(f"target must hold one row per packed node ({batch.num_nodes}), got {self.num_nodes}")
        largest = max(int(batch.support_ids.max(initial=PAD)), int(batch.token_ids.max(initial=PAD)))
        if largest >= self.vocabulary_size:
            raise ValueError(
                f"draft token ids must be below the target's vocabulary size {self.vocabulary_size}, "
                f"got {largest}; draft with the target's tokenizer"
            )
