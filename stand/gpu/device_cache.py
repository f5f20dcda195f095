"""The key-value cache of a captured step: a pool of pages in blocks of memory at fixed addresses."""

from __future__ import annotations

import gc
from collections.abc import Iterable, Sequence

import torch
from transformers import PreTrainedModel
from transformers.cache_utils import Cache

from stand.forward.cache.key_shape import LayerKeys, key_shape, layer_keys, new_states
from stand.forward.cache.tree_cache import CacheMemoryError, TreeCache, available_bytes
from stand.forward.recurrent.states import RecurrentStates
from stand.forward.recurrent.tree_scan import Scan


class DeviceCache(Cache):
    """`blocks`, each [C, P + 1, Hkv, S, D]: keys and values of P pages of S slots; nothing moves while it lives.

    Keys and values of all layers lie in one block, in their order, where all have as many heads of one size; else those
    that do share one. Whose pages they are says a `PageTable`. The last page belongs to nobody: tokens that pad a step
    write there.
    """

    def __init__(
        self,
        *,
        layers: Sequence[tuple[int, LayerKeys]],
        num_pages: int,
        page_size: int,
        dtype: torch.dtype,
        device: torch.device,
        recurrent: RecurrentStates | None = None,
    ):
        """layers: as in `KeyShape`; recurrent: of the others, a row for each place of a `PageTable`."""
        super().__init__(layers=[])
        self.recurrent = RecurrentStates(0) if recurrent is None else recurrent
        self._scan: Scan | None = None  # of the running step
        counts: dict[tuple[int, int], int] = {}  # by heads and their size
        self._places: dict[int, list[tuple[int, int]]] = {}  # by layer, of keys and of values: block, and place there
        self._layers = dict(layers)
        for index, keys in layers:
            self._places[index] = []
            for size in (keys.key_size, keys.value_size):
                shape = (keys.num_heads, size)
                place = counts[shape] = counts.get(shape, -1) + 1
                self._places[index].append((list(counts).index(shape), place))
        shapes = [(last + 1, num_pages + 1, num_heads, page_size, size) for (num_heads, size), last in counts.items()]
        self.blocks = _zeros(shapes, dtype=dtype, device=device)
        self.slots: torch.Tensor | None = None  # [M] int64, page * S + slot in it, of each token of the running step
        self._where: tuple[torch.Tensor, torch.Tensor] | None = None  # page and slot in it, once a layer has asked

    @classmethod
    def like(
        cls, prefilled: TreeCache, *, model: PreTrainedModel, num_pages: int, page_size: int, num_places: int
    ) -> DeviceCache:
        """An empty pool for the layers of `prefilled`, which must be of one type (see `has_one_type`), and recurrent
        states for so many rows. Where it has no layers, because nothing comes before a prompt's only token, as
        `key_shape` says."""
        if prefilled.keys:
            layers, recurrent = layer_keys(prefilled), prefilled.recurrent.like(num_places)
            dtype, device = prefilled.keys[0].dtype, prefilled.keys[0].device
        else:
            layers, recurrent = key_shape(model).layers, new_states(model, num_places)
            dtype, device = model.dtype, model.device
        asked = {"num_pages": num_pages, "page_size": page_size, "dtype": dtype, "device": device}
        return cls(layers=layers, recurrent=recurrent, **asked)

    def suits(self, model: PreTrainedModel, prefilled: TreeCache) -> bool:
        """Whether it could hold this model's keys: they have its type, lie on its device, and their layers, which are
        known as in `like`, are among its own."""
        layers = layer_keys(prefilled) if prefilled.keys else key_shape(model).layers
        has_states = prefilled.recurrent.layers.keys() <= self.recurrent.layers.keys()
        has_layers = has_states and dict(layers).items() <= self._layers.items()
        return has_layers and (self.blocks[0].dtype, self.device) == (model.dtype, model.device)

    @property
    def device(self) -> torch.device:
        return self.blocks[0].device

    @property
    def num_pages(self) -> int:
        """P."""
        return self.blocks[0].shape[1] - 1

    @property
    def page_size(self) -> int:
        """S, slots per page."""
        return self.blocks[0].shape[3]

    @property
    def spare_slot(self) -> int:
        """Where padding writes, as in `slots`."""
        return self.blocks[0].shape[1] * self.page_size - 1

    @property
    def nbytes(self) -> int:
        """Of what rows can have: the page that is nobody's is beside it."""
        keys = sum(block.nbytes for block in self.blocks) // (self.num_pages + 1) * self.num_pages
        return keys + self.recurrent.num_rows * self.recurrent.row_bytes

    def layer(self, layer_idx: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values [P + 1, Hkv, S, D] of one layer, views; D may differ between the two."""
        (keys, key_place), (values, value_place) = self._places[layer_idx]
        return self.blocks[keys][key_place], self.blocks[values][value_place]

    def seen(self, layer_idx: int) -> tuple[torch.Tensor, torch.Tensor]:
        """What the attention function gets: all of `layer`."""
        return self.layer(layer_idx)

    def begin(self, slots: torch.Tensor, scan: Scan | None = None) -> None:
        """The next forward writes its token i at slots[i]; scan: for layers with a recurrent state."""
        self.slots, self._scan, self._where = slots, scan, None

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
        if self._where is None:
            self._where = self.slots // self.page_size, self.slots % self.page_size
        pages, places = self._where
        for storage, states in zip(self.layer(layer_idx), (key_states, value_states), strict=True):
            storage[pages, :, places] = states[0].transpose(0, 1)
        return self.layer(layer_idx)

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """The pool's extent: rows have lengths of their own, which the attention knows."""
        return self.num_pages * self.page_size

    def write(self, pages: Sequence[int], prefilled: TreeCache, length: int, *, source: int = 0) -> None:
        """These pages take the first `length` slots of row `source` of `prefilled`."""
        whole, rest = divmod(length, self.page_size)
        numbers = torch.tensor(pages, dtype=torch.int64, device=self.device)
        for index, *states in zip(prefilled.layer_places, prefilled.keys, prefilled.values, strict=True):
            for own, state in zip(self.layer(index), states, strict=True):
                first = state[source, :, : length - rest].unflatten(1, (whole, self.page_size))
                own[numbers[:whole]] = first.transpose(0, 1)
                if rest:
                    own[pages[whole], :, :rest] = state[source, :, length - rest : length]

    def copy(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        """Page targets[i] becomes a copy of page sources[i], in every layer; reads come before writes."""
        read, write = (torch.tensor(pages, device=self.device) for pages in (sources, targets))
        for block in self.blocks:
            block[:, write] = block[:, read]

    def grow(self, num_pages: int) -> None:
        """More pages, at new addresses: what was recorded with the old ones must be gone.

        Old and new blocks lie on the device together only where all fit; else the keys wait on the host meanwhile.
        Raises CacheMemoryError or torch.OutOfMemoryError, and then everything is as before.
        """
        old, device = self.blocks, self.device
        dtype, shapes = old[0].dtype, [(len(block), num_pages + 1, *block.shape[2:]) for block in old]
        try:
            if _nbytes(shapes, dtype) > _free_bytes(device):
                old, self.blocks = [block.cpu() for block in old], []  # the device's blocks are free now
            larger = _zeros(shapes, dtype=dtype, device=device)
            for block, own in zip(larger, old, strict=True):
                block[:, : own.shape[1] - 1] = own[:, :-1]
        except BaseException:
            self.blocks = [block.to(device) for block in old]
            raise
        self.blocks = larger


def has_one_type(prefilled: TreeCache) -> bool:
    """Whether the keys and values of all layers have one type and lie on one device."""
    return len({(states.dtype, states.device) for states in (*prefilled.keys, *prefilled.values)}) == 1


def _zeros(shapes: Sequence[tuple[int, ...]], *, dtype: torch.dtype, device: torch.device) -> list[torch.Tensor]:
    """Zeros, because a masked weight of 0 times what memory happens to hold (NaN) would not be 0."""
    needed, left = _nbytes(shapes, dtype), _free_bytes(device)
    if needed > left:
        gc.collect()  # engines that nobody holds any more may wait for it with their memory
        left = _free_bytes(device)
    if needed > left:
        raise CacheMemoryError(
            f"the key-value cache must fit into the device's free memory, got a request for {needed / 2**30:.1f} GiB "
            f"where {left / 2**30:.1f} are left; lower num_return_sequences, max_new_tokens or the prompts per call"
        )
    return [torch.zeros(shape, dtype=dtype, device=device) for shape in shapes]


def _free_bytes(device: torch.device) -> float:
    """What a block of memory may take: on a GPU what is available, elsewhere no limit, because a CPU's pages are given
    when they are written."""
    return available_bytes(device) if device.type == "cuda" else float("inf")


def _nbytes(shapes: Iterable[tuple[int, ...]], dtype: torch.dtype) -> int:
    return sum(torch.Size(shape).numel() for shape in shapes) * torch.finfo(dtype).bits // 8
