"""The engine: a model, a drafter and a verifier in, tokens out. One step is draft, forward, verify, commit, learn."""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import TYPE_CHECKING

import numpy as np
import torch
from transformers import LogitsProcessor, PreTrainedModel, PreTrainedTokenizerBase
from transformers.generation.streamers import BaseStreamer

from stand.attention import tree_attention
from stand.backend import Backend, captured_step, choose_backend, with_fusion
from stand.cache import TreeCache, check_fits
from stand.drafter import BlendedDrafter, Drafter, LookupDrafter
from stand.output import GenerationOutput
from stand.plan import StepPlan
from stand.row import Row
from stand.sampling import SamplingParams, TargetLaw
from stand.stats import Stats
from stand.step import EagerStep, Step
from stand.step_cost import CostTable, StepCost, measure_cost, saved_costs
from stand.stop import StopRule
from stand.support import check_model, max_positions, run_plan, text_config
from stand.trees import BlendedLookup, DraftBatch, DraftTree, LookupTree, TreeShape, vocabulary_fingerprint
from stand.verifiers import Verdicts, Verifier, VerifierNoise, get_verifier

if TYPE_CHECKING:
    from stand.gpu.fusion import Fusion

DEBUG = os.environ.get("STAND_DEBUG", "0") == "1"  # check every draft's invariants
PROMPT_CHUNK = 512  # prompt tokens per forward; bounds the mask to [512, L]


def wrap(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase | None = None,
    *,
    lookup: BlendedLookup | LookupTree | None = None,
    budget: int | None = None,
    costs: CostTable | None = None,
    shape: TreeShape | None = None,
    draft_kind: str = "sampled",
    drafter: Drafter | None = None,
    verifier: str = "traversal",
    allow_lossy: bool = False,
    device: torch.device | str | None = None,
    backend: str = "auto",
    fuse: bool = True,
) -> Engine:
    """Make an engine around an unmodified transformers model.

    lookup: what was learned before (default: an empty `BlendedLookup` with this vocabulary's fingerprint).
    budget: the most draft nodes of all live rows of a step together (default: `default_budget` of the device, or with
    costs as many as were timed).
    costs: what steps cost here (`CostTable((engine.measure_cost(), ...))`): drafts then end where a node adds more to
    the step's time than to its tokens. On a GPU the table that scripts/gpu_bench.py saved is taken, if there is one.
    shape: fill these slots by STAND's rule from a `LookupTree` instead of growing drafts under a budget.
    draft_kind: "sampled", "mixed" or "deterministic" children; with a shape also "coupled" (for the verifiers `coupled`
    and `match`) and "independent".
    drafter: any `Drafter` instead of these five.
    verifier: a name from `stand.verifiers`; lossy ones need allow_lossy.
    device: move the model there first.
    backend: "triton" (kernels, the step as one graph), "sdpa" (any device) or "auto": triton on a GPU where it
    serves the model. `engine.backend` says which and why.
    fuse: in captured steps, run merged projections and fused norms, feed-forward blocks and attentions wherever they
    are proven equal on the loaded weights (`engine.fusion.report`). Merging gives the projections' parameters new
    addresses; values, names and objects stay.

    Raises UnsupportedModelError for a model that cannot be served exactly, ValueError for anything else that
    does not fit. The model is left as it is: weights, attention implementation and mode.
    """
    rule = get_verifier(verifier, allow_lossy=allow_lossy)
    if rule.requires.carries_debts:
        raise ValueError(
            f"the engine's drafters learn and may draft less than asked for, got verifier {verifier!r}, which needs "
            "one fixed law at every position of its debt; use 'block' on chains or 'traversal'"
        )
    if device is not None:
        model.to(device)
    check_model(model)
    if drafter is None:
        fingerprint = _fingerprint(model, tokenizer)
        drafter = _lookup_drafter(lookup, fingerprint, model, budget=budget, costs=costs, shape=shape, kind=draft_kind)
    elif not all(setting is None for setting in (lookup, shape, budget, costs)):
        raise ValueError(
            "drafter= brings its own state, got lookup=, budget=, costs= or shape= too; give them to the drafter"
        )
    chosen, fusion = choose_backend(model, rule, backend), None
    if fuse:
        chosen, fusion = with_fusion(model, chosen)
    return Engine(model, tokenizer, drafter=drafter, verifier=rule, backend=chosen, fusion=fusion)


