"""What the target said after a token in a hidden state, found again by states that are like it."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

import numpy as np

from stand.trees import NO_TOKEN

FEWEST_SLOTS = 1024
MOST_ASKED = 256  # entries of one token that a question looks at, the newest ones
NUM_NEAREST = 8  # of them that answer
SHARPNESS = 20.0  # a neighbour counts exp(SHARPNESS * its cosine)
LEAST_COSINE = 0.1  # what a cosine counts at least


@dataclass(frozen=True, slots=True, eq=False)
class Entries:
    """n places of a text: the state before the token, the token, and what came after it."""

    tokens: np.ndarray  # [n] int32
    befores: np.ndarray  # [n, d] float32: the state that the token was drawn from
    afters: np.ndarray  # [n, d] float32: the state at the token
    top_ids: np.ndarray  # [n, K] int32: the best tokens after it, padded with -1
    top_probs: np.ndarray  # [n, K] float32

    def put(self, places: list[int] | slice, others: Entries, *, first: int = 0) -> None:
        """Write `others` from `first` on over these places; longer laws are cut, shorter ones padded."""
        width = others.top_ids.shape[1]
        self.tokens[places] = others.tokens[first:]
        self.befores[places], self.afters[places] = others.befores[first:], others.afters[first:]
        for laws, given, padding in (
            (self.top_ids, others.top_ids, NO_TOKEN), (self.top_probs, others.top_probs, 0.0)
        ):  # fmt: skip
            laws[places, :width] = given[first:, : laws.shape[1]]
            laws[places, width:] = padding


class NeighbourMemory:
    """The newest `most_entries` entries of `dim` numbers a state and `width` tokens a law, by their token.

    An entry takes 8 * dim + 8 * width bytes and a few. States are compared by their cosine after the mean of all states
    before a token has been taken away: final norms leave a large part that all states have in common.
    """

    def __init__(self, *, dim: int, width: int, most_entries: int) -> None:
        self.most_entries = most_entries
        self._width = width
        self._slots: dict[int, deque[int]] = {}  # by token, oldest first
        self._next = 0  # the slot that is written next; the oldest one, when all are taken
        self._size = 0
        self._sum, self._count = np.zeros(dim), 0  # of states before a token
        self._entries = self._empty(min(FEWEST_SLOTS, most_entries), dim)

    def __len__(self) -> int:
        return self._size

    def add(self, entries: Entries) -> None:
        """Remember entries, in their order."""
        count = len(entries.tokens)
        self._sum += entries.befores.sum(axis=0, dtype=np.float64)
        self._count += count
        first = max(count - self.most_entries, 0)  # of those before it none would be left
        self._grow(min(self._size + count, self.most_entries))
        slots = [self._take(token) for token in entries.tokens[first:].tolist()]
        self._entries.put(slots, entries, first=first)

    def nearest(self, token: int, before: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray] | None:
        """What followed `token` in the states nearest to `before` [d]; None where it is not known.

        (ids [K] int32 and probabilities [K] float32, likeliest first, padded with -1 and 0; the state [d] at the
        token): the neighbours' weighted means. Probabilities are scaled by the square of the best cosine, because far
        neighbours know little.
        """
        known = self._slots.get(token)
        if not known:
            return None
        slots = np.array(known if len(known) <= MOST_ASKED else list(known)[-MOST_ASKED:])
        mean = self._sum / self._count
        cosines = _unit(self._entries.befores[slots] - mean) @ _unit(before - mean)
        best = np.argsort(-cosines, kind="stable")[:NUM_NEAREST]
        slots, cosines = slots[best], cosines[best]
        shares = np.exp(SHARPNESS * (cosines - cosines[0]))
        shares /= shares.sum()
        worth = min(max(float(cosines[0]), LEAST_COSINE), 1.0) ** 2
        ids, probs = self._mixed(slots, worth * shares)
        return ids, probs, shares.astype(np.float32) @ self._entries.afters[slots]

    def _mixed(self, slots: np.ndarray, shares: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The best tokens of the sum of these entries' laws."""
        ids, places = np.unique(self._entries.top_ids[slots], return_inverse=True)
        probs = np.bincount(places.ravel(), (shares[:, None] * self._entries.top_probs[slots]).ravel(), len(ids))
        probs[ids < 0] = 0.0
        best = np.argsort(-probs, kind="stable")[: self._width]
        best = best[probs[best] > 0.0]
        padding = (0, self._width - len(best))
        return np.pad(ids[best], padding, constant_values=NO_TOKEN), np.pad(probs[best].clip(max=1.0), padding)

    def _take(self, token: int) -> int:
        """A slot for an entry of `token`: a free one, else the oldest entry's."""
        slot = self._next
        self._next = (slot + 1) % self.most_entries
        if self._size == self.most_entries:
            oldest = int(self._entries.tokens[slot])
            self._slots[oldest].popleft()
            if not self._slots[oldest]:
                del self._slots[oldest]
        else:
            self._size += 1
        self._slots.setdefault(token, deque()).append(slot)
        return slot

    def _grow(self, size: int) -> None:
        """Room for `size` entries."""
        held, dim = self._entries, self._entries.befores.shape[1]
        if size > len(held.tokens):
            self._entries = self._empty(min(max(2 * len(held.tokens), size), self.most_entries), dim)
            self._entries.put(slice(len(held.tokens)), held)

    def _empty(self, size: int, dim: int) -> Entries:
        return Entries(
            np.zeros(size, dtype=np.int32),
            np.zeros((size, dim), dtype=np.float32),
            np.zeros((size, dim), dtype=np.float32),
            np.zeros((size, self._width), dtype=np.int32),
            np.zeros((size, self._width), dtype=np.float32),
        )


def _unit(states: np.ndarray) -> np.ndarray:
    """[..., d] of length 1; zeros stay."""
    lengths = np.linalg.norm(states, axis=-1, keepdims=True)
    return states / np.maximum(lengths, np.finfo(np.float32).tiny)
