"""What `stand.wrap` makes of the rule, the drafter and the tokenizer that it is given."""

from __future__ import annotations

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


def fingerprint_of(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None, drafter: Drafter) -> bytes:
    """Names the vocabulary that token ids mean something in; its size alone without a tokenizer, and where the
    drafter's lookup was learned without one. Raises ValueError for what is no tokenizer."""
    by_size = vocabulary_fingerprint({"vocab_size": text_config(model).vocab_size})
    if tokenizer is None:
        return by_size
    if isinstance(tokenizer, type) or not hasattr(tokenizer, "get_vocab"):
        raise ValueError(
            f"tokenizer must be one of transformers', got {tokenizer!r:.80}; pass "
            "AutoTokenizer.from_pretrained(...), or leave it out and pass token ids"
        )
    lookup = drafter.lookup if isinstance(drafter, LookupDrafter) else None
    if lookup is not None and lookup.fingerprint == by_size:
        return by_size
    return vocabulary_fingerprint(tokenizer.get_vocab())
