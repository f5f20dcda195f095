"""The threads of compiled loops on a CPU: torch's own."""

from __future__ import annotations

import ctypes
import os
from functools import lru_cache


@lru_cache
def parallel_region() -> int:
    """Address of GOMP_parallel in the OpenMP library that torch has loaded; 0 where torch has another one.

    A pool of threads beside torch's own would fight it for the processors: both wait by spinning.
    """
    try:
        library = ctypes.CDLL("libgomp.so.1", mode=os.RTLD_NOLOAD | os.RTLD_NOW)
        return ctypes.cast(library.GOMP_parallel, ctypes.c_void_p).value or 0
    except (OSError, AttributeError):
        return 0
