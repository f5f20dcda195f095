"""One call: all its rows from prompt to end, step by step. One step is draft, forward, verify, commit, learn."""

from __future__ import annotations

import os
from collections.abc import Callable, Generator, Hashable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial

from transformers import PreTrainedModel

from stand.backend import Backend
from stand.drafters.check import check_batch, check_within
from stand.drafters.drafter import Drafter, DraftRequest, Lesson
from stand.forward.long_factors import switching_length
from stand.forward.model import text_config
from stand.forward.tree_attention import exclusive, is_awaited
from stand.laws.grammars.masks import GrammarMasks
from stand.laws.kept_scores import KeptScores
from stand.laws.logprobs import LogprobNotes, StepLogprobs
from stand.laws.sampling import TargetLaw
from stand.row import LiveRows, Row
from stand.scheduling.admission import Admission, beginning
from stand.scheduling.arrivals import Arrivals
from stand.scheduling.kept_prompts import KeptPrompts
from stand.scheduling.prompt_keys import PromptKeys
from stand.scheduling.request import Job, same_on_all
from stand.scheduling.scheduler import Change, Entry, Scheduler
from stand.seeds import seed_with_prompt
from stand.stats import Stats
from stand.step import Step, StepStart
from stand.trees import DraftBatch, TokenMasks
from stand.verifiers import Verdicts, Verifier, VerifierNoise

End = tuple[int, str | None]  # tokens that a row gains, and why it ends with them, if it does
DEBUG = os.environ.get("STAND_DEBUG", "0") == "1"  # check every draft's invariants


