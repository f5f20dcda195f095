"""Steps of a model of llama.cpp: one `llama_decode` each."""

from __future__ import annotations

import llama_cpp

from stand.plugins.foreign.backend import ForeignBackend
from stand.plugins.llama_cpp.model import PAGE_SIZE

MOST_ROWS = 64  # with as many prompts and 128 further branches they are 256 sequences, all that llama.cpp has
MOST_DRAFTED = 128


class LlamaCppBackend(ForeignBackend):
    """Rows share the cells of one context; memory is counted in pages of these, and prompts are shared."""

    name = "llama.cpp"
    most_rows = MOST_ROWS
    most_drafted = MOST_DRAFTED
    page_size = PAGE_SIZE

    @property
    def computes_elsewhere(self) -> bool:
        """With a GPU or an Apple chip llama.cpp may leave any step of several tokens to it, wherever the layers lie."""
        return llama_cpp.llama_supports_gpu_offload()

    @property
    def num_slots(self) -> int:
        """Those that neither calls which are not over nor kept prompts have filled."""
        context = self._model.context
        filled = sum(cache.num_slots for cache in list(context.caches))
        return max(context.num_slots - filled, 0)
