"""Page tables by hand, for tests of what reads them."""

import numpy as np
import torch

from stand.gpu.device_cache import DeviceCache
from stand.gpu.page_table import PageTable


def one_page_each(num_rows: int, *, room: int = 512) -> PageTable:
    """Every row has one page, as long as a row may become."""
    cache = DeviceCache(
        layers=[0], num_pages=num_rows, num_heads=1, page_size=room, head_size=1, dtype=torch.float32,
        device=torch.device("cpu"),
    )  # fmt: skip
    table = PageTable(cache, num_places=num_rows, width=1)
    table.numbers[:, 0] = np.arange(num_rows)
    table.ends[:] = room
    return table
