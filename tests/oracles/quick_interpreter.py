"""Triton's interpreter without habits that take most of its time and decide nothing.

At every call of a function within a kernel it looks for `triton.language` to replace, though that was replaced when the
kernel began. It computes every sum and product of integers again in 64 bits, for an assertion that is only made with
`debug`; compiled kernels leave that out too. For every number it derives the same few shapes and types anew: they are
remembered here. And it looks for a common type of operands that have one, and converts them to what they are.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import numpy as np
import triton.language as tl
from triton.runtime import interpreter

INTEGERS = frozenset(tl.dtype.SINT_TYPES + tl.dtype.UINT_TYPES)  # names, as all below
HOLD_INTEGERS = frozenset({"int32", "int64", "fp32", "fp64"})  # every one of 32 bits, with its sign, as far as they can


def _where_not_yet_replaced(replace: Callable) -> Callable:
    seen: dict[Callable, list] = {}  # what a function sees of the language

    def replaced(function: Callable) -> interpreter._LangPatchScope:
        if function not in seen:
            seen[function] = [value for value in function.__globals__.values() if value is tl or value is tl.core]
        is_as_imported = any(tl.core.is_builtin(language.load) for language in seen[function])
        return replace(function) if is_as_imported else interpreter._LangPatchScope()

    return replaced


def _replaced_one_by_one(replace: Callable) -> Callable:
    asks_for_semantic = tl.core.builtin(lambda: None).__code__

    def replaced(owner: object, name: str, member: Callable, builder, scope: interpreter._LangPatchScope) -> None:
        is_asking = getattr(member, "__code__", None) is asks_for_semantic
        own, semantic = member.__wrapped__ if is_asking else member, interpreter.interpreter_semantic

        def interpreted(*args, _semantic=None, **kwargs):
            return own(*args, **kwargs, _semantic=semantic)

        scope.set_attr(owner, name, interpreted)

    return replaced


def _remembered_dtype(np_dtype: Callable) -> Callable:
    known: dict[str, object] = {}  # by name of the scalar type

    def of(kind: tl.dtype) -> object:
        name = kind.scalar.name
        if name not in known:
            known[name] = np_dtype(kind)
        return known[name]

    return of


def _broadcast_where_shapes_differ(broadcast: Callable) -> Callable:
    def filled(self, number: tl.tensor, kind: tl.block_type) -> tl.tensor:
        kind = kind.with_element_ty(number.dtype)
        return self.tensor(self.builder.create_splat(kind, number.handle), kind)

    def both(self, one: tl.tensor, other: tl.tensor) -> tuple[tl.tensor, tl.tensor]:
        kind, other_kind = one.type, other.type
        is_block, is_other_block = type(kind) is tl.block_type, type(other_kind) is tl.block_type
        if not is_block:
            return (filled(self, one, other_kind), other) if is_other_block else (one, other)
        if not is_other_block:
            return one, filled(self, other, kind)
        if kind.shape is other_kind.shape:  # as `_block_of_known_shape` makes it
            return one, other
        return broadcast(self, one, other)

    return both


def _is_held(number: object, kind: tl.dtype) -> bool:
    """Whether a number beside a tensor of this kind becomes one of it without a further look."""
    if type(number) is int:
        return kind.name in HOLD_INTEGERS and -(2**31) <= number < 2**31
    return type(number) is float and kind.name in ("fp32", "fp64")


def _checked_for_known_kinds(check: Callable) -> Callable:
    common: dict[tuple[str, str, bool], tl.dtype] = {}  # by names of two types

    def both_tensors(self, lhs: tl.tensor, rhs: tl.tensor, div_or_mod: bool) -> tuple[tl.tensor, tl.tensor]:
        key = lhs.dtype.name, rhs.dtype.name, div_or_mod
        if key not in common:
            common[key] = self.computation_type_impl(lhs.dtype, False, rhs.dtype, False, div_or_mod)
        return self.broadcast_impl_value(self.cast(lhs, common[key]), self.cast(rhs, common[key]))

    def checked(
        self, lhs, rhs, allow_lhs_ptr=False, allow_rhs_ptr=False, arithmetic_check=True, div_or_mod=False
    ) -> tuple[tl.tensor, tl.tensor]:
        is_left, is_right = type(lhs) is tl.tensor, type(rhs) is tl.tensor
        if is_left and is_right:
            is_plain = type(lhs.dtype) is tl.dtype
            if is_plain and type(rhs.dtype) is tl.dtype and arithmetic_check:
                return both_tensors(self, lhs, rhs, div_or_mod)
            if not is_plain and allow_lhs_ptr and rhs.dtype.name in INTEGERS:
                return self.broadcast_impl_value(lhs, rhs)
        elif arithmetic_check and is_left and _is_held(rhs, lhs.dtype):
            return self.broadcast_impl_value(lhs, self.scalar_constant(rhs, lhs.dtype))
        elif arithmetic_check and is_right and _is_held(lhs, rhs.dtype):
            return self.broadcast_impl_value(self.scalar_constant(lhs, rhs.dtype), rhs)
        return check(self, lhs, rhs, allow_lhs_ptr, allow_rhs_ptr, arithmetic_check, div_or_mod)

    return checked


def _cast_where_kinds_differ(cast: Callable) -> Callable:
    def quick(self, input, dst_ty, fp_downcast_rounding=None) -> tl.tensor:  # called by these names, too
        own, kind = input.dtype, dst_ty.scalar
        if own is kind or (type(own) is tl.dtype and own.name == kind.name):
            return input
        return cast(self, input, dst_ty, fp_downcast_rounding)

    return quick


def _unwrapped_where_wrapped(unwrap: Callable) -> Callable:
    bare = frozenset({tl.tensor, int, float, bool, type(None)})
    return lambda value: value if type(value) in bare else unwrap(value)


def _equal_by_name(equal: Callable) -> Callable:
    return lambda self, other: self.name == other.name if type(other) is tl.dtype else equal(self, other)


def _is_among_integers(is_int: Callable) -> Callable:
    return lambda self: self.name in INTEGERS


def _handle_of_known_size(init: Callable) -> Callable:
    fitting: set[tuple[int, str]] = set()  # bytes of a number, and name of its type

    def quick(self, data, dtype: tl.dtype, attr: dict | None = None) -> None:
        key = data.itemsize, dtype.name
        if key not in fitting:
            init(self, data, dtype)
            fitting.add(key)
        self.data, self.dtype, self.attr = data, dtype, {} if attr is None else attr

    return quick


def _block_of_known_shape(init: Callable) -> Callable:
    """Blocks of one shape have it as one object."""
    shapes: dict[tuple[int, ...], object] = {}
    known: dict[tuple[str, tuple[int, ...]], tuple] = {}

    def quick(self, element_ty: tl.dtype, shape) -> None:
        sizes = tuple([size.value if isinstance(size, tl.constexpr) else size for size in shape])
        key = element_ty.name, sizes
        if key not in known:
            init(self, element_ty, shape)
            self.shape = shapes.setdefault(sizes, self.shape)
            known[key] = self.shape, self.numel, self.name
        self.element_ty = element_ty
        self.shape, self.numel, self.name = known[key]

    return quick


def _tensor_of_known_shape(init: Callable) -> Callable:
    known: dict[str, tuple] = {}  # by name of the type, which holds the shape

    def quick(self, handle, type: tl.dtype) -> None:  # called by this name, too
        name = type.name
        if name not in known:
            init(self, handle, type)
            known[name] = self.numel, self.shape
        self.handle, self.type, self.dtype = handle, type, type.scalar
        self.numel, self.shape = known[name]

    return quick


def _halved_where_exact(reduce: Callable) -> Callable:
    """Integers are combined half by half: Triton asks for associative functions, and those of floats are so nearly."""

    def quick(self, input: tuple[tl.tensor, ...]) -> list[tl.tensor]:
        rest = input[0]
        if len(input) > 1 or self.keep_dims or len(rest.shape) != 1 or rest.dtype.name not in INTEGERS:
            return reduce(self, input)
        while rest.handle.data.size > 1:
            halves = np.split(rest.handle.data, 2)  # a block has a power of two
            rest = self.combine_fn.fn(*(self.to_tensor(half, rest.dtype) for half in halves))
        return [self.to_tensor(rest.handle.data.item(), input[0].dtype)]

    return quick


def _without_overflow_checks(options: object) -> object:
    return dataclasses.replace(options, sanitize_overflow=False)


CHANGES = (  # (owner, name, what makes the quick one of Triton's)
    (interpreter, "_patch_lang", _where_not_yet_replaced),
    (interpreter, "_patch_attr", _replaced_one_by_one),
    (interpreter, "_get_np_dtype", _remembered_dtype),
    (interpreter.interpreter_builder, "options", _without_overflow_checks),
    (type(interpreter.interpreter_semantic), "broadcast_impl_value", _broadcast_where_shapes_differ),
    (type(interpreter.interpreter_semantic), "binary_op_type_checking_impl", _checked_for_known_kinds),
    (type(interpreter.interpreter_semantic), "cast", _cast_where_kinds_differ),
    (interpreter.ReduceOps, "generic_reduce", _halved_where_exact),
    (interpreter.TensorHandle, "__init__", _handle_of_known_size),
    (tl.core, "_unwrap_if_constexpr", _unwrapped_where_wrapped),
    (tl.dtype, "__eq__", _equal_by_name),
    (tl.dtype, "is_int", _is_among_integers),
    (tl.block_type, "__init__", _block_of_known_shape),
    (tl.tensor, "__init__", _tensor_of_known_shape),
)
OWN = tuple((owner, name, getattr(owner, name)) for owner, name, _ in CHANGES)  # Triton's


def make_quick() -> None:
    """Of the interpreter of this process, until it ends."""
    for (owner, name, own), (*_, quick_from) in zip(OWN, CHANGES, strict=True):
        setattr(owner, name, quick_from(own))
