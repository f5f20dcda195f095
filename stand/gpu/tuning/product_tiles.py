"""Tiles of the few-token product: of how many rows of the weights, and how much of their depth, a program holds."""

from __future__ import annotations

from dataclasses import dataclass

MOST_TOKENS = 16  # the least that matrix instructions take
PROGRAMS_PER_PROCESSOR = 2  # that ask for weights at once
MOST_SPLITS = 16
LEAST_BLOCKS = 2  # of depth in a split: fewer, and its loads do not overlap


@dataclass(frozen=True, slots=True)
class ProductTile:
    """Sizes of one specialisation."""

    rows: int
    depth: int
    num_warps: int
    num_stages: int

    def num_splits(self, num_rows: int, depth: int, num_processors: int) -> int:
        """Parts of the depth of a weight [num_rows, depth], a power of two: as few as keep all processors busy."""
        tiles, blocks = -(-num_rows // self.rows), -(-depth // self.depth)
        splits = 1
        while tiles * splits < PROGRAMS_PER_PROCESSOR * num_processors and 2 * splits * LEAST_BLOCKS <= blocks:
            splits *= 2
        return min(splits, MOST_SPLITS)


# In 16 bits they ask for 48 to 64 KB of shared memory, which every GPU from sm_80 on has.
TILES = (
    ProductTile(16, 256, 4, 4),
    ProductTile(32, 256, 4, 3),
    ProductTile(64, 128, 4, 4),
)
