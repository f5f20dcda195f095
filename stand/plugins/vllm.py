"""vLLM: chains from the blended lookup, for `speculative_config={"method": "custom_class", "model":
"stand.plugins.vllm.LookupProposer", "num_speculative_tokens": 8}`.

vLLM hands over each row's tokens, without names, prompts' lengths or laws, and takes one chain per row. It verifies
chains as if they were certain, so the output's law is vLLM's own, but for a seed that an earlier request had: its
numbers have met what they would now test (docs/vllm.md, "Seeds").
"""

from __future__ import annotations

import inspect
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import wraps
from itertools import takewhile
from typing import TYPE_CHECKING

import numpy as np

from stand.drafters.costs.step_cost import processor_clock
from stand.plugins.saving import Saver
from stand.plugins.serving.arriving_laws import learn_laws
from stand.plugins.serving.backlog import Backlog
from stand.plugins.serving.options import PAYING, ServingOptions
from stand.plugins.serving.paying_drafts import PayingDrafts
from stand.plugins.serving.row_steps import Reporter, RowSteps
from stand.plugins.serving.scopes import Scopes
from stand.plugins.vllm_laws import VerifiedLaws, show_scores
from stand.sharing.exchange import Exchange, numbers_of
from stand.sharing.news import TextNews
from stand.trees import NO_TOKEN, DraftBatch, problem_key
from stand.trees.compiled import KnownTexts
from stand.trees.layouts.text_rows import TextRows

if TYPE_CHECKING:
    import torch
    from vllm.config import VllmConfig
    from vllm.v1.sample.metadata import SamplingMetadata
    from vllm.v1.spec_decode.metadata import SpecDecodeMetadata

LOGGER = logging.getLogger("vllm.stand")  # below vLLM's own, so that its lines are shown
OPTIONS = "stand"  # the entry of `additional_config` that holds ours
SCOPE, DRAFTED, CALL, PLACE = 0, 1, 2, 3  # notes on a text; the last two say which call drafted for it, and where
RECOVERY = (  # the first arguments of what `only_for_drafts` replaces
    "max_spec_len num_draft_tokens cu_num_draft_tokens draft_token_ids draft_probs target_probs sampling_metadata"
).split()
NOT_A_STEP = -1  # tokens drafted for a row that has only read its prompt


