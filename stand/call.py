"""One call of `generate`: all its rows from prompt to end, step by step. One step is draft, forward, verify, commit,
learn."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from functools import partial

import numpy as np
from transformers import PreTrainedModel

from stand.backend import Backend
from stand.drafters.check import check_batch
from stand.drafters.drafter import Drafter, DraftRequest, Lesson
from stand.forward.features import prefill_features
from stand.forward.model import prefill, text_config
from stand.forward.tree_attention import exclusive, tree_attention
from stand.forward.tree_cache import TreeCache
from stand.row import LiveRows, Row
from stand.sampling import TargetLaw
from stand.stats import Stats
from stand.step import Step, StepStart
from stand.stop import StopRule
from stand.trees import DraftBatch, DraftTree
from stand.verifiers import Verdicts, Verifier, VerifierNoise

DEBUG = os.environ.get("STAND_DEBUG", "0") == "1"  # check every draft's invariants


class Call:
    """Rows of equal prompts share one prefill. `rows` lists all rows of the call in order, ended ones too."""

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        backend: Backend,
        drafter: Drafter | None,  # None: ordinary decoding
        verifier: Verifier,
        law: TargetLaw,
        stop: StopRule,
        rows: Sequence[Row],
        seed: int,
        own_seed: Callable[[], int],
        is_learning: bool,
        is_seeded: bool = True,
        on_commit: Callable[[Row, list[int]], None] | None = None,
    ):
        """seed: the user's, or drawn where `is_seeded` is False; own_seed: gives, when the call begins, that of
        its drafts, tests and residual draws (stand/seeds.py).
        on_commit: told of every row's new tokens as they are kept."""
        self.rows = list(rows)
        self.seed = seed
        self.stats = Stats()
        self._model = model
        self._backend = backend
        self._drafter = drafter
        self._verifier = verifier
        self._law = law
        self._stop = stop
        self._new_own_seed = own_seed
        self._own_seed = seed  # until the call begins
        self._is_learning = is_learning
        self._is_seeded = is_seeded
        self._wants_features = drafter is not None and drafter.requires_features
        self._on_commit = on_commit
        self._live = list(rows)  # the row in place i of the batch holds place i of an eager step's cache
        self._step: Step | None = None  # from the end of the prompts on

    def run(self) -> None:
        """Decode every row to its end."""
        with exclusive(self._model), self.stats.timed_wall():
            self._begin()
            with self._step.attention():
                while self._live:
                    self._advance()
            self._step.finish()

    def steps(self) -> Iterator[None]:
        """The same step by step; between two steps the model is free for other work."""
        with self.stats.timed_wall():
            self._begin()
        while self._live:
            with self.stats.timed_wall(), self._step.attention():
                self._advance()
            yield
        self._step.finish()

    def _begin(self) -> None:
        """Prefill every prompt once: all but its last token, which becomes the pending one.

        The own seed is asked for here and not when the call is made: calls that ran in between may have taught.
        """
        self._own_seed = self._new_own_seed()
        prompts: dict[bytes, int] = {}
        sources = [prompts.setdefault(row.history.tobytes(), len(prompts)) for row in self.rows]
        firsts = [self.rows[sources.index(place)] for place in range(len(prompts))]
        self.stats.num_prompt_tokens = sum(len(row.history) for row in firsts)
        with self.stats.timed_prefill(), tree_attention(self._model):
            cache = TreeCache(num_rows=len(firsts), room=max(len(row.history) for row in firsts) + 1)
            for place, row in enumerate(firsts):
                if self._wants_features:
                    features = prefill_features(self._model, cache, row.history[:-1], row=place)
                    self._drafter.follow_prompt(row.history, features)
                else:
                    prefill(self._model, cache, row.history[:-1], row=place)
                if self._is_learning:
                    self._drafter.learn_prompt(row.history, problem=row.problem)
            num_top = self._drafter.num_candidates if self._is_learning else 0
            start = StepStart(
                cache, sources, self.rows, self._law, self._verifier, num_top, wants_features=self._wants_features
            )
            self._step = self._backend.new_step(start)

    def _advance(self) -> None:
        """One decoding step of all live rows."""
        live, timed = LiveRows.of(self._live), self.stats.timed
        with timed("draft"):
            request, batch = self._draft(live)
        before = self.stats.scoring_seconds
        with timed("forward"):
            self._step.forward(batch, live, self._noise(live))
        with timed("verify"):
            verdicts = self._step.verify()
        if self._drafter is not None:
            self._drafter.record_time(request, batch.num_nodes, self.stats.scoring_seconds - before)
        with timed("commit"):
            self._commit(live, batch, verdicts)
        self._step.teach(partial(self._learn, request, batch, verdicts))

    def _draft(self, live: LiveRows) -> tuple[DraftRequest, DraftBatch]:
        request = DraftRequest(
            histories=live.histories,
            seed=self._own_seed,
            target_seed=self.seed,
            rows=live.indices,
            steps=live.steps,
            problems=live.problems,
            max_depths=live.max_depths,
            is_greedy=self._law.params.is_greedy,
            is_seeded=self._is_seeded,
        )
        if self._drafter is None:
            return request, DraftBatch.concatenate([DraftTree.pending(int(tokens[-1])) for tokens in live.histories])
        batch = self._drafter.draft(request)
        check_batch(batch, request, vocabulary_size=text_config(self._model).vocab_size)
        if DEBUG:
            batch.check()
        return request, batch

    def _noise(self, live: LiveRows) -> VerifierNoise:
        return VerifierNoise(
            seed=self._own_seed,
            rows=live.indices,
            steps=live.steps,
            positions=live.lengths + 1,
            target_seed=self.seed,
        )

    def _commit(self, live: LiveRows, batch: DraftBatch, verdicts: Verdicts) -> None:
        """Append what was kept to every row, up to its end, move its keys together, and let ended rows go."""
        kept_nodes: list[np.ndarray] = []
        for place, (row, accepted) in enumerate(zip(live.rows, verdicts.accepted, strict=True)):
            nodes = batch.offsets[place] + accepted
            tokens = [*batch.token_ids[nodes].tolist(), int(verdicts.next_tokens[place])]
            emitted, row.finish_reason = self._stop.cut(row, tokens)
            row.extend(tokens[:emitted])
            kept_nodes.append(nodes[:emitted])
            self.stats.num_tokens += emitted
            if self._on_commit is not None:
                self._on_commit(row, tokens[:emitted])
        going = np.flatnonzero([row.finish_reason is None for row in live.rows])
        self._step.keep(going, live.lengths[going], [verdicts.accepted[place] for place in going])
        self.stats.count_step(batch, np.concatenate(kept_nodes))
        self._drop_finished()

    def _drop_finished(self) -> None:
        """Fill the places of ended rows from the end, so that live rows stay consecutive in the cache."""
        for place in range(len(self._live) - 1, -1, -1):
            if self._live[place].finish_reason is None:
                continue
            last = self._live.pop()
            if place < len(self._live):
                self._live[place] = last
                self._step.drop(len(self._live), place, last.num_cached)

    def _learn(self, request: DraftRequest, batch: DraftBatch, verdicts: Verdicts) -> None:
        """Teach the drafter what became of its draft, and the target's best tokens at every scored node."""
        if not (self._is_learning or self._wants_features):
            return
        with self.stats.timed("learn"):
            top_ids, top_probs = self._step.top_entries(self._drafter.num_candidates if self._is_learning else 0)
            features = self._step.features() if self._wants_features else None
            lesson = Lesson(
                request, batch, verdicts.accepted, verdicts.next_tokens, top_ids, top_probs, features=features
            )
            if self._wants_features:
                self._drafter.follow(lesson)
            if self._is_learning:
                self._drafter.learn(lesson)
