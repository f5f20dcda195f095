"""The keys of one prompt, and what another prompt that begins alike can take of them."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch

from stand.forward.cache.tree_cache import TreeCache
from stand.forward.model import PROMPT_CHUNK
from stand.forward.recurrent.states import RecurrentStates


@dataclass(slots=True, eq=False)
class Prefilled:
    """A prompt's keys, and where they were asked for the features of its tokens but the last."""

    keys: TreeCache
    token_ids: np.ndarray  # int32: whose keys they are, or will be
    done: int = -1  # tokens; -1: not begun
    copied: int = 0  # of them, from another prompt
    features: list[torch.Tensor] = field(default_factory=list)  # by chunk, of all that is done or of none
    states: dict[int, RecurrentStates] = field(default_factory=dict)  # by whole chunks: what was noted behind them
    noting: set[int] = field(default_factory=set)  # where states are to be noted
    is_shareable: bool = True  # not where the prompt shows what its token ids do not tell
    is_beyond: bool = False  # by the factors of longer texts, see `stand.forward.long_factors`
    is_cut: bool = False  # a chunk has begun and not ended: recurrent states may lie behind a part of it

    @property
    def is_recurrent(self) -> bool:
        """Whether layers have states: those behind all that is done, unless others were noted on the way."""
        return bool(self.keys.recurrent.layers)

    @property
    def nbytes(self) -> int:
        noted = [states for states in self.states.values() if states is not self.keys.recurrent]
        beside = sum(states.row_bytes for states in noted) + sum(features.nbytes for features in self.features)
        return self.keys.nbytes + beside

    def begins_at(self, most: int) -> int:
        """The most whole chunks, `most` of what is done or fewer, that another prompt can begin with."""
        if not (self.is_recurrent or self.keys.has_windows):
            return most
        ends = () if self.is_cut or self.done % PROMPT_CHUNK else (self.done // PROMPT_CHUNK,)
        return max((chunks for chunks in (*self.states, *ends) if chunks <= most), default=0)

    def note_states(self) -> None:
        """Where they are to be."""
        chunks, rest = divmod(self.done, PROMPT_CHUNK)
        if self.is_recurrent and not rest and chunks in self.noting:
            self.states[chunks] = self.keys.recurrent.copied()

    def begin_with(self, source: Prefilled, chunks: int) -> None:
        """What `source` has behind so many whole chunks, as its `begins_at` gives them."""
        self.done = chunks * PROMPT_CHUNK
        self.keys.enter(0, source.keys, self.done)
        if source.is_recurrent:
            self.states = {chunks: source.states.get(chunks) or source.keys.recurrent.copied()}
            self.keys.recurrent.enter(0, self.states[chunks])


def common_chunks(source: Prefilled, target: Prefilled) -> int:
    """Whole chunks that `source` has keys of and `target` begins with."""
    if source.is_beyond != target.is_beyond or not (source.is_shareable and target.is_shareable):
        return 0
    most = max(min(source.done, len(target.token_ids)), 0)
    differs = source.token_ids[:most] != target.token_ids[:most]
    return int(differs.argmax() if differs.any() else most) // PROMPT_CHUNK