def default_budget(device: torch.device) -> int:
    """Draft nodes per step that pay: few on a CPU, where each one costs; as many as cost little more than one on a GPU.

    32: best of 16 to 64 on two cores with the bundled model (LOG.md). 112: the knee that a roofline puts at 100 to 130
    tokens for dense bfloat16 models on an H200; not measured.
    """
    return 32 if device.type == "cpu" else 112


def _lookup_drafter(
    lookup: BlendedLookup | LookupTree | None,
    fingerprint: bytes,
    model: PreTrainedModel,
    *,
    budget: int | None,
    costs: CostTable | None,
    shape: TreeShape | None,
    kind: str,
) -> Drafter:
    """STAND's fixed shape where a shape or a `LookupTree` is given, growth under a budget otherwise."""
    if lookup is not None:
        _check_fingerprint(lookup, fingerprint)
    if shape is None and not isinstance(lookup, LookupTree):
        lookup = BlendedLookup(fingerprint=fingerprint) if lookup is None else lookup
        costs = saved_costs(model) if costs is None and budget is None else costs
        if budget is None:
            budget = default_budget(model.device) if costs is None else costs.most_tokens
        return BlendedDrafter(lookup, budget=budget, costs=costs, kind=kind)
    if budget is not None or costs is not None or isinstance(lookup, BlendedLookup):
        raise ValueError(
            "a shape belongs to a LookupTree, a budget and costs to a BlendedLookup, got a mixture; give lookup= with "
            "shape= of one kind, or budget= and costs= alone"
        )
    lookup = LookupTree(fingerprint=fingerprint) if lookup is None else lookup
    return LookupDrafter(lookup, shape or TreeShape.paper(), kind=kind)


@dataclass(frozen=True, slots=True)
class Lesson:
    """What a step's best rows are learned with: its drafts and what stood before them."""

    batch: DraftBatch
    histories: list[np.ndarray]
    problems: np.ndarray


@dataclass(slots=True)
class Run:
    """State of one generate call. Live rows are rows[: num_live]; cache row i belongs to rows[i]."""

    rows: list[Row]
    law: TargetLaw
    stop: StopRule
    seed: int
    problems: list[int]  # numbers of the call's prompts
    stats: Stats
    is_drafting: bool
    is_learning: bool
    streamer: BaseStreamer | None
    step: Step | None = None  # from the end of the prompts on
    lesson: Lesson | None = None  # of the last step, until it is learned


