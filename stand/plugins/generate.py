"""transformers' `custom_generate`: `model.generate(..., custom_generate=stand_generate)` decodes by the engine.

transformers prepares a call and hands over what it has made. The engine makes processors and limits of its own from
the same config, for every prompt without its padding, so of the prepared ones only the caller's own are passed on.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Mapping
from functools import partial

from stand.extra import MissingExtraError, has_engine

if not has_engine():
    raise MissingExtraError("stand.plugins.generate")

import torch
from transformers import (
    GenerationConfig,
    GenerationMixin,
    LogitsProcessorList,
    MinLengthLogitsProcessor,
    PreTrainedModel,
    StoppingCriteriaList,
    StopStringCriteria,
)
from transformers.generation import GenerateDecoderOnlyOutput
from transformers.generation.streamers import BaseStreamer

from stand.argument_checks import check_count
from stand.engine import Engine
from stand.forward.cache.cache_argument import CACHE_ARGUMENTS
from stand.forward.ranks import synced
from stand.generation_settings import PREPARED
from stand.media.media import TYPES, media_arguments
from stand.output import GenerationOutput
from stand.plugins.own_processors import own_criteria, own_processors
from stand.wrapping import wrap

ATTRIBUTE = "_stand_engine"  # of a model: its `_Kept`
MADE_BY_GENERATE = {"attention_mask", "position_ids", *CACHE_ARGUMENTS, "logits_to_keep", "use_cache"}
NOT_HANDED_OVER = {  # arguments that `generate` keeps from a function: why only None is served
    "assistant_model": "the engine drafts by its own drafter",
    "negative_prompt_ids": "guidance needs a second forward over every node",
    "negative_prompt_attention_mask": "guidance needs a second forward over every node",
}


class _AfterPrompt(BaseStreamer):
    """A streamer that `generate` has shown the prompt."""

    def __init__(self, streamer: BaseStreamer):
        self._streamer, self._is_prompt = streamer, True

    def put(self, value: torch.Tensor) -> None:
        if not self._is_prompt:
            self._streamer.put(value)
        self._is_prompt = False

    def end(self) -> None:
        self._streamer.end()


class _Kept:
    """An engine in an attribute of its model: it lives as long as the model, and copies of the model start without."""

    def __init__(self, engine: Engine | None = None, *, is_given: bool = False):
        self.engine = engine
        self.is_given = is_given  # by `use_engine`
        self.place = None if engine is None else _place(engine.model)

    def __deepcopy__(self, memo: dict) -> _Kept:
        return _Kept()

    def __reduce__(self) -> tuple:
        return _Kept, ()


def engine_of(model: PreTrainedModel) -> Engine:
    """The engine that `stand_generate` uses for this model. It is made when first asked for, and made again with
    the same lookup after the model has moved. `engine_of(model).lookup.save(path)` saves what it has learned.

    Raises UnsupportedModelError for a model that cannot be served exactly, ValueError for a model that has moved
    since `use_engine`.
    """
    kept = getattr(model, ATTRIBUTE, None)
    if kept is None or kept.engine is None or kept.engine.model is not model:
        kept = _Kept(wrap(model))
    elif kept.place != _place(model) and kept.is_given:
        raise ValueError(
            f"the model must stay where its engine was made, got it moved from {kept.place} to {_place(model)}; make "
            "another engine and call use_engine again"
        )
    elif kept.place != _place(model):
        kept = _Kept(wrap(model, drafter=kept.engine.lookup))
    setattr(model, ATTRIBUTE, kept)
    return kept.engine


def use_engine(engine: Engine) -> None:
    """Let `stand_generate` use this engine for its model: made by `stand.wrap`, with a drafter and rule of choice."""
    if not isinstance(engine, Engine):
        raise ValueError(f"engine must be an Engine, got {type(engine).__name__}; make one with stand.wrap(model)")
    setattr(engine.model, ATTRIBUTE, _Kept(engine, is_given=True))


def draft_always(model: PreTrainedModel) -> None:
    """From now on every call of `model.generate` decodes by the engine, whoever makes it: a trainer, say, between the
    steps of its optimiser. Of a model in peft's, give the model inside. `del model.generate` ends it.

    Raises ValueError for what is no model of transformers."""
    if not isinstance(model, PreTrainedModel):
        raise ValueError(f"model must be a PreTrainedModel, got {type(model).__name__}; give the model inside")
    model.generate = partial(generate, model=model)


def stand_generate(
    model: PreTrainedModel,
    input_ids: torch.Tensor,
    logits_processor: LogitsProcessorList,
    stopping_criteria: StoppingCriteriaList,
    generation_config: GenerationConfig,
    *,
    stand_seed: int | None = None,
    stand_streamer: BaseStreamer | None = None,
    stand_logprobs: int | None = None,
    stand_logprobs_mode: str | None = None,
    **model_kwargs: object,
) -> torch.Tensor | GenerateDecoderOnlyOutput:
    """For `model.generate(**inputs, custom_generate=stand_generate, ...)`: the result that `generate` returns.

    input_ids [B * n, L], left-padded, n = num_return_sequences; so are the rows of the result [B * n, L + longest],
    with padding tokens after a row's end. With return_dict_in_generate it is in `sequences`, and `stats` says what
    the drafts were worth; output_logits and output_scores give `logits` and `scores`, which hold zeros behind a
    row's end.
    stand_seed: seed of a sampled call; None draws it from torch's generator, so `torch.manual_seed` decides it.
    stand_streamer: a streamer for one row, as `streamer` is.
    stand_logprobs, stand_logprobs_mode: as logprobs and logprobs_mode of `Engine.generate`, for the result's
    `logprobs`, one of every row.

    Raises ValueError by name for an argument that cannot be served exactly.
    """
    _refuse_own_inputs(model)
    if input_ids.ndim != 2:
        raise ValueError(f"input_ids must be [rows, tokens], got {list(input_ids.shape)}; pass one row per prompt")
    shown = _shown(model)
    _refuse_unserved(input_ids, model_kwargs, shown)
    is_told = any(getattr(criterion, "wants_logprobs", False) for criterion in stopping_criteria)
    if stand_logprobs is None and stand_logprobs_mode is not None:
        raise ValueError(
            f"stand_logprobs_mode needs stand_logprobs, got {stand_logprobs_mode!r} alone; give stand_logprobs=0"
        )
    if stand_logprobs is not None and not (generation_config.return_dict_in_generate or is_told):
        raise ValueError(
            f"stand_logprobs needs return_dict_in_generate=True, got {stand_logprobs!r} without it; pass both"
        )
    streamer = _streamer(stand_streamer)
    mask = model_kwargs.get("attention_mask")
    check_count("num_return_sequences", generation_config.num_return_sequences, "ask for at least one row")
    num_rows, width = input_ids.shape
    num_samples = generation_config.num_return_sequences or 1
    allowed = _of_caller("prefix_allowed_tokens_fn")
    processors = own_processors(model, input_ids, logits_processor, generation_config, model_kwargs, allowed)
    criteria = own_criteria(model, stopping_criteria, generation_config)
    pad_id = _padding(generation_config, num_rows, criteria)
    if stand_seed is None:
        stand_seed = int(torch.randint(2**62, ())) if generation_config.do_sample else 0
    prompts = input_ids[::num_samples]
    mask = torch.ones_like(prompts) if mask is None else mask[::num_samples]
    with synced(model, _of_caller("synced_gpus")):
        output = engine_of(model).generate(
            input_ids={"input_ids": prompts, "attention_mask": mask, **shown},
            generation_config=_for_single_rows(generation_config, width, processors),
            logits_processors=processors,
            prefix_allowed_tokens_fn=allowed,
            stopping_criteria=criteria,
            stop_token_ids=[] if generation_config.eos_token_id is None else None,
            seed=stand_seed,
            streamer=streamer,
            logprobs=stand_logprobs,
            logprobs_mode=stand_logprobs_mode,
        )
    return _result(input_ids, output, pad_id, as_dict=generation_config.return_dict_in_generate)


def generate(*given: object, model: PreTrainedModel, **arguments: object) -> torch.Tensor | GenerateDecoderOnlyOutput:
    """What a hub folder's `custom_generate/generate.py` offers: all arguments of `model.generate`, as they were given.

    Here a streamer and stop strings with their tokenizer are served too. A model whose own folder holds it binds
    `model` by name, so that `given` are the arguments of `model.generate` without a name. There another
    `custom_generate` can be given, which is taken instead.
    """
    bound = inspect.signature(GenerationMixin.generate).bind(model, *given, **arguments).arguments
    arguments |= {name: bound[name] for name in bound.keys() - {"self", "kwargs"}}
    other = arguments.pop("custom_generate", None)
    if other is not None:
        return GenerationMixin.generate(model, custom_generate=other, **arguments)
    if arguments.get("cache_implementation") == "paged":
        raise ValueError(
            "cache_implementation must not be 'paged' here, got it: transformers then decodes by its continuous "
            "batching and asks no custom_generate; leave it out"
        )
    for name, reason in NOT_HANDED_OVER.items():
        if arguments.pop(name, None) is not None:
            raise ValueError(f"{name} must be None here, got a value: {reason}; leave it out")
    tokenizer, streamer = arguments.pop("tokenizer", None), arguments.pop("streamer", None)
    givers = [giver for giver in (arguments.get("generation_config"), model.generation_config) if giver is not None]
    set_there = [giver.stop_strings for giver in givers if giver.stop_strings is not None]
    stop = arguments.pop("stop_strings", set_there[0] if set_there else None)
    if set_there:
        arguments["stop_strings"] = None  # a criterion takes their place, else `generate` misses the tokenizer
    if stop is not None:
        if tokenizer is None:
            raise ValueError(f"stop strings need a tokenizer, got {stop!r}; pass tokenizer= to generate")
        given = arguments.get("stopping_criteria")
        arguments["stopping_criteria"] = StoppingCriteriaList([*(given or ()), StopStringCriteria(tokenizer, stop)])
    return GenerationMixin.generate(model, custom_generate=stand_generate, stand_streamer=streamer, **arguments)


def _of_caller(name: str) -> object:
    """An argument of the `generate` that has called: it hands some over to no function."""
    code, frame = inspect.unwrap(GenerationMixin.generate).__code__, inspect.currentframe()
    while frame is not None and frame.f_code is not code:
        frame = frame.f_back
    return None if frame is None else frame.f_locals.get(name)


def _streamer(own: BaseStreamer | None) -> BaseStreamer | None:
    given = _of_caller("streamer")
    if given is None:
        return own
    if own is not None:
        raise ValueError("one streamer can be served, got streamer and stand_streamer; leave stand_streamer out")
    return _AfterPrompt(given)


def _place(model: PreTrainedModel) -> tuple:
    return model.device, model.dtype


def _refuse_own_inputs(model: PreTrainedModel) -> None:
    """What somebody else puts before the tokens, as peft does with learned prompts."""
    maker = getattr(vars(model).get("prepare_inputs_for_generation"), "__self__", model)
    if maker is not model:
        raise ValueError(
            f"the model's inputs must be its own, got those of {type(maker).__name__}, as with a learned prompt: the "
            "engine runs the model on token ids alone; call generate without custom_generate"
        )


def _shown(model: PreTrainedModel) -> dict[str, object]:
    """What the caller's prompt shows, as it was given: `generate` hands it over encoded, and once per sample."""
    given = {name: value for name, value in (_of_caller("kwargs") or {}).items() if value is not None}
    if media_arguments(model).isdisjoint(given):
        return {}
    return {name: value for name, value in given.items() if name in media_arguments(model).union(TYPES)}


