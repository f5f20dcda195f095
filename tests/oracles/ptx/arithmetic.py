"""What PTX's arithmetic computes, on arrays of all threads.

`operation(opcode parts)` gives (kinds of the operands, kind of the result, function of arrays). A kind is a type such
as "f32", "s64", "b16" or "pred". Approximate instructions are rounded here; a GPU's differ in the last bits.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

DTYPES = {
    "b8": np.uint8, "u8": np.uint8, "s8": np.int8, "b16": np.uint16, "u16": np.uint16, "s16": np.int16,
    "b32": np.uint32, "u32": np.uint32, "s32": np.int32, "b64": np.uint64, "u64": np.uint64, "s64": np.int64,
    "f16": np.float16, "f32": np.float32, "f64": np.float64, "bf16": np.uint16, "f16x2": np.float16,
    "bf16x2": np.uint16, "pred": np.bool_,
}  # fmt: skip
COMPARISONS = {
    "eq": np.equal, "ne": np.not_equal, "lt": np.less, "le": np.less_equal, "gt": np.greater, "ge": np.greater_equal,
    "lo": np.less, "ls": np.less_equal, "hi": np.greater, "hs": np.greater_equal,
}  # fmt: skip
ROUNDED = {"rzi": np.trunc, "rni": np.rint, "rmi": np.floor, "rpi": np.ceil}
Operation = tuple[list[str], str, Callable[..., np.ndarray]]


def from_bfloat16(bits: np.ndarray) -> np.ndarray:
    return (np.asarray(bits).astype(np.uint32) << np.uint32(16)).view(np.float32)


def to_bfloat16(numbers: np.ndarray) -> np.ndarray:
    """Bits, rounded to the nearest, ties to even; NaN stays one."""
    bits = np.ascontiguousarray(numbers, dtype=np.float32).view(np.uint32)
    rounded = ((bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)).astype(np.uint16)
    return np.where(np.isnan(numbers), np.uint16(0x7FFF), rounded)


def exact_fma(one: np.ndarray, other: np.ndarray, addend: np.ndarray) -> np.ndarray:
    """one * other + addend in float64 with the product's error carried along; double rounding in rare last bits."""
    product = one * other
    high_one, high_other = _high_part(one), _high_part(other)
    low_one, low_other = one - high_one, other - high_other
    error = ((high_one * high_other - product) + high_one * low_other + low_one * high_other) + low_one * low_other
    total = product + addend
    rest = total - product
    lost = (product - (total - rest)) + (addend - rest)
    result = total + (error + lost)
    is_plain = ~np.isfinite(result) | (np.abs(one) > 1e290) | (np.abs(other) > 1e290)
    return np.where(is_plain, total, result)


def _high_part(number: np.ndarray) -> np.ndarray:
    scaled = number * 134217729.0  # 2^27 + 1 (Dekker)
    return scaled - (scaled - number)


def _flushed(numbers: np.ndarray) -> np.ndarray:
    return np.where(np.abs(numbers) < np.finfo(np.float32).tiny, np.copysign(np.float32(0), numbers), numbers)


def operation(parts: list[str]) -> Operation:
    """Of an opcode split at its dots. Raises NotImplementedError for one that is not known here."""
    base, kind, modifiers = parts[0], parts[-1], parts[1:-1]
    maker = _MAKERS.get(base)
    if maker is None:
        raise NotImplementedError(f"the PTX machine has no {'.'.join(parts)}")
    kinds, result, function = maker(kind, modifiers)
    if "ftz" in modifiers and kind == "f32":
        plain = function
        return kinds, result, lambda *numbers: _flushed_result(plain(*map(_flushed, numbers)))
    return kinds, result, function


def _flushed_result(result: np.ndarray) -> np.ndarray:
    return _flushed(result) if result.dtype == np.float32 else result


def _on_bfloat16(function: Callable[..., np.ndarray]) -> Callable[..., np.ndarray]:
    return lambda *bits: to_bfloat16(function(*map(from_bfloat16, bits)))


def _elementwise(function: Callable[..., np.ndarray], count: int):
    def make(kind: str, modifiers: list[str]) -> Operation:
        return [kind] * count, kind, _on_bfloat16(function) if kind.startswith("bf16") else function

    return make


def _logical(for_bits: Callable, for_predicates: Callable, count: int):
    return lambda kind, modifiers: ([kind] * count, kind, for_predicates if kind == "pred" else for_bits)


def _extreme(of_numbers: Callable, with_nan: Callable):
    def make(kind: str, modifiers: list[str]) -> Operation:
        function = with_nan if "NaN" in modifiers else of_numbers
        return [kind] * 2, kind, _on_bfloat16(function) if kind.startswith("bf16") else function

    return make


_WIDE = {"s16": "s32", "u16": "u32", "s32": "s64", "u32": "u64"}


