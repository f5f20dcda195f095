"""What `stand.wrap` makes of the rule, the drafter and the tokenizer that it is given."""

from __future__ import annotations

import warnings

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from stand.drafters.blended import BlendedDrafter
from stand.drafters.drafter import Drafter, LookupDrafter
from stand.drafters.fixed_shape import FixedShapeDrafter
from stand.forward.model import text_config
from stand.trees import BlendedLookup, LookupTree, vocabulary_fingerprint
from stand.verifiers import Verifier, get_verifier


def checked_rule(verifier: object) -> Verifier:
    """A rule itself or by its name. Raises ValueError for an unknown or lossy name, and a rule that carries debts."""
    rule = verifier if isinstance(verifier, Verifier) else get_verifier(verifier)
    if rule.requires.carries_debts:
        raise ValueError(
            f"the engine's drafters learn and may draft less than asked for, got verifier {rule.name!r}, which needs "
            "one fixed law at every position of its debt; use 'block' on chains or 'traversal'"
        )
    return rule


def checked_drafter(drafter: object) -> Drafter:
    """A drafter itself, or the default one of a lookup or of None. Raises ValueError for anything else."""
    if drafter is None or isinstance(drafter, BlendedLookup):
        return BlendedDrafter(drafter)
    if isinstance(drafter, LookupTree):
        return FixedShapeDrafter(drafter)
    if not isinstance(drafter, Drafter):
        raise ValueError(
            f"drafter must be a Drafter, a BlendedLookup or a LookupTree, got {type(drafter).__name__}; load a lookup "
            "with stand.BlendedLookup.load(path), or derive your class from stand.Drafter"
        )
    return drafter


def warn_of_idle_learning(drafter: Drafter) -> None:
    """A class with a `learn` of its own that is never called was hardly meant."""
    idle = [name for name in ("learn", "learn_prompt") if getattr(type(drafter), name) is not getattr(Drafter, name)]
    if idle and not drafter.num_candidates:
        warnings.warn(
            f"{type(drafter).__name__}.{idle[0]} is called only where num_candidates is above 0, got "
            f"{drafter.num_candidates}; set num_candidates = 10 in the class for the ten best tokens of every node",
            stacklevel=3,
        )


def fingerprint_of(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None, drafter: Drafter) -> bytes:
    """Names the vocabulary that token ids mean something in; its size alone without a tokenizer, and where the
    drafter's lookup was learned without one. Raises ValueError for what is no tokenizer."""
    by_size = vocabulary_fingerprint({"vocab_size": text_config(model).vocab_size})
    if tokenizer is None:
        return by_size
    if isinstance(tokenizer, type) or not all(hasattr(tokenizer, name) for name in ("get_vocab", "batch_decode")):
        raise ValueError(
            f"tokenizer must be one of transformers', got {type(tokenizer).__name__} ({tokenizer!r:.80}); pass "
            "AutoTokenizer.from_pretrained(...), PreTrainedTokenizerFast(tokenizer_object=...) for a Tokenizer of "
            "tokenizers, or leave it out and pass token ids"
        )
    lookup = drafter.lookup if isinstance(drafter, LookupDrafter) else None
    if lookup is not None and lookup.fingerprint == by_size:
        return by_size
    return vocabulary_fingerprint(tokenizer.get_vocab())
