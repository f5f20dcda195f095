"""STAND's drafter: the longest-match lookup fills a fixed shape."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from stand.drafters.drafter import check_kind
from stand.trees import DraftBatch, LookupTree, TreeShape
from stand.trees.longest_match.lookup import SHAPED_KINDS


class LookupDrafter:
    """STAND (arXiv 2506.04708): an adaptive n-gram lookup tree fills a fixed shape by Gumbel-Top-K."""

    def __init__(self, lookup: LookupTree, shape: TreeShape, *, kind: str = "sampled"):
        check_kind(kind, SHAPED_KINDS, "a LookupTree with a shape")
        self.lookup = lookup
        self.shape = shape
        self.kind = kind
        self.row_size = lookup.row_size
        self._shallow: dict[int, TreeShape] = {}

    def draft(
        self,
        histories: Sequence[np.ndarray],
        *,
        seed: int,
        rows: np.ndarray,
        steps: np.ndarray,
        problems: np.ndarray,
        max_depths: np.ndarray,
        is_greedy: bool,
    ) -> DraftBatch:
        shapes = [self._up_to(int(depth)) for depth in max_depths]
        kind = "deterministic" if is_greedy else self.kind
        return self.lookup.draft(histories, shapes, seed=seed, rows=rows, steps=steps, kind=kind)

    def learn_prompt(self, token_ids: np.ndarray, *, problem: int) -> None:
        self.lookup.learn(token_ids[:1], token_ids[1:])

    def learn(
        self,
        batch: DraftBatch,
        histories: Sequence[np.ndarray],
        row_ids: np.ndarray,
        row_probabilities: np.ndarray,
        *,
        problems: np.ndarray,
    ) -> None:
        self.lookup.learn_batch(batch, histories, row_ids, row_probabilities)

    def _up_to(self, depth: int) -> TreeShape:
        """The shape without slots below `depth`: known before anything is drawn, so drafts stay adapted."""
        if depth >= self.shape.max_depth:
            return self.shape
        if depth not in self._shallow:
            self._shallow[depth] = self.shape.truncated(depth)
        return self._shallow[depth]