class LookupProposer:
    """Made by vLLM in every process that runs the model.

    Options: `additional_config={"stand": {...}}` or the environment, see `ServingOptions`. With drafts="all" what is
    drafted follows from the calls alone, and from news where servers share; else from the times of steps too. vLLM
    verifies the drafts of one rank.
    """

    def __init__(self, vllm_config: VllmConfig, *, clock: Callable[[], float] | None = None):
        """clock: in seconds, which steps are timed by."""
        given = vllm_config.additional_config
        parallel = getattr(vllm_config, "parallel_config", None)
        self.options = ServingOptions.read(
            given.get(OPTIONS) if isinstance(given, dict) else None, rank=getattr(parallel, "data_parallel_index", 0)
        )
        for name in ("share", "laws"):
            if getattr(self.options, name) and _has_many_schedulers(parallel):
                raise ValueError(
                    f"{name} must be left out where an external launcher starts several ranks, which must draft alike; "
                    f"got {getattr(self.options, name)}"
                )
        self._has_seen_scores = False
        self._verified: VerifiedLaws | None = None  # by the step since the last call
        if self.options.laws > 0:
            show_scores(LookupProposer)
        self.num_tokens = vllm_config.speculative_config.num_speculative_tokens
        self.max_length = vllm_config.model_config.max_model_len
        self.vocabulary_size = vllm_config.model_config.get_vocab_size()
        self.lookup = self.options.new_lookup()
        self.row_steps = RowSteps()
        self._texts = KnownTexts(vllm_config.scheduler_config.max_num_seqs, num_notes=4)
        self._scopes = Scopes()
        self._backlog = Backlog(self.lookup, tokens_per_step=self.options.text_tokens)
        self.saver: Saver | None = None
        self.exchange: Exchange | None = None
        # vLLM takes the drafts of the first rank of tensor parallelism: it writes and shares.
        if getattr(parallel, "rank", 0) % getattr(parallel, "tensor_parallel_size", 1) == 0:
            if self.options.save:
                self.saver = Saver(self, self.lookup, self.options.save)
            self.exchange = self.options.new_exchange(
                self.lookup, vocabulary_size=self.vocabulary_size, numbers=_numbers_of(vllm_config)
            )
        self._reporter = Reporter(self.row_steps, LOGGER, every=self.options.report_every, exchange=self.exchange)
        self._clock = clock or _clock_of(vllm_config)
        self._started = self._now = 0.0  # when the last call was made, and this one
        self._num_calls = 0  # before this one
        self._drafted: DraftBatch | None = None  # by the last call, if its drafts were handed over
        self._path = np.arange(1, self.num_tokens + 1, dtype=np.int32)  # the nodes of a chain
        self._paying = PayingDrafts(self.num_tokens) if self._follows_times(parallel) else None
        LOGGER.info(
            "STAND drafts chains of at most %d tokens%s; %r",
            self.num_tokens, "" if self._paying is None else ", as many as pay", self.lookup,
        )  # fmt: skip

    def _follows_times(self, parallel: object) -> bool:
        """With an external launcher every rank schedules by itself and must draft alike. Pipeline stages overlap."""
        is_bound = _has_many_schedulers(parallel)
        if self.options.drafts == PAYING and (is_bound or getattr(parallel, "pipeline_parallel_size", 1) > 1):
            LOGGER.warning(
                "STAND: with an external launcher or pipeline stages drafts are not timed, so every step has all that "
                "floor and budget allow; set budget to the most draft tokens that pay in a step of all rows"
            )
            return False
        return self.options.drafts == PAYING

    def load_model(self, *arguments: object, **named: object) -> None:
        """There is no model; vLLM on a CPU asks for it."""

    def see_scores(
        self, logits: torch.Tensor | None, drafts: SpecDecodeMetadata | None, sampling: SamplingMetadata
    ) -> None:
        """The scores of a step, before vLLM samples from them; None where another rank has them."""
        self._has_seen_scores, self._verified = True, None
        if self.options.laws > 0 and logits is not None:
            self._verified = VerifiedLaws(logits, drafts, sampling, self.options.laws)

    def propose(
        self,
        sampled_token_ids: Sequence[Sequence[int]],
        num_tokens_no_spec: np.ndarray,
        token_ids_cpu: np.ndarray,
        slot_mappings: object = None,
    ) -> list[list[int]]:
        """Learn what every row has got and draft what follows: per row at most `num_speculative_tokens` tokens.

        sampled_token_ids: per row the tokens of this step, none while its prompt is being read. num_tokens_no_spec
        int [R]: tokens of every row, those of this step included. token_ids_cpu int32 [R, L]: the rows' tokens.
        """
        self._started, self._now = self._now, self._clock()
        if self.options.laws > 0 and not self._has_seen_scores:
            raise RuntimeError(
                "laws need a model runner that samples by vLLM's own _sample, but this one has shown no scores; leave "
                "laws out to learn tokens"
            )
        num_sampled = np.array(list(map(len, sampled_token_ids)), dtype=np.int64)
        (rows,) = num_sampled.nonzero()
        if len(rows) > 0:
            lengths = num_tokens_no_spec[rows].astype(np.int64)
            notes, scopes = self._learn(token_ids_cpu, rows, lengths, num_sampled[rows])
            if self._paying is not None:
                self._follow(notes, token_ids_cpu, rows, lengths, num_sampled)
            chains = self._draft(token_ids_cpu, rows, lengths, scopes)
            notes[:, DRAFTED] = list(map(len, chains))
            notes[:, CALL], notes[:, PLACE] = self._num_calls + 1, np.arange(len(rows))
            self._texts.keep(token_ids_cpu, rows, lengths, notes)
        else:
            chains = []
            self._backlog.work()
            if self.exchange is not None:
                self.exchange.receive()
        self._num_calls += 1
        self._reporter.look()
        if len(chains) == len(num_sampled):
            return chains
        drafts: list[list[int]] = [[] for _ in num_sampled]
        for row, chain in zip(rows.tolist(), chains, strict=True):
            drafts[row] = chain
        return drafts

    def _learn(
        self, tokens: np.ndarray, rows: np.ndarray, lengths: np.ndarray, num_sampled: np.ndarray
    ) -> tuple[np.ndarray, list[int]]:
        """The notes on the rows, and their scopes. What no step gave is learned little by little: a prompt, or the next
        turn of the chat that lay in the row."""
        before = lengths - num_sampled
        known, notes = self._texts.find(tokens, rows, before)
        is_given = (known == 0) | (before - known > 2 * (self.num_tokens + 1))  # two steps may have been missed
        notes[known != before, CALL] = NOT_A_STEP
        for place in is_given.nonzero()[0].tolist():
            text = tokens[rows[place], : before[place]]
            notes[place, : DRAFTED + 1] = self._scope_of_given(text, known[place], notes[place, SCOPE]), NOT_A_STEP
            known[place] = before[place]
        self._backlog.work()
        scopes = notes[:, SCOPE].tolist()
        has_laws = self._verified is not None and before.min() > 0  # they teach what was sampled, too
        ends = before if has_laws else lengths
        self.lookup.learn_rows(tokens, ends, ends - known, rows=rows, scopes=scopes)
        if self.exchange is not None:
            self.exchange.send(TextNews(tokens, ends, ends - known, rows, self.vocabulary_size))
        if has_laws:
            learn_laws(self.lookup, self.exchange, *self._verified.lesson(tokens, rows, before), scopes)
        self._verified = None
        if self.exchange is not None:
            self.exchange.receive()
        self.row_steps.add(num_sampled.tolist(), notes[:, DRAFTED].tolist())
        return notes, scopes

    def _scope_of_given(self, text: np.ndarray, num_known: int, scope: int) -> int:
        """The scope of a text that was given after its first tokens. It is learned soon, unless its like was."""
        if num_known == 0:
            key = problem_key(text)
            if key in self._scopes:
                return self._scopes.of(key)
            scope = self._scopes.of(key)
        if text.max(initial=0) < self.vocabulary_size:  # placeholders of images may be no tokens of the model
            self._backlog.add(text, scope, num_known=num_known)
        return scope

    def _follow(
        self, notes: np.ndarray, tokens: np.ndarray, rows: np.ndarray, lengths: np.ndarray, num_sampled: np.ndarray
    ) -> None:
        """Learn what the step since the last call took, unless it read a prompt, and what became of its drafts.

        num_sampled: of all rows, the others' that are reading their prompt included."""
        is_known = notes[:, CALL] == self._num_calls
        if len(rows) == len(num_sampled) and is_known.all():
            self._paying.record(len(rows), int(notes[:, DRAFTED].sum()), self._now - self._started)
        batch = self._drafted
        if batch is None:
            return
        places, known = notes[is_known, PLACE], rows[is_known]
        num_accepted = np.zeros(len(batch), dtype=np.int64)
        num_accepted[places] = np.minimum(num_sampled[known], batch.sizes[places]) - 1
        following = np.full(len(batch), NO_TOKEN, dtype=np.int32)
        following[places] = tokens[known, lengths[is_known] - 1]
        accepted = [self._path[:count] for count in num_accepted.tolist()]
        self.lookup.record_outcome(batch, accepted, following, kind="deterministic")

    def _draft(self, tokens: np.ndarray, rows: np.ndarray, lengths: np.ndarray, scopes: list[int]) -> list[list[int]]:
        num_rows, room = len(rows), self.num_tokens
        if max(lengths.tolist()) + room >= self.max_length:
            room = np.clip(self.max_length - 1 - lengths, 0, room).tolist()
        limits = None if self._paying is None else self._paying.limits(num_rows)
        most = num_rows * self.num_tokens if limits is None else limits.budget
        nothing = np.zeros(num_rows, dtype=np.int64)  # deterministic drafts take no noise
        batch = self.lookup.draft(
            TextRows(tokens, lengths, rows),
            min(most, self.options.budget) if self.options.budget else most,
            seed=0,
            rows=nothing,
            steps=nothing,
            floor=self.options.floor,
            rises=None if limits is None else limits.rises,
            max_nodes=room,
            width=1,
            scopes=scopes,
        )
        if limits is not None:
            expected = float(batch.path_probabilities.sum()) - num_rows  # roots are sure
            num_drafted = batch.num_nodes - num_rows
            self._drafted = batch if num_drafted > 0 and limits.pays(num_rows, expected, num_drafted) else None
            if self._drafted is None:
                return [[] for _ in range(num_rows)]
        chains = batch.chains(self.num_tokens)
        if int(batch.token_ids.max()) >= self.vocabulary_size:  # from a file of another model
            chains = [list(takewhile(self.vocabulary_size.__gt__, chain)) for chain in chains]
        return chains


