"""What a head adds to the scores of a place's tokens by the token before them."""

from __future__ import annotations

from abc import abstractmethod

import torch
from torch import nn

from stand.drafters.dflash.settings import DFlashSettings

MARKOV_CANDIDATES = 64  # of a place whose scores a Markov head changes; all others keep theirs


class PairScores(nn.Module):
    """num_candidates: the likeliest tokens of a place, whose scores it changes.

    is_closed: no other token is guessed where it has spoken.
    """

    num_candidates: int
    is_closed: bool

    @abstractmethod
    def forward(self, hidden: torch.Tensor, before: torch.Tensor, candidates: torch.Tensor) -> torch.Tensor:
        """Added scores [..., W, C] of candidates [..., C] int64 behind tokens before [..., W] int64, at places of
        hidden states [..., D]."""


class CandidateSelector(PairScores):
    """A low-rank form of the token before, the place's hidden state and the candidate (DFlash 2)."""

    is_closed = True

    def __init__(self, settings: DFlashSettings) -> None:
        super().__init__()
        config, rank = settings.config, settings.selector_rank
        self.num_candidates = settings.selector_top_k
        self.predecessor_codebook = nn.Parameter(_small(config.vocab_size, rank))
        self.successor_codebook = nn.Parameter(_small(config.vocab_size, rank))
        self.hidden_projection = nn.Linear(config.hidden_size, rank, bias=False)

    def forward(self, hidden: torch.Tensor, before: torch.Tensor, candidates: torch.Tensor) -> torch.Tensor:
        asked = self.predecessor_codebook[before] * self.hidden_projection(hidden)[..., None, :]
        return asked @ self.successor_codebook[candidates].transpose(-1, -2)


class MarkovHead(PairScores):
    """A low-rank bias by the token before, weighed by the place's hidden state where it is "gated" (DSpark)."""

    is_closed = False
    num_candidates = MARKOV_CANDIDATES

    def __init__(self, settings: DFlashSettings, num_guessed: int) -> None:
        super().__init__()
        config, rank = settings.config, settings.markov_rank
        self.markov_w1 = nn.Embedding(config.vocab_size, rank)
        self.markov_w2 = nn.Linear(rank, num_guessed, bias=False)
        if settings.markov_head_type == "gated":
            self.gate_proj = nn.Linear(config.hidden_size + rank, rank)

    def forward(self, hidden: torch.Tensor, before: torch.Tensor, candidates: torch.Tensor) -> torch.Tensor:
        """candidates: their numbers among the tokens that are guessed."""
        asked = self.markov_w1(before)
        if hasattr(self, "gate_proj"):
            places = hidden[..., None, :].expand(*asked.shape[:-1], -1)
            asked = asked * torch.sigmoid(self.gate_proj(torch.cat([places, asked], dim=-1)))
        return asked @ self.markov_w2.weight[candidates].transpose(-1, -2)


def pair_scores(settings: DFlashSettings, num_guessed: int) -> PairScores | None:
    """Those of the head; num_guessed: tokens that it guesses."""
    if settings.selector_rank:
        return CandidateSelector(settings)
    return MarkovHead(settings, num_guessed) if settings.markov_rank else None


def _small(*shape: int) -> torch.Tensor:
    return 0.02 * torch.randn(shape)
