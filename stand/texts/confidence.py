"""Ends rows that the model is not sure of, while they run: DeepConf (arXiv 2508.15260)."""

from __future__ import annotations

import math

import numpy as np
from transformers import StoppingCriteria

from stand.argument_checks import whole_number
from stand.laws.logprobs import TokenLogprobs
from stand.trees.arguments import real


class LowConfidence(StoppingCriteria):
    """Ends a row when the mean confidence of its last `window` tokens falls below `threshold`.

    A token's confidence is that of `TokenLogprobs.confidence`: calls need `logprobs=` above 0. A row of fewer tokens
    than `window` is not ended. Rows that end so have the finish reason "criteria".
    """

    wants_logprobs = True  # calls give `logprobs=` of the newest token
    least_logprobs = 1
    reads_input_ids = False  # they may be None

    def __init__(self, threshold: float, *, window: int = 2048):
        """Raises ValueError for a threshold that is no number, or a window without a token."""
        self.threshold = real(threshold, "threshold")
        if math.isnan(self.threshold):
            raise ValueError("threshold must be a number, got nan; take it from rows that have ended")
        self.window = whole_number("window", window, "2048 is usual")
        self._latest = np.empty(self.window)  # confidences, each in the place of the one `window` tokens before
        self._count = 0

    def __call__(
        self, input_ids: object, scores: object, *, logprobs: TokenLogprobs | None = None, **_: object
    ) -> bool:
        if logprobs is None:
            raise ValueError("LowConfidence needs log-probabilities, got none; call engine.generate with logprobs=20")
        (newest,) = logprobs.confidence()
        if newest == np.inf:
            raise ValueError(
                "confidence needs as many tokens of some probability as logprobs asks for, got fewer; leave "
                "logprobs_mode out, whose default counts no filters, or ask for fewer tokens"
            )
        self._latest[self._count % self.window] = newest
        self._count += 1
        return self._count >= self.window and bool(self._latest.mean() < self.threshold)
