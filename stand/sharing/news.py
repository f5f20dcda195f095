"""What one process tells the others: the laws of a step's nodes, or the new tokens of some texts, and their bytes.

A piece of news is one array of little-endian words of 32 bits: four sizes, then arrays one after the other.

    laws of a step    B rows, M nodes, W entries, T tokens before the rows' pending tokens; the numbers of tokens before
                      [B], offsets [B + 1], tokens before [T], token ids, parents, depths, ranks [M each], ids [M, W],
                      probabilities [M, W]
    tokens of texts   B texts, L columns, 0, 0; lengths [B], how many tokens are new [B], tokens [B, L]
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from stand.trees import BlendedLookup, DraftBatch
from stand.trees.lookups import MAX_DEPTH

WORD = np.dtype("<i4")
NUM_SIZES = 4
NUM_BEFORE = MAX_DEPTH  # tokens before what is new: no lookup looks back further


class NewsError(ValueError):
    """The bytes are no news that this version can read."""


@dataclass(frozen=True, slots=True)
class StepNews:
    """The laws after all scored nodes of a step."""

    batch: DraftBatch
    befores: Sequence[np.ndarray]  # per row: int32, committed tokens before its pending one
    top_ids: np.ndarray  # [M, W] int32
    top_probs: np.ndarray  # [M, W] float32

    @property
    def num_learned(self) -> int:
        """Nodes."""
        return self.batch.num_nodes

    @property
    def largest_id(self) -> int:
        return max(int(ids.max(initial=0)) for ids in (self.batch.token_ids, self.top_ids, *self.befores))

    def to_bytes(self) -> bytes:
        batch, befores = self.batch, [before[-NUM_BEFORE:] for before in self.befores]
        ends = np.cumsum([len(before) for before in befores], dtype=np.int32)
        sizes = [len(batch), batch.num_nodes, self.top_ids.shape[1], int(ends[-1])]
        nodes = batch.token_ids, batch.parents, batch.depths, batch.ranks
        laws = self.top_ids, np.ascontiguousarray(self.top_probs, dtype=np.float32).view(np.int32)
        return _joined(sizes, np.diff(ends, prepend=0), batch.offsets, *befores, *nodes, *laws)

    @classmethod
    def of(cls, sizes: Sequence[int], words: Words) -> StepNews:
        num_rows, num_nodes, width, num_before = sizes
        ends = np.cumsum(words.take(num_rows)).tolist()
        offsets, before = words.take(num_rows + 1), words.take(num_before)
        if any(end < start for start, end in pairwise([0, *ends])) or ends[-1] != num_before:
            raise NewsError(f"tokens before the pending ones must be {num_before} in all, got ends {ends}")
        token_ids, parents, depths, ranks = (words.take(num_nodes) for _ in range(4))
        top_ids = words.take(num_nodes * width).reshape(num_nodes, width)
        top_probs = words.take(num_nodes * width).view(np.float32).reshape(num_nodes, width)
        batch = DraftBatch.scored(token_ids, parents, offsets, depths, ranks)
        return cls(batch, np.split(before, ends[:-1]), top_ids, top_probs)

    def teach(self, lookup: BlendedLookup, *, scope: int) -> None:
        """Teach it to the lookup. Raises ValueError where the news is unsound."""
        scopes = [scope] * len(self.batch)
        lookup.learn_batch(self.batch, self.befores, self.top_ids, self.top_probs, scopes=scopes)


@dataclass(frozen=True, slots=True)
class TextNews:
    """The newest tokens of texts, as `BlendedLookup.learn_rows` takes them."""

    tokens: np.ndarray  # [R, L] int32
    lengths: np.ndarray  # [B] int64: tokens of each text, the new ones included
    num_new: np.ndarray  # [B] int64
    rows: np.ndarray | None = None  # [B] int64: the texts' rows of the array; None for the first B
    vocabulary_size: int = 2**31  # texts that end with other ids, such as placeholders of images, are not told

    @property
    def num_learned(self) -> int:
        """Tokens."""
        return int(self.num_new.sum())

    @property
    def largest_id(self) -> int:
        return int(self.tokens.max(initial=0))

    def to_bytes(self) -> bytes:
        rows = np.arange(len(self.lengths)) if self.rows is None else self.rows
        width = int(self.num_new.max()) + NUM_BEFORE
        starts = np.maximum(self.lengths - width, 0)
        columns = starts[:, None] + np.arange(width)
        tokens = self.tokens[rows[:, None], np.minimum(columns, self.tokens.shape[1] - 1)]
        tokens[columns >= self.lengths[:, None]] = 0
        is_told = (tokens < self.vocabulary_size).all(axis=1)
        tokens[~is_told] = 0
        sizes = [len(self.lengths), width, 0, 0]
        return _joined(sizes, self.lengths - starts, self.num_new * is_told, tokens)

    @classmethod
    def of(cls, sizes: Sequence[int], words: Words) -> TextNews:
        num_texts, width, *others = sizes
        if others != [0, 0]:
            raise NewsError(f"news of texts must have neither laws nor tokens before, got {others}")
        lengths, num_new = (words.take(num_texts).astype(np.int64) for _ in range(2))
        return cls(words.take(num_texts * width).reshape(num_texts, width), lengths, num_new)

    def teach(self, lookup: BlendedLookup, *, scope: int) -> None:
        """Teach it to the lookup. Raises ValueError where the news is unsound."""
        lookup.learn_rows(self.tokens, self.lengths, self.num_new, scopes=[scope] * len(self.lengths))


News = StepNews | TextNews


class Words:
    """Takes words from the front; `check_end` refuses words that are left over."""

    def __init__(self, data: bytes | memoryview):
        if len(data) % WORD.itemsize:
            raise NewsError(f"news must be whole words of {WORD.itemsize} bytes, got {len(data)} bytes")
        self._words = np.frombuffer(data, dtype=WORD)
        self._num_taken = 0

    def take(self, count: int) -> np.ndarray:
        """int32 [count], of the machine's own byte order."""
        start, self._num_taken = self._num_taken, self._num_taken + count
        if self._num_taken > len(self._words):
            raise NewsError(f"news must hold {self._num_taken} words or more, got {len(self._words)}")
        return self._words[start : self._num_taken].astype(np.int32, copy=False)

    def check_end(self) -> None:
        if self._num_taken != len(self._words):
            raise NewsError(f"news must hold {self._num_taken} words, got {len(self._words)}")


def news_of(data: bytes | memoryview) -> News:
    """Raises NewsError where sizes do not fit; what the arrays hold is judged by `teach`."""
    words = Words(data)
    sizes = words.take(NUM_SIZES).tolist()
    if min(sizes) < 0 or min(sizes[:2]) == 0:
        raise NewsError(f"sizes of news must not be negative, nor 0 for rows, nodes and columns, got {sizes}")
    news = StepNews.of(sizes, words) if sizes[2] > 0 else TextNews.of(sizes, words)
    words.check_end()
    return news


def _joined(sizes: Sequence[int], *arrays: np.ndarray) -> bytes:
    whole = np.concatenate([np.array(sizes, dtype=WORD), *map(np.ravel, arrays)], dtype=WORD, casting="same_kind")
    return whole.tobytes()
