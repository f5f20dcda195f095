"""Triton's interpreter without habits that take three quarters of its time and decide nothing.

At every call of a function within a kernel it looks for `triton.language` to replace, though that was replaced when the
kernel began. It computes every sum and product of integers again in 64 bits, for an assertion that is only made with
`debug`; compiled kernels leave that out too. And for every number it derives the same few shapes and types anew: they
are remembered here.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import triton.language as tl
from triton.runtime import interpreter


def _where_not_yet_replaced(replace: Callable) -> Callable:
    def replaced(function: Callable) -> interpreter._LangPatchScope:
        languages = [value for value in function.__globals__.values() if value is tl or value is tl.core]
        is_as_imported = any(tl.core.is_builtin(language.load) for language in languages)
        return replace(function) if is_as_imported else interpreter._LangPatchScope()

    return replaced


def _replaced_one_by_one(replace: Callable) -> Callable:
    def replaced(owner: object, name: str, member: Callable, builder, scope: interpreter._LangPatchScope) -> None:
        def interpreted(*args, _semantic=None, **kwargs):
            return member(*args, **kwargs, _semantic=interpreter.interpreter_semantic)

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
    def both(self, one: tl.tensor, other: tl.tensor) -> tuple[tl.tensor, tl.tensor]:
        kinds = one.type, other.type
        blocks = [kind for kind in kinds if kind.is_block()]
        if not blocks or (len(blocks) == 2 and kinds[0].shape is kinds[1].shape):  # as `_block_of_known_shape` makes it
            return one, other
        return broadcast(self, one, other)

    return both


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


def _without_overflow_checks(options: object) -> object:
    return dataclasses.replace(options, sanitize_overflow=False)


CHANGES = (  # (owner, name, what makes the quick one of Triton's)
    (interpreter, "_patch_lang", _where_not_yet_replaced),
    (interpreter, "_patch_attr", _replaced_one_by_one),
    (interpreter, "_get_np_dtype", _remembered_dtype),
    (interpreter.interpreter_builder, "options", _without_overflow_checks),
    (type(interpreter.interpreter_semantic), "broadcast_impl_value", _broadcast_where_shapes_differ),
    (tl.block_type, "__init__", _block_of_known_shape),
    (tl.tensor, "__init__", _tensor_of_known_shape),
)
OWN = tuple((owner, name, getattr(owner, name)) for owner, name, _ in CHANGES)  # Triton's


def make_quick() -> None:
    """Of the interpreter of this process, until it ends."""
    for (owner, name, own), (*_, quick_from) in zip(OWN, CHANGES, strict=True):
        setattr(owner, name, quick_from(own))
