"""Which problem a prompt is."""

from __future__ import annotations

from collections import OrderedDict

import numpy as np

from stand.trees import problem_key


class ProblemNumbers:
    """Prompts are numbered as they first come; equal ones have one number.

    The latest prompts are remembered. One that comes again after so many others has a new number, which nobody else
    has: its rows share no keys with those of the old number, and the lookup counts them as another problem's.
    """

    MOST_PROMPTS = 1 << 16  # 12 MB

    def __init__(self) -> None:
        self._numbers: OrderedDict[bytes, int] = OrderedDict()  # by `problem_key`, the latest one last
        self._num_given = 0

    def of(self, prompt: np.ndarray) -> int:
        """prompt: [L] int32."""
        key = problem_key(prompt)
        if key not in self._numbers:
            self._numbers[key] = self._num_given
            self._num_given += 1
            if len(self._numbers) > self.MOST_PROMPTS:
                self._numbers.popitem(last=False)
        self._numbers.move_to_end(key)
        return self._numbers[key]