def _refuse_unserved(input_ids: torch.Tensor, model_kwargs: Mapping[str, object], shown: Mapping[str, object]) -> None:
    """Arguments of the model's forward beyond those that `generate` makes, what a prompt shows and those with values of
    one's own."""
    known = {*MADE_BY_GENERATE, *shown, *(("mm_encoder_outputs",) if shown else ())}
    for name, value in model_kwargs.items():
        if name not in known and not _says_nothing(name, value):
            raise ValueError(
                f"{name} cannot be given here, got {type(value).__name__}: the engine runs the model on token ids "
                "alone; leave it out, or call model.generate without custom_generate"
            )
    for name, reason in NOT_HANDED_OVER.items():
        if _of_caller(name) is not None:
            raise ValueError(f"{name} must be left out here, got a value: {reason}; call model.generate for it")
    for name in CACHE_ARGUMENTS:
        cache = model_kwargs.get(name)
        if cache is not None and (cache.get_seq_length() > 0 or getattr(cache, "_is_user_defined", False)):
            raise ValueError(
                f"{name} must be left out here, got a cache: the engine keeps keys and values in its own; "
                "pass the whole text as input_ids"
            )
    mask, positions = model_kwargs.get("attention_mask"), model_kwargs.get("position_ids")
    if shown:
        positions = (_of_caller("kwargs") or {}).get("position_ids")
    if positions is not None and positions.shape[-1] != input_ids.shape[1]:  # `generate` counts them by the mask
        raise ValueError(
            f"attention_mask and position_ids must be as long as input_ids, got {positions.shape[-1]} for "
            f"{input_ids.shape[1]} tokens; pass both as the tokenizer gives them"
        )
    if positions is not None:
        ones = torch.ones_like(input_ids) if mask is None else mask.long()
        counted = (ones.cumsum(-1) - 1).clamp(min=0)  # positions may be several of a token, where images count
        if not ((positions == counted) | ~ones.bool()).all():
            raise ValueError("position_ids must count a row's tokens from 0, got others; leave position_ids out")