def _mul(kind: str, modifiers: list[str]) -> Operation:
    if "wide" in modifiers:
        wide = DTYPES[_WIDE[kind]]
        return [kind] * 2, _WIDE[kind], lambda one, other: np.multiply(one, other, dtype=wide, casting="same_kind")
    if "hi" in modifiers:
        dtype, wide, shift = DTYPES[kind], DTYPES[_WIDE[kind]], DTYPES[kind]().itemsize * 8
        return [kind] * 2, kind, lambda one, other: (_cast(one, wide) * _cast(other, wide) >> shift).astype(dtype)
    return _elementwise(np.multiply, 2)(kind, modifiers)


def _cast(numbers: np.ndarray, dtype: type) -> np.ndarray:
    return np.asarray(numbers).astype(dtype)


def _mad(kind: str, modifiers: list[str]) -> Operation:
    kinds, result, multiply = _mul(kind, modifiers)
    return [*kinds, result], result, lambda one, other, addend: multiply(one, other) + addend


def _fma(kind: str, modifiers: list[str]) -> Operation:
    if kind == "f64":
        return [kind] * 3, kind, exact_fma
    if kind in ("bf16", "bf16x2"):
        return [kind] * 3, kind, _on_bfloat16(lambda one, other, addend: one.astype(np.float64) * other + addend)
    dtype = DTYPES[kind]
    return [kind] * 3, kind, lambda one, other, addend: (_cast(one, np.float64) * other + addend).astype(dtype)


def _div(kind: str, modifiers: list[str]) -> Operation:
    if kind[0] == "f":
        return [kind] * 2, kind, np.divide
    return [kind] * 2, kind, lambda one, other: _quotient(one, other)[0]


