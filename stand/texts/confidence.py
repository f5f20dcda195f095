"""Ends rows that the model is not sure of, while they run: DeepConf (arXiv 2508.15260)."""

from __future__ import annotations

from collections import deque

import torch
from transformers import StoppingCriteria

from stand.argument_checks import whole_number
from stand.laws.logprobs import TokenLogprobs


class LowConfidence(StoppingCriteria):
    """Ends a row when the mean confidence of its last `window` tokens falls below `threshold`.

    A token's confidence is that of `TokenLogprobs.confidence`: calls need `logprobs=` above 0. A row of fewer tokens
    than `window` is not ended. Rows that end so have the finish reason "criteria".
    """

    wants_logprobs = True  # calls give `logprobs=` of the newest token

    def __init__(self, threshold: float, *, window: int = 2048):
        """Raises ValueError for a threshold that is no number, or a window without a token."""
        if isinstance(threshold, bool) or not isinstance(threshold, (int, float)) or not threshold == threshold:
            raise ValueError(f"threshold must be a number, got {threshold!r}; take one of rows that have ended")
        self.threshold = threshold
        self.window = whole_number("window", window, "2048 is usual")
        self._latest: deque[float] = deque(maxlen=self.window)
        self._sum = 0.0

    def __call__(self, input_ids: torch.Tensor, scores: object, *, logprobs: TokenLogprobs, **_: object) -> bool:
        (newest,) = logprobs.confidence().tolist()
        if newest == float("inf"):
            raise ValueError(
                "confidence needs as many tokens of some probability as logprobs asks for, got fewer; leave "
                "logprobs_mode out, whose default counts no filters, or ask for fewer tokens"
            )
        if len(self._latest) == self.window:
            self._sum -= self._latest[0]
        self._latest.append(newest)
        self._sum += newest
        return len(self._latest) == self.window and self._sum < self.threshold * self.window
