"""Page tables by hand, for tests of what reads them."""

from collections.abc import Iterable

import numpy as np
import torch

from stand.forward.cache.key_shape import LayerKeys
from stand.gpu.device_cache import DeviceCache
from stand.gpu.packets.page_table import PageTable


def alike(layers: Iterable[int], num_heads: int, head_size: int) -> list[tuple[int, LayerKeys]]:
    """Layers that keep keys and values of one shape, as a `DeviceCache` takes them."""
    return [(layer, LayerKeys(num_heads, head_size, head_size)) for layer in layers]


def one_page_each(num_rows: int, *, room: int = 512) -> PageTable:
    """Every row has one page, as long as a row may become."""
    cache = DeviceCache(
        layers=alike([0], 1, 1), num_pages=num_rows, page_size=room, dtype=torch.float32, device=torch.device("cpu")
    )
    table = PageTable(cache, num_places=num_rows, width=1)
    table.numbers[:, 0] = np.arange(num_rows)
    table.ends[:] = room
    return table