def _numbers_of(vllm_config: VllmConfig) -> int:
    """A name of the random numbers of requests without a seed (`Exchange.numbers`); 0 where nobody has set a seed."""
    try:
        from vllm.utils.torch_utils import set_random_seed

        is_mixed = "data_parallel_index" in inspect.signature(set_random_seed).parameters  # from 0.32 on
    except ImportError:
        is_mixed = False
    index = getattr(getattr(vllm_config, "parallel_config", None), "data_parallel_index", 0)
    return numbers_of(getattr(vllm_config.model_config, "seed", None), index if is_mixed else 0)


def _has_many_schedulers(parallel: object) -> bool:
    """Does each of several ranks schedule by itself?"""
    backend = getattr(parallel, "distributed_executor_backend", None)
    return backend == "external_launcher" and getattr(parallel, "world_size", 1) > 1


def _clock_of(vllm_config: VllmConfig) -> Callable[[], float]:
    """On a CPU the processor time of this thread, which runs the model: other work does not lengthen it."""
    device = getattr(getattr(vllm_config, "device_config", None), "device_type", None)
    return processor_clock() if device == "cpu" else time.perf_counter


def register() -> None:
    """The entry point of `vllm.general_plugins`: vLLM calls it in each of its processes.

    On a CPU it mends the sampler (`expand_batch_to_tokens`) and spares rows without drafts what is drawn for drafts
    (`only_for_drafts`); elsewhere it changes nothing.
    """
    from vllm.platforms import current_platform

    if current_platform.is_cpu():
        import vllm.v1.sample.rejection_sampler as sampler

        sampler.expand_batch_to_tokens = expand_batch_to_tokens
        if hasattr(sampler, "sample_recovered_tokens"):
            sampler.sample_recovered_tokens = only_for_drafts(sampler.sample_recovered_tokens)


