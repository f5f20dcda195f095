"""How many bytes of keys and values the devices of a model have room for."""

from __future__ import annotations

import math
from collections.abc import Sequence

from transformers import PreTrainedModel

from stand.forward.cache.key_shape import key_shape
from stand.forward.cache.tree_cache import available_bytes
from stand.forward.devices import input_device, is_offloaded
from stand.row import Row
from stand.scheduling.page_allocator import PageAllocator

SHARE = 0.8  # of what is free; the rest is for activations, which are small beside it, and for others


def lower_limit(
    pages: PageAllocator | None,
    rows: Sequence[Row],
    model: PreTrainedModel,
    *,
    num_tokens: int,
    num_places: int,
    held: int = 0,
) -> None:
    """Lower the limit of pages to what is free when a pool is about to be taken, because prompts' keys have taken rooms
    since the call was admitted. The limit stays if it would be less than `rows` need for a first step (one copied and
    one new page each, and those of the drafts).

    num_tokens: tokens of the largest step. num_places: rows whose recurrent states are taken beside the pool. held:
    bytes of the pool and the states that are given back before."""
    if pages is None:
        return
    free = most_bytes(model, held) - num_places * key_shape(model).row_bytes
    most = free // (pages.page_size * bytes_per_token(model))
    least = pages.most_used + 2 * len(rows) + pages.count(num_tokens)
    if least <= most < (pages.num_pages or math.inf):
        pages.num_pages = int(most)


def most_bytes(model: PreTrainedModel, held: int) -> float:
    """That a call's keys may take: a share of what is free, or what the call before has left. Of a model on several
    devices as much as the keys may come to until one of these is full."""
    shares = key_shape(model).shares
    places = {weight.device for weight in model.parameters()}
    was_moved = not (is_offloaded(model) or places.issuperset(device for device, _ in shares))
    if was_moved or not shares:
        shares = ((input_device(model), 1.0),)
    free = min(available_bytes(device) / share for device, share in shares)
    of_library = getattr(model, "free_bytes", None)  # of a model that another library runs
    if of_library is not None:
        free = min(free, of_library())
    return max(SHARE * (free + held), held)


def bytes_per_token(model: PreTrainedModel) -> int:
    """Of the keys and values of all layers."""
    return key_shape(model).token_bytes