class Engine:
    """Decodes many rows at once. Not thread-safe: it switches the model's attention while it runs."""

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase | None,
        *,
        drafter: Drafter,
        verifier: Verifier,
        backend: Backend,
        fusion: Fusion | None = None,
    ):
        self.model = model
        self.tokenizer = tokenizer
        self.drafter = drafter
        self.verifier = verifier
        self.backend = backend
        self.fusion = fusion
        self._captured: Step | None = None  # graphs and cache of the last call, for the next one
        self._problems: dict[bytes, int] = {}  # digest of every prompt so far: its number

    @property
    def lookup(self) -> BlendedLookup | LookupTree:
        """The lookup tree that drafts and learns; save it with `engine.lookup.save(path)`."""
        if not isinstance(self.drafter, (BlendedDrafter, LookupDrafter)):
            raise AttributeError(f"{type(self.drafter).__name__} has no lookup tree; read engine.drafter")
        return self.drafter.lookup

    @torch.inference_mode()
    def generate(
        self,
        prompts: str | Sequence[str] | None = None,
        *,
        input_ids: Sequence[int] | Sequence[Sequence[int]] | torch.Tensor | None = None,
        num_return_sequences: int = 1,
        max_new_tokens: int | None = None,
        temperature: float | None = None,
        top_k: int | None = None,
        top_p: float | None = None,
        min_p: float | None = None,
        repetition_penalty: float | None = None,
        logits_processors: Iterable[LogitsProcessor] = (),
        stop: str | Sequence[str] = (),
        stop_token_ids: Sequence[int] | None = None,
        seed: int | None = None,
        streamer: BaseStreamer | None = None,
        draft: bool = True,
        learn: bool = True,
    ) -> GenerationOutput:
        """Sample `num_return_sequences` continuations of every prompt, all rows in one batch.

        Sampling settings left at None come from `model.generation_config` (do_sample false means temperature 0).
        stop_token_ids replace the model's own end tokens. seed None draws one; it is in the output.
        draft=False is ordinary decoding by the same engine; learn=False leaves the drafter as it is.
        max_new_tokens None means as many as the model's context allows.

        The law of every row is plain sampling's. With the `match` verifier a row's tokens are a function of
        (seed, row) alone; with ratio rules also of its drafts, and so, while the drafter learns, of its batch mates.
        """
        params = SamplingParams.from_config(
            self.model.generation_config,
            temperature=temperature,
            top_k=top_k,
            top_p=top_p,
            min_p=min_p,
            repetition_penalty=repetition_penalty,
            logits_processors=tuple(logits_processors),
        )
        token_ids = self._prompt_ids(prompts, input_ids)
        limit = self._length_limit(token_ids, max_new_tokens)
        if not isinstance(num_return_sequences, int) or num_return_sequences < 1:
            raise ValueError(
                f"num_return_sequences must be an integer >= 1, got {num_return_sequences!r}; ask for at least one row"
            )
        num_rows = len(token_ids) * num_return_sequences
        if streamer is not None and num_rows != 1:
            raise ValueError(f"a streamer shows one row, got {num_rows}; leave streamer out or generate one row")
        _check_room(self.model, num_rows, max(map(len, token_ids)))
        stats = Stats(num_prompt_tokens=sum(len(prompt) for prompt in token_ids))
        problems = [self._problem_number(prompt) for prompt in token_ids]
        with stats.timed_wall():
            run = Run(
                rows=_new_rows(token_ids, problems, num_return_sequences, limit),
                law=TargetLaw(params),
                stop=StopRule(
                    self._end_ids(stop_token_ids),
                    stop_strings=(stop,) if isinstance(stop, str) else tuple(stop),
                    tokenizer=self.tokenizer,
                ),
                seed=secrets.randbits(63) if seed is None else _checked_seed(seed),
                problems=problems,
                stats=stats,
                is_drafting=draft,
                is_learning=learn and draft,
                streamer=streamer,
            )
            self._decode(run, token_ids, num_return_sequences)
        return self._output(run, num_return_sequences)

    @torch.inference_mode()
    def measure_cost(self, *, num_rows: int = 1, length: int = 1024, most_tokens: int | None = None) -> StepCost:
        """Time steps of several sizes for `num_rows` rows behind `length` tokens each, up to `most_tokens` tokens in
        all (default: what 32 nodes per row on a CPU, the largest captured step elsewhere, come to).

        Takes seconds. `wrap(costs=CostTable((cost, ...)))` takes the results; save the table for runs that are to
        repeat.
        """
        if most_tokens is None:
            most_tokens = 32 * num_rows if self.model.device.type == "cpu" else 256
        if min(num_rows, length) < 1 or most_tokens <= num_rows:
            raise ValueError(
                f"num_rows and length must be at least 1 and most_tokens above num_rows, got {num_rows}, {length} and "
                f"{most_tokens}; a step holds one token per row and its drafts"
            )
        prompt = np.arange(length + 1, dtype=np.int32) % text_config(self.model).vocab_size
        params = SamplingParams.from_config(self.model.generation_config)
        rows = _new_rows([prompt], [0], num_rows, 1)
        run = Run(
            rows=rows, law=TargetLaw(params), stop=StopRule([]), seed=0, problems=[0], stats=Stats(),
            is_drafting=False, is_learning=False, streamer=None,
        )  # fmt: skip
        with tree_attention(self.model):
            run.step = self._new_step(run, self._prefill(run, [prompt]), [0] * num_rows)

        def run_step(batch: DraftBatch) -> None:
            run.step.prepare(batch, rows, _noise(run))
            run.step.launch()
            run.step.verdicts()

        with run.step.attention():
            return measure_cost(run_step, num_rows=num_rows, length=length, most_tokens=most_tokens)

    def _problem_number(self, prompt: np.ndarray) -> int:
        """A prompt keeps its number over calls: what its samples showed is evidence for the next ones."""
        return self._problems.setdefault(blake2b(prompt.tobytes(), digest_size=16).digest(), len(self._problems))

    def _decode(self, run: Run, prompts: list[np.ndarray], num_return_sequences: int) -> None:
        everyone = list(run.rows)
        if run.streamer is not None:
            run.streamer.put(torch.from_numpy(prompts[0].astype(np.int64))[None])
        with run.stats.timed_prefill(), tree_attention(self.model):
            cache = self._prefill(run, prompts)
            sources = [row.index // num_return_sequences for row in run.rows]
            run.step = self._new_step(run, cache, sources)
        with run.step.attention():
            while run.rows:
                self._step(run)
        self._learn(run)
        run.rows = everyone
        if run.streamer is not None:
            run.streamer.end()

    def _prefill(self, run: Run, prompts: list[np.ndarray]) -> TreeCache:
        """Every prompt but its last token, which becomes the pending one, in a cache row of its own."""
        cache = TreeCache(num_rows=len(prompts), room=max(map(len, prompts)) + 1)
        for index, prompt in enumerate(prompts):
            for start in range(0, len(prompt) - 1, PROMPT_CHUNK):
                chunk = prompt[start : min(start + PROMPT_CHUNK, len(prompt) - 1)]
                plan = StepPlan.for_prompt(chunk, start, row=index, device=self.model.device)
                run_plan(self.model, cache, plan, logits_to_keep=1)
            if run.is_learning:
                self.drafter.learn_prompt(prompt, problem=run.problems[index])
        return cache

    def _new_step(self, run: Run, cache: TreeCache, sources: list[int]) -> Step:
        """The captured step where the backend has one and it serves this call, else the eager one."""
        if self.backend.name == "triton" and not run.law.looks_back:
            self._captured = captured_step(
                self._captured, self.model, cache, sources,
                law=run.law, verifier=self.verifier, rows=run.rows, fusion=self.fusion,
            )  # fmt: skip
            return self._captured
        cache.fan_out(sources)
        num_best = self.drafter.row_size if run.is_learning else 0
        return EagerStep(self.model, cache, run.law, self.verifier, num_best=num_best)

    def _step(self, run: Run) -> None:
        """One decoding step of all live rows."""
        stats, step = run.stats, run.step
        with stats.timed("draft"):
            batch = self._draft(run)
            step.prepare(batch, run.rows, _noise(run))
        with stats.timed("forward"):
            step.launch()
        with stats.timed("learn"):
            self._learn(run)  # what the step before showed, where the device is busy by itself meanwhile
        with stats.timed("forward" if step.learns_late else "verify"):
            verdicts = step.verdicts()
        run.lesson = Lesson(batch, [row.history[:-1] for row in run.rows], _problems(run.rows))
        with stats.timed("commit"):
            self._commit(run, batch, verdicts)
        if not step.learns_late:
            with stats.timed("learn"):
                self._learn(run)

    def _draft(self, run: Run) -> DraftBatch:
        if not run.is_drafting:
            return DraftBatch.concatenate([DraftTree.pending(int(row.history[-1])) for row in run.rows])
        batch = self.drafter.draft(
            [row.history for row in run.rows],
            seed=run.seed,
            rows=_row_indices(run.rows),
            steps=_step_counts(run.rows),
            problems=_problems(run.rows),
            max_depths=np.array([row.num_remaining - 1 for row in run.rows], dtype=np.int64),
            is_greedy=run.law.params.is_greedy,
        )
        if DEBUG:
            batch.check()
        return batch

    def _commit(self, run: Run, batch: DraftBatch, verdicts: Verdicts) -> None:
        """Append what was kept to every row, up to its end, move its keys together, and let ended rows go."""
        kept_nodes: list[np.ndarray] = []
        lengths = _cached_lengths(run.rows)
        for place, (row, accepted) in enumerate(zip(run.rows, verdicts.accepted, strict=True)):
            nodes = batch.offsets[place] + accepted
            tokens = [*batch.token_ids[nodes].tolist(), int(verdicts.next_tokens[place])]
            emitted, row.finish_reason = run.stop.cut(row, tokens)
            row.extend(tokens[:emitted])
            kept_nodes.append(nodes[:emitted])
            run.stats.num_tokens += emitted
            if run.streamer is not None:
                run.streamer.put(torch.tensor(tokens[:emitted]))
        live = np.flatnonzero([row.finish_reason is None for row in run.rows])
        run.step.keep(live, lengths[live], [verdicts.accepted[place] for place in live])
        run.stats.count_step(batch, np.concatenate(kept_nodes))
        self._drop_finished(run)

    def _drop_finished(self, run: Run) -> None:
        """Fill the places of ended rows from the end, so that live rows stay consecutive in the cache."""
        for place in range(len(run.rows) - 1, -1, -1):
            if run.rows[place].finish_reason is None:
                continue
            last = run.rows.pop()
            if place < len(run.rows):
                run.rows[place] = last
                run.step.drop(len(run.rows), place, last.num_cached)

    def _learn(self, run: Run) -> None:
        """Teach the drafter the target's best tokens at every scored node of the step that `run.lesson` holds."""
        lesson, run.lesson = run.lesson, None
        if lesson is None or not run.is_learning or self.drafter.row_size == 0:
            return
        row_ids, row_probabilities = run.step.best_rows(self.drafter.row_size)
        self.drafter.learn(lesson.batch, lesson.histories, row_ids, row_probabilities, problems=lesson.problems)

    def _output(self, run: Run, num_return_sequences: int) -> GenerationOutput:
        token_ids = [row.new_token_ids.tolist() for row in run.rows]
        texts = None
        if self.tokenizer is not None:
            texts = self.tokenizer.batch_decode(token_ids, skip_special_tokens=True)
        return GenerationOutput(
            token_ids=token_ids,
            texts=texts,
            finish_reasons=[row.finish_reason for row in run.rows],
            num_return_sequences=num_return_sequences,
            seed=run.seed,
            stats=run.stats,
        )

    def _prompt_ids(self, prompts: object, input_ids: object) -> list[np.ndarray]:
        """int32 arrays, one per prompt, from exactly one of the two arguments."""
        if (prompts is None) == (input_ids is None):
            raise ValueError("give exactly one of prompts and input_ids, got both or neither")
        if prompts is not None:
            if self.tokenizer is None:
                raise ValueError("text prompts need a tokenizer, got none; pass tokenizer= to stand.wrap or input_ids=")
            texts = [prompts] if isinstance(prompts, str) else list(prompts)
            sequences = [self.tokenizer(text)["input_ids"] for text in texts]
        else:
            sequences = _as_sequences(input_ids)
        if not sequences:
            raise ValueError("at least one prompt is needed, got an empty list")
        vocabulary_size = text_config(self.model).vocab_size
        return [_checked_prompt(sequence, vocabulary_size) for sequence in sequences]

    def _length_limit(self, prompts: list[np.ndarray], max_new_tokens: int | None) -> int:
        """New tokens per row that fit into the model's context."""
        longest, context = max(map(len, prompts)), max_positions(self.model)
        if context is not None and longest >= context:
            raise ValueError(
                f"a prompt must be shorter than the model's context of {context} tokens, got {longest}; shorten it"
            )
        if max_new_tokens is None:
            if context is None:
                raise ValueError("max_new_tokens must be given, got None, and the model's configuration has no limit")
            return context - longest
        if not isinstance(max_new_tokens, int) or max_new_tokens < 1:
            raise ValueError(f"max_new_tokens must be an integer >= 1, got {max_new_tokens!r}; ask for at least one")
        if context is not None and longest + max_new_tokens > context:
            raise ValueError(
                f"prompt and new tokens must fit into the model's context of {context}, got {longest} + "
                f"{max_new_tokens}; lower max_new_tokens to {context - longest} or leave it out"
            )
        return max_new_tokens

    def _end_ids(self, stop_token_ids: Sequence[int] | None) -> list[int]:
        if stop_token_ids is not None:
            return [int(token) for token in stop_token_ids]
        end = self.model.generation_config.eos_token_id
        if end is None and self.tokenizer is not None:
            end = self.tokenizer.eos_token_id
        return [] if end is None else [end] if isinstance(end, int) else list(end)


def _new_rows(prompts: list[np.ndarray], problems: list[int], num_return_sequences: int, limit: int) -> list[Row]:
    owners = np.repeat(np.arange(len(prompts)), num_return_sequences).tolist()
    return [Row(row, prompts[owner], limit, problem=problems[owner]) for row, owner in enumerate(owners)]


def _noise(run: Run) -> VerifierNoise:
    return VerifierNoise(
        seed=run.seed,
        rows=_row_indices(run.rows),
        steps=_step_counts(run.rows),
        positions=_cached_lengths(run.rows) + 1,
    )


def _row_indices(rows: list[Row]) -> np.ndarray:
    return np.array([row.index for row in rows], dtype=np.int64)


def _problems(rows: list[Row]) -> np.ndarray:
    return np.array([row.problem for row in rows], dtype=np.int64)


def _step_counts(rows: list[Row]) -> np.ndarray:
    return np.array([row.num_steps for row in rows], dtype=np.int64)


def _cached_lengths(rows: list[Row]) -> np.ndarray:
    return np.array([row.num_cached for row in rows], dtype=np.int64)


def _as_sequences(input_ids: object) -> list[object]:
    """A tensor [L] or [B, L], a list of ids or a list of lists, as a list of id sequences."""
    if isinstance(input_ids, torch.Tensor):
        return list(torch.atleast_2d(input_ids).cpu().numpy())
    sequences = list(input_ids)
    return [sequences] if sequences and isinstance(sequences[0], (int, np.integer)) else sequences


def _checked_prompt(sequence: object, vocabulary_size: int) -> np.ndarray:
    prompt = np.asarray(sequence, dtype=np.int64)
    if prompt.ndim != 1 or len(prompt) == 0:
        raise ValueError(
            f"a prompt must hold at least one token, got shape {prompt.shape}; start with the model's bos token or text"
        )
    if prompt.min() < 0 or prompt.max() >= vocabulary_size:
        raise ValueError(
            f"prompt tokens must be in [0, {vocabulary_size}), got {prompt.min()} .. {prompt.max()}; "
            "use the tokenizer that belongs to the model"
        )
    return prompt.astype(np.int32)


def _checked_seed(seed: object) -> int:
    if not isinstance(seed, int) or not 0 <= seed < 2**63:
        raise ValueError(f"seed must be an integer in [0, 2**63), got {seed!r}")
    return seed


def _fingerprint(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None) -> bytes:
    """Names the vocabulary that token ids mean something in; without a tokenizer, its size alone."""
    if tokenizer is not None:
        return vocabulary_fingerprint(tokenizer.get_vocab())
    return vocabulary_fingerprint({"vocab_size": text_config(model).vocab_size})


def _check_fingerprint(lookup: BlendedLookup | LookupTree, fingerprint: bytes) -> None:
    if lookup.fingerprint and lookup.fingerprint != fingerprint:
        raise ValueError(
            f"a lookup tree must have been trained with this tokenizer (vocabulary {fingerprint.hex()[:12]}), got one "
            f"for vocabulary {lookup.fingerprint.hex()[:12]}; train or load the tree that belongs to this model"
        )


def _check_room(model: PreTrainedModel, num_rows: int, length: int) -> None:
    """Refuse, before any work, prompts whose copies alone exceed the memory."""
    config = text_config(model)
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    element = torch.finfo(model.dtype).bits // 8
    check_fits(2 * config.num_hidden_layers * heads * size * element * num_rows * length, model.device)