def _says_nothing(name: str, value: object) -> bool:
    """Whether it tells the forward nothing: types that are all 0, as text has them, and the `mm_encoder_outputs` of no
    image that `generate` gives multimodal models."""
    if name in TYPES and value is not None:
        return not torch.as_tensor(value).any()
    return value is None or value is False or (isinstance(value, Mapping) and not value)


def _padding(config: GenerationConfig, num_rows: int, criteria: list) -> int | None:
    """The padding token, which rows of different lengths need."""
    prepared = getattr(config, "_pad_token_tensor", None)
    pad_id = config.pad_token_id if prepared is None else int(prepared)
    if pad_id is None and num_rows > 1 and (criteria or config.max_time is not None):
        raise ValueError("rows that end apart need a padding token, got none; pass pad_token_id=")
    return pad_id


def _for_single_rows(config: GenerationConfig, width: int, processors: list) -> GenerationConfig:
    """The config with lengths as new tokens: prepared ones count the padding, which the engine takes off."""
    config = copy.deepcopy(config)
    setattr(config, PREPARED, True)
    if not config.return_dict_in_generate:  # transformers returns none then
        config.output_scores = config.output_logits = None
    config.num_return_sequences = config.num_return_sequences or 1
    config.max_new_tokens, config.max_length = config.max_length - width, None
    least, config.min_length = (config.min_length or 0) - width, None
    is_replaced = any(type(processor) is MinLengthLogitsProcessor for processor in processors)
    if least > (config.min_new_tokens or 0) and not is_replaced:
        config.min_new_tokens = least
    if isinstance(config.min_new_tokens, int) and config.min_new_tokens > config.max_new_tokens:  # it has warned of it
        config.min_new_tokens = config.max_new_tokens
    return config


def _result(
    input_ids: torch.Tensor, output: GenerationOutput, pad_id: int | None, *, as_dict: bool | None
) -> torch.Tensor | GenerateDecoderOnlyOutput:
    new = output.padded(0 if pad_id is None else pad_id).to(input_ids.device)
    sequences = torch.cat([input_ids, new], dim=1)
    if not as_dict:
        return sequences
    told = {"logits": output.logits, "scores": output.scores}
    tensors = {
        name: tuple(values.to(input_ids.device) for values in by_position)
        for name, by_position in told.items()
        if by_position is not None
    }
    result = GenerateDecoderOnlyOutput(sequences=sequences, **tensors)
    result.stats = output.stats
    if output.logprobs is not None:
        result.logprobs = output.logprobs
    return result
