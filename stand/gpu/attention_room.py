"""How the attention of packed tokens is cut into pieces of work, and the scratch that all sizes of a step share."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping, Sequence

import torch

from stand.forward.attention_shape import AttentionShape
from stand.gpu.kernel_attention import KernelPlan, Work
from stand.gpu.packets.step_size import NUM_TOKENS
from stand.gpu.packets.work_list import Splitting, Tiling
from stand.gpu.tuning.attention_tiles import MOST_AT_ONCE, limits_of, programs_at_once, tile_tokens


class AttentionRoom:
    """For layers of these kinds and up to NUM_TOKENS[-1] tokens of at most `num_rows` rows. No two runs at once."""

    def __init__(
        self, shapes: Iterable[AttentionShape], num_rows: int, *, dtype: torch.dtype, device: torch.device
    ) -> None:
        self._shapes = tuple(shapes)
        self._dtype, self._device, self._limits = dtype, device, limits_of(device)
        self._splittings = self._splittings_of(num_rows)
        self._tilings: dict[int, tuple[Tiling, ...]] = {}  # by the tokens of the longest row
        self._make_scratch(num_rows)

    def tilings(self, tokens_per_row: int) -> tuple[Tiling, ...]:
        """Of the work of each kind of layers where the longest row has `tokens_per_row` tokens."""
        if tokens_per_row not in self._tilings:
            self._tilings[tokens_per_row] = tuple(self._tiling(shape, tokens_per_row) for shape in self._shapes)
        return self._tilings[tokens_per_row]

    def splits_as(self, num_rows: int) -> bool:
        """Whether rows are split as in a call of so many."""
        return self._splittings_of(num_rows) == self._splittings

    def plan(self, step: Mapping[str, torch.Tensor], tilings: Sequence[Tiling]) -> KernelPlan:
        """What attention needs of a step with these arrays on the device; see `StepPacket`."""
        works = {
            shape: Work(
                step[f"items_{number}"],
                step[f"partial_starts_{number}"],
                tiling.tile_tokens,
                room if tiling.splitting.row_items > 1 else 0,
            )
            for number, (shape, tiling, room) in enumerate(zip(self._shapes, tilings, self._rooms, strict=True))
        }
        return KernelPlan(step, works, self.partials, self.log_sums)

    def _splittings_of(self, num_rows: int) -> dict[AttentionShape, dict[int, Splitting]]:
        """For each kind of layers, by the number of programs that a processor holds at once."""
        return {
            shape: {
                count: Splitting.filling(
                    self._device, key_heads=shape.key_heads, num_rows=num_rows, programs=count, window=shape.window
                )
                for count in range(1, MOST_AT_ONCE + 1)
            }
            for shape in self._shapes
        }

    def _tiling(self, shape: AttentionShape, tokens_per_row: int) -> Tiling:
        asked = {"limits": self._limits}
        tile = tile_tokens(tokens_per_row, shape.groups, shape.sizes, self._dtype, **asked)
        programs = programs_at_once(tile * shape.groups, shape.sizes, self._dtype, **asked)
        return Tiling(tile, self._splittings[shape][programs])

    def _make_scratch(self, num_rows: int) -> None:
        """Room for the partial results of the largest step, whatever the length of its rows."""
        most = NUM_TOKENS[-1]
        sizes = [self.tilings(1), self.tilings(most)]  # small tiles and large ones
        self._rooms = [max(_room(tiling, most, num_rows) for tiling in tilings) for tilings in zip(*sizes, strict=True)]
        counts = [room * shape.num_heads for room, shape in zip(self._rooms, self._shapes, strict=True)]
        numbers = [count * shape.sizes.mixed for count, shape in zip(counts, self._shapes, strict=True)]
        self.partials = torch.zeros(max(numbers), dtype=torch.float32, device=self._device)
        self.log_sums = torch.zeros(max(counts), dtype=torch.float32, device=self._device)


def _room(tiling: Tiling, num_tokens: int, num_rows: int) -> int:
    """For the partial results of a head."""
    return 0 if tiling.splitting.row_items == 1 else tiling.most_partials(num_tokens, num_rows, sys.maxsize)
