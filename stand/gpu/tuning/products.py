"""Who multiplies in the linear layers of captured steps: torch, or the few-token product where it was measured faster.

A choice is made per shape of weights and number of tokens, on the loaded weights. Another way of multiplying rounds
otherwise, so a choice must not differ from run to run: it is kept in a file (`stand.gpu.tuning.known_products`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch.nn.functional import linear

from stand.fusion.forwards.chosen_products import Shape
from stand.fusion.forwards.merged_linear import Product
from stand.fusion.probe import MODULE_TOLERANCES
from stand.gpu.kernels.product import few_token_product
from stand.gpu.tuning.product_tiles import MOST_TOKENS, TILES

TOKENS = (1, 4, MOST_TOKENS)  # numbers that are measured; one between them takes the choice of the next
LEAST_GAIN = 0.95  # of torch's time: a tile that takes more is not worth other bits
DTYPES = (torch.bfloat16, torch.float16)

Choices = dict[Shape, tuple[int | None, ...]]  # per entry of TOKENS the number of a tile, None: torch's product
Timer = Callable[[Callable[[], None]], float]  # seconds of a function whose kernels run on the device


class Products:
    """`torch.nn.functional.linear` for inference, by the way that was chosen. Calls must not run at once."""

    def __init__(self, choices: Mapping[Shape, Sequence[int | None]], device: torch.device):
        self.choices = {shape: tuple(tiles) for shape, tiles in choices.items()}
        self._num_processors = num_processors(device)
        self._splits = {
            (shape, tile): TILES[tile].num_splits(*shape, self._num_processors)
            for shape, tiles in self.choices.items()
            for tile in tiles
            if tile is not None
        }
        partials = [splits * MOST_TOKENS * rows for ((rows, _), _), splits in self._splits.items() if splits > 1]
        tiles = [-(-rows // TILES[tile].rows) for (rows, _), tile in self._splits]
        self._partials = torch.empty(max(partials, default=0), dtype=torch.float32, device=device)
        self._arrivals = torch.zeros(max(tiles, default=0), dtype=torch.int32, device=device)

    def __call__(self, states: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """states [..., K], weight [N, K], bias [N] -> [..., N]."""
        shape = tuple(weight.shape)
        tile = self.tile(shape, states.numel() // max(states.shape[-1], 1))
        if tile is None or states.dtype != weight.dtype:
            return linear(states, weight, bias)
        scratch = self._partials, self._arrivals
        return few_token_product(states, weight, bias, *scratch, tile, self._splits[shape, tile])

    def tile(self, shape: Shape, num_tokens: int) -> int | None:
        """Which of `TILES` multiplies a weight of that shape with so many tokens; None: torch does."""
        tiles = self.choices.get(shape, ())
        return next((tile for most, tile in zip(TOKENS, tiles, strict=False) if 0 < num_tokens <= most), None)


def choose(weights: Sequence[torch.Tensor], timer: Timer) -> tuple[int | None, ...]:
    """Per entry of `TOKENS` the number of the fastest tile for `weights`, all of one shape [N, K].

    A tile counts where its result is torch's up to rounding, and takes at most LEAST_GAIN of torch's time. The weights
    are gone through in turn, so that they come from memory, as a model's do. Raises torch.OutOfMemoryError.
    """
    shape, device = tuple(weights[0].shape), weights[0].device
    generator = torch.Generator(device).manual_seed(0)  # the user's stays where it is
    chosen: list[int | None] = []
    for num_tokens in TOKENS:
        states = torch.randn(num_tokens, shape[1], generator=generator, device=device).to(weights[0].dtype)
        seconds = {None: _seconds(Products({}, states.device), states, weights, timer)}
        for tile in range(len(TILES)):
            products = Products({shape: (tile,) * len(TOKENS)}, states.device)
            try:
                if is_equal(products, states, weights[0]):
                    seconds[tile] = _seconds(products, states, weights, timer)
            except torch.OutOfMemoryError:
                raise  # says nothing of the tile, and what is chosen is kept for good
            except Exception:  # a kernel that this device refuses, in whatever way: Triton's errors derive from it
                continue
        best = min(seconds, key=seconds.__getitem__)
        chosen.append(best if seconds[best] <= LEAST_GAIN * seconds[None] else None)
    return tuple(chosen)


def is_equal(product: Product, states: torch.Tensor, weight: torch.Tensor) -> bool:
    """Whether its result is torch's in float32, as near as rounding to the dtype lets it be."""
    exact = linear(states.float(), weight.float())
    error = (product(states, weight, None).float() - exact).abs().amax(dim=-1)
    return bool((error <= MODULE_TOLERANCES[states.dtype] * exact.abs().amax(dim=-1)).all())


def num_processors(device: torch.device) -> int:
    """Multiprocessors of a GPU; elsewhere, in the interpreter, 2."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 2


def _seconds(product: Product, states: torch.Tensor, weights: Sequence[torch.Tensor], timer: Timer) -> float:
    def run() -> None:
        for weight in weights:
            product(states, weight, None)

    return timer(run)
