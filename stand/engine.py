"""What `stand.wrap` returns: an engine, which generates from prompts, any number of rows at once."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial

from stand.extra import MissingExtraError, has_engine

if not has_engine():
    raise MissingExtraError("stand.engine")

import torch
from transformers import (
    GenerationConfig,
    LogitsProcessor,
    LogitsProcessorList,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    ProcessorMixin,
    StoppingCriteria,
    StoppingCriteriaList,
)
from transformers.generation.streamers import BaseStreamer

from stand.argument_checks import check_flags, whole_number
from stand.backend import Backend, way_of_steps
from stand.call import Call
from stand.drafters.check import check_most_nodes
from stand.drafters.costs.step_cost import StepCost, StepTimer, clock_of, measure_cost
from stand.drafters.drafter import Drafter, LookupDrafter
from stand.forward.model import text_config
from stand.forward.ranks import ALONE
from stand.forward.self_check import refuse_unready
from stand.forward.tree_attention import exclusive
from stand.laws.kept_scores import KeptScores, new_kept_scores, refuse_kept_scores
from stand.numbered_keys import NumberedKeys
from stand.output import GenerationOutput, output_of
from stand.row import Row
from stand.scheduling.arrivals import Arrivals
from stand.scheduling.job_reader import JobReader
from stand.scheduling.kept_prompts import KeptPrompts
from stand.scheduling.memory import admission, checked_bytes, is_number
from stand.scheduling.open_run import OpenRun
from stand.scheduling.request import Job, Request
from stand.scheduling.run import Run
from stand.scheduling.sample_steps import checked_sizes, sample_steps
from stand.seeds import call_seed, checked_seed
from stand.simd.threads import release_pool
from stand.texts.prompts import is_one_prompt
from stand.texts.streaming import PiecesOfRows, begin_streaming, into, shown
from stand.trees import BlendedLookup, LookupTree
from stand.verifiers import Verifier

MANY_ROWS = 64  # a run of unknown size, as drafters are told of it
MOST_RETURNED_ROWS = 1 << 20  # of a call that gives them all together
MOST_PROMPTS = 1 << 16  # that an engine knows again: 12 MB. An older one counts as a new problem


class Engine:
    """Decodes many rows at once; made by `stand.wrap`.

    It switches the model's attention while it runs and gives it back afterwards. Calls of several threads on one model
    take turns: a `generate` as a whole, streams and runs step by step. So what a call runs of yours (requests,
    criteria, a streamer) must not wait for another thread's call.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase | None,
        *,
        drafter: Drafter,
        verifier: Verifier,
        backend: Backend,
        processor: ProcessorMixin | None = None,
    ):
        self.model = model
        self.tokenizer = tokenizer
        self.processor = processor
        self.drafter = drafter
        self.verifier = verifier
        self.backend = backend
        drafter.record_runs(backend.new_recorder())
        self._problems = NumberedKeys(MOST_PROMPTS)
        self._kept: KeptPrompts | None = None

    @property
    def lookup(self) -> BlendedLookup | LookupTree:
        """The lookup that drafts and learns; save it with `engine.lookup.save(path)`."""
        if not isinstance(self.drafter, LookupDrafter):
            raise AttributeError(f"{type(self.drafter).__name__} has no lookup; read engine.drafter")
        return self.drafter.lookup

    @contextmanager
    def keep_prompts(self, max_bytes: float) -> Iterator[None]:
        """Within it a prompt that begins as one of an earlier call takes over that one's keys, whole chunks of 512
        tokens of them, to the bit: for the branches of a search and the turns of a chat.

        max_bytes: of such keys at most, beside what the calls hold; the latest prompts stay. The model's weights are
        not to be changed meanwhile: most changes are seen, and the keys forgotten, but not single values that are
        written into `tensor.data`. Nothing is kept while somebody else's forward hook is on the model or
        weights are offloaded. Raises ValueError for no positive number, and within another block like this.
        """
        if self._kept is not None:
            raise ValueError("keep_prompts must not be nested, got a block within another one; leave one of them out")
        self._kept = KeptPrompts(self.model, checked_bytes(max_bytes), new_keys=self.backend.new_kept_keys)
        try:
            yield
        finally:
            self._kept = None

    @torch.inference_mode()
    def generate(
        self, prompts: object = None, *,
        input_ids: object = None, attention_mask: object = None, generation_config: GenerationConfig | None = None,
        num_return_sequences: int | None = None, max_new_tokens: int | None = None, temperature: float | None = None,
        top_k: int | None = None, top_p: float | None = None, min_p: float | None = None,
        repetition_penalty: float | None = None,
        logits_processors: LogitsProcessorList | Iterable[LogitsProcessor] | None = None,
        stop: str | Sequence[str] | None = None, stop_token_ids: int | Sequence[int] | None = None,
        stopping_criteria: StoppingCriteriaList | Iterable[StoppingCriteria] | None = None,
        seed: int | None = None, streamer: BaseStreamer | None = None, draft: bool = True, learn: bool = True,
        logprobs: int | None = None, logprobs_mode: str | None = None,
        max_rows: int | None = None, max_cache_bytes: float | None = None, **settings: object,
    ) -> GenerationOutput:  # fmt: skip
        """Sample `num_return_sequences` continuations of every prompt, as `run` does, and give them all together.

        max_rows, max_cache_bytes: as in `run`; a row that ends makes room for the next.

        prompts: a text, a chat (messages; with images where `wrap` was given a processor), several, or as input_ids.
        input_ids: a list, tensor or array of ids, one prompt or several, or a tokenizer's output with its mask; that of
        a processor, or a list of such, each of one prompt, with all that it shows (docs/images.md).
        attention_mask: 0 at padding, which is taken off. Without it the model's padding token is padding in tensors.

        Settings are resolved as transformers resolves them: what is given here (settings: any other field of
        `GenerationConfig`), then generation_config, then `model.generation_config`, then transformers' defaults, among
        them do_sample=False and top_k=50. Three rules are added: a temperature above 0 given here switches sampling on,
        temperature 0 is greedy, and where no configuration names an end token, the tokenizer's is it. The law is that
        of transformers' own processors in their order, logits_processors where transformers puts them; one that keeps a
        state sees a row as if it were decoded alone. What cannot be honoured is refused by name.

        stop adds to the config's stop_strings; what begins in the prompt ends no row. stop_token_ids replace its end
        tokens; [] means none. stopping_criteria are asked token by token, one row at a time. max_time counts the call's
        own time, from its first step on; it ends rows behind a step, so those that wait still get one each. Without
        max_new_tokens and max_length a row may fill the model's context; transformers ends it after 20 tokens. seed
        None draws one; it is in the output. draft=False is ordinary decoding here; learn=False learns nothing.
        logprobs: k for those of the new tokens, and of the k likeliest tokens in each place; logprobs_mode:
        "raw_logprobs" (default) are the model's, "processed_logprobs" those of the law that is drawn from.
        output_logits, output_scores: the whole vocabulary's numbers of every new token (docs/logprobs.md).

        Processors and criteria that are given are never called: every row, of processors every draft node, has a copy.
        So a state belongs in attributes, not in a closure, and a recorder stays empty. Copies share tokenizers, modules
        and any threading.Event, by which a call can be ended from outside.

        The law of every row is plain sampling's, in every call, also when calls share a seed (stand/seeds.py). A fresh
        engine repeats a call with the same seed and inputs exactly, as long as the files stand in which the default
        drafter keeps what steps cost here (`stand.drafters.costs.known`). With the verifiers `match` and `coupled` a
        row's tokens are a function of seed, prompt and row alone; with ratio rules also of its drafts, and so of its
        batch mates and, while the drafter learns, of earlier calls.
        """
        call, jobs = self._new_call(
            prompts, None if streamer is None else into(streamer), gives_tensors=True,
            input_ids=input_ids, attention_mask=attention_mask, generation_config=generation_config,
            num_return_sequences=num_return_sequences, max_new_tokens=max_new_tokens, temperature=temperature,
            top_k=top_k, top_p=top_p, min_p=min_p, repetition_penalty=repetition_penalty,
            logits_processors=logits_processors, stop=stop, stop_token_ids=stop_token_ids,
            stopping_criteria=stopping_criteria, seed=seed, draft=draft, learn=learn, logprobs=logprobs,
            logprobs_mode=logprobs_mode, max_rows=max_rows, max_cache_bytes=max_cache_bytes, **settings,
        )  # fmt: skip
        if streamer is not None:
            begin_streaming(streamer, jobs)
        call.run()
        if streamer is not None:
            streamer.end()
        return output_of(call, self.tokenizer, num_return_sequences=len(jobs[0].rows))

    def run(
        self,
        requests: Iterable[Request | object],
        *,
        max_rows: int | None = None,
        max_cache_bytes: float | None = None,
        on_step: Callable[[Run], None] | None = None,
        **settings: object,
    ) -> Run:
        """Decode any number of rows, at most `max_rows` at a time, and iterate over `Trajectory`s as they end.

        requests: `Request`s, or prompts alone; read one by one, when a place is free for a row, and one ahead.
        max_rows: None for as many as memory holds (stand/scheduling/memory.py). A row that ends hands its place and its
        share of the draft nodes to the next one, in the order of the requests. A prompt is prefilled once, in chunks
        between steps, and its keys stay until its last row has started.
        max_cache_bytes: the most bytes of keys and values; None: 0.8 of what is free, in eager steps with `max_rows` no
        limit. Where the cache has pages (`engine.backend.page_size`), the row that started last is put back where they
        run out and computed again later, and a request whose row may need more alone is a ValueError. Elsewhere rows
        start while all fit at their longest.
        on_step: called after every step, when the model is still set up for the next one; what it raises ends the run,
        and so does `close` of the run that it is given.
        settings: as `generate` takes them, but prompts and streamer; a request may have its own num_return_sequences,
        max_new_tokens, stop and stop_token_ids.

        Rows are numbered over the run. Order and batch mates change no row's law; with `match` and `coupled` they
        change no token, which follows from seed, prompt and number. Between two trajectories the model is free for
        other work. Closing the iterator ends the run. So does what a request ends in that does not fit (ValueError,
        with a note that names it), or whoever makes the requests: it is raised when the rows of the requests before
        have ended, and no further request is read.
        """
        call = self._run_of(requests, max_rows=max_rows, max_cache_bytes=max_cache_bytes, **settings)
        return Run(call, self.tokenizer, on_step=on_step)

    def open_run(self, *, max_rows: int = 16, max_cache_bytes: float | None = None, **settings: object) -> OpenRun:
        """A run whose requests come while it decodes, submitted from any thread: for a server or a search.

        max_rows: the most rows that are decoded together. All else is as in `run`, each row's law, too. Which rows are
        decoded together depends on time, so with ratio rules a seed does not repeat their tokens.
        Raises ValueError also where ranks share the model, for they cannot know when each of them is asked."""
        max_rows = whole_number("max_rows", max_rows, "16 is the default")
        if self.backend.ranks is not ALONE:
            raise ValueError("an open run needs a process with the model for itself, got ranks that share it; use run")
        with exclusive(self.model):
            reader, options = self._read_run(**settings)
            arrivals = Arrivals(reader.read, reader.forget, min(max_rows, self.backend.most_rows or max_rows))
            options |= {"num_rows": max_rows, "max_rows": max_rows, "max_cache_bytes": max_cache_bytes}
            run = OpenRun(arrivals, partial(self._call_of, reader, arrivals, **options), self.tokenizer)
        release_pool()  # of steps that were timed
        return run

    def stream(self, prompts: object = None, **settings: object) -> Iterator[tuple[int, str]]:
        """Yield (row, piece of text) as tokens are committed, any number of rows; takes what `generate` takes but
        streamer. The pieces of a row, joined, are its text. Only bytes that form no character may be shown as more or
        fewer replacement signs. Between two pieces the model is free for other work. That costs 1.5 ms per step for 30
        layers (SmolLM2); `generate` and `run` pay it seldom.

        Raises ValueError without a tokenizer, for logprobs, and for an argument that `generate` does not take.
        """
        if self.tokenizer is None:
            raise ValueError("streaming text needs a tokenizer, got none; pass tokenizer= to stand.wrap")
        if settings.get("logprobs") is not None:
            raise ValueError(
                f"a stream has no place for log-probabilities, got logprobs={settings['logprobs']!r}; use generate or "
                "run, also for criteria that want them"
            )
        pieces = PiecesOfRows(self.tokenizer)
        call, _ = self._new_call(prompts, pieces.add, **settings)
        return shown(call.steps(), pieces.committed)

    @torch.inference_mode()
    def measure_cost(
        self, *, num_rows: int = 1, length: int = 1024, most_tokens: int | None = None, seconds: float | None = None
    ) -> StepCost:
        """Time steps of several sizes for `num_rows` rows after `length` tokens each, up to `most_tokens` tokens in
        all, one per row among them (default: 32 per row on a CPU, 256 or one more than rows elsewhere). Where the
        model's context is shorter, after as many tokens as leave room for the draft.

        seconds: time fewer sizes, less often, and stop after about so long, or after sixteen of the smallest steps.
        None: it takes seconds to minutes. Where the calling thread computes steps, its processor time counts.
        `BlendedDrafter(costs=CostTable((cost, ...)))` takes the results; save the table for runs that are to repeat.

        Raises ValueError for numbers that no step has.
        """
        is_elsewhere = self.backend.computes_elsewhere
        if seconds is not None and not (is_number(seconds) and 0 <= seconds < math.inf):
            raise ValueError(f"seconds must be a number >= 0, got {seconds!r}; leave it out to time all sizes")
        num_rows, length, most_tokens = checked_sizes(self.model, self.backend, num_rows, length, most_tokens)
        sizes = {"num_rows": num_rows, "length": length}
        with sample_steps(self.model, self.backend, self.verifier, **sizes) as run_step:
            sizes |= {"most_tokens": most_tokens, "vocab_size": text_config(self.model).vocab_size}
            clock = partial(self.backend.ranks.agreed, clock_of(is_elsewhere))
            return measure_cost(run_step, **sizes, warms=is_elsewhere, seconds=seconds, clock=clock)

    def _new_call(
        self,
        prompts: object,
        on_commit: Callable[[Row, list[int]], None] | None,
        /,
        *,
        gives_tensors: bool = False,
        input_ids: object = None,
        attention_mask: object = None,
        max_rows: int | None = None,
        max_cache_bytes: float | None = None,
        seed: int | None = None,
        draft: bool = True,
        learn: bool = True,
        **settings: object,
    ) -> tuple[Call, list[Job]]:
        """A call that has not begun, and its jobs. What does not fit raises before any work; what does not fit into
        memory, after the drafter's preparation. gives_tensors: whether output_scores and output_logits are served."""
        with exclusive(self.model):
            check_flags(draft=draft, learn=learn)
            reader = self._reader(draft, gives_tensors=gives_tensors, **settings)
            read = reader.prompts.read(prompts, input_ids, attention_mask=attention_mask)
            count = reader.settings.num_return_sequences
            if count * len(read) > MOST_RETURNED_ROWS:
                raise ValueError(
                    f"a call returns at most {MOST_RETURNED_ROWS} rows, got {len(read)} prompts with "
                    f"num_return_sequences {count}; use engine.run, which yields rows as they end"
                )
            reader.check_rows(count * len(read))
            jobs = [reader.job(each, range(place * count, (place + 1) * count)) for place, each in enumerate(read)]
            options = {"seed": seed, "draft": draft, "learn": learn, "on_commit": on_commit}
            options |= {"kept_scores": new_kept_scores(reader.settings.config, num_rows=count * len(jobs))}
            options |= {"num_rows": count * len(jobs), "max_rows": max_rows, "max_cache_bytes": max_cache_bytes}
            return self._call_of(reader, jobs, **options), jobs

    def _reader(self, draft: bool, *, gives_tensors: bool = False, **settings: object) -> JobReader:
        needs_text = draft and (self.drafter.requires_features or self.drafter.rider is not None)
        beside = {"processor": self.processor, "follower": type(self.drafter).__name__ if needs_text else None}
        reader = JobReader(self.model, self.tokenizer, self._problems, **beside, **settings)
        if not gives_tensors:
            refuse_kept_scores(reader.settings.config)
        return reader

    def _run_of(
        self,
        requests: Iterable[Request | object],
        *,
        max_rows: int | None,
        max_cache_bytes: float | None,
        **settings: object,
    ) -> Call:
        """As `_new_call`, of requests that are still to be read."""
        if isinstance(requests, Request) or is_one_prompt(requests) or not isinstance(requests, Iterable):
            raise ValueError(
                f"requests must be prompts or Requests, got one {type(requests).__name__} itself; put it into a list, "
                "the prompts of a tokenizer's output one by one"
            )
        with exclusive(self.model):
            reader, options = self._read_run(**settings)
            beside = {"max_rows": max_rows, "max_cache_bytes": max_cache_bytes, "num_rows": MANY_ROWS}
            return self._call_of(reader, map(reader.read, requests), on_commit=None, **beside, **options)

    def _read_run(
        self, *, seed: int | None = None, draft: bool = True, learn: bool = True, **settings: object
    ) -> tuple[JobReader, dict[str, object]]:
        """What reads the requests of a run, and what its call is to know beside."""
        check_flags(draft=draft, learn=learn)
        return self._reader(draft, **settings), {"seed": seed, "draft": draft, "learn": learn}

    def _call_of(
        self,
        reader: JobReader,
        jobs: Iterable[Job],
        *,
        max_rows: int | None,
        max_cache_bytes: float | None,
        num_rows: int,
        seed: int | None,
        draft: bool,
        learn: bool,
        on_commit: Callable[[Row, list[int]], None] | None,
        kept_scores: KeptScores | None = None,
    ) -> Call:
        """num_rows: the most that may be live, as far as is known."""
        refuse_unready(self.model)
        is_seeded, is_learning = seed is not None, draft and learn and self.drafter.num_candidates > 0
        seed = self.backend.ranks.agreed(checked_seed, seed)
        most_slots = self.drafter.most_slots if draft else lambda num_rows: 0
        beside = {"backend": self.backend, "most_slots": most_slots, "kept": self._kept}
        allowed = admission(self.model, max_rows, max_cache_bytes, **beside)
        most_rows = min(int(limit) for limit in (num_rows, max_rows, self.backend.most_rows) if limit is not None)
        if draft:  # its largest draft counts in the checks
            self.drafter.prepare(
                most_rows, StepTimer(self.measure_cost, way_of_steps(self.model, self.backend), self.backend.step_sizes)
            )
            check_most_nodes(self.drafter, most_rows, self.backend)
        for job in jobs if isinstance(jobs, list) else ():  # others are checked as they are read
            allowed.check(job)
        return Call(
            self.model,
            backend=self.backend,
            drafter=self.drafter if draft else None,
            verifier=self.verifier,
            read_law=lambda: reader.law,
            jobs=jobs,
            admission=allowed,
            seed=seed,
            new_own_seed=partial(self._new_own_seed, seed, draft, is_learning),
            is_learning=is_learning,
            is_seeded=is_seeded,
            most_rows=most_rows,
            on_commit=on_commit,
            kept=self._kept,
            logprobs=reader.logprobs,
            kept_scores=kept_scores,
        )

    def _new_own_seed(self, seed: int, is_drafting: bool, is_learning: bool) -> int:
        """The seed of the own streams of a call that starts now (stand/seeds.py)."""
        return call_seed(seed, self.drafter.start_call(learns=is_learning)) if is_drafting else seed
