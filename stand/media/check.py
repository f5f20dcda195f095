"""Whether prompts that show something are served exactly, on the loaded weights and a prompt itself."""

from __future__ import annotations

from weakref import WeakKeyDictionary

import numpy as np
import torch
from transformers import GenerationMixin, PreTrainedModel

from stand.forward.cache.tree_cache import DRAFT_ROOM, TreeCache
from stand.forward.devices import input_device
from stand.forward.model import moving_ropes, prefill, run_plan, text_config
from stand.forward.model_state import unchanged
from stand.forward.packed_plan import StepPlan
from stand.forward.self_check import (
    CHECK_PARENTS,
    LOGIT_TOLERANCES,
    UnsupportedModelError,
    check_tree,
    failures_refused,
    path_to,
    relative_difference,
)
from stand.forward.tree_attention import exclusive, tree_attention
from stand.forward.window_check import looks_ahead
from stand.media.first_forward import prefill_media, refuse_midst
from stand.media.media import Media, misfits_refused
from stand.trees import DraftBatch

LEAF = 6  # of the check's tree: its path is compared, what lies beside it must not be seen
_CHECKED: WeakKeyDictionary[PreTrainedModel, set[frozenset[str]]] = WeakKeyDictionary()  # kinds: names of inputs


def check_media(model: PreTrainedModel, token_ids: np.ndarray, media: Media) -> None:
    """Of the first prompt of a kind, int32 [L], a prefill and a small tree behind it must give the logits of a plain
    forward over prompt and path, and no token may see what comes later (PaliGemma). Raises UnsupportedModelError where
    it is not so.
    """
    kinds, kind = _CHECKED.setdefault(model, set()), frozenset({*media.inputs, *media.types})
    if kind in kinds:
        return
    refuse_midst(model, media)
    name = type(model).__name__
    if moving_ropes(model):
        raise UnsupportedModelError(
            f"rotary factors must stay where a prompt shows something, got {name} with {', '.join(moving_ropes(model))}"
            "; give it text alone, or call model.generate"
        )
    if type(model).generate is not GenerationMixin.generate:
        raise UnsupportedModelError(
            f"prompts that show something need transformers' own generate, got {name} with another one, which may "
            "prepare the model for them; call it"
        )
    with exclusive(model), torch.autocast(input_device(model).type, enabled=False):
        difference = media_difference(model, token_ids, media)
        with failures_refused(name, "make its masks by transformers' functions"), unchanged(model):
            inputs = {**_asked(model, token_ids, 1), **media.inputs, **media.types}
            is_ahead = looks_ahead(model, media.text_start, **inputs)
    if is_ahead:
        raise UnsupportedModelError(
            f"tokens of a prompt must see none that come in a later forward, got {name} with "
            f"{', '.join(media.inputs)}, whose masks show a prompt all of itself; call model.generate for it"
        )
    tolerance = LOGIT_TOLERANCES[model.dtype]
    if not difference <= tolerance:
        raise UnsupportedModelError(
            f"a tree behind a prompt with {', '.join(media.inputs)} must have the logits of a plain forward (up to "
            f"rounding, {tolerance:g} of their spread), got {difference:.3g} from {name}; call model.generate for it"
        )
    kinds.add(kind)


@torch.inference_mode()
def media_difference(model: PreTrainedModel, token_ids: np.ndarray, media: Media) -> float:
    """`relative_difference` of the logits of a path of a tree behind the prompt, its last token being the root.

    Raises MediaError where the prompt does not fit, UnsupportedModelError where only the way of this project fails.
    """
    tree = DraftBatch.concatenate([check_tree(_tokens_of_text(model, token_ids[-1]))])
    path = path_to(LEAF)
    text = np.concatenate([token_ids[:-1], tree.token_ids[path]])
    expected = _last_logits(model, text, media, len(path))
    way = f"take {', '.join(media.inputs)} in one forward over this project's cache"
    with failures_refused(type(model).__name__, way):
        return relative_difference(_tree_logits(model, token_ids, media, tree)[path], expected)


def _last_logits(model: PreTrainedModel, token_ids: np.ndarray, media: Media, count: int) -> torch.Tensor:
    """[count, V] float32 of the last tokens of one forward over the prompt and what follows."""
    types = {
        name: torch.nn.functional.pad(kinds, (0, len(token_ids) - kinds.shape[1]))
        for name, kinds in media.types.items()
    }
    with misfits_refused(model, media.inputs), unchanged(model):
        output = model(**_asked(model, token_ids, count), **media.inputs, **types, use_cache=False)
        return output.logits[0].float()


def _asked(model: PreTrainedModel, token_ids: np.ndarray, count: int) -> dict[str, object]:
    """The logits of the last `count` tokens: of all of them they may be gigabytes."""
    ids = torch.from_numpy(token_ids.astype(np.int64)).to(input_device(model))[None]
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "logits_to_keep": count}


def _tree_logits(model: PreTrainedModel, token_ids: np.ndarray, media: Media, tree: DraftBatch) -> torch.Tensor:
    """[N, V] float32 behind the prompt without its last token, by the engine's own forwards."""
    cache = TreeCache(num_rows=1, room=len(token_ids) + DRAFT_ROOM)
    done, length, offset = prefill_media(model, cache, token_ids, media), len(token_ids) - 1, media.rotary_offset
    where = {"rotary_offsets": np.array([offset]), "device": input_device(model)}
    with tree_attention(model):
        prefill(model, cache, token_ids[:-1], done, row=0, rotary_offset=offset)
        return run_plan(model, cache, StepPlan.for_drafts(tree, np.array([length]), **where)).float()


def _tokens_of_text(model: PreTrainedModel, last: int) -> np.ndarray:
    """int32 of the check's nodes: `last` at the root, then tokens that stand for nothing that is shown."""
    named = {**vars(model.config), **vars(text_config(model))}
    special = [value for name, value in named.items() if name.endswith(("token_id", "token_index"))]
    tokens = [token for token in range(text_config(model).vocab_size) if token not in special]
    drawn = np.random.default_rng(0).choice(tokens, len(CHECK_PARENTS) - 1)
    return np.array([last, *drawn], dtype=np.int32)
