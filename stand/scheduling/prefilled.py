"""The keys of one prompt, and what another prompt that begins alike can take of them.

They are computed piece by piece, the same pieces whenever they are run: chunks of a text, and before them, where the
prompt shows something, all of it up to its last token that is not text.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch

from stand.forward.cache.tree_cache import TreeCache
from stand.forward.model import PROMPT_CHUNK
from stand.forward.recurrent.states import RecurrentStates
from stand.media.media import Media


@dataclass(slots=True, eq=False)
class Prefilled:
    """A prompt's keys, and where they were asked for the features of its tokens but the last."""

    keys: TreeCache
    token_ids: np.ndarray  # int32: whose keys they are, or will be
    done: int = -1  # tokens; -1: not begun
    copied: int = 0  # of them, from another prompt
    media: Media | None = None  # what the prompt shows
    features: list[torch.Tensor] = field(default_factory=list)  # by piece, of all that is done or of none
    states: dict[int, RecurrentStates] = field(default_factory=dict)  # by whole pieces: what was noted behind them
    noting: set[int] = field(default_factory=set)  # where states are to be noted
    is_beyond: bool = False  # by the factors of longer texts, see `stand.forward.long_factors`
    is_cut: bool = False  # a piece has begun and not ended: recurrent states may lie behind a part of it

    @property
    def is_recurrent(self) -> bool:
        """Whether layers have states: those behind all that is done, unless others were noted on the way."""
        return bool(self.keys.recurrent.layers)

    @property
    def nbytes(self) -> int:
        noted = [states for states in self.states.values() if states is not self.keys.recurrent]
        beside = sum(states.row_bytes for states in noted) + sum(features.nbytes for features in self.features)
        return self.keys.nbytes + beside

    def tokens_of(self, pieces: int) -> int:
        """How many tokens so many whole pieces are."""
        if self.media is None or not pieces:
            return pieces * PROMPT_CHUNK
        return self.media.text_start + (pieces - 1) * PROMPT_CHUNK

    def pieces_of(self, num_tokens: int) -> int:
        """How many whole pieces there are in so many tokens, -1 counting as none."""
        if self.media is None:
            return max(num_tokens, 0) // PROMPT_CHUNK
        return max((num_tokens - self.media.text_start) // PROMPT_CHUNK + 1, 0)

    def begins_at(self, most: int) -> int:
        """The most whole pieces, `most` of what is done or fewer, that another prompt can begin with."""
        if not (self.is_recurrent or self.keys.has_windows):
            return most
        whole = self.pieces_of(self.done)
        ends = () if self.is_cut or self.done != self.tokens_of(whole) else (whole,)
        return max((pieces for pieces in (*self.states, *ends) if pieces <= most), default=0)

    def note_states(self) -> None:
        """Where they are to be."""
        pieces = self.pieces_of(self.done)
        if self.is_recurrent and self.done == self.tokens_of(pieces) and pieces in self.noting:
            self.states[pieces] = self.keys.recurrent.copied()

    def begin_with(self, source: Prefilled, pieces: int) -> None:
        """What `source` has behind so many whole pieces, as its `begins_at` gives them."""
        self.done = self.tokens_of(pieces)
        self.keys.enter(0, source.keys, self.done)
        if source.is_recurrent:
            self.states = {pieces: source.states.get(pieces) or source.keys.recurrent.copied()}
            self.keys.recurrent.enter(0, self.states[pieces])


def common_pieces(source: Prefilled, target: Prefilled) -> int:
    """Whole pieces that `source` has keys of and `target` begins with."""
    shown, other = ((media.digest, media.text_start) if media else None for media in (source.media, target.media))
    if source.is_beyond != target.is_beyond or shown != other:
        return 0
    most = max(min(source.done, len(target.token_ids)), 0)
    differs = source.token_ids[:most] != target.token_ids[:most]
    return source.pieces_of(int(differs.argmax() if differs.any() else most))
