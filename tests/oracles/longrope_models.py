"""Configurations of tiny Phi-3 models with LongRoPE, whose rotary factors are others behind a border."""

from tiny_models import SHAPE
from transformers import Phi3Config

FACTORS = {"short_factor": [1.0, 1.1, 1.2, 1.3], "long_factor": [2.0, 3.0, 5.0, 9.0]}
FACTORS_OF_64 = {"short_factor": [1.0 + 0.01 * place for place in range(32)], "long_factor": [4.0] * 32}
ONE_HEAD_OF_64 = {"hidden_size": 64, "num_attention_heads": 1, "num_key_value_heads": 1}  # that the kernels take


def longrope_phi3(border: int, context: int, *, factors: dict = FACTORS, **shape: object) -> Phi3Config:
    return Phi3Config(
        **{**SHAPE, "max_position_embeddings": context, **shape},
        original_max_position_embeddings=border,
        rope_parameters={"rope_type": "longrope", "rope_theta": 10000.0, **factors},
    )
