"""What a rider computes behind the kept paths of a captured step: a graph of its own, run once the verdict is known.

The paths' keys lie together by then, so that a row's tail is a chain behind its committed keys.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch
from transformers import PreTrainedModel

from stand.forward.rider import Guesses
from stand.gpu.device_cache import DeviceCache
from stand.gpu.kernel_attention import KERNEL_ATTENTION_NAME
from stand.gpu.packets.packet import Packet
from stand.gpu.packets.page_table import PageTable
from stand.gpu.packets.step_packet import StepPacket
from stand.gpu.packets.step_size import NUM_TOKENS, StepSize
from stand.gpu.runner import Body, Runner
from stand.gpu.step_body import StepOutput
from stand.row import Row


@dataclass(frozen=True, slots=True, eq=False)
class Chains:
    """`Trees` that do not branch."""

    token_ids: np.ndarray
    parents: np.ndarray
    depths: np.ndarray
    offsets: np.ndarray

    @classmethod
    @lru_cache(maxsize=64)
    def of(cls, num_rows: int, length: int) -> Chains:
        """One per row, read-only. Their tokens are not known: only their places matter."""
        depths = np.tile(np.arange(length, dtype=np.int32), num_rows)
        offsets = np.arange(num_rows + 1, dtype=np.int32) * np.int32(length)
        chains = cls(np.zeros_like(depths), depths - np.int32(1), depths, offsets)
        for array in (chains.token_ids, chains.parents, chains.depths, chains.offsets):
            array.flags.writeable = False  # every call gets the same arrays
        return chains


class TailBody:
    """The tails of one step size; `packet` is to be filled before each run."""

    def __init__(
        self, packet: StepPacket, cache: DeviceCache, output: StepOutput, guessed: Packet, swap: Callable[[], None]
    ):
        """swap: as in `StepBody`."""
        self.packet, self._swap = packet, swap
        self._cache, self._output, self._guessed = cache, output, guessed
        self._plan = output.plan(packet)

    @torch.inference_mode()
    def run(self) -> None:
        """Packet up, the rider's forward, best tokens down."""
        self._swap()
        self.packet.upload()
        step, rider = self.packet.device, self._output.rider
        self._cache.begin(step["slots"])
        ids, probs = rider.guess(
            self._output.watched[step["ends"]],
            step["rotary_positions"][None],
            attention=KERNEL_ATTENTION_NAME,
            cache=self._cache,
            plan=self._plan,
        )
        self._guessed.device["ids"][: len(ids)].copy_(ids)
        self._guessed.device["probs"][: len(probs)].copy_(probs)
        self._guessed.download()


class Tails:
    """Runs the tails of a captured step's rows, as many at once as a step holds tokens."""

    def __init__(
        self,
        model: PreTrainedModel,
        output: StepOutput,
        num_rows: int,
        runner: Runner,
        *,
        swap: Callable[[], None] = lambda: None,
    ):
        """output: has a rider. swap: as in `StepBody`."""
        self._length, width = output.rider.tail_length, output.rider.law_size
        self._device, self._output, self._num_rows, self._runner = model.device, output, num_rows, runner
        self._swap = swap
        per_token = (NUM_TOKENS[-1], width)
        self._guessed = Packet({"ids": (np.int32, per_token), "probs": (np.float32, per_token)}, model.device)
        self._recorded: dict[StepSize, tuple[TailBody, Body]] = {}

    def guesses(
        self,
        rows: Sequence[Row],
        lengths: np.ndarray,
        places: np.ndarray,
        ends: np.ndarray,
        *,
        table: PageTable,
        before_moving: Callable[[], None],
    ) -> Guesses:
        """Of `rows` with `lengths` [B] keys, kept paths among them, in `places` [B] of the table; the paths end at
        packed nodes `ends` [B] of the step. All int64; before_moving: as in `PageTable.extend`."""
        table.extend(rows, lengths, Chains.of(len(rows), self._length).offsets, places, before_moving=before_moving)
        most = NUM_TOKENS[-1] // self._length
        starts = range(0, len(rows), most)
        parts = [self._part(*(of[start : start + most] for of in (lengths, places, ends)), table) for start in starts]
        ids, probs = (np.concatenate(part) for part in zip(*parts, strict=True))
        return ids, probs

    def forget(self) -> None:
        """Drop what is recorded: the pool or its table get other addresses."""
        self._recorded.clear()

    def _part(self, lengths: np.ndarray, places: np.ndarray, ends: np.ndarray, table: PageTable) -> Guesses:
        body, program = self._recorded_for(len(ends), table)
        body.packet.fill(Chains.of(len(ends), self._length), lengths, places, table)
        body.packet.host["ends"][: len(ends)] = ends
        self._runner.run_alone(program)
        shape = (len(ends), self._length, -1)
        count = len(ends) * self._length
        return tuple(self._guessed.host[name][:count].reshape(shape).copy() for name in ("ids", "probs"))

    def _recorded_for(self, num_rows: int, table: PageTable) -> tuple[TailBody, Body]:
        tilings = self._output.tilings(self._length)
        size = StepSize.covering(num_rows * self._length, self._num_rows, tilings=tilings, room=table.room)
        if size not in self._recorded:
            ends = (np.int64, (-(-size.num_tokens // self._length),))
            packet = StepPacket(size, self._device, table=table, more={"ends": ends})
            packet.clear(table)
            body = TailBody(packet, table.cache, self._output, self._guessed, self._swap)
            self._recorded[size] = body, self._runner.record_alone(body.run)
        return self._recorded[size]
