"""The suite's interpreter computes what Triton's own does, and looks for the language less often."""

import pytest
import torch

triton = pytest.importorskip("triton")
import triton.language as tl  # noqa: E402
from quick_interpreter import BUILDER, OWN_OPTIONS, OWN_REPLACE  # noqa: E402
from triton.runtime import interpreter  # noqa: E402


@triton.jit
def _mixed(number, place):
    return (number * 1103515245 + 12345) ^ (place << 7)  # beyond 31 bits


@triton.jit
def _scramble(numbers, out, BLOCK: tl.constexpr):
    places = tl.arange(0, BLOCK)
    mixed = _mixed(_mixed(tl.load(numbers + places), places), places + 1)
    tl.store(out + places, mixed * 3 - tl.max(mixed, 0))


def scrambled() -> list[int]:
    numbers, out = torch.arange(64, dtype=torch.int32) * 77_777_777, torch.zeros(64, dtype=torch.int32)
    _scramble[(1,)](numbers, out, BLOCK=64)
    return out.tolist()


def count_replacements(monkeypatch) -> list[str]:
    counted = []
    replace_module = interpreter._patch_builtin
    monkeypatch.setattr(interpreter, "_patch_builtin", lambda *of: counted.append("") or replace_module(*of))
    return counted


def test_sums_that_overflow_and_functions_within_functions_give_the_same_bits(monkeypatch):
    counted = count_replacements(monkeypatch)
    quick, num_quick = scrambled(), len(counted)
    monkeypatch.setattr(interpreter, "_patch_lang", OWN_REPLACE)
    monkeypatch.setattr(BUILDER, "options", OWN_OPTIONS)
    counted.clear()
    assert scrambled() == quick and len(set(quick)) > 60
    assert 0 < num_quick < len(counted) / 2


def test_after_a_kernel_the_language_is_as_it_was_imported():
    """Of `tl.core`, which functions of Triton's own see, Triton's interpreter does not put back what it replaced."""
    scrambled()
    assert tl.core.is_builtin(tl.load) and tl.core.is_builtin(tl.tensor.__add__)
