"""The threads of compiled loops on a CPU: torch's own."""

from __future__ import annotations

import ctypes
import os
from functools import lru_cache

OMP_PAUSE_HARD = 1  # OpenMP 5.0, section 2.12


@lru_cache
def parallel_region() -> int:
    """Address of GOMP_parallel in the OpenMP library that torch has loaded; 0 where torch has another one.

    A pool of threads beside torch's own would fight it for the processors: both wait by spinning.
    """
    try:
        return ctypes.cast(_gomp().GOMP_parallel, ctypes.c_void_p).value or 0
    except (OSError, AttributeError):
        return 0


def release_pool() -> None:
    """Give back the threads that help this one to compute; the next computation takes new ones, in microseconds.

    Every thread that computes has helpers of its own. Where all of them are more than processors, GOMP has them wait
    with less spinning: on two cores a step took 16 to 27 % longer in a thread beside another one that had computed.
    """
    try:
        _gomp().omp_pause_resource_all(OMP_PAUSE_HARD)
    except (OSError, AttributeError):
        pass  # another library, or one that is older than this function


@lru_cache
def _gomp() -> ctypes.CDLL:
    """Raises OSError where torch has not loaded it."""
    return ctypes.CDLL("libgomp.so.1", mode=os.RTLD_NOLOAD | os.RTLD_NOW)
