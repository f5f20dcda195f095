"""Lossless speculative decoding by STAND: transformers calls `generate` with all arguments of `model.generate`."""

try:
    from stand.plugins.generate import generate
except ImportError as error:
    raise ImportError(
        'this generation recipe needs STAND and its engine; in its source folder: pip install --editable ".[engine]"'
    ) from error

__all__ = ["generate"]
