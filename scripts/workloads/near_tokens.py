"""A grammar without a library: a token follows the one before it by at most 63."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from unittest.mock import patch

import numpy as np
import torch
from transformers import LogitsProcessor

from stand.laws.grammars.matchers import KNOWN, LibraryMatcher
from stand.own_copy import full_name


class NearTokens(LogitsProcessor):
    """Stands for a grammar library's processor; within `known` its masks are asked for, as theirs are."""

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        raise AssertionError("masks must be asked for instead")

    @contextmanager
    def known(self) -> Iterator[None]:
        with patch.dict(
            KNOWN, {full_name(self): (lambda _: True, lambda _, row, num_tokens: _NearMatcher(num_tokens))}
        ):
            yield


class _NearMatcher(LibraryMatcher):
    def __init__(self, num_tokens: int):
        super().__init__(num_tokens)
        self._num_tokens, self._tokens = num_tokens, [0]

    def write_mask(self, words: np.ndarray) -> None:
        allowed = np.zeros(32 * len(words), dtype=np.uint8)
        allowed[(self._tokens[-1] + np.arange(1, 64)) % self._num_tokens] = 1
        words.view(np.uint8)[:] = np.packbits(allowed, bitorder="little")

    def takes_any(self, token: int) -> bool:
        return False

    def _take(self, token: int) -> bool:
        self._tokens.append(token)
        return True

    def _go_back(self, count: int) -> None:
        del self._tokens[len(self._tokens) - count :]
