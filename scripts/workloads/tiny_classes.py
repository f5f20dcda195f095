"""Tiny random models of the causal language models that the installed transformers has, by the names of its
configurations: `llama`, `qwen3_moe` ..."""

from __future__ import annotations

import copy

import torch
from transformers import (
    CONFIG_MAPPING,
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    Gemma3nVisionConfig,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from transformers.utils import is_timm_available

CLASSES: dict[str, str] = dict(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)  # by names of configurations
VOCABULARY_SIZE = 61
MOST_WEIGHTS = 20_000_000  # what has more was not made small by these settings
# One meaning has many names, and each configuration has some of them.
SETTINGS: dict[str, object] = {
    **dict.fromkeys(("vocab_size", "vocab_size_per_layer_input"), VOCABULARY_SIZE),
    **dict.fromkeys(("hidden_size", "n_embd", "d_model", "dim", "word_embed_proj_dim", "embedding_size"), 32),
    **dict.fromkeys(("out_hidden_size", "adapter_in_dim", "adapter_out_dim", "adapter_input_size"), 32),
    **dict.fromkeys(("hidden_size_global", "mm_embed_dim"), 32),
    **dict.fromkeys(("intermediate_size", "n_inner", "ffn_dim", "d_ff", "mlp_hidden_size", "ffn_hidden_size"), 48),
    **dict.fromkeys(("decoder_ffn_dim", "encoder_ffn_dim"), 48),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "num_layers", "decoder_layers"), 4),
    **dict.fromkeys(("num_decoder_layers", "num_decoder_attention_heads"), 4),
    **dict.fromkeys(("num_encoder_layers", "encoder_layers", "num_key_value_heads", "num_global_key_value_heads"), 2),
    **dict.fromkeys(("kv_n_heads",), 2),
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
    **dict.fromkeys(("indexer_n_heads", "index_n_heads"), 2),
    **dict.fromkeys(("indexer_head_dim", "index_head_dim", "indexer_budget", "index_topk"), 16),
    "indexer_kv_heads": 1,
    "indexer_compress_ratio": 4,
    **dict.fromkeys(("linear_num_key_heads", "n_groups"), 2),
    "mamba_n_groups": 1,
    "is_decoder": True,
    "tie_word_embeddings": False,  # else the best token after a token is often itself
    "initializer_range": 0.4,  # peaked laws: the best token has a margin
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
# The last two of four layers reuse the keys of the first two.
SHARING = {"layer_types": ["sliding_attention", "full_attention"] * 2, "num_kv_shared_layers": 2}
# What a class needs to have layers of all its kinds among four, and where its sizes depend on each other.
OF_CLASS: dict[str, dict[str, object]] = {
    "bailing_hybrid": {"layer_group_size": 2},
    "blt": {"encoder_hash_byte_group_vocab": VOCABULARY_SIZE, "num_hidden_layers": 4},
    "bamba": {"attn_layer_indices": [1, 3]},
    "cohere_compass_text": {
        "rope_parameters": {
            kind: {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1]}
            for kind in ("full_attention", "sliding_attention")
        },
    },
    # its class needs what its defaults lack
    "dbrx": {"attn_config": {"kv_n_heads": 2, "rope_theta": 1e4, "clip_qkv": 8}},
    "dots3_note_text": {
        "num_key_value_heads": 4,
        "head_dim": 16,
        **dict.fromkeys(("swa_num_attention_heads", "swa_num_key_value_heads"), 4),
        **dict.fromkeys(("swa_q_lora_rank", "swa_kv_lora_rank", "swa_head_dim"), 16),
        **dict.fromkeys(("swa_qk_nope_head_dim", "swa_v_head_dim"), 8),
    },
    "dots3_note_vision_encoder": {"pyramid_num_routed": [-1, -1, 4, 4]},
    "falcon_h1": {"mamba_d_ssm": 64},
    **dict.fromkeys(("gemma3n_text", "gemma4_text", "gemma4_unified_text"), SHARING),
    "gpt_neo": {"attention_types": [[["global", "local"], 2]], "window_size": 8},
    "granitemoehybrid": {"layer_types": ["linear_attention", "full_attention"] * 2},
    "kimi_linear": {"layer_types": ["linear_attention", "full_attention"] * 2},
    "lfm2": {"layer_types": ["conv", "full_attention", "conv", "conv"]},
    "lfm2_moe": {"layer_types": ["conv", "full_attention", "conv", "conv"]},
    "mamba2": {"head_dim": 16},
    "nemotron_h": {
        "layers_block_type": ["linear_attention", "full_attention", "mlp", "linear_attention"],
        "num_hidden_layers": None,
        "time_step_min": 1e-12,
    },
    "prophetnet": {"num_encoder_layers": 4},  # its cache has as many layers
    "reformer": {
        "axial_pos_embds": False,
        "attention_head_size": 8,
        "feed_forward_size": 48,
        "hash_seed": 0,
        "num_buckets": 2,
    },
    "xlstm": {"hidden_size": 64, "qk_dim_factor": 1.0},  # its sizes are multiples of 64
    "xmod": {"default_language": "en_XX"},
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


class _NoImages(PreTrainedModel):
    """Stands for a part that only images run."""

    config_class = Gemma3nVisionConfig


if not is_timm_available():  # whose model it would be
    AutoModel.register(Gemma3nVisionConfig, _NoImages, exist_ok=True)


class NotTinyError(ValueError):
    """These settings make no tiny model of a class."""


def tiny_model(kind: str) -> PreTrainedModel:
    """In float32, for inference, with weights that are always the same; it runs a forward. Raises NotTinyError."""
    try:
        defaults = CONFIG_MAPPING[kind]()
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
    settings = {
        name: value for name, value in SETTINGS.items() if name not in left_out and _takes(defaults, name, value)
    }
    for name, of_part in defaults.sub_configs.items():
        part = getattr(defaults, name, None)
        if part is None and of_part is not AutoConfig:  # published models have it
            part = of_part()
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


def _takes(defaults: PreTrainedConfig, name: str, value: object) -> bool:
    """Whether it has it and lets it be set; also where reading it raises, because layers differ in it."""
    try:
        if not hasattr(defaults, name):
            return False
    except Exception:
        pass
    try:
        setattr(copy.deepcopy(defaults), name, value)
    except (AttributeError, NotImplementedError):
        return False
    except Exception:  # what it says of a value
        pass
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
