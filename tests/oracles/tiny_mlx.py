"""Tiny random models of mlx-lm, and what mlx-lm itself makes of them."""

from __future__ import annotations

import importlib

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_map
from mlx_lm.generate import generate_step

VOCABULARY_SIZE = 61
WINDOW = 8
SHAPE = {
    "vocab_size": VOCABULARY_SIZE,
    "hidden_size": 64,
    "num_hidden_layers": 4,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 2048,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "rms_norm_eps": 1e-6, "layer_norm_eps": 1e-6, "layer_norm_epsilon": 1e-6, "norm_eps": 1e-6, "norm_epsilon": 1e-6,
    # The same by names that some architectures have for it.
    "n_embd": 64, "d_model": 64, "num_layers": 4, "n_layer": 4, "n_layers": 4, "num_heads": 4, "n_head": 4,
    "n_heads": 4, "num_kv_heads": 2, "n_kv_heads": 2, "kv_channels": 16, "n_inner": 96, "ffn_hidden_size": 96,
    "n_positions": 2048, "n_ctx": 2048, "max_seq_len": 2048, "seq_length": 2048,
    # Biases, activations and factors.
    "attention_bias": False, "mlp_bias": False, "use_bias": False, "qkv_bias": False, "bias": False,
    "hidden_act": "silu", "logit_scale": 1.0, "logits_scaling": 1.0, "attention_multiplier": 0.25,
    "embedding_multiplier": 1.0, "residual_multiplier": 1.0, "query_pre_attn_scalar": 16,
    "use_qk_norm": True, "use_parallel_residual": True, "use_cache": True, "multi_query": True,
    # Rotary positions of a part of a head.
    "partial_rotary_factor": 0.5, "rotary_dim": 8, "rotary_pct": 0.25, "rotary_emb_base": 10000,
    "rope_local_base_freq": 10000.0, "rope_global_base_freq": 10000.0, "rope_scaling": None,
    # Windows in every other layer.
    "sliding_window": WINDOW, "sliding_window_pattern": 2, "layer_types": ["sliding_attention", "full_attention"] * 2,
    # Experts.
    "num_experts": 4, "num_local_experts": 4, "n_routed_experts": 4, "num_experts_per_tok": 2, "num_shared_experts": 1,
    "n_shared_experts": 1, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 32, "norm_topk_prob": True,
    "decoder_sparse_step": 1, "mlp_only_layers": [], "routed_scaling_factor": 1.0, "n_group": 1, "topk_group": 1,
    "first_k_dense_replace": 1, "moe_layer_freq": 1, "scoring_func": "sigmoid",
    "ffn_config": {"ffn_hidden_size": 96, "moe_num_experts": 4, "moe_top_k": 2, "ffn_act_fn": {"name": "silu"}},
    "attn_config": {"kv_n_heads": 2, "rope_theta": 10000.0, "clip_qkv": 8},
}  # fmt: skip
YARN = {
    "factor": 4.0, "original_max_position_embeddings": 128, "beta_fast": 32.0, "beta_slow": 1.0, "mscale": 1.0,
    "mscale_all_dim": 1.0,
}  # fmt: skip
LATENTS = {
    "kv_lora_rank": 16, "q_lora_rank": 24, "qk_rope_head_dim": 8, "qk_nope_head_dim": 16, "v_head_dim": 16,
    "num_key_value_heads": 4, "topk_method": "noaux_tc", "head_dim": None, "partial_rotary_factor": 1.0,
    "rope_interleave": True, "rope_scaling": YARN | {"type": "yarn"},
}  # fmt: skip
DELTA_RULE = {
    "linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 16, "linear_value_head_dim": 16,
    "linear_conv_kernel_dim": 4, "full_attention_interval": 2, "num_experts": 0, "layer_types": None,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5},
}  # fmt: skip
MAMBA = {
    "mamba_n_heads": 4, "mamba_d_head": 32, "mamba_d_state": 16, "mamba_d_conv": 4, "mamba_n_groups": 1,
    "mamba_proj_bias": False, "mamba_conv_bias": True,
}  # fmt: skip
CONVOLUTION = {"conv_bias": False, "conv_L_cache": 3, "full_attn_idxs": [1, 3]}
HYBRIDS = {
    "falcon_h1": MAMBA | dict.fromkeys(
        ("attention_in_multiplier", "attention_out_multiplier", "embedding_multiplier", "key_multiplier",
         "lm_head_multiplier", "ssm_in_multiplier", "ssm_out_multiplier"), 1.0,
    ) | {
        "mamba_d_head": 16, "mamba_d_ssm": 64, "mamba_expand": 2, "mamba_norm_before_gate": False,
        "mamba_rms_norm": False, "mlp_multipliers": [1.0, 1.0], "ssm_multipliers": [1.0] * 5, "projectors_bias": False,
        "time_step_limit": [0.0, 1e9], "time_step_max": 0.1, "time_step_min": 0.001, "time_step_floor": 1e-4,
    },
    "granitemoehybrid": MAMBA | {
        "layer_types": ["mamba", "attention"] * 2, "shared_intermediate_size": 32, "position_embedding_type": "rope",
    },
    "kimi_linear": {
        "linear_attn_config": {
            "num_heads": 4, "head_dim": 16, "short_conv_kernel_size": 4, "kda_layers": [1, 3],
            "full_attn_layers": [2, 4],
        },
        "model_max_length": 2048, "kv_lora_rank": 16, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 16,
        "moe_router_activation_func": "sigmoid", "num_expert_group": 1, "moe_renormalize": True, "head_dim": None,
        "num_experts_per_token": 2, "num_key_value_heads": 4,
    },
    "lfm2": CONVOLUTION | {
        "block_dim": 64, "block_ff_dim": 96, "block_multiple_of": 8, "block_ffn_dim_multiplier": 1.0,
        "block_auto_adjust_ff_dim": False, "layer_types": None,
    },
    "lfm2_moe": CONVOLUTION | {
        "num_dense_layers": 1, "use_expert_bias": True, "layer_types": ["conv", "full_attention"] * 2,
    },
    "nemotron_h": {
        "mamba_num_heads": 4, "mamba_head_dim": 16, "mamba_proj_bias": False, "ssm_state_size": 16, "conv_kernel": 4,
        "n_groups": 1, "time_step_limit": (0.0, 100.0), "hybrid_override_pattern": ["M", "*", "M", "-"],
        "mlp_hidden_act": "relu2", "use_conv_bias": True,
    },
    "olmo_hybrid": DELTA_RULE | {
        "layer_types": ["linear_attention", "full_attention"] * 2, "linear_num_key_heads": 4, "linear_use_gate": True,
        "linear_allow_neg_eigval": True,
    },
    "qwen3_5": DELTA_RULE,
    "qwen3_5_moe": DELTA_RULE | {"num_experts": 4},
    "qwen3_next": DELTA_RULE | {"num_experts": 4},
}  # fmt: skip
OWN = HYBRIDS | {
    "apertus": {"post_norm": False, "qk_norm": True},
    "deepseek_v2": LATENTS | {"topk_method": "greedy", "aux_loss_alpha": 0.1, "seq_aux": True},
    "deepseek_v3": LATENTS,
    "ernie4_5_moe": {
        "moe_num_experts": 4, "moe_k": 2, "moe_layer_start_index": 1, "moe_capacity": [1, 1, 1],
    },
    "exaone4": {"sliding_window_pattern": "LG"},
    "gemma4_text": {  # the last two layers reuse the keys of the two before them, whose sizes differ
        "num_kv_shared_layers": 2, "global_head_dim": 32, "hidden_size_per_layer_input": 8, "num_experts": None,
        "vocab_size_per_layer_input": VOCABULARY_SIZE, "num_key_value_heads": 1,
    },
    "glm4_moe_lite": LATENTS
    | {"rope_scaling": None, "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}},
    "hunyuan": {
        "moe_topk": 2, "num_shared_expert": 1, "use_mixed_mlp_moe": True, "use_cla": True, "cla_share_factor": 2,
        "rope_scaling": {"factor": 1.0, "alpha": 1000.0, "type": "dynamic"},
    },
    "kimi_k25": LATENTS,
    "kimi_vl": LATENTS,
    "mellum": {"rope_parameters": {
        kind: {"rope_type": "default", "rope_theta": 10000.0} for kind in ("sliding_attention", "full_attention")
    }},
    "minicpm": {"dim_model_base": 32, "scale_depth": 1.4, "scale_emb": 12},
    "minicpm3": LATENTS | {"dim_model_base": 32, "scale_depth": 1.4, "scale_emb": 12},
    "ministral3": {"rope_parameters": YARN | {
        "rope_type": "yarn", "rope_theta": 10000.0, "llama_4_scaling_beta": 0.1,
    }},
    "phi3": {
        "rope_scaling": {"type": "longrope", "long_factor": [2.0] * 8, "short_factor": [1.0] * 8},
        "original_max_position_embeddings": 64, "partial_rotary_factor": 1.0,
    },
    "qwen2": {"rope_scaling": YARN | {"rope_type": "yarn"}},
}  # fmt: skip
SERVED = tuple(
    """
    afmoe apertus bailing_moe cohere cohere2 dbrx deepseek deepseek_v2 deepseek_v3 dots1 ernie4_5 ernie4_5_moe
    exaone exaone4 falcon_h1 gear gemma gemma3 gemma3_text gemma4_text glm glm4 glm4_moe glm4_moe_lite gpt2
    gpt_neox gpt_oss gptj granite granitemoe granitemoehybrid helium hunyuan hunyuan_v1_dense internlm2
    internlm3 iquestloopcoder kimi_k25 kimi_linear kimi_vl Klear laguna lfm2 lfm2_moe llama mellum mimo minicpm
    minicpm3 ministral3 mistral3 mixtral muse_glimmer nanbeige nanochat nemotron nemotron_h olmo2 olmo3
    olmo_hybrid olmoe phi phi3 phimoe pixtral qwen qwen2 qwen2_moe qwen2_vl qwen3 qwen3_5 qwen3_5_moe qwen3_moe
    qwen3_next qwen3_vl qwen3_vl_moe seed_oss smollm3 solar_open starcoder2 talkie telechat3 youtu_llm
    """.split()
)


def tiny_model(architecture: str, **changed: object) -> nn.Module:
    """In float32, with peaked laws: greedy tokens have a margin."""
    code = importlib.import_module(f"mlx_lm.models.{architecture}")
    arguments = {"model_type": architecture} | SHAPE | OWN.get(architecture, {}) | changed
    mx.random.seed(0)
    model = code.Model(code.ModelArgs.from_dict(arguments | {"text_config": arguments}))
    model.update(tree_map(lambda weight: weight * 3 if weight.ndim == 2 else weight, model.parameters()))
    model.eval()
    mx.eval(model.parameters())
    return model


def own_greedy(model: nn.Module, prompt: list[int], count: int) -> list[int]:
    """By mlx-lm's own generation."""
    return [int(token) for token, _ in generate_step(mx.array(prompt), model, max_tokens=count)]
