"""Tiny random models of the causal language models that the installed transformers has, by the names of its
configurations: `llama`, `qwen3_moe` ..."""

from __future__ import annotations

import torch
from transformers import CONFIG_MAPPING, AutoModel, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

CLASSES: dict[str, str] = dict(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)  # by names of configurations
VOCABULARY_SIZE = 61
MOST_WEIGHTS = 20_000_000  # what has more was not made small by these settings
# One meaning has many names, and each configuration has some of them.
SETTINGS: dict[str, object] = {
    **dict.fromkeys(("vocab_size", "vocab_size_per_layer_input"), VOCABULARY_SIZE),
    **dict.fromkeys(("hidden_size", "n_embd", "d_model", "dim", "word_embed_proj_dim", "embedding_size"), 32),
    **dict.fromkeys(("intermediate_size", "n_inner", "ffn_dim", "d_ff", "mlp_hidden_size", "ffn_hidden_size"), 48),
    **dict.fromkeys(("decoder_ffn_dim", "encoder_ffn_dim"), 48),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "num_layers", "decoder_layers"), 4),
    **dict.fromkeys(("num_encoder_layers", "encoder_layers", "num_key_value_heads", "num_global_key_value_heads"), 2),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_heads", "decoder_attention_heads"), 4),
    **dict.fromkeys(("encoder_attention_heads", "rotary_dim"), 4),
    **dict.fromkeys(("head_dim", "global_head_dim", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"), 8),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "n_ctx"), 512),
    **dict.fromkeys(("sliding_window", "attention_window_size", "hidden_size_per_layer_input"), 8),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), 4),
    **dict.fromkeys(("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_k", "zero_expert_num"), 2),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size", "expert_ffn_hidden_size"), 16),
    **dict.fromkeys(("n_shared_experts", "first_k_dense_replace", "n_group", "topk_group", "num_expert_group"), 1),
    **dict.fromkeys(("q_lora_rank", "kv_lora_rank", "qk_head_dim", "chunk_size", "mamba_chunk_size"), 16),
    **dict.fromkeys(("linear_num_heads", "linear_num_value_heads", "mamba_n_heads", "mamba_num_heads"), 4),
    **dict.fromkeys(("linear_head_dim", "linear_key_head_dim", "linear_value_head_dim"), 8),
    **dict.fromkeys(("mamba_d_state", "ssm_state_size", "state_size"), 8),
    **dict.fromkeys(("mamba_d_head", "mamba_head_dim"), 16),
    **dict.fromkeys(("linear_num_key_heads", "n_groups"), 2),
    "mamba_n_groups": 1,
    "initializer_range": 0.4,  # peaked laws: the best token has a margin
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
# What a class needs to have layers of all its kinds among four.
OF_CLASS: dict[str, dict[str, object]] = {
    "bamba": {"attn_layer_indices": [1, 3]},
    "falcon_h1": {"mamba_d_ssm": 64},
    "granitemoehybrid": {"layer_types": ["linear_attention", "full_attention"] * 2},
    "kimi_linear": {"layer_types": ["linear_attention", "full_attention"] * 2},
    "lfm2": {"layer_types": ["conv", "full_attention", "conv", "conv"]},
    "lfm2_moe": {"layer_types": ["conv", "full_attention", "conv", "conv"]},
    "nemotron_h": {
        "layers_block_type": ["linear_attention", "full_attention", "mlp", "linear_attention"],
        "num_hidden_layers": None,
        "time_step_min": 1e-12,
    },
    "zamba2": {
        "layers_block_type": ["linear_attention", "hybrid"] * 2,
        "mamba_ngroups": 1,
        "mamba_headdim": 16,
        "n_mamba_heads": 4,
        "num_mem_blocks": 1,
        "time_step_min": 1e-12,
    },
}
# Left out where a class refuses the settings, one set after the other.
LEFT_OUT = (
    (),
    ("num_key_value_heads",),  # where every head has keys of its own (MLA)
    ("num_key_value_heads", "num_attention_heads"),
    ("head_dim",),
    ("head_dim", "num_key_value_heads"),
    ("head_dim", "rotary_dim"),
    ("head_dim", "global_head_dim", "num_global_key_value_heads"),
    ("num_hidden_layers",),
    ("num_hidden_layers", "head_dim"),
    ("num_experts_per_tok",),
    ("hidden_size_per_layer_input", "vocab_size_per_layer_input"),
    ("initializer_range",),
)


class NotTinyError(ValueError):
    """These settings make no tiny model of a class."""


def tiny_model(kind: str) -> PreTrainedModel:
    """In float32, for inference, with weights that are always the same; it runs a forward. Raises NotTinyError."""
    try:
        defaults = CONFIG_MAPPING[kind](**OF_CLASS.get(kind, {}))
    except Exception as error:  # configurations may raise anything
        raise NotTinyError(_reason(error)) from error
    reason: Exception | None = None
    for names in LEFT_OUT:
        try:
            return _made(_shrunk(defaults, names))
        except Exception as error:
            reason = reason or error
    raise NotTinyError(_reason(reason)) from reason


def _shrunk(defaults: PreTrainedConfig, left_out: tuple[str, ...]) -> PreTrainedConfig:
    """A configuration of the same class by SETTINGS, and those within it (of text, of images, of sound) likewise."""
    settings = {name: value for name, value in SETTINGS.items() if name not in left_out and _has(defaults, name)}
    for name in defaults.sub_configs:
        part = getattr(defaults, name, None)
        if isinstance(part, PreTrainedConfig):
            settings[name] = _shrunk_part(part, left_out)
    return type(defaults)(**{**settings, **OF_CLASS.get(defaults.model_type, {})})


def _shrunk_part(defaults: PreTrainedConfig, left_out: tuple[str, ...]) -> PreTrainedConfig:
    """What is left out may differ from what is around it: the part must make a model by itself, where it can be one."""
    for names in (left_out, *LEFT_OUT):
        try:
            configuration = _shrunk(defaults, names)
            with torch.device("meta"):
                AutoModel.from_config(configuration)
        except Exception:
            continue
        return configuration
    return _shrunk(defaults, left_out)


def _has(defaults: PreTrainedConfig, name: str) -> bool:
    """Also where reading it raises, because layers differ in it."""
    try:
        return hasattr(defaults, name)
    except Exception:
        return True


def _made(configuration: PreTrainedConfig) -> PreTrainedModel:
    with torch.device("meta"):
        num_weights = sum(weight.numel() for weight in AutoModelForCausalLM.from_config(configuration).parameters())
    if num_weights > MOST_WEIGHTS:
        raise ValueError(f"a tiny model must have {MOST_WEIGHTS:,} weights or fewer, got {num_weights:,}")
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(configuration, dtype=torch.float32).eval()
    with torch.inference_mode():
        model(input_ids=torch.arange(3, 12)[None])
    return model


def _reason(error: Exception | None) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())[:200]
