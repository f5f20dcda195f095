"""Triton's interpreter truncates float32 to bfloat16, where hardware rounds to nearest even; this makes it round."""

from collections.abc import Iterator
from contextlib import contextmanager
from unittest.mock import patch

import numpy as np
import triton.language as tl
from triton.runtime import interpreter


@contextmanager
def nearest_bfloat16() -> Iterator[None]:
    """Kernels interpreted inside the block round as the GPU does."""
    original = interpreter._convert_float

    def convert(values: np.ndarray, source: tl.dtype, target: tl.dtype, rounding: object) -> np.ndarray:
        if source != tl.float32 or target != tl.bfloat16:
            return original(values, source, target, rounding)
        bits = np.ascontiguousarray(values, dtype=np.float32).view(np.uint32).astype(np.uint64)
        rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
        return np.where(np.isnan(values), 0x7FC0, rounded).astype(np.uint16).reshape(values.shape)

    with patch.object(interpreter, "_convert_float", convert):
        yield
