"""As many rows as memory holds: what the user allows, or what the device has when a call begins."""

from __future__ import annotations

import math
import numbers
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from transformers import PreTrainedModel

from stand.argument_checks import whole_number
from stand.backend import Backend
from stand.forward.cache.key_shape import key_shape
from stand.forward.cache.tree_cache import DRAFT_ROOM
from stand.forward.devices import input_device
from stand.row import Row
from stand.scheduling.admission import Admission, AtMost
from stand.scheduling.free_memory import bytes_per_token, most_bytes
from stand.scheduling.kept_prompts import KeptPrompts
from stand.scheduling.page_allocator import PageAllocator
from stand.scheduling.within_pages import WithinPages


@dataclass(frozen=True, slots=True)
class WithinMemory(Admission):
    """For caches without pages: rows are admitted while rooms as long as the longest may become fit into `num_bytes`.

    Rooms are of one length. So rows whose limits are high wait where few of them fit, although most end earlier.
    """

    num_bytes: float  # one row is admitted in any case
    bytes_per_token: int
    most_rows: int | None = None
    bytes_per_row: int = 0  # beside its tokens'

    def allows(self, live: Sequence[Row], row: Row) -> bool:
        longest = max(row.most_cached, *(other.most_cached for other in live)) + DRAFT_ROOM
        of_row = longest * self.bytes_per_token + self.bytes_per_row
        is_within = (len(live) + 1) * of_row <= self.num_bytes
        return is_within and (self.most_rows is None or len(live) < self.most_rows)


def admission(
    model: PreTrainedModel,
    max_rows: object,
    max_cache_bytes: object,
    *,
    backend: Backend,
    most_slots: Callable[[int], int | None],
    kept: KeptPrompts | None = None,
) -> Admission:
    """For `max_rows` and `max_cache_bytes` as users give them; None: as many as memory and the backend's steps hold.

    most_slots: slots behind the committed keys that a step of so many rows takes at most, where that is known. kept:
    prompts that are kept in the same memory, where a backend has slots from the start. Raises ValueError unless
    `max_rows` is an integer >= 1 or None, and `max_cache_bytes` a number of bytes that holds a page, or None; and where
    there is no page.
    """
    if max_rows is not None:
        max_rows = whole_number("max_rows", max_rows, "leave it out for as many rows as memory holds")
        if max_rows > (backend.most_rows or max_rows):
            most = f"max_rows must be at most {backend.most_rows} for {backend.name} steps here"
            warnings.warn(f"{most}, got {max_rows}; the others wait (engine.backend.most_rows)", stacklevel=5)
    token_bytes, size = bytes_per_token(model), backend.page_size
    least = token_bytes * (size or 1)
    if max_cache_bytes is not None and not (is_number(max_cache_bytes) and max_cache_bytes >= least):
        raise ValueError(
            f"max_cache_bytes must be a number of bytes that holds a page of {size or 1} tokens, {token_bytes} bytes "
            f"each, got {max_cache_bytes!r}; a GiB is 2**30"
        )
    limits = [limit for limit in (max_rows, backend.most_rows) if limit is not None]
    num_bytes = max_cache_bytes
    if max_cache_bytes is None and backend.num_slots is None and (max_rows is None or backend.has_pool):
        num_bytes = backend.ranks.room(most_bytes(model, backend.held_bytes), input_device(model))
    if backend.num_slots is not None:
        to_be_kept = 0 if kept is None else kept.num_free
        room = backend.num_slots * token_bytes - to_be_kept
        if room < least:
            raise ValueError(
                f"the cache must hold a page beside other calls and kept prompts, got {backend.num_slots} free slots "
                f"of {token_bytes} bytes and {to_be_kept:g} bytes of prompts to be kept; end other calls, keep fewer "
                "bytes of prompts, or raise num_slots"
            )
        num_bytes = room if num_bytes is None else min(num_bytes, room)
    if size is not None:
        is_limited = num_bytes is not None and num_bytes != math.inf
        num_pages, spare = divmod(num_bytes, size * token_bytes) if is_limited else (None, 0.0)
        most_rows = min(limits, default=None)
        return WithinPages(
            PageAllocator(size, None if num_pages is None else max(int(num_pages), 1)),
            most_rows=most_rows,
            most_places=None if backend.has_pool else most_rows,  # a step of a pool has buffers by its places
            most_slots=most_slots,
            is_asked_for=max_cache_bytes is not None or backend.num_slots is not None,
            row_pages=key_shape(model).row_bytes / (size * token_bytes),
            spare=spare / (size * token_bytes),
        )
    if num_bytes is None:
        return AtMost(max_rows)
    return WithinMemory(num_bytes, token_bytes, min(limits, default=None), key_shape(model).row_bytes)


def checked_bytes(max_bytes: object) -> float:
    """Raises ValueError for what is no positive number."""
    if not (is_number(max_bytes) and max_bytes > 0):
        raise ValueError(
            f"max_bytes must be a number above 0, got {max_bytes!r}; 2e9 keeps 35,000 tokens of a 7B model"
        )
    return float(max_bytes)


def is_number(given: object) -> bool:
    return isinstance(given, numbers.Real) and not isinstance(given, bool)
