"""Rows that a head follows, for tests that look at its estimates."""

from collections.abc import Sequence

import numpy as np
import torch

from stand.drafters.dflash.followed_blocks import FollowedBlocks
from stand.drafters.eagle.followed_rows import FollowedRows


class EstimatedBlocks(FollowedBlocks):
    """`run` gives the estimates [rows, G, D] at the places that guess."""

    def __init__(self, target, head):
        super().__init__(target, head, temperature=1.0, count=4, width=4)

    def run(self, histories: Sequence[np.ndarray]) -> torch.Tensor:
        super().run(histories)
        return self.estimates

    def _estimates(self, plans, features):
        self.estimates = super()._estimates(plans, features)
        return self.estimates


class EstimatedRows(FollowedRows):
    """`catch_up` and `extend` give the estimates [n, D] of the features after the nodes."""

    def __init__(self, target, head):
        super().__init__(target, head, temperature=1.0, count=4)

    def catch_up(self, histories):
        rows, laws = super().catch_up(histories)
        return rows, None if laws is None else laws.estimates

    def extend(self, rows, tokens, parents, features):
        return super().extend(rows, tokens, parents, features).estimates
