"""One decoding step as one graph: packet up, forward, laws, verification, compaction, verdict down.

    host      draft | fill packet | replay ......  learn the step before  ...... | read verdict | commit | draft ...
    stream                        [ packet -> model -> laws -> rule -> compaction -> verdict ]
    side                                                                           [ best rows -> host ]

The host waits once per step, for the verdict. The best tokens of all nodes, which the lookup tree learns from, follow
on a side stream while the host drafts, and are learned one step late. Without a GPU the same bodies run operation by
operation (under Triton's interpreter), which is how they are tested.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext

import numpy as np
from transformers import PreTrainedModel

from stand.forward.tree_attention import tree_attention
from stand.forward.tree_cache import TreeCache
from stand.gpu.device_cache import DeviceCache
from stand.gpu.device_rule import DeviceRule, GreedyRule
from stand.gpu.fusion.fusion import Fusion
from stand.gpu.kernel_attention import KERNEL_ATTENTION_NAME
from stand.gpu.packing import kept_paths
from stand.gpu.replay import Program, replay_for
from stand.gpu.step_body import LEARNED_ROWS, StepBody, StepOutput
from stand.gpu.step_packet import StepPacket
from stand.gpu.step_size import MAX_ROW_NODES, StepSize
from stand.gpu.work_list import SPLIT_LENGTH, WorkList
from stand.row import LiveRows, Row
from stand.sampling import TargetLaw
from stand.trees import DraftBatch
from stand.verifiers import Verdicts, VerifierNoise

FIRST_ROOM = 8192  # new tokens per row that have room from the start; beyond, the cache doubles


class CapturedStep:
    """Implements `stand.step.Step` over a `DeviceCache`; a row's place there is its number within the call."""

    def __init__(
        self, model: PreTrainedModel, law: TargetLaw, rule: DeviceRule, *, num_rows: int, fusion: Fusion | None
    ):
        self._model = model
        self._fusion = fusion
        self._law = law
        self._rule = GreedyRule() if law.params.is_greedy else rule
        self._num_rows = num_rows
        self._cache: DeviceCache | None = None
        self._output = StepOutput(model, num_rows)
        self._replay = replay_for(model.device)
        self._recorded: dict[StepSize, tuple[StepBody, Program]] = {}
        self._unread: tuple[np.ndarray, np.ndarray] | None = None  # best rows that a recording would overwrite
        self._num_scored = 0
        self._verdicts: Verdicts | None = None
        self._lesson: Callable[[], None] | None = None  # of the step before, for the time while the device works

    @property
    def num_graphs(self) -> int:
        """Step sizes met since the cache last grew."""
        return len(self._recorded)

    def serves(self, law: TargetLaw, num_rows: int) -> bool:
        """Whether a further call with these settings can use what is recorded."""
        return law.params == self._law.params and num_rows <= self._num_rows

    @contextmanager
    def attention(self) -> Iterator[None]:
        fused = nullcontext() if self._fusion is None else self._fusion.active()
        with tree_attention(self._model, KERNEL_ATTENTION_NAME), fused:
            yield

    def load(self, prefilled: TreeCache, sources: Sequence[int], rows: Sequence[Row]) -> None:
        """Row rows[i] starts with the keys of row sources[i] of `prefilled`."""
        room = max(row.num_cached + min(row.num_remaining, FIRST_ROOM) for row in rows) + MAX_ROW_NODES
        if self._cache is None or self._cache.room < room:
            self.use(None)  # the old block goes before the new one comes
            self.use(DeviceCache.like(prefilled, num_rows=self._num_rows, room=room))
        self._cache.load(prefilled, sources, max(row.num_cached for row in rows))
        self._num_scored, self._lesson = 0, None

    def use(self, cache: DeviceCache | None) -> None:
        """Decode behind these keys; what is recorded knows another cache's addresses and goes."""
        self._replay.wait_for_best()  # nothing that is recorded may still run
        self._recorded.clear()
        self._cache = cache

    def forward(self, batch: DraftBatch, live: LiveRows, noise: VerifierNoise) -> None:
        """The whole step, up to the verdict; what the step before showed is learned while the device works."""
        self.prepare(batch, live.rows, noise)
        self.launch()
        self.finish()
        self._verdicts = self.verdicts()

    def verify(self) -> Verdicts:
        return self._verdicts

    def teach(self, lesson: Callable[[], None]) -> None:
        self._lesson = lesson

    def finish(self) -> None:
        lesson, self._lesson = self._lesson, None
        if lesson is not None:
            lesson()

    def prepare(self, batch: DraftBatch, rows: Sequence[Row], noise: VerifierNoise) -> None:
        lengths = np.array([row.num_cached for row in rows], dtype=np.int64)
        places = np.array([row.index for row in rows], dtype=np.int64)
        counts = batch.sizes
        self._make_room(int((lengths + counts).max()) + 1)
        tile = self._output.tile_tokens(int(counts.max()))
        work = WorkList.build(batch.offsets, lengths, places, tile_tokens=tile, split_length=SPLIT_LENGTH)
        size = StepSize.covering(batch.num_nodes, len(work.items), self._num_rows, tile_tokens=tile)
        body, self._program = self._recorded.get(size) or self._record(size)
        body.packet.fill(batch, lengths, places, noise, work=work, room=self._cache.room)
        self._batch = batch

    def launch(self) -> None:
        self._replay.step(self._program)

    def verdicts(self) -> Verdicts:
        self._replay.wait(self._program)
        self._unread, self._num_scored = None, self._batch.num_nodes
        stops, next_tokens = self._output.verdict(len(self._batch))
        return Verdicts(kept_paths(stops, self._batch.parents, self._batch.offsets), next_tokens)

    def keep(self, places: np.ndarray, lengths: np.ndarray, accepted: Sequence[np.ndarray]) -> None:
        """Nothing: the graph has moved the keys."""

    def drop(self, source: int, target: int, length: int) -> None:
        """Nothing: a row keeps its place in the cache, whatever its place in the batch."""

    def top_entries(self, count: int) -> tuple[np.ndarray, np.ndarray]:
        if count > LEARNED_ROWS:
            raise ValueError(
                f"a captured step returns the {LEARNED_ROWS} best tokens of a node, got a request for {count}; "
                "use a lookup with num_candidates=10 or wrap the model with backend='sdpa'"
            )
        ids, probabilities = self._read_best() if self._unread is None else self._unread
        return ids[:, :count], probabilities[:, :count]

    def _read_best(self) -> tuple[np.ndarray, np.ndarray]:
        self._replay.wait_for_best()
        return self._output.best(self._num_scored)

    def _record(self, size: StepSize) -> tuple[StepBody, Program]:
        self._unread = self._read_best()
        packet = StepPacket(size, self._rule, self._model.device)
        packet.clear(self._cache.room)
        body = StepBody(self._model, self._cache, self._law, self._rule, packet, self._output, SPLIT_LENGTH)
        self._recorded[size] = body, self._replay.record(body.run, body.find_best)
        return self._recorded[size]

    def _make_room(self, extent: int) -> None:
        """Double the cache when a row outgrows it."""
        if extent > self._cache.room:
            self.use(self._cache.grown(max(extent, 2 * self._cache.room)))
