"""Log-probabilities of an answer, place by place, as harnesses and clients have them: texts and bytes of tokens."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # they load torch
    from transformers import PreTrainedTokenizerBase

    from stand.laws.logprobs import TokenLogprobs

Place = list[tuple[str, float]]  # text and log-probability: of the token that was drawn, then of the likeliest ones


@lru_cache(maxsize=4)
def texts_of(tokenizer: PreTrainedTokenizerBase) -> Callable[[int], str]:
    """What gives a token's text; it remembers them, for answers have mostly the same tokens."""
    return lru_cache(maxsize=1 << 16)(lambda token: tokenizer.decode([token]))


def places_of(token_ids: Sequence[int], found: TokenLogprobs, text_of: Callable[[int], str]) -> list[Place]:
    """One of each token. text_of: a token's text."""
    own = zip(token_ids, found.of_tokens.tolist(), strict=True)
    others = (zip(*pair, strict=True) for pair in zip(found.top_ids.tolist(), found.top.tolist(), strict=True))
    return [
        [(text_of(token), value) for token, value in (first, *rest)] for first, rest in zip(own, others, strict=True)
    ]


def bytes_of(text: str) -> list[int] | None:
    """Of a token's text; None where it is a part of a character, which its text does not tell."""
    from stand.texts.pieces import UNFINISHED

    return None if UNFINISHED in text else list(text.encode())
