"""Which models and prompts a pool of pages could serve, and how much of it rows can have."""

from types import SimpleNamespace

import pytest
import torch

from stand.forward.cache.key_shape import LayerKeys
from stand.forward.cache.tree_cache import TreeCache
from stand.forward.recurrent.states import LayerStates, RecurrentStates
from stand.gpu.device_cache import DeviceCache

LAYERS = ((0, LayerKeys(2, 16, 32)), (2, LayerKeys(1, 16, 16)))
PAGES = {"num_pages": 3, "page_size": 16, "dtype": torch.float32, "device": torch.device("cpu")}


def states(*indices: int, num_rows: int = 2) -> RecurrentStates:
    found = RecurrentStates(num_rows)
    for index in indices:
        found.layers[index] = LayerStates(torch.zeros(num_rows, 3, 5))
    return found


def prompt(layers=LAYERS, recurrent: RecurrentStates | None = None) -> TreeCache:
    """A cache of one row with such layers."""
    cache = TreeCache(1, 16)
    cache.layer_places = {index: place for place, (index, _) in enumerate(layers)}
    cache.keys = [torch.zeros(1, keys.num_heads, 16, keys.key_size) for _, keys in layers]
    cache.values = [torch.zeros(1, keys.num_heads, 16, keys.value_size) for _, keys in layers]
    cache.recurrent = states() if recurrent is None else recurrent
    return cache


def test_bytes_are_those_of_pages_that_rows_can_have_and_of_their_states():
    per_slot = sum(keys.count for _, keys in LAYERS) * 4
    assert DeviceCache(layers=LAYERS, **PAGES).nbytes == 3 * 16 * per_slot
    pool = DeviceCache(layers=LAYERS, recurrent=states(1), **PAGES)
    assert pool.nbytes == 3 * 16 * per_slot + 2 * 3 * 5 * 4


@pytest.mark.parametrize(
    ("suits", "changed", "given"),
    [
        (True, {}, prompt()),
        (True, {}, prompt(LAYERS[:1])),
        (False, {"dtype": torch.bfloat16}, prompt()),
        (False, {"device": torch.device("meta")}, prompt()),
        (False, {}, prompt(((0, LayerKeys(2, 16, 16)),))),
        (False, {}, prompt(((1, LayerKeys(2, 16, 32)),))),
        (True, {}, prompt(recurrent=states(1))),
        (False, {}, prompt(recurrent=states(3))),
        (False, {"dtype": torch.bfloat16}, prompt(((0, LayerKeys(2, 16, 16)),))),
    ],
)
def test_a_pool_suits_models_of_its_type_device_layers_and_states(suits, changed, given):
    """Each of them by itself decides."""
    pool = DeviceCache(layers=LAYERS, recurrent=states(1), **PAGES)
    model = SimpleNamespace(**{"dtype": torch.float32, "device": torch.device("cpu")} | changed)
    assert pool.suits(model, given) is suits
