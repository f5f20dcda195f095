"""What the host tells the device about one recorded run of a head."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from stand.drafters.heads.packed_run import PackedRun
from stand.gpu.attention_room import AttentionRoom
from stand.gpu.head_runs.rooms import KernelRooms, RoomsPlan
from stand.gpu.packets.packet import Field, Packet
from stand.gpu.packets.step_size import MAX_ROW_NODES, NUM_TOKENS, WORD_BITS, StepLimitError
from stand.gpu.packets.work_list import ITEM_FIELDS, Tiling
from stand.step_compiled import ListArrays

LENGTH, END, CACHE_ROW = (ITEM_FIELDS.index(name) for name in ("length", "k_end", "cache_row"))


@dataclass(frozen=True, slots=True)
class PartSize:
    """Capacities of one `PackedRun`. num_words: of 64 tokens each that a token may see; 0: none attends."""

    num_tokens: int
    num_words: int
    tilings: tuple[Tiling, ...]


@dataclass(frozen=True, slots=True)
class RunSize:
    """Capacities of a recorded run; a smaller one is padded to them."""

    num_rows: int
    parts: tuple[PartSize, ...]
    num_ends: int  # 0: there are none

    @classmethod
    def covering(
        cls, parts: Sequence[PackedRun], ends: np.ndarray | None, attention: AttentionRoom, num_rows: int
    ) -> RunSize:
        """For these and their like. Raises StepLimitError where a recorded run has no place for them."""
        sizes = tuple(_covering_part(part, attention, num_rows) for part in parts)
        return cls(num_rows, sizes, 0 if ends is None else _covering(len(ends)))


def _covering_part(run: PackedRun, attention: AttentionRoom, num_rows: int) -> PartSize:
    width, is_block = run.seen.shape[1], run.block_size > 0
    size = num_rows * run.block_size if is_block else _covering(run.num_tokens)
    if size > NUM_TOKENS[-1] or width > MAX_ROW_NODES:
        raise StepLimitError(
            f"a recorded run of a head takes at most {NUM_TOKENS[-1]} tokens, {MAX_ROW_NODES} of a row, got {size} "
            f"and {width}; lower the number of rows"
        )
    longest = run.block_size if is_block else int(np.diff(run.offsets).max())
    return PartSize(size, -(-width // WORD_BITS), attention.tilings(longest) if width else ())


def _covering(count: int) -> int:
    """The smallest of NUM_TOKENS, or `count` itself beyond them."""
    return next((size for size in NUM_TOKENS if size >= count), count)


class RunPacket:
    """Arrays of one size, filled for each run: per part p token_ids_p, positions_p, rows_p and slots_p [M] int64, and
    where tokens attend ancestors_p [M, W] int64 and the work lists of `StepPacket`; ends [E] int64."""

    def __init__(self, size: RunSize, rooms: KernelRooms, attention: AttentionRoom) -> None:
        self._size, self._rooms = size, rooms
        device = rooms.keys[0].device
        fields: dict[str, Field] = {"ends": (np.int64, (size.num_ends,))}
        for number, part in enumerate(size.parts):
            fields |= _fields(number, part, size.num_rows, rooms.room)
        self._packet = Packet(fields, device)
        own_pages = torch.arange(rooms.num_rows, dtype=torch.int32, device=device)[:, None]
        self._lists = [self._lists_of(number, part) for number, part in enumerate(size.parts)]
        self.plans = [self._plan(number, part, own_pages, attention) for number, part in enumerate(size.parts)]
        self.ends = self._packet.device["ends"] if size.num_ends else None

    def clear(self) -> None:
        """Padding alone: a run computes everything and changes nothing."""
        none = np.zeros(0, dtype=np.int64)
        for number, part in enumerate(self._size.parts):
            empty = PackedRun(none, np.zeros(1, dtype=np.int64), none, np.zeros((0, part.num_words), dtype=bool), none)
            self._fill(number, empty)
        self._packet.host["ends"][:] = 0

    def fill(self, parts: Sequence[PackedRun], ends: np.ndarray | None) -> None:
        for number, part in enumerate(parts):
            self._fill(number, part)
        if ends is not None:
            self._packet.host["ends"][: len(ends)] = ends
            self._packet.host["ends"][len(ends) :] = 0

    def upload(self) -> None:
        self._packet.upload()

    def _fill(self, number: int, run: PackedRun) -> None:
        host, count, counts = self._packet.host, run.num_tokens, np.diff(run.offsets)
        firsts = run.ends - counts
        rows = np.repeat(np.arange(run.num_rows), counts)
        places = np.arange(count) - np.repeat(run.offsets[:-1], counts)
        padded = {
            "token_ids": (run.token_ids, 0),
            "positions": (run.lengths[rows] + run.depths, 0),
            "rows": (rows, self._rooms.capacity),  # the room that is nobody's
            "slots": (firsts[rows] + places, 0),
        }
        for name, (values, padding) in padded.items():
            host[f"{name}_{number}"][:count] = values
            host[f"{name}_{number}"][count:] = padding
        if self._size.parts[number].num_words:
            self._fill_attention(number, run)

    def _fill_attention(self, number: int, run: PackedRun) -> None:
        """Whom a token sees, and who computes it. Of its own row a tile reads all tokens: in a block later ones count
        too, and of a tree those that earlier runs wrote."""
        words = self._packet.host[f"ancestors_{number}"]
        words[:] = 0
        bits = np.packbits(run.seen, axis=1, bitorder="little")
        words.view(np.uint8)[: run.num_tokens, : bits.shape[1]] = bits
        offsets, lengths, places = run.offsets.astype(np.int32), run.lengths.astype(np.int64), np.arange(run.num_rows)
        ends = run.ends
        for items, arrays in self._lists[number]:
            used = items[: arrays.list(offsets, lengths, places)]
            is_last = used[:, END] > used[:, LENGTH]
            used[is_last, END] = ends[used[is_last, CACHE_ROW]]

    def _lists_of(self, number: int, part: PartSize) -> list[tuple[np.ndarray, ListArrays]]:
        found = []
        for kind, tiling in enumerate(part.tilings):
            items, starts = (self._packet.host[f"{name}_{kind}_{number}"] for name in ("items", "partial_starts"))
            found.append((items, ListArrays(items, starts, tiling)))
        return found

    def _plan(self, number: int, part: PartSize, pages: torch.Tensor, attention: AttentionRoom) -> RoomsPlan:
        device = self._packet.device
        own = {name.removesuffix(f"_{number}"): array for name, array in device.items() if name.endswith(f"_{number}")}
        ids, positions, rows, slots = (own[name] for name in ("token_ids", "positions", "rows", "slots"))
        plan = attention.plan({**own, "pages": pages}, part.tilings) if part.num_words else None
        return RoomsPlan(ids[None], positions[None], rows, slots, plan)


def _fields(number: int, part: PartSize, num_rows: int, room: int) -> dict[str, Field]:
    per_token = (np.int64, (part.num_tokens,))
    fields = {f"{name}_{number}": per_token for name in ("token_ids", "positions", "rows", "slots")}
    if part.num_words:
        fields[f"ancestors_{number}"] = np.int64, (part.num_tokens, part.num_words)
    for kind, tiling in enumerate(part.tilings):
        items = tiling.most_items(part.num_tokens, num_rows, room)
        fields[f"items_{kind}_{number}"] = np.int32, (items, len(ITEM_FIELDS))
        fields[f"partial_starts_{kind}_{number}"] = np.int32, (part.num_tokens + 1,)
    return fields