def only_for_drafts(sample: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """vLLM's `sample_recovered_tokens`, called for the rows that have drafts.

    In every step of an engine that may draft it draws a number per row and token of the vocabulary, a millisecond per
    row on a CPU. A row without a draft recovers no token.
    """

    @wraps(sample)
    def sample_recovered_tokens(most, num_drafted, ends, token_ids, draft_probs, probs, metadata, *others, **named):
        rows = [row for row, number in enumerate(num_drafted) if number > 0]
        if not rows:
            return token_ids.clone()
        places = {row: place for place, row in enumerate(rows)}
        generators = {places[row]: one for row, one in metadata.generators.items() if row in places}
        num_drafted, metadata = [num_drafted[row] for row in rows], replace(metadata, generators=generators)
        return sample(most, num_drafted, ends[rows], token_ids, draft_probs, probs, metadata, *others, **named)

    names = [*inspect.signature(sample).parameters][:7]
    return sample_recovered_tokens if names == RECOVERY else sample


def expand_batch_to_tokens(
    x: torch.Tensor, cu_num_tokens: torch.Tensor, num_tokens: int, replace_from: int = 0, replace_to: int = 0
) -> torch.Tensor:
    """[num_tokens]: x[b] for each token of row b, `replace_from` replaced; cu_num_tokens are the ends of the rows.

    vLLM's own on a CPU (0.22 to 0.33) fills a copy unless x is int64, and returns uninitialised memory: the draft
    positions' temperatures, top_k and top_p.
    """
    import torch

    replaced = torch.where(x == replace_from, torch.full_like(x, replace_to), x)
    return torch.repeat_interleave(replaced, torch.diff(cu_num_tokens, prepend=cu_num_tokens.new_zeros(1)).long())
