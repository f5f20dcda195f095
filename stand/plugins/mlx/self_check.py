"""Which models of mlx-lm are served."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import torch
from mlx_lm.models.cache import make_prompt_cache

from stand.forward.cache.tree_cache import CacheMemoryError
from stand.forward.self_check import UnsupportedModelError
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
    with _failures_refused(inner):
        model = MlxModel(inner, end_ids)
        model.refuse_training()
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


@contextmanager
def _failures_refused(inner: nn.Module) -> Iterator[None]:
    """Within it, whatever a model's own code raises is a refusal. A lack of memory says nothing of the model."""
    try:
        yield
    except (UnsupportedModelError, CacheMemoryError):
        raise
    except (RuntimeError, AttributeError, TypeError, ValueError, LookupError) as error:
        what = str(error).partition("\n")[0]  # MLX lists all types that a function takes
        raise UnsupportedModelError(
            f"{type(inner).__module__}.{type(inner).__name__} must run packed tokens over a cache of this engine, got "
            f"{type(error).__name__}: {what}; this model class cannot be served"
        ) from error
