"""A model of llama.cpp as transformers' settings and the engine's steps see one."""

from __future__ import annotations

import sys

import llama_cpp
import torch
from llama_cpp import Llama
from transformers import GenerationConfig, GenerationMixin, PreTrainedConfig, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutputWithPast

from stand.forward.cache.key_shape import key_shape
from stand.forward.cache.tree_cache import DRAFT_ROOM
from stand.forward.packed_plan import StepPlan, plain_forward_error
from stand.plugins.llama_cpp.context import Context
from stand.plugins.llama_cpp.sequences import SequenceCache

PAGE_SIZE = 16  # slots; memory is counted in pages
TYPES = {0: torch.float32, 1: torch.float16, 30: torch.bfloat16}  # of keys and values, by ggml's numbers


class LlamaCppConfig(PreTrainedConfig):
    """Sizes that llama.cpp tells of a model."""

    model_type = "llama.cpp"


class LlamaCppModel(PreTrainedModel, GenerationMixin):
    """Without weights of its own: they are `llm`'s. It runs plans of steps alone, over a `SequenceCache`."""

    config_class = LlamaCppConfig
    main_input_name = "input_ids"

    def __init__(self, llm: Llama, num_slots: int):
        super().__init__(_config_of(llm, num_slots))
        self.llm = llm
        dtype = TYPES.get(llm.context_params.type_k, torch.float16)
        self.nothing = torch.nn.Parameter(torch.empty(0, dtype=dtype), requires_grad=False)  # says device and dtype
        self.generation_config = GenerationConfig(
            bos_token_id=_token(llama_cpp.llama_vocab_bos(llm._model.vocab)), eos_token_id=_end_ids(llm) or None
        )
        self._num_bytes = llama_cpp.llama_model_size(llm.model)
        self._has_windows = llama_cpp.llama_model_n_swa(llm.model) > 0
        self.context = Context(llm, num_slots)
        self.eval()

    @property
    def way(self) -> str:
        """How steps run, for files of what they cost."""
        version, threads = llama_cpp.__version__, f"{self.llm.n_threads}-{self.llm.n_threads_batch} threads"
        layers = min(self.llm.model_params.n_gpu_layers, self.config.num_hidden_layers + 1)
        return f"llama.cpp {version} {threads} {layers} layers offloaded"

    def new_cache(self) -> SequenceCache:
        """For any number of rows."""
        token_bytes = key_shape(self).token_bytes
        return SequenceCache(self.context, token_bytes=token_bytes, has_windows=self._has_windows)

    def get_memory_footprint(self, return_buffers: bool = True) -> int:
        """Bytes of the weights."""
        return self._num_bytes

    def set_attn_implementation(self, *arguments: object, **named: object) -> None:
        """llama.cpp's is not chosen here."""

    def forward(
        self,
        input_ids: torch.Tensor,
        position_ids: torch.Tensor | None = None,
        past_key_values: SequenceCache | None = None,
        use_cache: bool = True,
        logits_to_keep: int = 0,
        stand_plan: StepPlan | None = None,
    ) -> CausalLMOutputWithPast:
        if stand_plan is None:
            raise plain_forward_error(type(self).__name__)
        logits = past_key_values.run(stand_plan, logits_to_keep or stand_plan.num_tokens)
        return CausalLMOutputWithPast(logits=logits[None])


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
