"""The middle of a decoding step: a forward over the drafts and the verdict on them; two ways to run it.

`EagerStep` runs on every device, operation by operation. `stand.gpu.captured_step` replays one graph.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Protocol

import numpy as np
from transformers import PreTrainedModel

from stand.attention import tree_attention
from stand.cache import TreeCache
from stand.plan import StepPlan
from stand.row import Row
from stand.sampling import TargetLaw
from stand.support import run_plan
from stand.trees import DraftBatch
from stand.verifiers import TargetRows, Verdicts, Verifier, VerifierNoise


class Step(Protocol):
    """Used in this order: prepare, launch, verdicts, keep, best_rows; drop when a row ends."""

    learns_late: bool  # best_rows is for the time when the next step is already running

    def attention(self) -> AbstractContextManager[None]:
        """Within it the model attends as this step needs."""

    def prepare(self, batch: DraftBatch, rows: Sequence[Row], noise: VerifierNoise) -> None:
        """Lay out the forward over the drafts of `rows`."""

    def launch(self) -> None:
        """Start it."""

    def verdicts(self) -> Verdicts:
        """What stays of each draft, and the token after it."""

    def keep(self, places: np.ndarray, lengths: np.ndarray, accepted: Sequence[np.ndarray]) -> None:
        """Move the keys of nodes accepted[i], of the row at places[i], behind its lengths[i] committed ones."""

    def drop(self, source: int, target: int, length: int) -> None:
        """The row at place `source`, with `length` committed keys, takes the place `target` of a row that ended."""

    def best_rows(self, count: int) -> tuple[np.ndarray, np.ndarray]:
        """The target's best tokens after every node of the last step: ids [M, count] int32, probabilities float32."""


class EagerStep:
    """A packed forward on an unmodified model and a verifier of `stand.verifiers`."""

    learns_late = False

    def __init__(
        self, model: PreTrainedModel, cache: TreeCache, law: TargetLaw, verifier: Verifier, *, num_best: int = 0
    ):
        """`num_best`: the largest count that `best_rows` will be asked for."""
        self.cache = cache
        self._model = model
        self._law = law
        self._verifier = verifier
        self._num_best = num_best

    def attention(self) -> AbstractContextManager[None]:
        return tree_attention(self._model)

    def prepare(self, batch: DraftBatch, rows: Sequence[Row], noise: VerifierNoise) -> None:
        lengths = np.array([row.num_cached for row in rows], dtype=np.int64)
        self._plan = StepPlan.for_drafts(batch, lengths, device=self._model.device)
        self._batch, self._rows, self._noise = batch, rows, noise

    def launch(self) -> None:
        self._logits = run_plan(self._model, self.cache, self._plan)

    def verdicts(self) -> Verdicts:
        scores = self._law.process(self._logits, self._batch, self._rows)
        self._laws = self._law.laws(scores, self._num_best)
        return self._verifier.verify(self._batch, TargetRows(self._laws.probabilities), self._noise)

    def keep(self, places: np.ndarray, lengths: np.ndarray, accepted: Sequence[np.ndarray]) -> None:
        moved = [index for index, path in enumerate(accepted) if len(path) and path[-1] != len(path)]
        if not moved:
            return
        counts = [len(accepted[index]) for index in moved]
        rows, starts = np.repeat(places[moved], counts), np.repeat(lengths[moved], counts)
        sources = np.concatenate([accepted[index] for index in moved])
        targets = np.concatenate([np.arange(1, count + 1) for count in counts])
        self.cache.compact(rows, starts + sources, starts + targets)

    def drop(self, source: int, target: int, length: int) -> None:
        self.cache.move(source, target, length)

    def best_rows(self, count: int) -> tuple[np.ndarray, np.ndarray]:
        """As in `Laws`."""
        return self._laws.best_ids[:, :count].cpu().numpy(), self._laws.best_probabilities[:, :count].cpu().numpy()
