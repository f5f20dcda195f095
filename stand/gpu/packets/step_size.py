"""Sizes that a step is captured for: a few, so that a few graphs serve every step."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass

from transformers import PreTrainedModel

from stand.forward.model import is_mixture
from stand.gpu.packets.work_list import Tiling

WORD_BITS = 64
MAX_ROW_NODES = 256  # a byte of a turn names one
NUM_TOKENS = (1, 4, 8, 16, 32, 48, 64, 96, 128, 160, 192, 256, 384, 512)
CLOSE_NUM_TOKENS = (1, 2, 3, 4, 6, 8, 12, 16, 24, *NUM_TOKENS[4:])  # where padding goes to experts that read weights
SUPPORT_SIZES = (16, 32, 64)  # candidates per node that a draft's laws may span


def sizes_for(model: PreTrainedModel) -> tuple[int, ...]:
    """Tokens that its steps are captured for."""
    return CLOSE_NUM_TOKENS if is_mixture(model) else NUM_TOKENS


class StepLimitError(ValueError):
    """A captured step does not hold what it is given; an eager one does."""


@dataclass(frozen=True, slots=True)
class StepSize:
    """Capacities of a captured step; a smaller step is padded to them."""

    num_tokens: int  # M, packed tokens
    num_rows: int  # B
    tilings: tuple[Tiling, ...]  # of the pieces of attention work, for each kind of layers
    num_items: tuple[int, ...]  # I, such pieces
    support_size: int = SUPPORT_SIZES[0]  # S, candidates per node, where the rule reads laws

    @classmethod
    def covering(
        cls,
        num_tokens: int,
        num_rows: int,
        *,
        tilings: Sequence[Tiling],
        room: int,
        support_size: int = SUPPORT_SIZES[0],
        sizes: Sequence[int] = NUM_TOKENS,
    ) -> StepSize:
        """The smallest of `sizes` that holds `num_tokens` tokens of at most `num_rows` rows with `room` slots each.

        Its items are those that any such step can need, so that a growing context needs no other size. Raises
        StepLimitError beyond the largest size.
        """
        if num_tokens > sizes[-1]:
            raise StepLimitError(
                f"a captured step holds at most {sizes[-1]} tokens of all rows together, got {num_tokens}; "
                "lower the budget or the number of rows, or wrap the model with backend='sdpa'"
            )
        size = sizes[bisect_left(sizes, num_tokens)]
        items = tuple(tiling.most_items(size, num_rows, room) for tiling in tilings)
        return cls(size, num_rows, tuple(tilings), items, support_size)

    @staticmethod
    def covering_support(num_candidates: int) -> int:
        """The smallest support size for laws over so many candidates. Raises StepLimitError beyond the largest."""
        if num_candidates > SUPPORT_SIZES[-1]:
            raise StepLimitError(
                f"a captured step takes laws over at most {SUPPORT_SIZES[-1]} candidates, got {num_candidates}; "
                "draft with fewer per node or wrap the model with backend='sdpa'"
            )
        return SUPPORT_SIZES[bisect_left(SUPPORT_SIZES, num_candidates)]

    @property
    def num_words(self) -> int:
        """W, 64-bit words that name the ancestors of a node."""
        return -(-min(self.num_tokens, MAX_ROW_NODES) // WORD_BITS)
