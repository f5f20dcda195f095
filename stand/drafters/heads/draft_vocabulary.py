"""The tokens that a head guesses, of the target's: as published checkpoints name them."""

from __future__ import annotations

import torch

OFFSETS, KNOWN = "d2t", "t2d"  # of the tokens that are guessed to the target's ids; whether the head guesses a token


def tokens_of(offsets: torch.Tensor, size: int) -> torch.Tensor:
    """[W] int64: what is guessed, of the target's `size` tokens. Raises ValueError where that is not distinct."""
    if offsets.dtype not in (torch.int32, torch.int64) or offsets.dim() != 1 or len(offsets) == 0:
        got = f"{list(offsets.shape)} of {offsets.dtype}"
        raise ValueError(f"{OFFSETS} must be integers in a row, got {got}; fetch the checkpoint again")
    tokens = offsets.long() + torch.arange(len(offsets))
    if not (0 <= tokens.min() and tokens.max() < size):
        raise ValueError(
            f"{OFFSETS} must lead to tokens from 0 to {size - 1}, got {tokens.min()} to {tokens.max()}; "
            "take the head that was trained for this model"
        )
    if len(tokens.unique()) < len(tokens):
        raise ValueError(f"{OFFSETS} must lead to distinct tokens, got some twice; fetch the checkpoint again")
    return tokens


def check_known(vocabulary: torch.Tensor | None, known: torch.Tensor | None, count: int | None, size: int) -> None:
    """Raise ValueError where `known`, or the `count` of the configuration, tells of other tokens than `vocabulary`,
    which is all of `size` where it is None."""
    tokens = torch.arange(size) if vocabulary is None else vocabulary
    if known is not None and not torch.equal(known.reshape(-1).nonzero()[:, 0], tokens.sort().values):
        raise ValueError(
            f"{KNOWN} must be true at the tokens that {OFFSETS} leads to, got {int(known.count_nonzero())} true and "
            f"{len(tokens)} tokens that are not the same; fetch the checkpoint again"
        )
    if vocabulary is not None and count not in (None, len(tokens)):
        raise ValueError(
            f"draft_vocab_size of config.json must be the number of tokens that {OFFSETS} leads to, {len(tokens)}, "
            f"got {count!r}; fetch all files of the checkpoint again"
        )


def offsets_of(vocabulary: torch.Tensor, size: int) -> dict[str, torch.Tensor]:
    """Both tensors of a vocabulary, int64 [W] ascending, of the target's `size` tokens."""
    ids = vocabulary.cpu()
    known = torch.zeros(size, dtype=torch.bool)
    known[ids] = True
    return {OFFSETS: ids - torch.arange(len(ids)), KNOWN: known}
