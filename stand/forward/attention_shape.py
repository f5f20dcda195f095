"""What the attention of a layer works on: heads, sizes of keys and values, window."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class HeadSizes:
    """Numbers of a head's key and of its value. is_latent: a key is the two together, `key` numbers of a latent and
    `value` turned ones, and what is mixed are latents (see `stand.forward.latent_keys`)."""

    key: int
    value: int
    is_latent: bool = False

    @classmethod
    def alike(cls, size: int) -> HeadSizes:
        """Of keys and values of one size."""
        return cls(size, size)

    @property
    def mixed(self) -> int:
        """Numbers that attention gives for a token and head."""
        return self.key if self.is_latent else self.value


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """num_heads: of queries, a multiple of key_heads. window: tokens, 0 where the whole text is seen."""

    num_heads: int
    key_heads: int
    sizes: HeadSizes
    window: int = 0

    @classmethod
    def seen(
        cls, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, window: int | None, *, is_latent: bool
    ) -> AttentionShape:
        """Of what an attention function gets: query [1, H, M, D], key and value [*, Hkv, *, D]; window: None is 0."""
        return cls(query.shape[1], key.shape[1], HeadSizes(key.shape[3], value.shape[3], is_latent), window or 0)

    @property
    def groups(self) -> int:
        """Query heads that share a key head."""
        return self.num_heads // self.key_heads