def _quotient(one: np.ndarray, other: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Towards zero, and the remainder; 0 where nothing is to be divided by."""
    safe = np.where(other == 0, np.ones_like(other), other)
    rest = np.fmod(one, safe)
    return (one - rest) // safe, rest


def _rem(kind: str, modifiers: list[str]) -> Operation:
    return [kind] * 2, kind, lambda one, other: _quotient(one, other)[1]


def _shift(kind: str, is_left: bool) -> Operation:
    width, dtype = DTYPES[kind]().itemsize * 8, DTYPES[kind]
    shift = np.left_shift if is_left else np.right_shift

    def shifted(number, amount):
        result = shift(number, np.minimum(amount, width - 1).astype(dtype))
        beyond = np.zeros_like(result) if is_left or kind[0] != "s" else result
        return np.where(np.asarray(amount) >= width, beyond, result)

    return [kind, "u32"], kind, shifted


def _setp(kind: str, modifiers: list[str]) -> Operation:
    name = modifiers[0]
    load = from_bfloat16 if kind == "bf16" else np.asarray
    if name in ("num", "nan"):
        wanted = name == "nan"
        return [kind] * 2, "pred", lambda one, other: (np.isnan(load(one)) | np.isnan(load(other))) == wanted
    if name.endswith("u") and name[:-1] in COMPARISONS:  # true where one is not a number
        compare = COMPARISONS[name[:-1]]
        return (
            [kind] * 2, "pred",
            lambda one, other: compare(load(one), load(other)) | np.isnan(load(one)) | np.isnan(load(other)),
        )  # fmt: skip
    compare = COMPARISONS[name]
    return [kind] * 2, "pred", lambda one, other: _ordered(compare, load(one), load(other), name)


def _ordered(compare: Callable, one: np.ndarray, other: np.ndarray, name: str) -> np.ndarray:
    result = compare(one, other)
    if name == "ne" and one.dtype.kind == "f":  # PTX's ne is false for what is not a number
        result = result & ~np.isnan(one) & ~np.isnan(other)
    return result


def _selp(kind: str, modifiers: list[str]) -> Operation:
    return [kind, kind, "pred"], kind, lambda one, other, is_one: np.where(is_one, one, other)


def _cvt(kind: str, modifiers: list[str]) -> Operation:
    """`cvt.(rounding).(to).(from)`."""
    target, rounding = modifiers[-1], [name for name in modifiers[:-1] if name in ROUNDED]
    if strange := set(modifiers[:-1]) - {"rn", "ftz", *ROUNDED}:
        raise NotImplementedError(f"the PTX machine has no cvt with {', '.join(sorted(strange))}")
    if target in ("bf16x2", "f16x2"):
        half, pack = ("bf16", to_bfloat16) if target == "bf16x2" else ("f16", _float16_bits)
        return [kind] * 2, "b32", lambda high, low: _packed(pack(low), pack(high))
    if target == "bf16":
        return [kind], "b16", lambda number: to_bfloat16(_cast(number, np.float32))
    source = from_bfloat16 if kind == "bf16" else np.asarray
    dtype = DTYPES[target]
    if target[0] != "f" and kind[0] in "fb" and kind in ("f16", "f32", "f64", "bf16"):
        return [kind], target, lambda number: _saturated(ROUNDED[rounding[0]](source(number)), dtype)
    if rounding:  # from float to float
        return [kind], target, lambda number: ROUNDED[rounding[0]](source(number)).astype(dtype)
    return [kind], target, lambda number: source(number).astype(dtype)


def _saturated(numbers: np.ndarray, dtype: type) -> np.ndarray:
    """To integers; what does not fit becomes the nearest that does, NaN becomes 0."""
    limits = np.iinfo(dtype)
    inside = np.clip(np.nan_to_num(numbers.astype(np.float64), nan=0.0), float(limits.min), float(limits.max))
    return np.where(inside >= float(limits.max), limits.max, inside.astype(dtype)).astype(dtype)


def _float16_bits(numbers: np.ndarray) -> np.ndarray:
    return _cast(numbers, np.float16).view(np.uint16)


def _packed(low: np.ndarray, high: np.ndarray) -> np.ndarray:
    return low.astype(np.uint32) | (high.astype(np.uint32) << np.uint32(16))


def _bfe(kind: str, modifiers: list[str]) -> Operation:
    dtype, width = DTYPES[kind], DTYPES[kind]().itemsize * 8

    def extract(number, first, length):
        first, length = np.asarray(first).astype(np.int64), np.asarray(length).astype(np.int64)
        if (first + length > width).any() or (length == 0).any():
            raise NotImplementedError("bfe beyond the end or of no bits")
        up = (width - first - length).astype(dtype)
        return (np.asarray(number) << up) >> (width - length).astype(dtype)

    return [kind, "u32", "u32"], kind, extract


def _popc(kind: str, modifiers: list[str]) -> Operation:
    dtype = DTYPES[kind]
    places = np.arange(dtype().itemsize * 8, dtype=dtype)
    return [kind], "u32", lambda number: ((np.asarray(number)[..., None] >> places) & dtype(1)).sum(-1, dtype=np.uint32)


def _prmt(kind: str, modifiers: list[str]) -> Operation:
    def permute(one, other, selector):
        selector, result = np.asarray(selector), np.uint32(0)
        both = np.asarray(one).astype(np.uint64) | (np.asarray(other).astype(np.uint64) << np.uint64(32))
        for place in range(4):
            choice = (selector >> np.uint32(4 * place)) & np.uint32(15)
            byte = (both >> ((choice & np.uint32(7)).astype(np.uint64) * np.uint64(8))) & np.uint64(0xFF)
            byte = np.where(choice & np.uint32(8), np.where(byte & np.uint64(0x80), 0xFF, 0), byte)
            result = result | (byte.astype(np.uint32) << np.uint32(8 * place))
        return result

    return ["b32"] * 3, "b32", permute


def _rcp(kind: str, modifiers: list[str]) -> Operation:
    if kind == "f64" and "approx" in modifiers:  # the upper half alone is right
        mask = np.uint64(0xFFFFFFFF00000000)
        return [kind], kind, lambda number: (_as_array(1.0 / number).view(np.uint64) & mask).view(np.float64)
    return [kind], kind, lambda number: np.divide(DTYPES[kind](1), number)


def _as_array(number: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(number, dtype=np.float64)


_MAKERS: dict[str, Callable[[str, list[str]], Operation]] = {
    "add": _elementwise(np.add, 2),
    "sub": _elementwise(np.subtract, 2),
    "mul": _mul,
    "mad": _mad,
    "fma": _fma,
    "div": _div,
    "rem": _rem,
    "neg": _elementwise(np.negative, 1),
    "abs": _elementwise(np.abs, 1),
    "min": _extreme(np.fmin, np.minimum),
    "max": _extreme(np.fmax, np.maximum),
    "and": _logical(np.bitwise_and, np.logical_and, 2),
    "or": _logical(np.bitwise_or, np.logical_or, 2),
    "xor": _logical(np.bitwise_xor, np.logical_xor, 2),
    "not": _logical(np.bitwise_not, np.logical_not, 1),
    "shl": lambda kind, modifiers: _shift(kind, True),
    "shr": lambda kind, modifiers: _shift(kind, False),
    "setp": _setp,
    "selp": _selp,
    "cvt": _cvt,
    "bfe": _bfe,
    "popc": _popc,
    "prmt": _prmt,
    "rcp": _rcp,
    "ex2": _elementwise(np.exp2, 1),
    "lg2": _elementwise(np.log2, 1),
    "sqrt": _elementwise(np.sqrt, 1),
    "rsqrt": _elementwise(lambda number: np.divide(np.float32(1), np.sqrt(number)), 1),
    "tanh": _elementwise(np.tanh, 1),
}
