"""When a model's modules have the forwards of captured steps: from where a body first runs to the end of a block."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from transformers import PreTrainedModel

from stand.forward.latent_keys import unexpanded_keys
from stand.forward.recurrent.layers import recurrent_forwards
from stand.forward.tree_attention import tree_attention
from stand.fusion.fusion import Fusion
from stand.gpu.kernel_attention import KERNEL_ATTENTION_NAME


class SwappedForwards:
    """Of attention by kernels, of recurrent layers, and the fused ones.

    A replay runs no module, and swapping takes milliseconds, which a stream would pay in every step.
    """

    def __init__(self, model: PreTrainedModel, fusion: Fusion | None):
        self._model, self._fusion = model, fusion
        self._block: ExitStack | None = None  # the one that runs
        self._is_swapped = False

    @contextmanager
    def block(self) -> Iterator[None]:
        """When it ends, the model is as it was."""
        try:
            with ExitStack() as self._block:
                yield
        finally:
            self._block, self._is_swapped = None, False

    def swap(self) -> None:
        """Until the block ends; outside of one nothing is done."""
        if self._block is None or self._is_swapped:
            return
        self._block.enter_context(tree_attention(self._model, KERNEL_ATTENTION_NAME))
        self._block.enter_context(recurrent_forwards(self._model))
        self._block.enter_context(unexpanded_keys(self._model))
        if self._fusion is not None:
            self._block.enter_context(self._fusion.active())
        self._is_swapped = True
