"""The key-value cache of a captured step: one block of memory at fixed addresses."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from transformers.cache_utils import Cache

from stand.forward.tree_cache import CacheMemoryError, TreeCache


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
        self.storage = _zeros(shape, dtype=dtype, device=device)
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

    def enter(self, row: int, prefilled: TreeCache, length: int, *, source: int = 0) -> None:
        """Row `row` starts as the first `length` slots of row `source` of `prefilled`."""
        for layer, states in enumerate(zip(prefilled.keys, prefilled.values, strict=True)):
            for kind, state in enumerate(states):
                self.storage[layer, kind, row, :, :length] = state[source, :, :length]

    def grow(self, room: int) -> None:
        """More slots per row, at new addresses: what was recorded with the old ones must be gone.

        Old and new block lie on the device together only where both fit; else the keys wait on the host meanwhile.
        Raises CacheMemoryError or torch.OutOfMemoryError, and then everything is as before.
        """
        old, device = self.storage, self.storage.device
        shape = (*old.shape[:4], room, old.shape[5])
        try:
            if _nbytes(shape, old.dtype) > available_bytes(device):
                old, self.storage = old.cpu(), None  # the device's block is free now
            larger = _zeros(shape, dtype=old.dtype, device=device)
            larger[..., : old.shape[4] - 1, :] = old[..., :-1, :]
        except BaseException:
            self.storage = old.to(device)
            raise
        self.storage = larger

    def release(self, places: Sequence[int]) -> TreeCache:
        """A cache for eager steps whose row i has the keys of row places[i]; it takes over the memory of this one.

        Nothing is allocated but one layer's keys at a time, so that it works where memory has run out.
        """
        order = torch.tensor(places, dtype=torch.int64, device=self.storage.device)
        rows = TreeCache(num_rows=len(places), room=self.room)
        rows.room = self.room  # unrounded
        for keys, values in self.storage:
            for states, kept in ((keys, rows.keys), (values, rows.values)):
                states[: len(places)] = states[order]
                kept.append(states[: len(places)])
        return rows


def is_uniform(prefilled: TreeCache) -> bool:
    """Whether all layers have one number of heads, one head size, one type and one device."""
    return len({(s.shape[1], s.shape[3], s.dtype, s.device) for s in (*prefilled.keys, *prefilled.values)}) == 1


def _zeros(shape: tuple[int, ...], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Zeros, because a masked weight of 0 times what memory happens to hold (NaN) would not be 0."""
    needed, left = _nbytes(shape, dtype), available_bytes(device)
    if needed > left:
        raise CacheMemoryError(
            f"the key-value cache must fit into the device's free memory, got a request for {needed / 2**30:.1f} GiB "
            f"where {left / 2**30:.1f} are left; lower num_return_sequences, max_new_tokens or the prompts per call"
        )
    return torch.zeros(shape, dtype=dtype, device=device)


def available_bytes(device: torch.device) -> float:
    """What can still be allocated on a GPU: its free memory, and what torch holds of it unused. Elsewhere no limit:
    a CPU's pages are given when they are written."""
    if device.type != "cuda":
        return float("inf")
    unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return torch.cuda.mem_get_info(device)[0] + unused


def _nbytes(shape: tuple[int, ...], dtype: torch.dtype) -> int:
    return torch.Size(shape).numel() * torch.finfo(dtype).bits // 8
