"""A captured step that goes on as an eager one where it fails: out of memory, a capture refused, a kernel not launched.

What is committed lies in the cache untouched by the step that failed, so the rows lose nothing. Recurrent states alone
may have moved where a verdict does not come: they are computed anew from the rows' tokens.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial

import numpy as np
import torch
from transformers import PreTrainedModel

from stand.forward.cache.tree_cache import TreeCache
from stand.forward.model import prefill
from stand.forward.tree_attention import tree_attention
from stand.fusion.fusion import Fusion
from stand.gpu.captured_step import CapturedStep
from stand.gpu.packets.page_table import PageTable
from stand.gpu.packets.step_size import StepLimitError
from stand.gpu.pooled_step import PooledStep
from stand.laws.scored import Scored
from stand.row import LiveRows, Row
from stand.step import EagerStep, Step, StepStart
from stand.trees import DraftBatch
from stand.verifiers import Verdicts, VerifierNoise


class GuardedStep:
    """Implements `stand.step.Step`. `captured` is None once it has failed."""

    def __init__(
        self,
        captured: CapturedStep | None,
        new_eager: Callable[[PageTable], EagerStep],
        begun_anew: Callable[[Sequence[Row]], EagerStep],
        on_failure: Callable[[str], None],
    ):
        """new_eager: over the same keys and states; begun_anew: of rows that have their tokens alone. on_failure: told
        why eager steps take over, when they do."""
        self.captured = captured
        self._new_eager, self._begun_anew, self._on_failure = new_eager, begun_anew, on_failure
        self._step: Step | None = captured
        self.is_free = False  # the call is over, so that a further one may take the graphs
        self._rows: list[Row] = []  # by place
        self._attention: ExitStack | None = None  # while it is entered
        self._lesson_error: Exception | None = None
        self._ride_error: Exception | None = None  # of a step whose verdict stood

    @classmethod
    def start(
        cls,
        previous: GuardedStep | None,
        model: PreTrainedModel,
        start: StepStart,
        *,
        fusion: Fusion | None,
        on_failure: Callable[[str], None],
    ) -> GuardedStep:
        """A step without rows, as `Backend.new_step` says.

        `previous` with its graphs is taken where it serves this call, else dissolved, unless its call still goes on. A
        step that cannot be made begins as an eager one.
        """

        law, verifier, num_places = start.law, start.verifier, start.num_places  # `start` would keep a prompt's keys
        asked = start.asked
        beside = {name: asked[name] for name in ("feature_layers", "rider", "held")}

        def new_eager(table: PageTable) -> EagerStep:
            return PooledStep(model, table, law, verifier, **asked)

        def in_rooms(rows: Sequence[Row]) -> EagerStep:
            rooms = TreeCache(num_places, room=max(row.num_cached for row in rows) + 1)
            return EagerStep(model, rooms, law, verifier, **asked)

        def begun_anew(rows: Sequence[Row]) -> EagerStep:
            step = in_rooms(rows)
            for place, row in enumerate(rows):
                with tree_attention(model):
                    keys = TreeCache(1, room=row.num_cached)
                    prefill(model, keys, row.history[: row.num_cached], row=0)
                step.enter(row, place, keys)
            return step

        captured = None if previous is None or not previous.is_free else previous.captured
        try:
            if captured is None or not captured.serves(start):
                runner = None if captured is None else captured.dissolve()
                captured = CapturedStep(
                    model, law, verifier, num_rows=start.num_places, fusion=fusion, runner=runner, **beside
                )
            captured.begin(start)
        except Exception as error:
            step = cls(None, new_eager, begun_anew, on_failure)
            step._go_on(in_rooms(start.rows), error)
            return step
        return cls(captured, new_eager, begun_anew, on_failure)

    @property
    def held_bytes(self) -> int:
        """Of the cache that a further call takes over."""
        return self.captured.nbytes if self.captured is not None and self.is_free else 0

    @contextmanager
    def attention(self) -> Iterator[None]:
        try:
            with ExitStack() as self._attention:
                self._attention.enter_context(self._step.attention())
                yield
        finally:
            self._attention = None

    def forward(self, batch: DraftBatch, live: LiveRows, noise: VerifierNoise) -> None:
        """A ValueError is no failure of the device, the step refuses what it was given; nor is an error of a lesson or
        a logits processor. What only a captured step does not hold is decoded by eager ones."""
        self._end_ride(live.rows)
        if self.captured is not None:
            try:
                return self.captured.forward(batch, live, noise)
            except Exception as error:
                is_refusal = isinstance(error, ValueError) and not isinstance(error, StepLimitError)
                if is_refusal or error in (self._lesson_error, self.captured.law_error):
                    raise
                self._fall_back(live.rows, error)
        self._step.forward(batch, live, noise)

    def verify(self) -> Verdicts:
        return self._step.verify()

    def ride(self, accepted: Sequence[np.ndarray]) -> None:
        """Where it fails, the verdict stands, rows have no guesses, and all later steps are eager."""
        try:
            self._step.ride(accepted)
        except Exception as error:
            if self.captured is None:
                raise
            self._ride_error = error

    def keep(self, live: LiveRows, accepted: Sequence[np.ndarray]) -> None:
        self._step.keep(live, accepted)

    def leave(self, row: Row, place: int) -> None:
        self._step.leave(row, place)

    def enter(self, row: Row, place: int, keys: TreeCache) -> None:
        """Where it fails, those that entered before go on with eager steps, and so does this one."""
        if self.captured is not None:
            try:
                self.captured.enter(row, place, keys)
            except Exception as error:
                self._fall_back(self._rows, error)
        if self.captured is None:
            self._step.enter(row, place, keys)
        self._rows[place : place + 1] = [row]

    def move(self, row: Row, source: int, target: int) -> None:
        self._step.move(row, source, target)
        self._rows[target] = row
        del self._rows[source:]

    def top_entries(self, count: int) -> tuple[np.ndarray, np.ndarray]:
        return self._step.top_entries(count)

    def scored(self) -> Scored:
        return self._step.scored()

    def features(self) -> torch.Tensor:
        return self._step.features()

    def teach(self, lesson: Callable[[], None]) -> None:
        def watched() -> None:
            try:
                lesson()
            except Exception as error:
                self._lesson_error = error
                raise

        self._step.teach(watched)

    def finish(self) -> None:
        self._step.finish()
        self._end_ride([])

    def close(self) -> None:
        self._lesson_error = self._ride_error = None  # whose tracebacks hold the call and the graphs' memory
        self._step.close()
        self._rows, self.is_free = [], True

    def dissolve(self) -> None:
        """Give all memory back."""
        if self.captured is not None:
            self.captured.dissolve()

    def _end_ride(self, rows: Sequence[Row]) -> None:
        """Eager steps for these rows, where the last ride failed."""
        error, self._ride_error = self._ride_error, None
        if error is not None and self.captured is not None:
            self._fall_back(rows, error)
        del error  # its traceback holds the graphs' memory

    def _fall_back(self, rows: Sequence[Row], error: Exception) -> None:
        """From here on eager steps over the same memory. Raises `error` where the keys cannot be read."""
        captured, is_lost = self.captured, self.captured.has_lost_states
        try:
            if is_lost:
                captured.dissolve()
                begin = partial(self._begun_anew, rows)
            else:
                begin = partial(self._new_eager, captured.release(rows))
        except Exception as broken:  # after an illegal access the device answers nothing any more
            raise error from broken
        captured.finish()  # what the step before showed, which it still holds
        if self._attention is not None:
            self._attention.close()
        self._go_on(begin(), error)
        if self._attention is not None:
            self._attention.enter_context(self._step.attention())

    def _go_on(self, step: EagerStep, error: Exception) -> None:
        self.captured, self._step = None, step
        reason = f"a captured step ended in {type(error).__name__}: {error}"
        self._on_failure(reason)
        logging.getLogger("stand").warning("%s", reason, exc_info=error)
        warnings.warn(f"{reason}; decoding goes on with eager steps", stacklevel=4)
