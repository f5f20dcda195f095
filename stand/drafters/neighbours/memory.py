"""What the target said after a token in a hidden state, found again by states that are like it."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import islice

import numpy as np

from stand.trees import NO_TOKEN

FEWEST_SLOTS = 1024
NO_SLOT = 0  # where there are too few neighbours: any slot, its share is 0
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


@dataclass(frozen=True, slots=True, eq=False)
class Answers:
    """What a memory says about m places, each the weighted mean of its neighbours."""

    places: np.ndarray  # [m] int64, ascending: those of the question that it knows something about
    ids: np.ndarray  # [m, K] int32: the tokens after it, likeliest first, padded with -1
    probs: np.ndarray  # [m, K] float32
    states: np.ndarray  # [m, d] float32: the state at the token


class NeighbourMemory:
    """The newest `most_entries` entries of `dim` numbers a state and `width` tokens a law, by their token.

    An entry takes 8 * dim + 8 * width bytes and a few. States are compared by their cosine after the mean of all states
    before a token, as far as it was known when they came, has been taken away: final norms leave a large part that all
    states have in common.
    """

    def __init__(self, *, dim: int, width: int, most_entries: int) -> None:
        self.most_entries = most_entries
        self._width = width
        self._slots: dict[int, deque[int]] = {}  # by token, oldest first
        self._next = 0  # the slot that is written next; the oldest one, when all are taken
        self._size = 0
        self._sum, self._count = np.zeros(dim), 0  # of states before a token
        self._entries = self._empty(min(FEWEST_SLOTS, most_entries), dim)  # `befores` without the mean, of length 1

    def __len__(self) -> int:
        return self._size

    def add(self, entries: Entries) -> None:
        """Remember entries, in their order."""
        count = len(entries.tokens)
        if count == 0:
            return  # there may be no mean yet
        self._sum += entries.befores.sum(axis=0, dtype=np.float64)
        self._count += count
        first = max(count - self.most_entries, 0)  # of those before it none would be left
        self._grow(min(self._size + count, self.most_entries))
        slots = [self._take(token) for token in entries.tokens[first:].tolist()]
        self._entries.put(slots, replace(entries, befores=self._directions(entries.befores)), first=first)

    def nearest(self, tokens: Sequence[int], befores: np.ndarray) -> Answers | None:
        """What followed each of n tokens in the states nearest to `befores` [n, d]; None where no token is known.

        Probabilities are scaled by the square of the best cosine, because far neighbours know little.
        """
        places = [place for place, token in enumerate(tokens) if token in self._slots]
        if not places:
            return None
        slots = np.full((len(places), NUM_NEAREST), NO_SLOT, dtype=np.int64)
        cosines = np.full((len(places), NUM_NEAREST), -np.inf, dtype=np.float32)
        for row, (place, direction) in enumerate(zip(places, self._directions(befores[places]), strict=True)):
            known = self._slots[tokens[place]]
            asked = np.fromiter(islice(reversed(known), MOST_ASKED), np.int64, min(len(known), MOST_ASKED))
            found = self._entries.befores[asked] @ direction
            best = (-found).argsort(kind="stable")[:NUM_NEAREST]
            slots[row, : len(best)], cosines[row, : len(best)] = asked[best], found[best]
        shares = np.exp(SHARPNESS * (cosines - cosines[:, :1]))  # 0 where there is no neighbour
        shares /= shares.sum(axis=1, keepdims=True)
        worth = cosines[:, :1].clip(LEAST_COSINE, 1.0) ** 2
        ids, probs = self._mixed(slots, worth * shares)
        states = (shares[:, None] @ self._entries.afters[slots])[:, 0]
        return Answers(np.array(places), ids, probs, states)

    def _mixed(self, slots: np.ndarray, shares: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The best tokens of the sums of these entries' laws, [m, n] of both."""
        rows = len(slots)
        ids = self._entries.top_ids[slots].reshape(rows, -1)
        probs = (shares[:, :, None] * self._entries.top_probs[slots]).reshape(rows, -1)
        order = ids.argsort(axis=1, kind="stable")
        ids, probs = np.take_along_axis(ids, order, axis=1), np.take_along_axis(probs, order, axis=1)
        is_first = np.ones(ids.shape, dtype=bool)
        is_first[:, 1:] = ids[:, 1:] != ids[:, :-1]
        starts = np.flatnonzero(is_first)
        sums = np.zeros(ids.shape, dtype=np.float32)
        sums.flat[starts] = np.add.reduceat(probs.ravel(), starts)
        sums[ids < 0] = 0.0
        best = (-sums).argsort(axis=1, kind="stable")[:, : self._width]
        sums = np.take_along_axis(sums, best, axis=1)
        return np.where(sums > 0.0, np.take_along_axis(ids, best, axis=1), NO_TOKEN), sums.clip(max=1.0)

    def _directions(self, states: np.ndarray) -> np.ndarray:
        """[n, d] float32 without the mean, of length 1; zeros stay."""
        centred = states - (self._sum / self._count).astype(np.float32)
        lengths = np.linalg.norm(centred, axis=-1, keepdims=True)
        return centred / np.maximum(lengths, np.finfo(np.float32).tiny)

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
