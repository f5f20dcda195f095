"""The public door: `wrap` makes an engine of a model, a drafter and a verifier, and checks that they fit together."""

from __future__ import annotations

import warnings

from stand.extra import MissingExtraError, has_engine

if not has_engine():
    raise MissingExtraError("stand.wrap")

from transformers import PreTrainedModel, PreTrainedTokenizerBase, ProcessorMixin

from stand.argument_checks import check_flags
from stand.backend import choose_backend
from stand.drafters.blended import BlendedDrafter
from stand.drafters.drafter import Drafter, LookupDrafter
from stand.drafters.fixed_shape import FixedShapeDrafter
from stand.engine import Engine
from stand.forward.devices import is_shared
from stand.forward.model import text_config
from stand.forward.recurrent.layers import recurrent_layers
from stand.forward.self_check import UnsupportedModelError, check_model
from stand.simd.threads import release_pool
from stand.trees import BlendedLookup, LookupTree, vocabulary_fingerprint
from stand.verifiers import Verifier, get_verifier
from stand.verifiers.registry import fitted


def wrap(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase | ProcessorMixin | None = None,
    *,
    drafter: Drafter | BlendedLookup | LookupTree | None = None,
    verifier: str | Verifier = "traversal",
    backend: str = "auto",
    fuse: bool = True,
) -> Engine:
    """Make an engine around an unmodified transformers model, where it is and as it is.

    tokenizer: or the model's processor (`AutoProcessor`), which holds one; then chats may show images, and what else it
    takes.
    drafter: who guesses. A lookup means its default drafter: `BlendedDrafter(lookup)`, or `FixedShapeDrafter(lookup)`
    for a `LookupTree`. None: `BlendedDrafter()`, which starts with an empty lookup. One drafter serves one model.
    verifier: a name from `stand.verifiers`, or a `Verifier`. A rule that changes the output's law must be passed as an
    object, such as `stand.verifiers.get_verifier("typical", allow_lossy=True)`: that is consent.
    backend: "triton" (kernels, the step as one graph), "sdpa" (any device) or "auto": triton on a GPU where it
    serves the model. `engine.backend` says which and why.
    fuse: run fused norms, feed-forward blocks and attentions wherever they are proven equal on the loaded weights
    (`engine.backend.fusion.report`), in captured steps and in those of a model on a CPU in float32 or bfloat16. The
    proof is kept with the model object. Captured steps have merged projections too, which gives their parameters new
    addresses; values, names and objects stay.

    Raises UnsupportedModelError for a model that cannot be served exactly, ValueError for anything else that
    does not fit. Weights, attention implementation and mode of the model stay as they are.
    """
    check_flags(fuse=fuse)
    rule = checked_rule(verifier)
    drafter = checked_drafter(drafter)
    check_model(model)
    if drafter.rider is not None and recurrent_layers(model):
        raise UnsupportedModelError(
            f"{type(drafter).__name__} needs a model that keeps keys and values alone, got {type(model).__name__} with "
            "recurrent states, which its streams would have to go through; leave drafter= out"
        )
    if is_shared(model):
        refuse_needy(drafter, "several processes")
    processor = tokenizer if isinstance(tokenizer, ProcessorMixin) else None
    tokenizer = tokenizer if processor is None else getattr(processor, "tokenizer", None)
    attach(drafter, model, tokenizer, rule)
    chosen = choose_backend(model, rule, backend, fuse=fuse, drafter=drafter)
    release_pool()  # of the checks: perhaps another thread decodes
    return Engine(model, tokenizer, drafter=drafter, verifier=rule, backend=chosen, processor=processor)


def attach(drafter: Drafter, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None, rule: Verifier) -> None:
    """Show a drafter its model. Raises ValueError where they, or its drafts and the rule, do not fit."""
    drafter.attach(model, _fingerprint_of(model, tokenizer, drafter))
    _warn_of_idle_learning(drafter)
    typical = drafter.typical_draft()
    if typical is not None:
        fitted(rule, typical)


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
            f"drafter must be a Drafter, a BlendedLookup or a LookupTree, got {drafter!r:.80}; load a lookup "
            "with stand.BlendedLookup.load(path), or derive your class from stand.Drafter"
        )
    return drafter


def refuse_needy(drafter: Drafter, library: str) -> None:
    """Raise ValueError for a drafter of a model whose hidden states `library` keeps to itself."""
    if drafter.requires_features or drafter.rider is not None:
        raise ValueError(
            f"drafters of a model of {library} must do without its hidden states, got {type(drafter).__name__}; leave "
            "drafter= out"
        )


def _warn_of_idle_learning(drafter: Drafter) -> None:
    """A class with a `learn` of its own that is never called was hardly meant."""
    idle = [name for name in ("learn", "learn_prompt") if getattr(type(drafter), name) is not getattr(Drafter, name)]
    if idle and not drafter.num_candidates:
        warnings.warn(
            f"{type(drafter).__name__}.{idle[0]} is called only where num_candidates is above 0, got "
            f"{drafter.num_candidates}; set num_candidates = 10 in the class for the ten best tokens of every node",
            stacklevel=4,
        )


def _fingerprint_of(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None, drafter: Drafter) -> bytes:
    """Names the vocabulary that token ids mean something in; its size alone without a tokenizer, and where the
    drafter's lookup was learned without one. Raises ValueError for what is no tokenizer."""
    by_size = vocabulary_fingerprint({"vocab_size": text_config(model).vocab_size})
    if tokenizer is None:
        return by_size
    if isinstance(tokenizer, type) or not all(hasattr(tokenizer, name) for name in ("get_vocab", "batch_decode")):
        raise ValueError(
            f"tokenizer must be one of transformers', got {type(tokenizer).__name__} ({tokenizer!r:.80}); pass "
            "AutoTokenizer.from_pretrained(...), a processor, PreTrainedTokenizerFast(tokenizer_object=...) for a "
            "Tokenizer of tokenizers, or leave it out and pass token ids"
        )
    lookup = drafter.lookup if isinstance(drafter, LookupDrafter) else None
    if lookup is not None and lookup.fingerprint == by_size:
        return by_size
    return vocabulary_fingerprint(tokenizer.get_vocab())
