"""The law of a draw, measured: its token is a step function of the uniform, whose edges are found by halving."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

LARGEST = float(np.nextafter(1.0, 0.0))

Draw = Callable[[torch.Tensor], torch.Tensor]  # uniforms [n] float64 -> tokens [n]


def support_first(support_ids: np.ndarray, vocabulary_size: int) -> np.ndarray:
    """[n, V]: each row's support [n, S] (negative: padding), then the other tokens in ascending order."""
    everything = np.arange(vocabulary_size)
    return np.array([[*ids[ids >= 0], *np.setdiff1d(everything, ids)] for ids in support_ids])


def draw_laws(draw: Draw, orders: np.ndarray) -> np.ndarray:
    """[n, V]: how much of [0, 1) makes each token. `draw` takes uniforms [n]; orders [n, V]: tokens as they come."""
    count, size = orders.shape
    ranks = np.argsort(orders, axis=1)

    def rank_at(points: np.ndarray) -> np.ndarray:
        return ranks[np.arange(count), draw(torch.from_numpy(points)).numpy()]

    grid = np.stack([rank_at(np.full(count, point)) for point in np.linspace(0, LARGEST, 60)])
    assert np.all(np.diff(grid, axis=0) >= 0)  # else there would be more edges than are looked for
    edges = np.ones((count, size))
    for rank in range(size - 1):
        low, high = np.zeros(count), np.ones(count)  # ranks up to `rank` below `low`, later ones from `high` on
        for _ in range(55):
            middle = np.minimum((low + high) / 2, LARGEST)
            is_early = rank_at(middle) <= rank
            low, high = np.where(is_early, middle, low), np.where(is_early, high, middle)
        edges[:, rank] = high
    laws = np.zeros((count, size))
    np.put_along_axis(laws, orders, np.diff(edges, axis=1, prepend=0.0), axis=1)
    return laws
