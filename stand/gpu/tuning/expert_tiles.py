"""Tiles of the products of experts: of how many tokens, of how many rows of the weights and how much of their depth a
program holds."""

from __future__ import annotations

from dataclasses import dataclass, replace

MOST_CHOSEN = 32  # experts of a token: their results are added up in one loop that is written out
FEW_PAIRS = 16  # of a token and an expert: so few that narrow tiles are needed to keep all processors reading


@dataclass(frozen=True, slots=True)
class ExpertTile:
    """Sizes of one specialisation: a program multiplies `tokens` rows of states by `rows` rows of weights, and takes
    `depth` columns of both at a time."""

    tokens: int
    rows: int
    depth: int
    num_warps: int
    num_stages: int

    def num_tiles(self, num_pairs: int, num_experts: int) -> int:
        """The most tiles of tokens that `num_pairs` pairs can make, however they fall on the experts.

        An expert with c > 0 pairs has 1 + (c - 1) // tokens tiles. The sum is largest where as many experts as can be
        have pairs.
        """
        taken = min(num_pairs, num_experts)
        return taken + (num_pairs - taken) // self.tokens


# In 16 bits they ask for 48 to 60 KB of shared memory, which every GPU from sm_80 on has; the last one for 72 KB on
# sm_90, where its instructions read a block later.
NARROW = ExpertTile(16, 32, 256, 4, 3)
TILES = (ExpertTile(16, 64, 128, 4, 4), ExpertTile(32, 64, 128, 4, 3), ExpertTile(64, 128, 64, 4, 3))


def expert_tile(num_tokens: int, chosen: int, num_experts: int, *, is_transposed: bool, is_float32: bool) -> ExpertTile:
    """The tile for `num_tokens` tokens with `chosen` of `num_experts` experts each.

    One tile should hold the pairs of most experts: up to twice the mean, and never more than there are tokens.
    Transposed weights lie together along their rows, so 64 rows are needed to read 128 bytes at once. Numbers in
    float32 are twice as long, so half as many columns; no matrix instruction takes them, so twice as many warps.
    """
    num_pairs = num_tokens * chosen
    usual = min(num_tokens, 2 * num_pairs // num_experts)
    tile = next((tile for tile in TILES if tile.tokens >= usual), TILES[-1])
    if num_pairs <= FEW_PAIRS and tile is TILES[0] and not is_transposed:
        tile = NARROW
    return replace(tile, depth=tile.depth // 2, num_warps=2 * tile.num_warps) if is_float32 else tile
