"""What a seed promises, and the seed of a call's own random streams.

A call's drafts, tests and residual draws use numbers that follow from (seed, what the drafter's memory has learned and
which calls began to teach it before). Two calls with one seed therefore share no number where one of them may draft
from the other one's outcome, be it over, under way or begun at the same instant in another thread: with shared numbers
one test would decide what is drafted and then test it again, and the output's law would be wrong. The noise of `match`
and `coupled` follows from the user's seed, because it never meets the drafts.

All of a row's numbers also follow from its prompt. So a call whose prompt holds what an earlier one drew with the same
seed, such as the next turn of a chat, draws anew. That prompt shapes the drafts of its batch mates, too: they share the
node budget with it, and may learn from it. So the numbers of a call's own streams follow from all prompts that it has
met so far, but where nothing is learned and the drafter keeps rows apart (`Drafter.rows_apart`).
"""

from __future__ import annotations

import operator
import secrets
from hashlib import blake2b

import numpy as np


def checked_seed(seed: object) -> int:
    """The seed of a call; None draws one. Raises ValueError unless it is an integer in [0, 2**63)."""
    if seed is None:
        return secrets.randbits(63)
    try:
        number = -1 if isinstance(seed, bool) else operator.index(seed)
    except TypeError:
        number = -1
    if not 0 <= number < 2**63:
        raise ValueError(f"seed must be an integer in [0, 2**63), got {seed!r}; leave it out to draw one")
    return number


def call_seed(seed: int, start: int) -> int:
    """The seed in [0, 2**63) of a call's own streams; `start`, in [0, 2**64): what `Drafter.start_call` gave.

    `seed` itself where that is 0, as for the first call that teaches an empty lookup.
    """
    if start == 0:
        return seed
    words = b"".join(word.to_bytes(8, "little") for word in (seed, start))
    return int.from_bytes(blake2b(words, digest_size=8).digest(), "little") >> 1


def seed_with_prompt(seed: int, prompt: np.ndarray) -> int:
    """The seed in [0, 2**63) of the own streams of a call that drafts once it has met `prompt`, int32 [L]; `seed`: that
    before.

    The prompt may hold what the same numbers drew in another call, whether or not this one learns from it.
    """
    return call_seed(seed, _digest(prompt, 8))


def prompt_word(prompt: np.ndarray, shown: bytes = b"") -> int:
    """32 bits of a digest of a prompt, int32 [L], and of what it shows (`Media.digest`).

    A row's random numbers are named by its number in the call XOR this word: rows of one prompt never share a name, two
    rows of different prompts do with a chance of 2**-32.
    """
    return _digest(prompt, 4, shown)


def _digest(prompt: np.ndarray, num_bytes: int, shown: bytes = b"") -> int:
    digest = blake2b(np.ascontiguousarray(prompt, dtype="<i4"), digest_size=num_bytes, key=shown)
    return int.from_bytes(digest.digest(), "little")
