"""The public door: `wrap` makes an engine of a model, a drafter and a verifier; the engine generates."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from hashlib import blake2b

import numpy as np
import torch
from transformers import (
    GenerationConfig,
    LogitsProcessor,
    LogitsProcessorList,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    StoppingCriteria,
    StoppingCriteriaList,
)
from transformers.generation.streamers import BaseStreamer

from stand.backend import Backend, choose_backend
from stand.call import Call
from stand.drafters.blended import BlendedDrafter
from stand.drafters.drafter import Drafter, LookupDrafter
from stand.drafters.fixed_shape import FixedShapeDrafter
from stand.drafters.step_cost import StepCost, measure_cost
from stand.forward.model import prefill, text_config
from stand.forward.self_check import check_model
from stand.forward.tree_attention import exclusive, tree_attention
from stand.forward.tree_cache import TreeCache, check_fits
from stand.generation_settings import GenerationSettings
from stand.output import GenerationOutput
from stand.prompts import PromptReader
from stand.row import LiveRows, Row
from stand.seeds import call_seed, checked_seed
from stand.step import StepStart
from stand.stop import StopRule, as_strings
from stand.text_pieces import TextPieces
from stand.trees import BlendedLookup, DraftBatch, LookupTree, vocabulary_fingerprint
from stand.verifiers import Verifier, VerifierNoise, get_verifier


def wrap(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase | None = None,
    *,
    drafter: Drafter | BlendedLookup | LookupTree | None = None,
    verifier: str | Verifier = "traversal",
    backend: str = "auto",
    fuse: bool = True,
) -> Engine:
    """Make an engine around an unmodified transformers model, where it is and as it is.

    drafter: who guesses. A lookup means its default drafter: `BlendedDrafter(lookup)`, or `FixedShapeDrafter(lookup)`
    for a `LookupTree`. None: `BlendedDrafter()`, which starts with an empty lookup. One drafter serves one model.
    verifier: a name from `stand.verifiers`, or a `Verifier`. A rule that changes the output's law must be passed as an
    object, such as `TypicalVerifier()`: that is consent.
    backend: "triton" (kernels, the step as one graph), "sdpa" (any device) or "auto": triton on a GPU where it
    serves the model. `engine.backend` says which and why.
    fuse: in captured steps, run merged projections and fused norms, feed-forward blocks and attentions wherever they
    are proven equal on the loaded weights (`engine.backend.fusion.report`). Merging gives the projections' parameters
    new addresses; values, names and objects stay.

    Raises UnsupportedModelError for a model that cannot be served exactly, ValueError for anything else that
    does not fit. Weights, attention implementation and mode of the model stay as they are.
    """
    rule = _checked_rule(verifier)
    drafter = _checked_drafter(drafter)
    check_model(model)
    drafter.attach(model, _fingerprint(model, tokenizer))
    typical = drafter.typical_draft()
    if typical is not None:
        rule.check_draft(typical)
    chosen = choose_backend(model, rule, backend, fuse=fuse)
    return Engine(model, tokenizer, drafter=drafter, verifier=rule, backend=chosen)


class Engine:
    """Decodes many rows at once; made by `stand.wrap`. One model runs one call at a time.

    It switches the model's attention while it runs and gives it back afterwards.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase | None,
        *,
        drafter: Drafter,
        verifier: Verifier,
        backend: Backend,
    ):
        self.model = model
        self.tokenizer = tokenizer
        self.drafter = drafter
        self.verifier = verifier
        self.backend = backend
        self._problems: dict[bytes, int] = {}  # digest of every prompt so far: its number

    @property
    def lookup(self) -> BlendedLookup | LookupTree:
        """The lookup that drafts and learns; save it with `engine.lookup.save(path)`."""
        if not isinstance(self.drafter, LookupDrafter):
            raise AttributeError(f"{type(self.drafter).__name__} has no lookup; read engine.drafter")
        return self.drafter.lookup

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
        **settings: object,
    ) -> GenerationOutput:  # fmt: skip
        """Sample `num_return_sequences` continuations of every prompt, all rows in one batch.

        prompts: a text, a chat (a list of messages), or several; also ids, as input_ids takes them.
        input_ids: a list, tensor or array of ids, one prompt or several, or a tokenizer's output with its mask.
        attention_mask: 0 at padding, which is taken off. Without it the model's padding token is padding in tensors.

        Settings are resolved as transformers resolves them: what is given here (settings: any other field of
        `GenerationConfig`), then generation_config, then `model.generation_config`, then transformers' defaults, among
        them do_sample=False and top_k=50. Two rules are added: a temperature above 0 given here switches sampling on,
        and temperature 0 is greedy. The law is that of transformers' own processors in their order, logits_processors
        where transformers puts them; one that keeps a state sees a row as if it were decoded alone. What cannot be
        honoured is refused by name (stand/generation_settings.py).

        stop adds to the config's stop_strings; stop_token_ids replace its end tokens. stopping_criteria are asked
        token by token, one row at a time. Without max_new_tokens and max_length a row may fill the model's context,
        where transformers ends it after 20 tokens. seed None draws one; it is in the output.
        draft=False is ordinary decoding by the same engine; learn=False leaves the drafter as it is.

        The law of every row is plain sampling's, in every call, also when calls share a seed (stand/seeds.py). A fresh
        engine repeats a call with the same seed and inputs exactly. With the verifiers `match` and `coupled` a row's
        tokens are a function of (seed, row) alone; with ratio rules also of its drafts, and so, while the drafter
        learns, of its batch mates and of earlier calls.
        """
        call, num_samples = self._new_call(
            prompts, on_commit=None if streamer is None else _into(streamer),
            input_ids=input_ids, attention_mask=attention_mask, generation_config=generation_config,
            num_return_sequences=num_return_sequences, max_new_tokens=max_new_tokens, temperature=temperature,
            top_k=top_k, top_p=top_p, min_p=min_p, repetition_penalty=repetition_penalty,
            logits_processors=logits_processors, stop=stop, stop_token_ids=stop_token_ids,
            stopping_criteria=stopping_criteria, seed=seed, draft=draft, learn=learn, **settings,
        )  # fmt: skip
        if streamer is not None:
            _check_streamed(call)
            streamer.put(torch.from_numpy(call.rows[0].history.astype(np.int64))[None])
        call.run()
        if streamer is not None:
            streamer.end()
        return self._output(call, num_samples)

    def stream(self, prompts: object = None, **settings: object) -> Iterator[tuple[int, str]]:
        """Yield (row, piece of text) as tokens are committed, any number of rows; takes what `generate` takes but
        streamer. The pieces of a row, joined, are its text. Between two pieces the model is free for other work.

        Raises ValueError without a tokenizer, and for an argument that `generate` does not take.
        """
        if self.tokenizer is None:
            raise ValueError("streaming text needs a tokenizer, got none; pass tokenizer= to stand.wrap")
        committed: list[tuple[int, str]] = []
        texts: dict[int, TextPieces] = {}

        def collect(row: Row, token_ids: list[int]) -> None:
            pieces = texts.setdefault(row.index, TextPieces(self.tokenizer))
            committed.append((row.index, pieces.add(token_ids, is_last=row.finish_reason is not None)))

        call, _ = self._new_call(prompts, on_commit=collect, **settings)
        return _stream(call, committed)

    @torch.inference_mode()
    def measure_cost(self, *, num_rows: int = 1, length: int = 1024, most_tokens: int | None = None) -> StepCost:
        """Time steps of several sizes for `num_rows` rows after `length` tokens each, up to `most_tokens` tokens in
        all (default: what 32 nodes per row on a CPU, the largest captured step elsewhere, come to).

        Takes seconds. `BlendedDrafter(costs=CostTable((cost, ...)))` takes the results; save the table for runs that
        are to repeat.
        """
        if most_tokens is None:
            most_tokens = 32 * num_rows if self.model.device.type == "cpu" else 256
        if min(num_rows, length) < 1 or most_tokens <= num_rows:
            raise ValueError(
                f"num_rows and length must be at least 1 and most_tokens above num_rows, got {num_rows}, {length} and "
                f"{most_tokens}; a step holds one token per row and its drafts"
            )
        prompt = np.arange(length + 1, dtype=np.int32) % text_config(self.model).vocab_size
        rows = [Row(row, prompt, 1) for row in range(num_rows)]
        live = LiveRows.of(rows)
        noise = VerifierNoise(seed=0, rows=live.indices, steps=live.steps, positions=live.lengths + 1)
        settings = GenerationSettings.resolve(self.model, num_return_sequences=num_rows)
        law = settings.law(self.model, [prompt], [1])
        with exclusive(self.model):
            with tree_attention(self.model):
                cache = TreeCache(num_rows=1, room=length + 1)
                prefill(self.model, cache, prompt[:-1], row=0)
                start = StepStart(cache, [0] * num_rows, rows, law, self.verifier, num_top=0)
                step = self.backend.new_step(start)

            def run_step(batch: DraftBatch) -> None:
                step.forward(batch, live, noise)
                step.verify()

            with step.attention():
                return measure_cost(run_step, num_rows=num_rows, length=length, most_tokens=most_tokens)

    def _new_call(
        self,
        prompts: object,
        *,
        on_commit: Callable[[Row, list[int]], None] | None,
        input_ids: object = None,
        attention_mask: object = None,
        generation_config: GenerationConfig | None = None,
        logits_processors: object = None,
        stop: str | Sequence[str] | None = None,
        stop_token_ids: object = None,
        stopping_criteria: object = None,
        seed: int | None = None,
        draft: bool = True,
        learn: bool = True,
        **settings: object,
    ) -> tuple[Call, int]:
        """A call that has not begun, and its samples per prompt; everything that does not fit raises before any
        work."""
        resolved = GenerationSettings.resolve(
            self.model,
            generation_config,
            end_ids=stop_token_ids,
            default_end=None if self.tokenizer is None else self.tokenizer.eos_token_id,
            **settings,
        )
        num_samples = resolved.num_return_sequences
        token_ids = self._reader(resolved).read(prompts, input_ids, attention_mask=attention_mask)
        limits = resolved.limits(self.model, token_ids)
        _check_room(self.model, len(token_ids) * num_samples, max(map(len, token_ids)))
        seed, is_learning = checked_seed(seed), draft and learn and self.drafter.num_candidates > 0
        call = Call(
            self.model,
            backend=self.backend,
            drafter=self.drafter if draft else None,
            verifier=self.verifier,
            law=resolved.law(self.model, token_ids, limits, logits_processors=logits_processors),
            stop=StopRule(
                resolved.end_ids,
                stop_strings=(*resolved.stop_strings, *as_strings(stop)),
                tokenizer=self.tokenizer,
                criteria=stopping_criteria,
                device=self.model.device,
                max_time=resolved.config.max_time,
            ),
            rows=self._new_rows(token_ids, limits, num_samples),
            seed=seed,
            own_seed=partial(self._own_seed, seed, draft, is_learning),
            is_learning=is_learning,
            on_commit=on_commit,
        )
        return call, num_samples

    def _reader(self, settings: GenerationSettings) -> PromptReader:
        pad_id = settings.config.pad_token_id
        if pad_id is None and self.tokenizer is not None:
            pad_id = self.tokenizer.pad_token_id
        return PromptReader(
            text_config(self.model).vocab_size, tokenizer=self.tokenizer, pad_id=pad_id, end_ids=settings.end_ids
        )

    def _own_seed(self, seed: int, is_drafting: bool, is_learning: bool) -> int:
        """The seed of the own streams of a call that starts now (stand/seeds.py)."""
        return call_seed(seed, self.drafter.start_call(learns=is_learning)) if is_drafting else seed

    def _new_rows(self, prompts: list[np.ndarray], limits: list[int], num_samples: int) -> list[Row]:
        """Prompt-major. A prompt keeps its number over calls: what its samples showed is evidence for the next ones."""
        rows = []
        for prompt, limit in zip(prompts, limits, strict=True):
            digest = blake2b(prompt.tobytes(), digest_size=16).digest()
            problem = self._problems.setdefault(digest, len(self._problems))
            first = len(rows)
            rows += [Row(first + sample, prompt, limit, problem=problem) for sample in range(num_samples)]
        return rows

    def _output(self, call: Call, num_samples: int) -> GenerationOutput:
        token_ids = [row.new_token_ids.tolist() for row in call.rows]
        texts = None
        if self.tokenizer is not None:
            texts = self.tokenizer.batch_decode(token_ids, skip_special_tokens=True)
        return GenerationOutput(
            token_ids=token_ids,
            texts=texts,
            finish_reasons=[row.finish_reason for row in call.rows],
            num_return_sequences=num_samples,
            seed=call.seed,
            stats=call.stats,
        )


