"""The key-value cache of a captured step: one block of memory at fixed addresses."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from transformers.cache_utils import Cache

from stand.forward.tree_cache import TreeCache, check_fits


class DeviceCache(Cache):
    """`storage` [layers, 2, R, Hkv, S, D]: keys and values of R rows with S slots each; nothing moves while it lives.

    The last slot of row 0 belongs to no row: tokens that pad a step write there.
    """

    def __init__(
        self,
        *,
        num_layers: int,
        num_rows: int,
        num_heads: int,
        room: int,
        head_size: int,
        dtype: torch.dtype,
        device: torch.device,
    ):
        super().__init__(layers=[])
        shape = (num_layers, 2, num_rows, num_heads, room, head_size)
        check_fits(torch.Size(shape).numel() * torch.finfo(dtype).bits // 8, device)
        # Zeros, because a masked weight of 0 times what memory happens to hold (NaN) would not be 0.
        self.storage = torch.zeros(shape, dtype=dtype, device=device)
        self.slots: torch.Tensor | None = None  # [M] int64, row * S + slot of each token of the running step

    @classmethod
    def like(cls, prefilled: TreeCache, *, num_rows: int, room: int) -> DeviceCache:
        """An empty cache for the layers of `prefilled`, which must be of one shape (see `is_uniform`)."""
        keys = prefilled.keys[0]
        return cls(
            num_layers=len(prefilled.keys),
            num_rows=num_rows,
            num_heads=keys.shape[1],
            room=room,
            head_size=keys.shape[3],
            dtype=keys.dtype,
            device=keys.device,
        )

    @property
    def num_rows(self) -> int:
        return self.storage.shape[2]

    @property
    def room(self) -> int:
        """S, slots per row."""
        return self.storage.shape[4]

    @property
    def nbytes(self) -> int:
        return self.storage.nbytes

    def layer(self, layer_idx: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values [R, Hkv, S, D] of one layer, views."""
        return self.storage[layer_idx, 0], self.storage[layer_idx, 1]

    def begin(self, slots: torch.Tensor) -> None:
        """The next forward writes its token i at slots[i]."""
        self.slots = slots

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: object, **kwargs: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write [1, Hkv, M, D] at the step's slots; the layer's whole storage (called by the model's layers)."""
        if self.slots is None:
            raise RuntimeError("begin(slots) must come before a forward pass, got a forward without slots")
        rows, places = self.slots // self.room, self.slots % self.room
        for storage, states in zip(self.layer(layer_idx), (key_states, value_states), strict=True):
            storage[rows, :, places] = states[0].transpose(0, 1)
        return self.layer(layer_idx)

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """The storage's extent: rows have lengths of their own, which the attention knows."""
        return self.room

    def load(self, prefilled: TreeCache, sources: Sequence[int], length: int) -> None:
        """Row i starts as the first `length` slots of row sources[i] of `prefilled`."""
        for layer, states in enumerate(zip(prefilled.keys, prefilled.values, strict=True)):
            for kind, state in enumerate(states):
                for row, source in enumerate(sources):
                    self.storage[layer, kind, row, :, :length] = state[source, :, :length]

    def grown(self, room: int) -> DeviceCache:
        """A copy with more slots per row."""
        layers, _, rows, heads, old_room, size = self.storage.shape
        larger = DeviceCache(
            num_layers=layers, num_rows=rows, num_heads=heads, room=room, head_size=size,
            dtype=self.storage.dtype, device=self.storage.device,
        )  # fmt: skip
        larger.storage[..., : old_room - 1, :] = self.storage[..., : old_room - 1, :]
        return larger


def is_uniform(prefilled: TreeCache) -> bool:
    """Whether all layers have one number of heads, one head size, one type and one device."""
    return len({(s.shape[1], s.shape[3], s.dtype, s.device) for s in (*prefilled.keys, *prefilled.values)}) == 1
