"""Digests that name a vocabulary, or a problem."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence

import numpy as np

from stand.trees.compiled import tokens_of

FINGERPRINT_BYTES = 16


def vocabulary_fingerprint(token_to_id: Mapping[str, int]) -> bytes:
    """16 bytes (blake2b) that identify a vocabulary, whatever the order of the mapping.

    token_to_id: as given by `tokenizer.get_vocab()`. Raises ValueError where it is no such mapping, or empty.
    """
    if not isinstance(token_to_id, Mapping) or len(token_to_id) == 0:
        got = type(token_to_id).__name__ if not isinstance(token_to_id, Mapping) else "an empty one"
        raise ValueError(f"token_to_id must be a mapping of tokens to ids, got {got}; pass tokenizer.get_vocab()")
    digest = hashlib.blake2b(digest_size=FINGERPRINT_BYTES)
    for token, token_id in sorted(token_to_id.items()):
        text = token.encode("utf-8", "surrogatepass")
        digest.update(f"{len(text)} {token_id} ".encode())
        digest.update(text)
    return digest.digest()


def problem_key(prompt: Sequence[int] | np.ndarray) -> bytes:
    """16 bytes (blake2b) that name the problem of a prompt: equal token ids, equal keys, in every process and release.

    prompt: token ids [L]. Raises ValueError where they are no whole numbers in [0, 2**31).
    """
    tokens = tokens_of(prompt, "prompt")
    return hashlib.blake2b(tokens.astype("<i4", copy=False).tobytes(), digest_size=FINGERPRINT_BYTES).digest()
