"""What the attention of a layer works on: heads, sizes of keys and values, window."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """num_heads: of queries, a multiple of key_heads. key_size, value_size: numbers per head. window: tokens, 0 where
    the whole text is seen."""

    num_heads: int
    key_heads: int
    key_size: int
    value_size: int
    window: int = 0

    @property
    def groups(self) -> int:
        """Query heads that share a key head."""
        return self.num_heads // self.key_heads
