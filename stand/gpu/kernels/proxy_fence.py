"""A fence that Triton before 3.7.1 leaves out: between asynchronous copies and the matrix instructions that read them.

The matrix instructions of sm_90 and sm_100 read shared memory by another path ("asynchronous proxy") than the copies
write it. Without the fence a GPU may read what was there before (triton #10537; PTX ISA, section on proxies). Triton
lets its stages be replaced, so here the fence is written into the PTX behind every wait for copies.
"""

from __future__ import annotations

import contextlib
import re
import threading
from collections.abc import Callable, Iterator, MutableMapping

import triton
from triton import knobs

from stand.gpu.kernels.launch import version_numbers

FENCED_SINCE = (3, 7, 1)
MUST_ADD_FENCES = version_numbers(triton.__version__) < FENCED_SINCE
_FENCE = "fence.proxy.async.shared::cta;"
_WAIT = re.compile(r"cp\.async\.wait_(?:group\s+\d+|all);")
_READERS = ("wgmma.mma_async", "tcgen05.mma")
_compiling = threading.RLock()  # Triton has one hook for all threads


def add_fences(ptx: str) -> str:
    """The PTX with a fence behind every wait for copies, where matrix instructions of the other path are used."""
    if not any(reader in ptx for reader in _READERS):
        return ptx
    return _WAIT.sub(lambda wait: f"{wait.group()}\n\t{_FENCE}", ptx)


@contextlib.contextmanager
def fences_added() -> Iterator[None]:
    """Kernels that are compiled within have the fences, whichever Triton compiles them.

    Triton 3.6 does not ask how a stage was replaced when it looks for a kernel that was compiled before, so kernels
    should take `MUST_ADD_FENCES` as a constant: it is part of what they are kept by.
    """
    if not MUST_ADD_FENCES:
        yield
        return
    with _compiling:
        former = knobs.runtime.add_stages_inspection_hook
        knobs.runtime.add_stages_inspection_hook = _hook_after(former)
        try:
            yield
        finally:
            knobs.runtime.add_stages_inspection_hook = former


def _hook_after(former: Callable | None) -> Callable:
    """Triton's hook: given a backend, its stages and more, it replaces a stage. 3.7.0 calls it without arguments too:
    what compiled kernels are kept by."""

    def hook(*given) -> tuple[str, str]:
        key, digest = (former(*given) if former else None) or ("", "")
        if given:
            stages: MutableMapping[str, Callable] = given[1]
            make_ptx = stages["ptx"]
            stages["ptx"] = lambda source, metadata: add_fences(make_ptx(source, metadata))
        return f"{key} {_FENCE}", f"{digest} {_FENCE}"

    return hook
