"""When the layers of a head attend by kernels: while a body of theirs runs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from torch import nn

from stand.forward.tree_attention import ATTENTION_NAME
from stand.gpu.kernel_attention import KERNEL_ATTENTION_NAME


@contextmanager
def kernel_attention(modules: Sequence[nn.Module]) -> Iterator[None]:
    """In place of the attention by PyTorch; a replay runs no module."""
    found = {id(config): config for module in modules for part in module.modules() if (config := _own(part))}
    try:
        for config in found.values():
            config._attn_implementation = KERNEL_ATTENTION_NAME
        yield
    finally:
        for config in found.values():
            config._attn_implementation = ATTENTION_NAME


def _own(module: nn.Module) -> object | None:
    """The configuration that says how it attends, where that is as heads do."""
    config = getattr(module, "config", None)
    return config if getattr(config, "_attn_implementation", None) == ATTENTION_NAME else None
