"""Attention on a CPU for the few tokens of a speculative step.

A token looks at its row's committed keys and at its own path's, in each row at as many as there are: no padding, no
mask. Paths are read as if their keys followed the committed ones. So what a token sees, and every rounding on the way,
is what it would see had its path been committed: drafts change no bit of it.
"""

from __future__ import annotations

import numpy as np
import torch

from stand.forward.few_tokens.dot_products import attend
from stand.forward.few_tokens.product import DTYPE_NAMES, DTYPES, ORDINARY, WIDEST, described
from stand.simd.threads import parallel_region

LANES = 16  # numbers of a head are a multiple of it


class TokenPaths:
    """Which keys of their rows packed tokens see, as compiled code reads it.

    offsets: [A + 1], where a row's tokens begin. lengths: [A], committed keys. tails: [A], keys behind those, the new
    tokens' among them. ancestors: [M, T] bool, which of them a token sees.
    """

    def __init__(self, offsets: np.ndarray, lengths: np.ndarray, tails: np.ndarray, ancestors: np.ndarray):
        _, paths = np.nonzero(ancestors)
        path_offsets = np.zeros(len(ancestors) + 1, dtype=np.int64)
        np.cumsum(ancestors.sum(axis=1), out=path_offsets[1:])
        longs = (np.ascontiguousarray(array, dtype=np.int64) for array in (offsets, lengths, tails, path_offsets))
        self._arrays = (*longs, paths.astype(np.int32))
        self.num_rows, self.num_tokens = len(lengths), len(ancestors)
        self.longest = int((lengths + tails).max(initial=0))  # keys of one row
        self.addresses = tuple(array.__array_interface__["data"][0] for array in self._arrays)


def few_token_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, paths: TokenPaths, *, scale: float, window: int = 0
) -> torch.Tensor:
    """query [1, H, M, D] over key and value [A, Hkv, L, D] -> [1, M, H, D]; on a CPU, all of one dtype of
    `product.DTYPES` (bfloat16 needs AVX2), L at least `paths.longest`, D a multiple of 16. Sums are in
    float32.

    `window`: keys that a token sees, itself among them; 0 for all. Scores and sums are added up key by key in order, so
    a token's result has the same bits whatever else the step holds and with any number of threads.

    Raises ValueError for other tensors.
    """
    fits = is_supported(query, key, value) and query.shape[2] == paths.num_tokens and key.shape[0] == paths.num_rows
    if not fits or key.shape[2] < paths.longest:
        raise ValueError(_refusal(paths, query=query, key=key, value=value))
    return supported_attention(query, key, value, paths, scale=scale, window=window)


def supported_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, paths: TokenPaths, *, scale: float, window: int = 0
) -> torch.Tensor:
    """`few_token_attention` of tensors that are known to be supported and to fit the paths."""
    num_heads, num_tokens, size = query.shape[1:]
    mixed = query.new_empty((1, num_tokens, num_heads, size))
    row_stride, head_stride = key.stride()[:2]
    attend(
        query.data_ptr(),
        key.data_ptr(),
        value.data_ptr(),
        mixed.data_ptr(),
        paths.addresses,
        (query.stride(2), query.stride(1), row_stride, head_stride),
        (paths.num_rows, key.shape[1], num_heads // key.shape[1], size, window),
        scale,
        query.dtype is torch.bfloat16,
        WIDEST,
        torch.get_num_threads(),
        parallel_region(),
    )
    return mixed


def is_supported(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> bool:
    """Whether `few_token_attention` takes them."""
    dtype = query.dtype
    for tensor in (query, key, value):
        if type(tensor) not in ORDINARY or not (tensor.is_cpu and tensor.dtype is dtype):
            return False
        if tensor.dim() != 4 or tensor.stride(3) != 1:
            return False
    if dtype not in DTYPES:
        return False
    if torch.is_grad_enabled() and (query.requires_grad or key.requires_grad or value.requires_grad):
        return False
    size, shape = query.shape[3], key.shape
    if query.shape[1] == 0 or shape[1] == 0:
        return False
    if value.shape != shape or value.stride() != key.stride() or shape[3] != size or key.stride(2) != size:
        return False
    return size % LANES == 0 and size > 0 and query.shape[0] == 1 and query.shape[1] % shape[1] == 0


def _refusal(paths: TokenPaths, **tensors: torch.Tensor) -> str:
    got = ", ".join(
        f"{name} {described(tensor)} with strides {list(tensor.stride())}" for name, tensor in tensors.items()
    )
    return (
        f"query [1, H, {paths.num_tokens}, D], key and value [{paths.num_rows}, Hkv, L, D] must be on a CPU, all of "
        f"{DTYPE_NAMES}, without gradients, L at least {paths.longest}, D a multiple of {LANES}, a head's keys one "
        f"behind the other, got {got}; take torch's sdpa"
    )
