"""As many rows as memory holds, asked of the device when a call begins."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from transformers import PreTrainedModel

from stand.backend import Backend
from stand.forward.model import text_config
from stand.forward.tree_cache import DRAFT_ROOM, available_bytes
from stand.row import Row
from stand.scheduling.scheduler import Admission, AtMost

SHARE = 0.8  # of what is free; the rest is for activations, which are small beside it, and for others


@dataclass(frozen=True, slots=True)
class WithinMemory:
    """Rows are admitted while rooms as long as the longest of them may become fit into `num_bytes` together.

    Rooms are of one length. So rows whose limits are high wait where few of them fit, although most end earlier.
    """

    num_bytes: float
    bytes_per_token: int
    most_rows: int | None = None

    @classmethod
    def of(cls, model: PreTrainedModel, backend: Backend) -> WithinMemory:
        """`SHARE` of what is free now on the model's device, what the last call holds for the next one included."""
        free = available_bytes(model.device) + backend.held_bytes
        return cls(SHARE * free, bytes_per_token(model), backend.most_rows)

    def allows(self, live: Sequence[Row], row: Row) -> bool:
        longest = max(row.most_cached, *(other.most_cached for other in live)) + DRAFT_ROOM
        is_within = (len(live) + 1) * longest * self.bytes_per_token <= self.num_bytes
        return is_within and (self.most_rows is None or len(live) < self.most_rows)


def admission(model: PreTrainedModel, max_rows: object, *, backend: Backend) -> Admission:
    """For `max_rows` as users give it; None: as many as memory and the backend's steps hold.

    Raises ValueError unless it is an integer >= 1 or None.
    """
    if max_rows is None:
        return WithinMemory.of(model, backend)
    if isinstance(max_rows, bool) or not hasattr(max_rows, "__index__") or int(max_rows) < 1:
        raise ValueError(
            f"max_rows must be an integer >= 1, got {max_rows!r}; leave it out for as many rows as memory holds"
        )
    return AtMost(int(max_rows))


def bytes_per_token(model: PreTrainedModel) -> int:
    """Of the keys and values of all layers, by the model's configuration."""
    config = text_config(model)
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return 2 * config.num_hidden_layers * heads * size * (torch.finfo(model.dtype).bits // 8)
