"""The suite's interpreter computes what Triton's own does, with values that have the same attributes."""

from contextlib import contextmanager

import numpy as np
import pytest
import torch

triton = pytest.importorskip("triton")
import triton.language as tl  # noqa: E402
from quick_interpreter import OWN  # noqa: E402
from triton.runtime import interpreter  # noqa: E402


@triton.jit
def _mixed(number, place):
    return (number * 1103515245 + 12345) ^ (place << 7)  # beyond 31 bits


@triton.jit
def _sum(one, other):
    return one + other


@triton.jit
def _scramble(numbers, out, BLOCK: tl.constexpr):
    places = tl.arange(0, BLOCK)
    mixed = _mixed(_mixed(tl.load(numbers + places), places), places + 1)
    tl.store(out + places, mixed * 3 - tl.max(mixed, 0) + tl.reduce(mixed, 0, _sum))


def scrambled() -> list[int]:
    numbers, out = torch.arange(64, dtype=torch.int32) * 77_777_777, torch.zeros(64, dtype=torch.int32)
    _scramble[(1,)](numbers, out, BLOCK=64)
    return out.tolist()


def count_replacements(monkeypatch) -> list[str]:
    counted = []
    replace_module = interpreter._patch_builtin
    monkeypatch.setattr(interpreter, "_patch_builtin", lambda *of: counted.append("") or replace_module(*of))
    return counted


def put_back_triton(monkeypatch):
    """Its own interpreter, until the test ends."""
    for owner, name, own in OWN:
        monkeypatch.setattr(owner, name, own)


def test_sums_that_overflow_and_functions_within_functions_give_the_same_bits(monkeypatch):
    counted = count_replacements(monkeypatch)
    quick, num_quick = scrambled(), len(counted)
    put_back_triton(monkeypatch)
    counted.clear()
    assert scrambled() == quick and len(set(quick)) > 60
    assert 0 < num_quick < len(counted) / 2


def attributes(value) -> dict[str, object]:
    """What a type or a tensor holds, down to what can be compared."""
    return {name: plain(held) for name, held in vars(value).items()}


def plain(held):
    if isinstance(held, tl.tuple):
        return [plain(one) for one in held.values], [attributes(kind) for kind in held.type.types]
    if isinstance(held, tl.constexpr):
        return "constexpr", held.value
    return attributes(held) if isinstance(held, (tl.dtype, tl.tensor)) else held


def made() -> list[object]:
    """Types, tensors, numpy's dtypes and sums, of shapes and elements that look alike; the second time as the first."""
    elements = (tl.float32, tl.bfloat16, tl.int1, tl.pointer_type(tl.float32), tl.pointer_type(tl.int8, const=True))
    found = []
    for _ in range(2):
        for element in elements:
            blocks = [tl.block_type(element, shape) for shape in ([2, 16], [16, 2], [tl.constexpr(32)])]
            found += [attributes(kind) for kind in blocks]
            found += [attributes(tl.tensor("handle", kind)) for kind in (element, *blocks)]
            found += [interpreter._get_np_dtype(kind) for kind in (element, *blocks)]
    return found


def broadcasted() -> list[tuple]:
    semantic = interpreter.interpreter_semantic
    flat, row = semantic.arange(0, 8), semantic.expand_dims(semantic.arange(0, 8), 0)
    column = semantic.expand_dims(semantic.arange(0, 4), 1)
    pairs = [(flat, flat), (row, column), (flat, semantic.to_tensor(3)), (semantic.to_tensor(3), row)]
    results = [semantic.broadcast_impl_value(*pair) for pair in pairs]
    return [(str(one.type), one.handle.data.tolist()) for pair in results for one in pair]


OPERATORS = ("add", "mul", "truediv", "mod", "and_", "less_than")
NUMBERS = (0, -2, 2**31 - 1, 2**31, 2**40, True, -0.0, 2.5, 1e300)
KINDS = (
    tl.int1, tl.int8, tl.int32, tl.uint32, tl.int64, tl.uint64, tl.float16, tl.bfloat16, tl.float32, tl.float64,
)  # fmt: skip


def operate(name: str, one, other):
    """Its result down to types and bits, or what kind of error it is."""
    semantic = interpreter.interpreter_semantic
    more = (False,) if name in ("add", "mul") else ()
    try:
        with np.errstate(all="ignore"):
            result = getattr(semantic, name)(one, other, *more)
    except Exception as error:
        return type(error).__name__
    data = result.handle.data
    return attributes(result.type), plain(result.dtype), plain(result.handle.dtype), str(data.dtype), data.tobytes()


def computed() -> list[object]:
    """Results of operators on blocks, single ones, pointers and numbers of all kinds."""
    semantic, found = interpreter.interpreter_semantic, []
    with tl_patched():
        blocks = [semantic.cast(semantic.arange(0, 4), kind) for kind in KINDS]
        singles = [semantic.scalar_constant(3, kind) for kind in (tl.int32, tl.float32)]
        kind = tl.pointer_type(tl.int64)
        pointer = tl.tensor(interpreter.TensorHandle(np.array([4096], dtype=np.uint64), kind), kind)
        for name in OPERATORS:
            for one in (*blocks, pointer):
                found += [operate(name, one, other) for other in (*blocks, *singles, pointer, *NUMBERS)]
                found += [operate(name, number, one) for number in (*singles, *NUMBERS)]
    return found


@contextmanager
def tl_patched():
    """The language as it is within a kernel."""
    scope = interpreter._patch_lang(scrambled)
    try:
        yield
    finally:
        scope.restore()


@pytest.mark.parametrize("work", [made, broadcasted, computed])
def test_what_is_remembered_is_what_would_be_made(work, monkeypatch):
    quick = work()
    put_back_triton(monkeypatch)
    assert work() == quick and len(quick) >= 8


def test_what_is_remembered_wrongly_is_seen(monkeypatch):
    init = tl.tensor.__init__

    def forgetful(self, handle, type):
        init(self, handle, type)
        self.numel = tl.constexpr(1)

    monkeypatch.setattr(tl.tensor, "__init__", forgetful)
    wrong = made()
    put_back_triton(monkeypatch)
    assert made() != wrong


def test_after_a_kernel_the_language_is_as_it_was_imported():
    """Of `tl.core`, which functions of Triton's own see, Triton's interpreter does not put back what it replaced."""
    scrambled()
    assert tl.core.is_builtin(tl.load) and tl.core.is_builtin(tl.tensor.__add__)
