"""Which models of mlx-lm are served."""

from __future__ import annotations

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import torch
from mlx_lm.models.cache import make_prompt_cache

from stand.forward.self_check import UnsupportedModelError, failures_refused
from stand.plugins.foreign.tree_check import check_trees
from stand.plugins.mlx.model import MlxModel

TOLERANCES = {torch.float32: 0.02}  # of the logits' spread; a GPU may round products of float32
TOLERANCE = 0.1  # of 16 bits, and quantised weights


def checked_model(inner: object, end_ids: list[int]) -> MlxModel:
    """The model, shown to score trees as its own forward scores texts. Raises UnsupportedModelError."""
    if not isinstance(inner, nn.Module):
        raise UnsupportedModelError(
            f"wrap needs a model of mlx-lm, got {type(inner).__name__}; pass the first of what mlx_lm.load returns, or "
            "a transformers model to stand.wrap"
        )
    _refuse_split(inner)
    name, rule = f"{type(inner).__module__}.{type(inner).__name__}", "run packed tokens over a cache of this engine"
    with failures_refused(name, rule, of_error=_first_line):
        model = MlxModel(inner, end_ids)
        model.refuse_unready()
        tolerance = TOLERANCES.get(model.dtype, TOLERANCE)
        check_trees(model, lambda *text: text_logits(inner, *text), tolerance=tolerance, runner="mlx-lm")
    return model


def _refuse_split(inner: nn.Module) -> None:
    for module in inner.modules():
        group = getattr(module, "sharding_group", None) or getattr(module, "group", None)
        count = max(getattr(module, "pipeline_size", 1), 1 if group is None else group.size())
        if count > 1:
            raise UnsupportedModelError(
                f"a model must be whole in one process, got one of {count} that share it, each of which would draw and "
                "draft for itself; load it without sharding"
            )


def text_logits(inner: nn.Module, tokens: np.ndarray, count: int) -> torch.Tensor:
    """[count, V] float32 of the last tokens of a text, by the model's own forward over its own cache."""
    logits = inner(mx.array(tokens.astype(np.int32))[None], cache=make_prompt_cache(inner))
    return torch.from_numpy(np.array(logits[0, -count:].astype(mx.float32)))


def _first_line(error: Exception) -> str:
    """MLX lists all types that a function takes."""
    return str(error).partition("\n")[0]
