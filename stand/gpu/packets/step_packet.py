"""Everything the host tells the device about one step, as one packet."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import numpy as np
import torch

from stand.gpu.packets.packet import Field, Packet
from stand.gpu.packets.page_table import PageTable
from stand.gpu.packets.step_size import StepSize
from stand.gpu.packets.work_list import ITEM_FIELDS
from stand.step_compiled import StepArrays


class Trees(Protocol):
    """Packed trees, as `DraftBatch` has them; int32."""

    token_ids: np.ndarray  # [m]
    parents: np.ndarray  # [m] row-local, -1 at roots
    depths: np.ndarray  # [m]
    offsets: np.ndarray  # [b + 1]


class StepPacket:
    """Arrays of one step of at most M tokens, I work items and B rows; the attention function receives it as plan.

    token_ids, positions [M] int64: places in the text; rotary_positions [M] int64: what a model's forward is told;
    slots [M] int64: page * its size + slot in it; ancestors [M, W] int64: bit j is
    local node j; parents [M] int64 packed (roots and padding: themselves); depths, follows [M] int64; turns [M] int64:
    up to eight nodes of a row that can be settled at once, a byte each, and in its last word the number of turns;
    offsets [B + 1] int32; lengths, cache_rows [B] int64; pages [B, T] int32: by cache row, see `PageTable`; for
    tiling n of the size items_n [I, 8] and partial_starts_n [M + 1] int32: see `WorkList`; and what else is asked for.
    """

    def __init__(
        self,
        size: StepSize,
        device: torch.device,
        *,
        table: PageTable,
        more: Mapping[str, Field],
    ):
        """table: gives the shape of `pages`. more: arrays that the owner fills in `host`."""
        num_tokens, num_rows = size.num_tokens, size.num_rows
        per_token, per_row = (np.int64, (num_tokens,)), (np.int64, (num_rows,))
        names = ("token_ids", "positions", "rotary_positions", "slots", "parents", "depths", "follows", "turns")
        works = {
            name: field
            for number, num_items in enumerate(size.num_items)
            for name, field in (
                (f"items_{number}", (np.int32, (num_items, len(ITEM_FIELDS)))),
                (f"partial_starts_{number}", (np.int32, (num_tokens + 1,))),
            )
        }
        self.size = size
        self._packet = Packet(
            {
                **dict.fromkeys(names, per_token),
                "ancestors": (np.int64, (num_tokens, size.num_words)),
                "offsets": (np.int32, (num_rows + 1,)),
                "lengths": per_row,
                "cache_rows": per_row,
                "pages": (np.int32, table.numbers.shape),
                **works,
                **more,
            },
            device,
        )
        self.host: Mapping[str, np.ndarray] = self._packet.host  # as `upload` sends them
        self._arrays = StepArrays(self.host, size.tilings)

    @property
    def device(self) -> Mapping[str, torch.Tensor]:
        """The arrays on the device, at fixed addresses."""
        return self._packet.device

    @property
    def nbytes(self) -> int:
        return self._packet.nbytes

    def upload(self) -> None:
        self._packet.upload()

    def fill(
        self,
        trees: Trees,
        lengths: np.ndarray,
        cache_rows: np.ndarray,
        table: PageTable,
        *,
        rotary_offsets: np.ndarray | None = None,
    ) -> None:
        """One tree per row after `lengths` [b] int64 committed keys in cache rows `cache_rows` [b] int64;
        rotary_offsets [b] int64: what rotary positions are beyond places in the text, None for 0."""
        offsets = np.zeros_like(lengths) if rotary_offsets is None else rotary_offsets
        self._arrays.fill(
            trees.token_ids, trees.parents, trees.depths, trees.offsets, lengths, offsets, cache_rows,
            table.numbers, table.ends, table.page_size, table.spare_slot,
        )  # fmt: skip

    def clear(self, table: PageTable) -> None:
        """A step of padding alone: it computes everything and changes nothing."""
        empty, none = np.zeros(0, dtype=np.int32), np.zeros(0, dtype=np.int64)
        self._arrays.fill(
            empty, empty, empty, np.zeros(1, dtype=np.int32), none, none, none,
            table.numbers, table.ends, table.page_size, table.spare_slot,
        )  # fmt: skip
