"""Layers of a head that guesses a block: attention over the target's hidden states and over the block itself."""

from __future__ import annotations

import torch
from torch import nn
from transformers.cache_utils import Cache
from transformers.models.qwen3.modeling_qwen3 import Qwen3DecoderLayer, apply_rotary_pos_emb

from stand.drafters.dflash.settings import DFlashSettings
from stand.forward.cache.cache_argument import cache_argument

Angles = tuple[torch.Tensor, torch.Tensor]  # cosines and sines [R, M, d] of rotary positions


class BlockLayer(nn.Module):
    """A decoder layer of Qwen3, with convolutions around its sublayers where the head has them (DFlash 2)."""

    def __init__(self, settings: DFlashSettings, index: int) -> None:
        super().__init__()
        layer = Qwen3DecoderLayer(settings.config, index)
        self.self_attn, self.mlp = layer.self_attn, layer.mlp
        self.input_layernorm, self.post_attention_layernorm = layer.input_layernorm, layer.post_attention_layernorm
        self.index = index
        if settings.conv_kernel_size:
            self.attention_conv, self.mlp_conv = BlockConvolution(settings), BlockConvolution(settings)

    def remember(self, context: torch.Tensor, angles: Angles, cache: Cache) -> None:
        """Write keys and values of context [R, M, D] into the cache."""
        attention = self.self_attn
        shape = (*context.shape[:-1], -1, attention.head_dim)
        keys = attention.k_norm(attention.k_proj(context).view(shape)).transpose(1, 2)
        values = attention.v_proj(context).view(shape).transpose(1, 2)
        _, keys = apply_rotary_pos_emb(keys, keys, *angles)
        cache.update(keys, values, self.index)

    def forward(self, hidden: torch.Tensor, cache: object, **kwargs: object) -> torch.Tensor:
        """[R, N, D], blocks of B places one behind the other. kwargs go to the attention."""
        normed, kernel = self._before("attention_conv", self.input_layernorm(hidden))
        attended, _ = self.self_attn(normed, **{cache_argument(self.self_attn): cache}, **kwargs)
        hidden = hidden + self._behind("attention_conv", attended, kernel)
        normed, kernel = self._before("mlp_conv", self.post_attention_layernorm(hidden))
        return hidden + self._behind("mlp_conv", self.mlp(normed), kernel)

    def _before(self, name: str, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        convolution = getattr(self, name, None)
        return (hidden, None) if convolution is None else convolution.before(hidden)

    def _behind(self, name: str, hidden: torch.Tensor, kernel: torch.Tensor | None) -> torch.Tensor:
        return hidden if kernel is None else getattr(self, name).behind(hidden, kernel)


class BlockConvolution(nn.Module):
    """Two convolutions over the newest places of a block, one before a sublayer and one behind it (DFlash 2).

    A kernel is a learned one per channel plus one per group of channels that the sublayer's input makes.
    """

    def __init__(self, settings: DFlashSettings) -> None:
        super().__init__()
        size, taps = settings.config.hidden_size, settings.conv_kernel_size
        self.block_size, self.num_groups = settings.block_size, size // settings.conv_group_size
        kernel = torch.zeros(2, taps, size)
        kernel[:, 0] = 1.0  # gives what it gets, until it is trained
        self.base_kernel = nn.Parameter(kernel)
        self.kernel_projection = nn.Linear(size, 2 * taps * self.num_groups, bias=False)
        nn.init.zeros_(self.kernel_projection.weight)

    def before(self, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """[R, N, D], and the kernels [R, N, taps, groups] for `behind`."""
        made = self.kernel_projection(hidden).unflatten(-1, (2, -1, self.num_groups))
        return self._convolved(hidden, self.base_kernel[0], made[..., 0, :, :]), made[..., 1, :, :]

    def behind(self, hidden: torch.Tensor, kernel: torch.Tensor) -> torch.Tensor:
        """[R, N, D]."""
        return self._convolved(hidden, self.base_kernel[1], kernel)

    def _convolved(self, hidden: torch.Tensor, base: torch.Tensor, made: torch.Tensor) -> torch.Tensor:
        """Tap t of a place reads the place t before it in its own block, or nothing."""
        blocks = hidden.view(-1, self.block_size, self.num_groups, hidden.shape[-1] // self.num_groups)
        made = made.reshape(*blocks.shape[:2], len(base), self.num_groups, 1)
        mixed = torch.zeros_like(blocks)
        for tap in range(len(base)):
            kernel = base[tap].view(self.num_groups, -1) + made[:, :, tap]
            mixed[:, tap:] += kernel[:, tap:] * blocks[:, : self.block_size - tap]
        return mixed.view_as(hidden)
