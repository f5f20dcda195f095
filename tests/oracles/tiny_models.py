"""Tiny random models of the served families, real transformers classes, float32."""

import copy
from functools import lru_cache

import torch
from torch._subclasses.fake_tensor import unset_fake_temporarily
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    Gemma3TextConfig,
    GptOssConfig,
    LlamaConfig,
    MistralConfig,
    Phi3Config,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
)

VOCABULARY_SIZE = 61
SHAPE = {
    "vocab_size": VOCABULARY_SIZE,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "initializer_range": 0.4,  # peaked laws: rows differ, argmax has a margin
}

CONFIGS: dict[str, PreTrainedConfig] = {
    "llama": LlamaConfig(**SHAPE),
    "qwen2": Qwen2Config(**SHAPE),
    "qwen3": Qwen3Config(**SHAPE, head_dim=16),
    "mistral": MistralConfig(**SHAPE, sliding_window=8),
    "gemma2": Gemma2Config(**SHAPE, head_dim=16, sliding_window=8, query_pre_attn_scalar=16),
    "gemma3": Gemma3TextConfig(**SHAPE, head_dim=16, sliding_window=8, query_pre_attn_scalar=16),
    "phi3": Phi3Config(**SHAPE),
    "qwen3_moe": Qwen3MoeConfig(
        **SHAPE, head_dim=16, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16
    ),
    "gpt_oss": GptOssConfig(
        **SHAPE, head_dim=16, num_local_experts=4, sliding_window=8,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
    ),
}  # fmt: skip


@lru_cache
def tiny_model(family: str) -> PreTrainedModel:
    """Soft-capped scores are left to eager attention: the default of transformers 5.16 leaves the cap out."""
    config = CONFIGS[family]
    attention = "eager" if getattr(config, "attn_logit_softcapping", None) else None
    return _kept(config, seed=1, attn_implementation=attention)


@lru_cache
def kernel_model(family: str):
    """A tiny random model with a head size that the kernels take."""
    config = copy.deepcopy(CONFIGS[family])
    config.head_dim = 64
    return _kept(config, seed=0)


def _kept(config: PreTrainedConfig, *, seed: int, **settings: object) -> PreTrainedModel:
    """With values in its weights, also where a test on fake tensors is the first that asks."""
    with unset_fake_temporarily():
        torch.manual_seed(seed)
        return AutoModelForCausalLM.from_config(config, **settings).eval()
