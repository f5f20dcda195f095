"""A model of llama.cpp as transformers' settings and the engine's steps see one."""

from __future__ import annotations

import sys

import llama_cpp
import torch
from llama_cpp import Llama
from transformers import PreTrainedConfig

from stand.forward.cache.key_shape import key_shape
from stand.forward.cache.tree_cache import DRAFT_ROOM
from stand.plugins.foreign.model import ForeignModel
from stand.plugins.llama_cpp.context import Context
from stand.plugins.llama_cpp.sequences import SequenceCache

PAGE_SIZE = 16  # slots; memory is counted in pages
TYPES = {0: torch.float32, 1: torch.float16, 30: torch.bfloat16}  # of keys and values, by ggml's numbers


class LlamaCppConfig(PreTrainedConfig):
    """Sizes that llama.cpp tells of a model."""

    model_type = "llama.cpp"


class LlamaCppModel(ForeignModel):
    """The weights are `llm`'s, the cache is a `SequenceCache`."""

    config_class = LlamaCppConfig

    def __init__(self, llm: Llama, num_slots: int):
        super().__init__(
            _config_of(llm, num_slots),
            dtype=TYPES.get(llm.context_params.type_k, torch.float16),
            num_bytes=llama_cpp.llama_model_size(llm.model),
            begin_id=_token(llama_cpp.llama_vocab_bos(llm._model.vocab)),
            end_ids=_end_ids(llm),
        )
        self.llm = llm
        self._has_windows = llama_cpp.llama_model_n_swa(llm.model) > 0
        self.context = Context(llm, num_slots)

    @property
    def way(self) -> str:
        version, threads = llama_cpp.__version__, f"{self.llm.n_threads}-{self.llm.n_threads_batch} threads"
        layers = 0  # whatever was asked for, in a build without a GPU
        if llama_cpp.llama_supports_gpu_offload():
            layers = min(self.llm.model_params.n_gpu_layers, self.config.num_hidden_layers + 1)
        return f"llama.cpp {version} {threads} {layers} layers offloaded"

    def new_cache(self, num_rows: int = 1, room: int = 1) -> SequenceCache:
        """For any number of rows, as long as cells are free."""
        token_bytes = key_shape(self).token_bytes
        return SequenceCache(self.context, token_bytes=token_bytes, has_windows=self._has_windows)


def _config_of(llm: Llama, num_slots: int) -> LlamaCppConfig:
    model = llm.model
    heads, width = llama_cpp.llama_model_n_head(model), llama_cpp.llama_model_n_embd(model)
    head_dim = int(llm.metadata.get(f"{llm.metadata.get('general.architecture')}.attention.key_length", 0))
    longest, room = _longest(llm), num_slots - DRAFT_ROOM - 2 * PAGE_SIZE
    return LlamaCppConfig(
        vocab_size=llm.n_vocab(),
        hidden_size=width,
        num_hidden_layers=llama_cpp.llama_model_n_layer(model),
        num_attention_heads=heads,
        num_key_value_heads=llama_cpp.llama_model_n_head_kv(model),
        head_dim=head_dim or width // heads,
        max_position_embeddings=min(longest, room),
        context_note=" (num_slots has room for no more)" if room < longest else "",
    )


def _longest(llm: Llama) -> int:
    """Tokens of a text: what the model was made for, unless whoever made the Llama has chosen its positions."""
    chosen = llm.context_params
    is_scaled = chosen.rope_freq_scale > 0 or chosen.rope_scaling_type != llama_cpp.LLAMA_ROPE_SCALING_TYPE_UNSPECIFIED
    return sys.maxsize if is_scaled else llama_cpp.llama_model_n_ctx_train(llm.model)


def _end_ids(llm: Llama) -> list[int]:
    """All tokens at which llama.cpp ends a text."""
    vocabulary = llm._model.vocab
    return [token for token in range(llm.n_vocab()) if llama_cpp.llama_vocab_is_eog(vocabulary, token)]


def _token(number: int) -> int | None:
    return None if number < 0 else number
