"""An eager step over the pages of a pool: what goes on where a captured step fails, or cannot serve a call.

Rows of a pool lie in pieces, which PyTorch's attention cannot read: each layer's keys are gathered into rooms, as long
as the longest row, for as long as the layer runs.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from transformers import PreTrainedModel
from transformers.cache_utils import Cache

from stand.forward.cache.tree_cache import TreeCache
from stand.forward.packed_plan import StepPlan
from stand.forward.recurrent.tree_scan import Scan, TreeScan
from stand.gpu.device_cache import DeviceCache
from stand.gpu.packets.page_table import PageTable, PoolSize
from stand.gpu.packets.step_size import NUM_TOKENS
from stand.laws.sampling import TargetLaw
from stand.row import LiveRows, Row
from stand.scheduling.free_memory import lower_limit
from stand.step import EagerStep, StepStart
from stand.trees import DraftBatch
from stand.verifiers import Verifier, VerifierNoise


class GatheredKeys(Cache):
    """What a forward and `compact` need of a cache, over the pages of a table."""

    def __init__(self, table: PageTable):
        super().__init__(layers=[])
        self._table = table
        self._plan: StepPlan | None = None

    def begin(self, plan: StepPlan) -> None:
        """The next forward writes the plan's tokens, whose pages the table has."""
        table, size = self._table, self._table.page_size
        rows = slice(plan.first_row, plan.first_row + plan.num_rows)
        pages = torch.from_numpy(table.numbers[rows, : -(-plan.kv_length // size)].astype(np.int64)).to(plan.device)
        numbers = pages[plan.cache_rows - plan.first_row, plan.cache_slots // size]
        table.cache.begin(numbers * size + plan.cache_slots % size, TreeScan(plan, table.cache.recurrent))
        self._plan, self._pages = plan, pages

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: object, **kwargs: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write [1, Hkv, M, D] and return the plan's rows [A, Hkv, L, D], copies (called by the model's layers)."""
        keys, values = self._table.cache.update(key_states, value_states, layer_idx)
        return self._gathered(keys), self._gathered(values)

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Longest row's extent in the coming step, new tokens included (0 before the first)."""
        return self._plan.kv_length if self._plan is not None else 0

    def scan(self) -> Scan:
        """For layers with a recurrent state, in a forward."""
        return self._table.cache.scan()

    def keep_states(self, ends: Sequence[int]) -> None:
        """Recurrent states go on to token ends[a], row-local, of each row a of the last forward over drafts."""
        if self._table.cache.recurrent.layers:
            self._table.cache.recurrent.keep(self._plan, ends)

    def compact(self, rows: np.ndarray, sources: np.ndarray, targets: np.ndarray) -> None:
        """Copy slot sources[i] of row rows[i] to slot targets[i], in every layer; reads come before writes."""
        cache, size = self._table.cache, self._table.page_size
        read, write = (
            (torch.from_numpy(self._table.numbers[rows, slots // size].astype(np.int64)).to(cache.device),
             torch.from_numpy(slots % size).to(cache.device))
            for slots in (sources, targets)
        )  # fmt: skip
        for block in cache.blocks:
            block[:, write[0], :, write[1]] = block[:, read[0], :, read[1]]

    def _gathered(self, states: torch.Tensor) -> torch.Tensor:
        """[P, Hkv, S, D] -> [A, Hkv, L, D]"""
        return states[self._pages].transpose(1, 2).flatten(2, 3)[:, :, : self._plan.kv_length]


class PooledStep(EagerStep):
    """An `EagerStep` whose row i has the pages of place i of a table."""

    def __init__(
        self,
        model: PreTrainedModel,
        table: PageTable,
        law: TargetLaw,
        verifier: Verifier,
        **asked: object,
    ):
        """asked: keywords of an `EagerStep`."""
        super().__init__(model, GatheredKeys(table), law, verifier, **asked)
        self._table = table

    @classmethod
    def starting(cls, model: PreTrainedModel, start: StepStart) -> PooledStep:
        """With a pool of its own, for as long as the call lasts."""
        beside = {"num_tokens": NUM_TOKENS[-1], "num_places": start.num_places}
        lower_limit(start.pages, start.rows, model, **beside)
        size = PoolSize.of(start.rows, start.num_places, start.pages)
        asked = {"num_pages": size.num_pages, "page_size": size.page_size, "num_places": start.num_places}
        cache = DeviceCache.like(start.keys, model=model, **asked)
        table = PageTable(cache, num_places=start.num_places, width=size.width, pages=start.pages)
        return cls(model, table, start.law, start.verifier, **start.asked)

    def forward(self, batch: DraftBatch, live: LiveRows, noise: VerifierNoise) -> None:
        offsets = batch.offsets
        if self._rider is not None:
            slots = np.cumsum(batch.sizes + self._rider.num_slots(batch.sizes))
            offsets = np.concatenate([[0], slots]).astype(np.int32)
        self._table.extend(live.rows, live.lengths, offsets, np.arange(len(live.rows)))
        super().forward(batch, live, noise)

    def leave(self, row: Row, place: int) -> None:
        self._table.leave(row)

    def enter(self, row: Row, place: int, keys: TreeCache) -> None:
        self._table.enter(place, row, keys)

    def move(self, row: Row, source: int, target: int) -> None:
        self._table.move(source, target)
