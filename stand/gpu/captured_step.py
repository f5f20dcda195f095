"""One decoding step as one graph, or two: packet up, forward, laws, verification, compaction, verdict down.

    host      draft | fill packet | replay ......  learn the step before  ...... | read verdict | commit | draft ...
    stream                        [ packet -> model -> laws -> rule -> compaction -> verdict ]
    side                                                                           [ best tokens -> host ]

Where a call has logits processors the graph ends before the laws. They run as in eager steps; a second graph goes on.
A rider's tails (`stand.gpu.tails`) run between the verdict and the commit, and the host waits for them too.
The host waits once per step, for the verdict. The best tokens of all nodes, which the lookup learns from, follow
on a side stream while the host drafts, and are learned one step late; where a drafter requires features, before the
next draft. Without a GPU the same bodies run operation by operation (under Triton's interpreter), which is how they are
tested.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial

import numpy as np
import torch
from transformers import PreTrainedModel

from stand.forward.cache.tree_cache import TreeCache
from stand.forward.features import FeatureLayers
from stand.forward.model_state import ModelState
from stand.forward.recurrent.layers import recurrent_layers
from stand.forward.recurrent.states import RecurrentStates
from stand.forward.rider import Guesses, Rider, path_ends
from stand.fusion.fusion import Fusion
from stand.gpu.device_cache import DeviceCache
from stand.gpu.device_rule import GreedyRule, rule_like
from stand.gpu.packets.page_table import PageTable, PoolSize
from stand.gpu.packets.step_packet import StepPacket
from stand.gpu.packets.step_size import MAX_ROW_NODES, NUM_TOKENS, StepLimitError, StepSize, sizes_for
from stand.gpu.runner import Program, Runner, runner_for
from stand.gpu.step_body import LEARNED_ROWS, StepBody, StepOutput, needs_logits
from stand.gpu.swapped_forwards import SwappedForwards
from stand.gpu.tails import Tails
from stand.laws.sampling import TargetLaw
from stand.laws.scored import Scored
from stand.row import LiveRows, Row
from stand.scheduling.free_memory import lower_limit
from stand.scheduling.page_allocator import PageAllocator
from stand.step import StepStart
from stand.step_compiled import kept_paths
from stand.trees import DraftBatch
from stand.verifiers import Verdicts, Verifier, VerifierNoise

LOGGER = logging.getLogger("stand")


class CapturedStep:
    """A `stand.step.Step` over a `DeviceCache`. A row keeps its place there, whatever its place in the batch: that is
    its row in the page table."""

    def __init__(
        self,
        model: PreTrainedModel,
        law: TargetLaw,
        verifier: Verifier,
        *,
        num_rows: int,
        fusion: Fusion | None,
        feature_layers: FeatureLayers | None = None,
        rider: Rider | None = None,
        held: frozenset[str] = frozenset(),
        runner: Runner | None = None,
    ):
        """verifier: has a device rule; runner: of a step that was closed, so that an engine has one capture stream,
        default: a new one."""
        self._model = model
        self._state: ModelState | None = None  # of the model when the call began
        self._law = TargetLaw(law.params)  # what is recorded
        self._processing: TargetLaw | None = law  # a call's own, between the two parts of a step
        self._is_split = law.has_processors
        self._verifier = verifier
        self._rule = GreedyRule() if law.params.is_greedy else rule_like(verifier)
        self._num_rows = num_rows
        self._sizes = sizes_for(model)
        self._table: PageTable | None = None
        self._held: list[Row | None] = [None] * num_rows  # by place in the cache: whose keys lie there
        self._place_of: dict[int, int] = {}  # by row number: its place in the cache
        self._has_states = bool(recurrent_layers(model))  # which take memory by places, as the call has counted them
        asked = {"feature_layers": feature_layers, "rider": rider, "has_processors": self._is_split}
        self._output = StepOutput(model, num_rows, keeps_logits=needs_logits(held, law), **asked)
        self.runner = runner_for(model.device) if runner is None else runner
        self._forwards = SwappedForwards(model, fusion)
        swap = self._forwards.swap
        self._tails = None if rider is None else Tails(model, self._output, num_rows, self.runner, swap=swap)
        self._recorded: dict[tuple[StepSize, bool], tuple[StepBody, Program]] = {}  # by size, and whether it is split
        self._by_nodes: dict[tuple[int, int, int, bool], tuple[StepBody, Program]] = {}  # the same by what was met
        self.body: StepBody | None = None  # of the last step prepared
        self._program: Program | None = None
        self._unread: tuple[np.ndarray, np.ndarray] | None = None  # best tokens that a recording would overwrite
        self._num_scored = 0
        self._batch: DraftBatch | None = None  # of the last step prepared
        self._live: LiveRows | None = None  # whose drafts they are
        self._verdicts: Verdicts | None = None
        self._is_undecided = False  # a step was launched whose verdict has not come
        self.law_error: Exception | None = None  # that a processor has raised
        self._lesson: Callable[[], None] | None = None  # of the step before, for the time while the device works

    @property
    def nbytes(self) -> int:
        """Of keys, values and recurrent states."""
        return 0 if self._table is None else self._table.cache.nbytes

    @property
    def has_lost_states(self) -> bool:
        """Whether recurrent states may have gone on along a path that nobody has been told of."""
        return self._is_undecided and bool(self._table.cache.recurrent.layers)

    def serves(self, start: StepStart) -> bool:
        """Whether a further call that begins so can use what is recorded."""
        if self._output is None:  # it was dissolved, and a call that was interrupted has put nothing in its place
            return False
        return (
            self._output.suits(self._model)
            and self._output.holds(start)
            and start.law.params == self._law.params
            and start.verifier is self._verifier
            and (start.num_places == self._num_rows if self._has_states else start.num_places <= self._num_rows)
        )

    @contextmanager
    def attention(self) -> Iterator[None]:
        if self._state is not None and not self._state.holds_weights():  # moved while a stream waited
            self._follow_model()
        with self._forwards.block():
            yield

    def begin(self, start: StepStart) -> None:
        """A call begins, whose first rows are still to enter; its law is the one that this step was made with, but for
        the call's own processors.

        The pool of the call before stays where it is large enough and no larger than the call allows, and what is
        recorded stays where the model is as it was."""
        self._follow_model()
        keys, rows, pages = start.keys, start.rows, start.pages
        self._processing, self._is_split = start.law, start.law.has_processors
        beside = {"num_tokens": NUM_TOKENS[-1], "num_places": self._num_rows}
        lower_limit(pages, rows, self._model, **beside, held=self.nbytes)
        size = PoolSize.of(rows, self._num_rows, pages)
        known = 0 if self._table is None else self._table.numbers.shape[1]
        if not self._has_pool(size, keys):
            self._drop()  # the old pool goes before the new one comes
            cache = DeviceCache.like(
                keys, model=self._model, num_pages=size.num_pages, page_size=size.page_size, num_places=self._num_rows
            )
        else:
            cache = self._table.cache
        if size.width > known:
            self._forget()
        self._follow(cache, max(size.width, known), pages)
        self._unread, self._num_scored, self._lesson, self._is_undecided = None, 0, None, False

    def _has_pool(self, size: PoolSize, keys: TreeCache) -> bool:
        cache = None if self._table is None else self._table.cache
        return cache is not None and size.is_met_by(cache) and cache.suits(self._model, keys)

    def enter(self, row: Row, place: int, keys: TreeCache, *, source: int = 0) -> None:
        """As in `Step`; source: the row of `keys`."""
        free = self._held.index(None)
        self._table.enter(free, row, keys, source=source, before_moving=self._forget)
        self._held[free], self._place_of[row.index] = row, free

    def leave(self, row: Row, place: int) -> None:
        """Its place in the cache is free."""
        self._held[self._place_of.pop(row.index)] = None
        self._table.leave(row)

    def use(self, cache: DeviceCache, rows: Sequence[Row]) -> None:
        """Decode after these keys: the pages of `rows` are the first ones of the pool, one row's after another's."""
        self._drop()
        self._follow(cache, cache.num_pages // self._num_rows, None)
        for place, row in enumerate(rows):
            self._table.enter(place, row, None)
            self._held[place], self._place_of[row.index] = row, place

    def forward(self, batch: DraftBatch, live: LiveRows, noise: VerifierNoise) -> None:
        """The whole step, up to the verdict; what the step before showed is learned while the device works."""
        self._prepare(batch, live, noise)
        self.launch()
        self.finish()
        self._verdicts = self.verdicts()

    def verify(self) -> Verdicts:
        return self._verdicts

    def ride(self, accepted: Sequence[np.ndarray]) -> None:
        guesses = partial(self.guesses, self._live, accepted)
        self._output.rider.kept(self._batch, self._live, accepted, guesses)

    def guesses(self, live: LiveRows, accepted: Sequence[np.ndarray]) -> Guesses:
        """The rider's, behind the paths that the last step kept."""
        lengths = live.lengths + 1 + np.array([len(path) for path in accepted], dtype=np.int64)
        places, ends = self._places(live.rows), path_ends(self._batch, accepted)
        return self._tails.guesses(
            live.rows, lengths, places, ends, table=self._table, before_moving=self._forget
        )  # fmt: skip

    def teach(self, lesson: Callable[[], None]) -> None:
        """Put off, but where the next draft follows from this step's features."""
        if self._output.features is None:
            self._lesson = lesson
        else:
            lesson()

    def finish(self) -> None:
        lesson, self._lesson = self._lesson, None
        if lesson is not None:
            lesson()

    def close(self) -> None:
        """The rows are gone; the cache and what is recorded stay, for a further call."""
        self._lesson = self._processing = self._live = self.law_error = None
        self.runner.wait_for_step()  # one that was interrupted reads its packet yet, which may be filled or go
        self.runner.wait_for_best()  # else they might come after the memory has gone to somebody else

    def dissolve(self) -> Runner:
        """Give all memory back; the runner, for the step that follows."""
        self._drop()
        self._output = self._tails = None
        return self.runner

    def release(self, rows: Sequence[Row]) -> PageTable:
        """The pages of these rows, in their order, and places for as many rows as before, for eager steps. The step
        itself is of no use after it."""
        self._forget()
        table, self._table = self._table, None
        places = [self._place_of.get(row.index) for row in rows]  # None: another row has entered there
        others = (place for place in range(self._num_rows) if place not in set(places))
        order = [next(others) if place is None else place for place in places]
        table.reorder([*order, *others])
        return table

    def prepare(self, batch: DraftBatch, rows: Sequence[Row], noise: VerifierNoise) -> None:
        """Fill the packet of this step, recording it first where its size is new."""
        self._prepare(batch, LiveRows.of(rows), noise)

    def _places(self, rows: Sequence[Row]) -> np.ndarray:
        """[B] int64: where their keys lie in the cache."""
        return np.array([self._place_of[row.index] for row in rows], dtype=np.int64)

    def _prepare(self, batch: DraftBatch, live: LiveRows, noise: VerifierNoise) -> None:
        lengths, places = live.lengths, self._places(live.rows)
        self._verifier.check_draft(batch)
        most_nodes = max(batch.sizes.tolist())  # of a few numbers, faster than numpy
        if most_nodes > MAX_ROW_NODES:
            raise StepLimitError(
                f"a captured step takes at most {MAX_ROW_NODES} nodes of a row, got {most_nodes}; lower the budget or "
                "wrap the model with backend='sdpa'"
            )
        self._table.extend(live.rows, lengths, batch.offsets, places, before_moving=self._forget)
        met = (batch.num_nodes, most_nodes, batch.support_ids.shape[1], self._is_split)
        self.body, self._program = self._by_nodes.get(met) or self._recorded_for(met)
        self.body.packet.fill(batch, lengths, places, self._table, rotary_offsets=live.rotary_offsets)
        self._rule.fill(self.body.packet.host, batch, noise)
        self._batch, self._live = batch, live

    def _recorded_for(self, met: tuple[int, int, int, bool]) -> tuple[StepBody, Program]:
        """What serves drafts as in `_size`."""
        size = self._size(*met[:3])
        found = self._by_nodes[met] = self._recorded.get((size, self._is_split)) or self._record(size)
        return found

    def _size(self, num_nodes: int, most_nodes: int, num_candidates: int) -> StepSize:
        """For `num_nodes` nodes of all rows together, `most_nodes` of the longest, and laws over so many candidates."""
        return StepSize.covering(
            num_nodes,
            self._num_rows,
            tilings=self._output.tilings(most_nodes),
            room=self._table.room,
            support_size=self._rule.support_size(num_candidates),
            sizes=self._sizes,
        )

    def launch(self) -> None:
        """The prepared step, up to the processors where the law has some."""
        self._is_undecided = True
        (self.runner.forward if self._is_split else self.runner.step)(self._program)

    def verdicts(self) -> Verdicts:
        """Of the launched step; before them its processors run."""
        if self._is_split:
            self._process()
            self.runner.step(self._program)
        self.runner.wait(self._program)
        self._unread, self._num_scored = None, self._batch.num_nodes
        stops, next_tokens = self._output.verdict(len(self._batch))
        self._is_undecided = False
        return Verdicts(kept_paths(stops, self._batch.parents, self._batch.offsets), next_tokens)

    def _process(self) -> None:
        """What processors make of the scores. Their errors are no failures of the step, but for a lack of memory."""
        scores = self._output.scores[: self._batch.num_nodes]
        try:
            scores.copy_(self._processing.process(scores, self._batch, self._live.rows))
        except torch.OutOfMemoryError:
            raise
        except Exception as error:
            self.law_error = error
            raise

    def keep(self, live: LiveRows, accepted: Sequence[np.ndarray]) -> None:
        """Nothing: the graph has moved the keys."""

    def move(self, row: Row, source: int, target: int) -> None:
        """Nothing: a row keeps its place in the cache."""

    def top_entries(self, count: int) -> tuple[np.ndarray, np.ndarray]:
        if count > LEARNED_ROWS:
            raise ValueError(
                f"a captured step returns the {LEARNED_ROWS} best tokens of a node, got a request for {count}; "
                "use a lookup with num_candidates=10 or wrap the model with backend='sdpa'"
            )
        self._keep_best()
        ids, probabilities = self._unread
        return ids[:, :count], probabilities[:, :count]

    def scored(self) -> Scored:
        return self._output.scored(self._processing)

    def features(self) -> torch.Tensor:
        """As in `Step`, a copy."""
        return self._output.features[: self._num_scored].clone()

    def direct(self, num_nodes: int) -> tuple[torch.Tensor, torch.Tensor]:
        """What a replay of the prepared step is checked against: by the body itself, logits [num_nodes, V] and
        `written`. The keys of rejected nodes are where they were written until the replay."""
        self.body.packet.upload()
        return self.body.forward()[:num_nodes], self.written(num_nodes)

    def written(self, num_nodes: int) -> torch.Tensor:
        """[num_nodes, all numbers of a token's keys and values] that lie now where the prepared step's nodes were
        written."""
        slots = self.body.packet.device["slots"][:num_nodes]
        cache = self._table.cache
        pages, places = slots // cache.page_size, slots % cache.page_size
        return torch.cat([block[:, pages, :, places].flatten(1) for block in cache.blocks], dim=1)

    def states(self) -> RecurrentStates:
        """The rows' recurrent states, in the order in which rows entered."""
        return self._table.cache.recurrent

    def laws(self, num_nodes: int) -> torch.Tensor:
        """[num_nodes, V] float32 of the last step, a copy."""
        return self._output.laws[:num_nodes].clone()

    def _keep_best(self) -> None:
        """Those of the last verdicts, before something writes over them."""
        self.runner.wait_for_best()
        if self._unread is None:
            self._unread = self._output.best(self._num_scored)

    def _record(self, size: StepSize) -> tuple[StepBody, Program]:
        self._keep_best()
        packet = StepPacket(size, self._model.device, table=self._table, more=self._rule.fields(size))
        packet.clear(self._table)
        body = StepBody(
            self._model, self._table.cache, self._law, self._rule, packet, self._output, swap=self._forwards.swap
        )
        parts = (body.decide, body.find_best, body.score) if self._is_split else (body.run, body.find_best)
        found = self._recorded[size, self._is_split] = body, self.runner.record(*parts)
        return found

    def _follow_model(self) -> None:
        """Forget what was recorded of a model that has changed since: a graph would not see it."""
        state = ModelState(self._model)
        change = None if self._state is None else state.change_since(self._state)
        if change is not None:
            LOGGER.info("steps are recorded anew, because the model is not as it was: %s", change)
            self._forget()
        self._state = state  # last: who is interrupted before sees the change again

    def _follow(self, cache: DeviceCache, width: int, pages: PageAllocator | None) -> None:
        """A table without rows, for this pool."""
        self._table = PageTable(cache, num_places=self._num_rows, width=width, pages=pages)
        self._held, self._place_of = [None] * self._num_rows, {}

    def _drop(self) -> None:
        """Give the pool back, and what knows its addresses."""
        self._forget()
        self._table = None

    def _forget(self) -> None:
        """Drop what is recorded, and with it the memory of the graphs."""
        if self._recorded:
            self.runner.wait_for_step()  # one that was interrupted may run without a verdict
            self._keep_best()  # which waits, so that nothing that is recorded still runs
        self._recorded.clear()
        self._by_nodes.clear()
        self._program = self.body = None
        if self._tails is not None:
            self._tails.forget()
        self.runner.forget()
