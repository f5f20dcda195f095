"""Which problem a prompt is."""

from __future__ import annotations

import numpy as np

from stand.numbered_keys import NumberedKeys
from stand.trees import problem_key


class ProblemNumbers(NumberedKeys):
    """Equal prompts have one number. One that comes again after many others has a new one, which nobody else has: its
    rows share no keys with those of the old number, and the lookup counts them as another problem's."""

    MOST_KEYS = 1 << 16  # 12 MB

    def of(self, prompt: np.ndarray) -> int:
        """prompt: [L] int32."""
        return super().of(problem_key(prompt))
