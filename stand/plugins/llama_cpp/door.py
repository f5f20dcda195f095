"""`wrap` for models of llama.cpp."""

from __future__ import annotations

from llama_cpp import Llama
from transformers import PreTrainedTokenizerBase

from stand.argument_checks import whole_number
from stand.drafters.drafter import Drafter
from stand.engine import Engine
from stand.forward.cache.tree_cache import DRAFT_ROOM
from stand.plugins.llama_cpp.backend import LlamaCppBackend
from stand.plugins.llama_cpp.model import LlamaCppModel
from stand.plugins.llama_cpp.self_check import check_forwards, refuse_by_kind
from stand.trees import BlendedLookup, LookupTree
from stand.verifiers import Verifier
from stand.wrapping import attach, checked_drafter, checked_rule, refuse_needy


def wrap(
    llm: Llama,
    tokenizer: PreTrainedTokenizerBase | None = None,
    *,
    num_slots: int | None = None,
    drafter: Drafter | BlendedLookup | LookupTree | None = None,
    verifier: str | Verifier = "traversal",
) -> Engine:
    """Make an engine around the weights of a `llama_cpp.Llama`.

    tokenizer: transformers', of the same model, for texts and chats; without one prompts are token ids.
    num_slots: tokens whose keys and values fit in, of all rows together, where rows of one prompt share its keys; None:
    `llm.n_ctx()`. They are taken at once, beside those that `llm` has for itself: make that with a small n_ctx.
    drafter, verifier: as in `stand.wrap`.

    Settings of `llm` that say how it computes (threads, layers on a GPU, types of keys, positions, an adapter) hold
    here too. Those that say how it samples do not: `generate` takes transformers' settings, in their order.

    Raises UnsupportedModelError for a model that cannot be served exactly, ValueError for anything else that
    does not fit.
    """
    rule = checked_rule(verifier)
    drafter = checked_drafter(drafter)
    refuse_by_kind(llm)
    num_slots = llm.n_ctx() if num_slots is None else whole_number("num_slots", num_slots, "16384 is usual")
    if num_slots < 2 * DRAFT_ROOM:
        raise ValueError(f"num_slots must be at least {2 * DRAFT_ROOM}, got {num_slots}; 16384 is usual")
    refuse_needy(drafter, "llama.cpp")
    model = LlamaCppModel(llm, num_slots)
    check_forwards(model)
    attach(drafter, model, tokenizer, rule)
    return Engine(model, tokenizer, drafter=drafter, verifier=rule, backend=LlamaCppBackend(model))
