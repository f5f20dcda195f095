"""Triton 3.7.1's interpreter keeps bfloat16 as bit patterns and multiplies those; this widens them first."""

from collections.abc import Iterator
from contextlib import contextmanager
from unittest.mock import patch

import triton.language as tl
from triton.runtime import interpreter


@contextmanager
def widened_bfloat16() -> Iterator[None]:
    """Matrix products of kernels interpreted inside the block multiply values."""
    multiply = interpreter.InterpreterBuilder.create_dot

    def widened(self, left, right, *rest):
        sides = [
            self.cast_impl(side, tl.float32) if side.dtype.scalar == tl.bfloat16 else side for side in (left, right)
        ]
        return multiply(self, *sides, *rest)

    with patch.object(interpreter.InterpreterBuilder, "create_dot", widened):
        yield