class Call:
    """Decodes the rows of its jobs. Rows enter as the scheduler says; those that ended are in `scheduler.ended`."""

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        backend: Backend,
        drafter: Drafter | None,  # None: ordinary decoding
        verifier: Verifier,
        read_law: Callable[[], TargetLaw],
        jobs: Iterable[Job],
        admission: Admission,
        seed: int,
        new_own_seed: Callable[[], int],
        is_learning: bool,
        is_seeded: bool = True,
        most_rows: int = 0,
        on_commit: Callable[[Row, list[int]], None] | None = None,
        kept: KeptPrompts | None = None,
        logprobs: LogprobNotes | None = None,
        kept_scores: KeptScores | None = None,
    ):
        """read_law: of all jobs that were read; jobs: read as places become free.
        seed: the user's, or drawn where `is_seeded` is False; new_own_seed: gives, when the call begins, that of
        its drafts, tests and residual draws (stand/seeds.py). most_rows: see `DraftRequest`.
        on_commit: told of every row's new tokens as they are kept. kept: prompts of earlier calls. logprobs: where
        those of the rows' tokens are written down; kept_scores: and what they were drawn by."""
        self.seed = seed
        self.stats = Stats()
        self._border = switching_length(model)  # of rows, see `stand.forward.long_factors`
        self._is_open = isinstance(jobs, Arrivals)  # further requests may come
        told = jobs if self._is_open else same_on_all(backend.ranks, jobs, logprobs)
        self.scheduler = Scheduler(told, admission, border=self._border)
        self._model = model
        self._vocabulary_size = text_config(model).vocab_size
        self._backend = backend
        self._drafter = drafter
        self._verifier = verifier
        self._read_law = read_law
        self._law: TargetLaw | None = None  # from the first step on
        self._has_processors = False  # of the law; asked in every step
        self._grammar: GrammarMasks | None = None  # of the law
        self._new_own_seed = new_own_seed
        self._own_seed: int | None = None  # until the call begins
        self._is_learning = is_learning
        self._is_seeded = is_seeded
        self._most_rows = most_rows
        self._feature_layers = None if drafter is None else drafter.asked_features
        self._rider = None if drafter is None else drafter.rider
        self._on_commit = on_commit
        self.logprobs, self.kept_scores = logprobs, kept_scores
        self._prompts = PromptKeys(
            model,
            new_keys=backend.key_maker(),
            admission=admission,
            on_ready=self._meet_prompt,
            feature_layers=self._feature_layers,
            kept=kept,
            ranks=backend.ranks,
            border=self._border,
        )
        self._is_settled = False  # since rows were let in, none has ended, memory holds them and the next one is ready
        self._step: Step | None = None  # from the first row on
        self._num_places: int | None = None  # that the step has

    def run(self) -> None:
        """Decode every row to its end."""
        with exclusive(self._model), self._ending(), self.stats.timed_wall():
            while self._refill():
                self.scheduler.raise_failure()
                with self._step.attention():
                    self._advance()
                    while self._is_settled:
                        self._advance()

    def steps(self, *, until_ended: bool = False) -> Iterator[None]:
        """The same step by step. Between two steps the model is free for other work, also of other threads. With
        `until_ended` it is given back only where rows have ended, others are to be let in or another thread waits for
        it, so that its forwards are swapped less often."""
        with self._ending():
            while True:
                with exclusive(self._model), self.stats.timed_wall():
                    is_live = self._refill()
                    is_told = is_live and (yield from self._settled_steps(until_ended))
                if not is_live and not self.scheduler.wait():
                    break
                if not is_told:
                    yield

    def _settled_steps(self, until_ended: bool) -> Generator[None, None, bool]:
        """A step, and with `until_ended` more while nothing has to be let in; between two of them the clock stands.
        Whether the last one was yielded: other calls in between may let the drafter ask for more memory."""
        with self._step.attention():
            self._advance()
            while until_ended and self._is_settled and not self.scheduler.ended and not is_awaited(self._model):
                with self.stats.paused_wall():
                    yield
                if self.scheduler.has_news or not self.scheduler.is_held():
                    return True
                self._advance()
        return False

    @contextmanager
    def _ending(self) -> Iterator[None]:
        """Around all steps: what was put off is called after the last one, and places are given back in any case."""
        try:
            yield
            if self._step is not None:
                with exclusive(self._model):
                    self._step.finish()
        finally:
            if self._step is not None:
                self._step.close()
            self._step = None
            self._prompts.end()

    def _refill(self) -> bool:
        """Let rows into free places, their prompts' keys first; whether any row is live.

        Where rows are running, prompts get one chunk, so that nobody waits for a long one. The own seed is asked for
        here and not when the call is made: calls that ran in between may have taught.
        """
        scheduler, ready = self.scheduler, self._prompts.ready
        if self._own_seed is None or self._is_open and not scheduler.is_running():
            if self._own_seed is None:
                self._own_seed = self._new_own_seed()
            self._prompts.keep_only(scheduler.waiting_row)  # weights may be changed while nobody waits for an answer:
            if self._is_open and scheduler.next_row() is None:  # who comes after this look at them waits for the next
                ready = _not_yet
            self._prompts.begin()
        for row in scheduler.rows_left():
            row.finish_reason = "cancelled"
            self._end(row)
        with self.stats.timed_prefill():
            if scheduler.is_running():
                self._prompts.allow_one_chunk()
            else:
                self._prompts.allow_all()
            if not scheduler.is_held():
                self._prompts.keep_shared()  # before a row is put back, what only waits goes
            changes = scheduler.settle(ready, self._leave)
            if changes and (self._step is None or scheduler.num_places != self._num_places):
                self._make_step(changes)
            self._follow([change for change in changes if isinstance(change, Entry)])
            for change in changes:
                self._change(change)
            coming = scheduler.next_row() if scheduler.live else None
            self._is_settled = (
                coming is None
                or not scheduler.has_memory_for(coming)
                or scheduler.prepared(coming, self._prompts.ready) is not None
            )
            if scheduler.live:
                self._prompts.keep_only(scheduler.next_row(), scheduler.problems_to_keep())
            else:
                self._prompts.keep_only(None)
        self.stats.num_prompt_tokens = self._prompts.num_tokens
        self.stats.num_copied_prompt_tokens = self._prompts.num_copied
        self.stats.num_put_back, self.stats.num_replayed_tokens = scheduler.num_put_back, self._prompts.num_replayed
        if not scheduler.live:
            if self._step is not None:
                self._step.finish()  # nothing may come for long
            scheduler.raise_failure()
        return bool(scheduler.live)

    def _leave(self, row: Row, place: int) -> None:
        self._step.leave(row, place)

    def _change(self, change: Change) -> None:
        if isinstance(change, Entry):
            if not change.row.num_steps:
                change.row.started = self.stats.elapsed
            self._step.enter(change.row, change.place, change.keys.keys)
        else:
            self._step.move(change.row, change.source, change.target)

    def _make_step(self, changes: Sequence[Entry]) -> None:
        """The step of this call, of the rows that enter first; a new one where it has other places now."""
        if self._step is not None:
            self._step.finish()
            self._step.close()
        self._num_places = self.scheduler.num_places
        longest = max(changes, key=lambda entry: entry.row.num_cached)
        self._law = self._read_law()
        self._has_processors, self._grammar = self._law.has_processors, self._law.grammar
        if self._grammar is not None:
            self._grammar.expect(self._vocabulary_size)
        notes = (self.logprobs, self.kept_scores)
        self._step = self._backend.new_step(
            StepStart(
                num_places=self._num_places,
                rows=[entry.row for entry in changes],
                keys=longest.keys.keys,
                law=self._law,
                verifier=self._verifier,
                num_top=self._drafter.num_candidates if self._is_learning else 0,
                feature_layers=self._feature_layers,
                rider=self._rider,
                pages=self.scheduler.admission.pages,
                held=frozenset().union(*(told.held(self._law) for told in notes if told is not None)),
            )
        )

    def _follow(self, entries: Sequence[Entry]) -> None:
        """Show a drafter that asks for features those of what the rows that enter begin with, each prompt once."""
        if self._feature_layers is not None:
            shown: set[Hashable] = set()
            for entry in entries:
                if beginning(entry.row) not in shown:
                    shown.add(beginning(entry.row))
                    self._drafter.follow_prompt(entry.row.history, self._prompts.features(entry.keys))

    def _meet_prompt(self, row: Row) -> None:
        if self._is_learning or self._drafter is not None and not self._drafter.rows_apart:
            self._own_seed = seed_with_prompt(self._own_seed, row.history)
        if self._is_learning:
            text = row.history if row.media is None else row.history[row.media.text_start :]
            self._drafter.learn_prompt(text, problem=row.problem)

    def _advance(self) -> None:
        """One decoding step of all live rows."""
        live, work_on = LiveRows.of(self.scheduler.live), self.stats.work_on
        work_on("draft")
        request, batch = self._draft(live)
        work_on("commit")
        slots = batch.sizes if self._rider is None else batch.sizes + self._rider.num_slots(batch.sizes)
        self.scheduler.admission.take(live.rows, (live.lengths + slots).tolist())
        before = self.stats.scoring_seconds
        work_on("forward")
        self._step.forward(batch, live, self._noise(live))
        work_on("verify")
        verdicts, gained, ends, read, failures = self._backend.ranks.agreed(self._judge, live, batch)
        if self._drafter is not None:
            self._drafter.record_time(request, batch.num_nodes, self.stats.scoring_seconds - before)
        if self._rider is not None:
            work_on("draft")
            self._step.ride(verdicts.accepted)
            work_on("commit")
        if read is not None:
            self.logprobs.keep(live.rows, read, [emitted for emitted, _ in ends])
        if self.kept_scores is not None:
            counts = [emitted for emitted, _ in ends]
            self.kept_scores.keep(self._step.scored(), batch, verdicts.accepted, live.rows, counts)
        self._commit(live, batch, verdicts, gained, ends)
        for place, error in failures:
            self.scheduler.fail(live.rows[place], error)
        self._is_settled = self._is_settled and self.scheduler.is_held()
        if self._is_open and self._is_settled:
            self._is_settled = not self.scheduler.has_news
        work_on(None)
        if self._is_learning or self._feature_layers is not None:
            self._step.teach(partial(self._learn, request, batch, verdicts))

    def _draft(self, live: LiveRows) -> tuple[DraftRequest | None, DraftBatch]:
        """What the drafter was asked, None without one, and its answer."""
        if self._drafter is None:
            return None, DraftBatch.pending([tokens[-1] for tokens in live.histories])
        request = DraftRequest(
            histories=live.histories,
            seed=self._own_seed,
            target_seed=self.seed,
            rows=live.indices,
            steps=live.steps,
            problems=live.problems,
            max_depths=live.max_depths if self._border is None else live.depths_within(self._border),
            is_greedy=self._law.params.is_greedy,
            is_seeded=self._is_seeded,
            is_learning=self._is_learning,
            prompt_words=live.prompt_words,
            most_rows=self._most_rows,
            masks_at=None if self._grammar is None else self._planner(live.rows),
        )
        batch = self._backend.ranks.agreed(self._drafter.draft, request)
        check_batch(batch, request, vocabulary_size=self._vocabulary_size)
        if self._border is not None:
            check_within(self._border, batch, request)
        if DEBUG:
            batch.check()
        return request, batch

    def _planner(self, rows: Sequence[Row]) -> Callable[[DraftBatch], TokenMasks] | None:
        """What says at planned nodes which tokens the rows' grammars allow."""
        return partial(self._grammar.planned, rows=rows) if self._grammar.is_plannable(rows) else None

    def _noise(self, live: LiveRows) -> VerifierNoise:
        return VerifierNoise(
            seed=self._own_seed,
            rows=live.indices,
            steps=live.steps,
            positions=live.lengths + 1,
            target_seed=self.seed,
            prompt_words=live.prompt_words,
        )

    def _judge(
        self, live: LiveRows, batch: DraftBatch
    ) -> tuple[Verdicts, list[list[int]], list[End], StepLogprobs | None, list[tuple[int, Exception]]]:
        """What stays of the drafts, the tokens that rows would gain with it, where that ends them, the tokens'
        log-probabilities where the call notes them, and by place what is wrong behind a row's sound tokens."""
        verdicts, read = self._step.verify(), None
        self.stats.work_on("commit")
        gained, elapsed = verdicts.gained(batch), self.stats.elapsed
        if self.logprobs is not None:
            read = self.logprobs.read(self._step.scored(), batch, verdicts.accepted, gained)
        ends, failures = list(gained), []  # a place for each; few
        for place, (row, tokens) in enumerate(zip(live.rows, gained, strict=True)):
            stop, drawn, error = self.scheduler.job_of(row).stop, tokens, None
            if self._has_processors:
                count, error = self._law.sound(batch, place, verdicts.accepted[place])
                drawn = tokens[:count]
            told = read.of(place, len(drawn)) if stop.wants_logprobs else None
            ends[place] = emitted, reason = stop.cut(row, drawn, elapsed=elapsed, logprobs=told)
            if error is not None and (reason is None or not emitted):
                ends[place] = emitted, None
                failures.append((place, error))
        return verdicts, gained, ends, read, failures

    def _commit(
        self,
        live: LiveRows,
        batch: DraftBatch,
        verdicts: Verdicts,
        gained: Sequence[list[int]],
        ends: Sequence[End],
    ) -> None:
        """Append what was kept to every row, up to its end, and move its keys together."""
        num_kept: list[int] = []  # by row: nodes that are emitted
        for row, tokens, size, end in zip(live.rows, gained, batch.sizes.tolist(), ends, strict=True):
            emitted, row.finish_reason = end
            row.extend(tokens[:emitted])
            row.num_drafted += size - 1
            num_kept.append(min(emitted, len(tokens) - 1))
            self.stats.num_tokens += emitted
            if row.finish_reason is not None:
                self._end(row)
            if self._on_commit is not None and emitted:
                self._on_commit(row, tokens[:emitted])
        self._step.keep(live, verdicts.accepted)
        self.stats.count_step(batch, verdicts.accepted, num_kept)

    def _end(self, row: Row) -> None:
        row.ended, self._is_settled = self.stats.elapsed, False
        self.scheduler.job_of(row).stop.forget(row)
        self._law.forget(row, is_last=self.scheduler.end(row))

    def _learn(self, request: DraftRequest, batch: DraftBatch, verdicts: Verdicts) -> None:
        """Teach the drafter what became of its draft, and the target's best tokens at every scored node."""
        interrupted = self.stats.work_on("learn")
        top_ids, top_probs = self._step.top_entries(self._drafter.num_candidates if self._is_learning else 0)
        features = None if self._feature_layers is None else self._step.features()
        lesson = Lesson(request, batch, verdicts.accepted, verdicts.next_tokens, top_ids, top_probs, features=features)
        if self._feature_layers is not None:
            self._drafter.follow(lesson)
        if self._is_learning:
            self._drafter.learn(lesson)
        self.stats.work_on(interrupted)


def _not_yet(row: Row) -> None:
    """Keys of a row that is to come in later."""