@torch.inference_mode()
def _stream(call: Call, committed: list[tuple[int, str]]) -> Iterator[tuple[int, str]]:
    """What `committed` holds after every step of `call`."""
    for _ in call.steps():
        pieces = [(row, text) for row, text in committed if text]
        committed.clear()
        yield from pieces


def _check_streamed(call: Call) -> None:
    if len(call.rows) != 1:
        raise ValueError(f"a streamer shows one row, got {len(call.rows)}; use engine.stream, which shows all rows")


def _into(streamer: BaseStreamer) -> Callable[[Row, list[int]], None]:
    return lambda row, token_ids: streamer.put(torch.tensor(token_ids))


def _checked_rule(verifier: object) -> Verifier:
    rule = verifier if isinstance(verifier, Verifier) else get_verifier(verifier)
    if rule.requires.carries_debts:
        raise ValueError(
            f"the engine's drafters learn and may draft less than asked for, got verifier {rule.name!r}, which needs "
            "one fixed law at every position of its debt; use 'block' on chains or 'traversal'"
        )
    return rule


def _checked_drafter(drafter: object) -> Drafter:
    if drafter is None or isinstance(drafter, BlendedLookup):
        return BlendedDrafter(drafter)
    if isinstance(drafter, LookupTree):
        return FixedShapeDrafter(drafter)
    if not isinstance(drafter, Drafter):
        raise ValueError(
            f"drafter must be a Drafter, a BlendedLookup or a LookupTree, got {type(drafter).__name__}; load a lookup "
            "with stand.BlendedLookup.load(path), or derive your class from stand.Drafter"
        )
    return drafter


def _fingerprint(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None) -> bytes:
    """Names the vocabulary that token ids mean something in; without a tokenizer, its size alone."""
    if tokenizer is not None:
        return vocabulary_fingerprint(tokenizer.get_vocab())
    return vocabulary_fingerprint({"vocab_size": text_config(model).vocab_size})


def _check_room(model: PreTrainedModel, num_rows: int, length: int) -> None:
    """Refuse, before any work, prompts whose copies alone exceed the memory."""
    config = text_config(model)
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    element = torch.finfo(model.dtype).bits // 8
    check_fits(2 * config.num_hidden_layers * heads * size * element * num_rows * length, model.device)
