"""MLX: the engine around a model of mlx-lm, on an Apple chip or whatever MLX runs on.

>>> model, tokenizer = mlx_lm.load("mlx-community/Qwen3-8B-4bit")
>>> engine = stand.plugins.mlx.wrap(model, tokenizer)

Every token of a step is one text of a batch with a place of its own. So a tree's nodes get the positions of their
depths from the model itself. Attention is asked for elsewhere, over rooms of keys with a mask of paths, and layers
with a state get what lies on a token's path.
"""

from stand.extra import missing_package

try:
    from stand.plugins.mlx.door import wrap
except ModuleNotFoundError as error:
    raise missing_package(error, "mlx", asker=__name__, install="mlx-lm") from error

__all__ = ["wrap"]
