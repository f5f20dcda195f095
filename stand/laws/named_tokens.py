"""Tokens that settings name: what transformers takes without a word, or fails at in the middle of a call."""

from __future__ import annotations

from collections.abc import Iterable
from numbers import Integral

from transformers import GenerationConfig


def check_named_tokens(config: GenerationConfig, vocabulary_size: int) -> None:
    """Raises ValueError by name. Tokens that are forced must be there: the last one of a row would fail, after all
    others were decoded. So must those of words. Those that are suppressed may be absent.

    What has another form altogether is left to transformers' processors."""
    for name in ("forced_bos_token_id", "forced_eos_token_id"):
        value = getattr(config, name)
        tokens = value if isinstance(value, list) else [value]
        if value is not None and not (tokens and _are_within(tokens, vocabulary_size)):
            raise ValueError(f"{name} must be a token in [0, {vocabulary_size}), got {value!r}; leave it out for none")
    for name in ("suppress_tokens", "begin_suppress_tokens"):
        value = getattr(config, name)
        if isinstance(value, (list, tuple)) and not all(map(_is_id, value)):
            raise ValueError(f"{name} must be token ids, got {value!r:.80}; give integers")
    for name in ("bad_words_ids", "sequence_bias"):
        value = getattr(config, name)
        for word in _words(value):
            if isinstance(word, (list, tuple)) and not _are_within(word, vocabulary_size):
                raise ValueError(
                    f"{name} must hold lists of tokens in [0, {vocabulary_size}), got {word!r:.80} among them; give "
                    "integers that the model has"
                )
    pad_id = config.pad_token_id
    if isinstance(pad_id, (list, tuple, range)):
        raise ValueError(f"pad_token_id must be one token, got {pad_id!r:.80}; give an integer")


def _words(value: object) -> Iterable[object]:
    """Of `bad_words_ids`, or of `sequence_bias` in either of its forms."""
    if not isinstance(value, list):
        return value if isinstance(value, dict) else ()
    return [pair[0] if _is_biased(pair) else pair for pair in value]


def _is_biased(pair: object) -> bool:
    return isinstance(pair, (list, tuple)) and len(pair) == 2 and isinstance(pair[0], (list, tuple))


def _are_within(tokens: Iterable[object], vocabulary_size: int) -> bool:
    return all(_is_id(token) and 0 <= token < vocabulary_size for token in tokens)


def _is_id(value: object) -> bool:
    return isinstance(value, Integral) and not isinstance(value, bool)
