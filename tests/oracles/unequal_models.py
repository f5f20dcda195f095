"""Tiny random models whose layers keep keys of several sizes, or values narrower than keys; real transformers classes,
float32."""

from functools import lru_cache

import pytest
import torch
from tiny_models import SHAPE
from transformers import AutoModelForCausalLM, DeepseekV3Config, MiniCPM3Config, PreTrainedModel

FOUR = {**SHAPE, "num_hidden_layers": 4}
LATENT = {"q_lora_rank": 16, "kv_lora_rank": 48, "qk_nope_head_dim": 32, "qk_rope_head_dim": 16, "v_head_dim": 32}
EXPERTS = {"moe_intermediate_size": 16, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1}
KINDS = ["sliding_attention", "full_attention"] * 2


def new_deepseek():
    """Keys of 48 numbers, values of 32, and no key heads shared."""
    return DeepseekV3Config(
        **{**FOUR, "num_key_value_heads": 4}, **LATENT, **EXPERTS, n_routed_experts=4, n_shared_experts=1,
        first_k_dense_replace=2,
    )  # fmt: skip


def new_minicpm():
    return MiniCPM3Config(**{**FOUR, "num_key_value_heads": 4}, **LATENT)


def new_gemma4(**settings):
    """Layers with a window have heads of 16 numbers and two key heads, the others of 32 and one, which serves values
    too."""
    gemma4 = pytest.importorskip("transformers.models.gemma4", reason="transformers has no Gemma 4")
    given = {
        **FOUR, "head_dim": 16, "global_head_dim": 32, "num_global_key_value_heads": 1, "attention_k_eq_v": True,
        "sliding_window": 8, "layer_types": KINDS, "vocab_size_per_layer_input": 61, "hidden_size_per_layer_input": 8,
    }  # fmt: skip
    return gemma4.Gemma4TextConfig(**{**given, **settings})


def new_sharing_gemma4():
    """E2B and E4B: the last layers have no keys of their own, and the values of the others have a projection."""
    return new_gemma4(
        num_hidden_layers=6, num_kv_shared_layers=2, layer_types=KINDS + KINDS[:2], attention_k_eq_v=False
    )


def new_mimo():
    """Layers with a window have four key heads, sinks, and values narrower than keys; the others two key heads."""
    mimo = pytest.importorskip("transformers.models.mimo_v2_flash", reason="transformers has no MiMo V2")
    return mimo.MiMoV2FlashConfig(
        **FOUR, **EXPERTS, head_dim=48, v_head_dim=32, swa_head_dim=48, swa_v_head_dim=32, swa_num_attention_heads=4,
        swa_num_key_value_heads=4, sliding_window=8, layer_types=KINDS, n_routed_experts=4,
    )  # fmt: skip


UNEQUAL = {
    "deepseek_v3": new_deepseek,
    "minicpm3": new_minicpm,
    "gemma4": new_gemma4,
    "gemma4_e2b": new_sharing_gemma4,
    "mimo_v2": new_mimo,
}


@lru_cache
def unequal_model(family: str) -> PreTrainedModel:
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(UNEQUAL[family]()).eval()
