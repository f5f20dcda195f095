"""The key-value cache of a captured step: a pool of pages in one block of memory at fixed addresses."""

from __future__ import annotations

import gc
from collections.abc import Sequence

import torch
from transformers import PreTrainedModel
from transformers.cache_utils import Cache

from stand.forward.key_shape import key_shape, new_states
from stand.forward.recurrent_states import RecurrentStates
from stand.forward.tree_cache import CacheMemoryError, TreeCache, available_bytes
from stand.forward.tree_scan import Scan


class DeviceCache(Cache):
    """`storage` [layers, 2, P + 1, Hkv, S, D]: keys and values of P pages of S slots; nothing moves while it lives.

    Whose pages they are says a `PageTable`. The last page belongs to nobody: tokens that pad a step write there.
    """

    def __init__(
        self,
        *,
        layers: Sequence[int],
        num_pages: int,
        num_heads: int,
        page_size: int,
        head_size: int,
        dtype: torch.dtype,
        device: torch.device,
        recurrent: RecurrentStates | None = None,
    ):
        """layers: indices of those that keep keys; recurrent: of the others, a row for each place of a `PageTable`."""
        super().__init__(layers=[])
        self.layer_places = dict(zip(layers, range(len(layers)), strict=True))
        self.recurrent = RecurrentStates(0) if recurrent is None else recurrent
        self._scan: Scan | None = None  # of the running step
        shape = (len(layers), 2, num_pages + 1, num_heads, page_size, head_size)
        self.storage = _zeros(shape, dtype=dtype, device=device)
        self.slots: torch.Tensor | None = None  # [M] int64, page * S + slot in it, of each token of the running step

    @classmethod
    def like(
        cls, prefilled: TreeCache, *, model: PreTrainedModel, num_pages: int, page_size: int, num_places: int
    ) -> DeviceCache:
        """An empty pool for the layers of `prefilled`, which must be of one shape (see `is_uniform`), and recurrent
        states for so many rows. Where it has no layers, because nothing comes before a prompt's only token, as
        `key_shape` says."""
        if prefilled.keys:
            layers, (_, num_heads, _, head_size) = tuple(prefilled.layer_places), prefilled.keys[0].shape
            recurrent = prefilled.recurrent.like(num_places)
            dtype, device = prefilled.keys[0].dtype, prefilled.keys[0].device
        else:
            shape, dtype, device = key_shape(model), model.dtype, model.device
            layers, num_heads, recurrent = shape.layers, shape.num_heads, new_states(model, num_places)
            head_size = shape.head_bytes // dtype.itemsize
        return cls(
            layers=layers,
            num_pages=num_pages,
            num_heads=num_heads,
            page_size=page_size,
            head_size=head_size,
            dtype=dtype,
            device=device,
            recurrent=recurrent,
        )

    def suits(self, model: PreTrainedModel) -> bool:
        """Whether it could hold this model's keys: they have its type and lie on its device."""
        return (self.storage.dtype, self.storage.device) == (model.dtype, model.device)

    @property
    def num_pages(self) -> int:
        """P."""
        return self.storage.shape[2] - 1

    @property
    def page_size(self) -> int:
        """S, slots per page."""
        return self.storage.shape[4]

    @property
    def spare_slot(self) -> int:
        """Where padding writes, as in `slots`."""
        return self.storage.shape[2] * self.page_size - 1

    @property
    def nbytes(self) -> int:
        """Of what rows can have: the page that is nobody's is beside it."""
        keys = self.storage.nbytes // (self.num_pages + 1) * self.num_pages
        return keys + self.recurrent.num_rows * self.recurrent.row_bytes

    def layer(self, layer_idx: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values [P + 1, Hkv, S, D] of one layer, views."""
        place = self.layer_places[layer_idx]
        return self.storage[place, 0], self.storage[place, 1]

    def seen(self, layer_idx: int) -> tuple[torch.Tensor, torch.Tensor]:
        """What the attention function gets: all of `layer`."""
        return self.layer(layer_idx)

    def begin(self, slots: torch.Tensor, scan: Scan | None = None) -> None:
        """The next forward writes its token i at slots[i]; scan: for layers with a recurrent state."""
        self.slots, self._scan = slots, scan

    def scan(self) -> Scan:
        """For layers with a recurrent state, in a forward."""
        if self._scan is None:
            raise RuntimeError("begin(slots, scan) must come before a forward pass, got a forward without a scan")
        return self._scan

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: object, **kwargs: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write [1, Hkv, M, D] at the step's slots; the layer's whole storage (called by the model's layers)."""
        if self.slots is None:
            raise RuntimeError("begin(slots) must come before a forward pass, got a forward without slots")
        pages, places = self.slots // self.page_size, self.slots % self.page_size
        for storage, states in zip(self.layer(layer_idx), (key_states, value_states), strict=True):
            storage[pages, :, places] = states[0].transpose(0, 1)
        return self.layer(layer_idx)

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """The pool's extent: rows have lengths of their own, which the attention knows."""
        return self.num_pages * self.page_size

    def write(self, pages: Sequence[int], prefilled: TreeCache, length: int, *, source: int = 0) -> None:
        """These pages take the first `length` slots of row `source` of `prefilled`."""
        whole, rest = divmod(length, self.page_size)
        numbers = torch.tensor(pages, dtype=torch.int64, device=self.storage.device)
        for place, states in enumerate(zip(prefilled.keys, prefilled.values, strict=True)):
            for own, state in zip(self.storage[place], states, strict=True):
                first = state[source, :, : length - rest].unflatten(1, (whole, self.page_size))
                own[numbers[:whole]] = first.transpose(0, 1)
                if rest:
                    own[pages[whole], :, :rest] = state[source, :, length - rest : length]

    def copy(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        """Page targets[i] becomes a copy of page sources[i], in every layer; reads come before writes."""
        read, write = (torch.tensor(pages, device=self.storage.device) for pages in (sources, targets))
        self.storage[:, :, write] = self.storage[:, :, read]

    def grow(self, num_pages: int) -> None:
        """More pages, at new addresses: what was recorded with the old ones must be gone.

        Old and new block lie on the device together only where both fit; else the keys wait on the host meanwhile.
        Raises CacheMemoryError or torch.OutOfMemoryError, and then everything is as before.
        """
        old, device = self.storage, self.storage.device
        shape = (*old.shape[:2], num_pages + 1, *old.shape[3:])
        try:
            if _nbytes(shape, old.dtype) > _free_bytes(device):
                old, self.storage = old.cpu(), None  # the device's block is free now
            larger = _zeros(shape, dtype=old.dtype, device=device)
            larger[:, :, : old.shape[2] - 1] = old[:, :, :-1]
        except BaseException:
            self.storage = old.to(device)
            raise
        self.storage = larger


def is_uniform(prefilled: TreeCache) -> bool:
    """Whether all layers have one number of heads, one head size, one type and one device."""
    return len({(s.shape[1], s.shape[3], s.dtype, s.device) for s in (*prefilled.keys, *prefilled.values)}) == 1


def _zeros(shape: tuple[int, ...], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Zeros, because a masked weight of 0 times what memory happens to hold (NaN) would not be 0."""
    needed, left = _nbytes(shape, dtype), _free_bytes(device)
    if needed > left:
        gc.collect()  # engines that nobody holds any more may wait for it with their memory
        left = _free_bytes(device)
    if needed > left:
        raise CacheMemoryError(
            f"the key-value cache must fit into the device's free memory, got a request for {needed / 2**30:.1f} GiB "
            f"where {left / 2**30:.1f} are left; lower num_return_sequences, max_new_tokens or the prompts per call"
        )
    return torch.zeros(shape, dtype=dtype, device=device)


def _free_bytes(device: torch.device) -> float:
    """What a block of memory may take: on a GPU what is available, elsewhere no limit, because a CPU's pages are given
    when they are written."""
    return available_bytes(device) if device.type == "cuda" else float("inf")


def _nbytes(shape: tuple[int, ...], dtype: torch.dtype) -> int:
    return torch.Size(shape).numel() * torch.finfo(dtype).bits // 8
