"""`wrap` for models of mlx-lm."""

from __future__ import annotations

import warnings

import mlx.nn as nn
from mlx_lm.tokenizer_utils import TokenizerWrapper
from transformers import PreTrainedTokenizerBase

from stand.drafters.drafter import Drafter
from stand.engine import Engine
from stand.plugins.mlx.backend import MlxBackend
from stand.plugins.mlx.self_check import checked_model
from stand.trees import BlendedLookup, LookupTree
from stand.verifiers import Verifier
from stand.wrapping import attach, checked_drafter, checked_rule, refuse_needy


def wrap(
    model: nn.Module,
    tokenizer: TokenizerWrapper | PreTrainedTokenizerBase | None = None,
    *,
    drafter: Drafter | BlendedLookup | LookupTree | None = None,
    verifier: str | Verifier = "traversal",
) -> Engine:
    """Make an engine around a model of mlx-lm, as it is.

    model, tokenizer: what `mlx_lm.load` returns. mlx-lm's tokenizer knows the tokens that end a text; of one of
    transformers' its `eos_token_id` does; without one prompts are token ids, and `eos_token_id=` of a call says it.
    drafter, verifier: as in `stand.wrap`.

    Raises UnsupportedModelError for a model that cannot be served exactly, ValueError for anything else that
    does not fit.
    """
    rule = checked_rule(verifier)
    drafter = checked_drafter(drafter)
    refuse_needy(drafter, "MLX")
    end_ids = _end_ids(tokenizer)
    if isinstance(tokenizer, TokenizerWrapper):
        _warn_of_template(tokenizer)
        tokenizer = tokenizer._tokenizer
    foreign = checked_model(model, end_ids)
    attach(drafter, foreign, tokenizer, rule)
    return Engine(foreign, tokenizer, drafter=drafter, verifier=rule, backend=MlxBackend(foreign))


def _warn_of_template(tokenizer: TokenizerWrapper) -> None:
    if tokenizer._chat_template is not None:
        warnings.warn(
            "chats are rendered by the tokenizer's template, not by mlx-lm's own for this model; pass texts that "
            "tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True) makes",
            stacklevel=3,
        )


def _end_ids(tokenizer: object) -> list[int]:
    if isinstance(tokenizer, TokenizerWrapper):
        return sorted(tokenizer.eos_token_ids)
    end_id = getattr(tokenizer, "eos_token_id", None)
    return [] if end_id is None else [end_id]
