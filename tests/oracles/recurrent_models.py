"""Tiny random models whose layers keep recurrent states beside keys, real transformers classes, float32."""

import copy
from functools import lru_cache

import torch
import transformers
from packaging.version import Version
from tiny_models import SHAPE
from transformers import (
    AutoModelForCausalLM,
    BambaConfig,
    FalconH1Config,
    GraniteMoeHybridConfig,
    Lfm2Config,
    Lfm2MoeConfig,
    NemotronHConfig,
    OlmoHybridConfig,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen3_5MoeTextConfig,
    Qwen3_5TextConfig,
    Qwen3NextConfig,
    Zamba2Config,
)

FOUR = {**SHAPE, "num_hidden_layers": 4}
DELTA = {
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 12,
}
EXPERTS = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 16,
}
MAMBA = {"mamba_n_heads": 4, "mamba_d_head": 16, "mamba_d_state": 8, "mamba_chunk_size": 16}
CONVOLUTIONS = ["conv", "full_attention", "conv", "conv"]
LAYERS = ["linear_attention", "full_attention", "mlp", "linear_attention"]

DELTA_RULE: dict[str, PreTrainedConfig] = {
    "qwen3_next": Qwen3NextConfig(**FOUR, **DELTA, **EXPERTS, head_dim=16),
    "qwen3_5": Qwen3_5TextConfig(**FOUR, **DELTA, head_dim=16),
    "qwen3_5_moe": Qwen3_5MoeTextConfig(**FOUR, **DELTA, **EXPERTS, head_dim=16),
    "olmo_hybrid": OlmoHybridConfig(**FOUR, **{**DELTA, "linear_num_key_heads": 4}),
}
STATE_SPACE: dict[str, PreTrainedConfig] = {
    "bamba": BambaConfig(**FOUR, **MAMBA, mamba_n_groups=2, attn_layer_indices=[1, 3]),
    "granite": GraniteMoeHybridConfig(
        **FOUR, **MAMBA, mamba_n_groups=1, layer_types=["linear_attention", "full_attention"] * 2,
        num_local_experts=4, num_experts_per_tok=2, shared_intermediate_size=16,
    ),
    "falcon_h1": FalconH1Config(**FOUR, **MAMBA, mamba_n_groups=1, mamba_d_ssm=64),
    "nemotron_h": NemotronHConfig(
        **{**SHAPE, "num_hidden_layers": None}, layers_block_type=LAYERS, mamba_num_heads=4, mamba_head_dim=16,
        n_groups=2, ssm_state_size=8, chunk_size=16, head_dim=16, time_step_min=1e-12,
    ),
    "zamba2": Zamba2Config(
        **FOUR, layers_block_type=["linear_attention", "hybrid"] * 2, mamba_ngroups=1, mamba_d_state=8,
        mamba_headdim=16, n_mamba_heads=4, num_mem_blocks=1, chunk_size=16, time_step_min=1e-12,
    ),
}  # fmt: skip
CONVOLUTION: dict[str, PreTrainedConfig] = {
    "lfm2": Lfm2Config(**FOUR, layer_types=CONVOLUTIONS),
    "lfm2_moe": Lfm2MoeConfig(
        **FOUR, layer_types=CONVOLUTIONS, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16,
        num_dense_layers=1,
    ),
}  # fmt: skip
if Version(transformers.__version__) < Version("5.23"):  # 5.16 hands it no plan, so no step is captured
    del STATE_SPACE["falcon_h1"]
RECURRENT = {**DELTA_RULE, **STATE_SPACE, **CONVOLUTION}


@lru_cache
def recurrent_model(family: str) -> PreTrainedModel:
    return new_recurrent_model(RECURRENT[family])


def new_recurrent_model(config: PreTrainedConfig) -> PreTrainedModel:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("conv1d.bias"):  # which transformers makes zeros
                parameter.normal_(std=0.3)
    return model


@lru_cache
def recurrent_kernel_model(family: str) -> PreTrainedModel:
    """With heads of a size that the kernels of attention take."""
    config = copy.deepcopy(RECURRENT[family])
    config.head_dim = 64
    return new_recurrent_model(config)
