"""Steps of a model of mlx-lm."""

from __future__ import annotations

from stand.plugins.foreign.backend import ForeignBackend


class MlxBackend(ForeignBackend):
    """Over rooms of MLX. Its device, or its own threads on a CPU, compute them."""

    name = "mlx"
