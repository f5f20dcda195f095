"""Untrained heads of DFlash's kinds."""

import torch
from transformers import PreTrainedModel, Qwen3Config

from stand.drafters.dflash.head import DFlashHead
from stand.drafters.dflash.settings import DFlashSettings

LAYER = {
    "intermediate_size": 40, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "rms_norm_eps": 0.01,
    "rope_parameters": {"rope_type": "default", "rope_theta": 50.0}, "max_position_embeddings": 512,
}  # fmt: skip
CONVOLUTIONS = {"conv_kernel_size": 2, "conv_group_size": 4}
SELECTOR = {"selector_rank": 6, "selector_top_k": 16}
MARKOV = {"markov_rank": 6}


def random_dflash(
    target: PreTrainedModel,
    *,
    num_layers: int = 2,
    feature_layers: tuple[int, ...] = (1, 0, 1),
    block_size: int = 5,
    windows: tuple[bool, ...] | None = None,
    is_causal: tuple[bool, ...] | None = None,
    vocabulary: list[int] | None = None,
    seed: int = 0,
    head_size: int = 8,
    **settings: object,
) -> DFlashHead:
    """windows: per layer, whether it sees the newest 4 tokens alone."""
    windows = windows or (False,) * num_layers
    kinds = ["sliding_attention" if is_windowed else "full_attention" for is_windowed in windows]
    config = Qwen3Config(
        vocab_size=target.config.vocab_size, hidden_size=target.config.hidden_size, num_hidden_layers=num_layers,
        layer_types=kinds, use_sliding_window=any(windows), sliding_window=4 if any(windows) else None,
        **LAYER | {"head_dim": head_size},
    )  # fmt: skip
    torch.manual_seed(seed)
    known = None if vocabulary is None else torch.tensor(vocabulary)
    given = DFlashSettings(config, feature_layers, block_size, 3, is_causal or (False,) * num_layers, **settings)
    head = DFlashHead(target, given, vocabulary=known)
    with torch.no_grad():
        for name, parameter in head.named_parameters():
            if parameter.dim() == 1:
                parameter.copy_(1 + 0.3 * torch.randn_like(parameter))
            elif "conv" in name or "codebook" in name or "hidden_projection" in name:
                parameter.copy_(0.5 * torch.randn_like(parameter))
    return head.eval()
