"""Prompt lookup: copy what followed the newest n-gram the last time it occurred."""

from __future__ import annotations

import numpy as np

from stand.drafters.blended import MOST_NODES
from stand.drafters.drafter import Drafter, DraftRequest
from stand.drafters.settings import check_count
from stand.trees import DraftBatch, DraftTree


class PromptLookupDrafter(Drafter):
    """Chains of up to gamma tokens from the row's own text (Saxena 2023; transformers' `prompt_lookup_num_tokens`).

    The longest n-gram, between `longest` and `shortest` tokens, that ends the row and occurred in it before decides,
    and of its occurrences the last one. Deterministic: `match` is the rule for it. Nothing is learned.
    """

    remembers = False
    rows_apart = True

    def __init__(self, *, gamma: int = 8, longest: int = 3, shortest: int = 1) -> None:
        check_count("gamma", gamma, 1, MOST_NODES, usual="8 is usual")
        check_count("shortest", shortest, 1, usual="1 is usual")
        check_count("longest", longest, shortest, usual="3 is usual, and no less than shortest")
        self.gamma = gamma
        self.longest = longest
        self.shortest = shortest

    def most_nodes(self, num_rows: int) -> int:
        return num_rows * self.gamma

    def draft(self, request: DraftRequest) -> DraftBatch:
        """See `Drafter.draft`; nothing is drawn, so only histories and max_depths matter."""
        chains = [
            DraftTree.chain([history[-1], *self._successors(history)[: max(int(depth), 0)]])
            for history, depth in zip(request.histories, request.max_depths, strict=True)
        ]
        return DraftBatch.concatenate(chains)

    def _successors(self, history: np.ndarray) -> np.ndarray:
        """[<= gamma] tokens after the last earlier occurrence of the longest n-gram that has one."""
        for length in range(min(self.longest, len(history) - 1), self.shortest - 1, -1):
            windows = np.lib.stride_tricks.sliding_window_view(history[:-1], length)
            places = np.flatnonzero((windows == history[-length:]).all(axis=1))
            if len(places):
                first = places[-1] + length
                return history[first : first + self.gamma]
        return history[:0]
