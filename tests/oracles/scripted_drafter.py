"""A drafter that knows one text."""

from collections.abc import Sequence

import numpy as np

import stand
from stand.trees import DraftBatch, DraftTree


class ScriptedDrafter(stand.Drafter):
    """Drafts these tokens behind every prompt, as far as a row has kept to them."""

    def __init__(self, tokens: Sequence[int], prompt_lengths: Sequence[int]):
        """prompt_lengths: by row."""
        self.tokens, self.prompt_lengths = list(tokens), prompt_lengths

    def draft(self, request: stand.DraftRequest) -> DraftBatch:
        drafts = []
        for row, history, most in zip(request.rows, request.histories, request.max_depths, strict=True):
            behind = history[self.prompt_lengths[row] :].tolist()
            ahead = self.tokens[len(behind) :][:most] if behind == self.tokens[: len(behind)] else []
            drafts.append(DraftTree.branching(np.array([history[-1], *ahead], dtype=np.int32), 1))
        return DraftBatch.concatenate(drafts)
