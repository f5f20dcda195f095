"""Lossless speculative decoding by STAND: transformers calls `generate` with all arguments of `model.generate`."""

try:
    from stand.plugins.generate import generate
except ImportError as error:
    raise ImportError("this generation recipe needs STAND; install it from its source with `pip install .`") from error

__all__ = ["generate"]
