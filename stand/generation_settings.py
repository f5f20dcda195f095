"""What a call asks for, resolved as transformers resolves it; what the engine cannot honour is refused by name."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from numbers import Integral, Real

import numpy as np
import torch
from transformers import GenerationConfig, LogitsProcessor, PreTrainedModel, WatermarkingConfig

from stand.argument_checks import check_count, check_flags, check_number, check_positive
from stand.forward.devices import input_device
from stand.forward.long_factors import served_positions
from stand.forward.model import longrope_border, text_config
from stand.laws.named_tokens import check_named_tokens
from stand.laws.sampling import SamplingParams, TargetLaw
from stand.texts.stop import as_strings

# Every field of `GenerationConfig` is in exactly one of these five groups; one that is in none is refused if it is set.
LAW = frozenset(  # transformers' own code makes processors of them
    "do_sample temperature top_k top_p min_p top_h typical_p epsilon_cutoff eta_cutoff repetition_penalty "
    "encoder_repetition_penalty no_repeat_ngram_size encoder_no_repeat_ngram_size bad_words_ids min_length "
    "min_new_tokens renormalize_logits forced_bos_token_id forced_eos_token_id remove_invalid_values "
    "exponential_decay_length_penalty suppress_tokens begin_suppress_tokens sequence_bias watermarking_config".split()
)
OF_SAMPLING = (
    "top_k top_p min_p top_h typical_p epsilon_cutoff eta_cutoff".split()
)  # of LAW: without it they do nothing
LIMITS = frozenset("max_length max_new_tokens max_time stop_strings num_return_sequences eos_token_id".split())
BEAMS = "a beam search ranks continuations instead of drawing them"
OTHER_MODE = "it is another way of decoding than sampling and greedy search"
ASSISTED = "the engine drafts by its own drafter"
NOT_KEPT = "the output holds tokens alone"
REFUSED: dict[str, tuple[tuple[object, ...], str]] = {  # name: values that ask for nothing, why others are refused
    "num_beams": ((None, 1), BEAMS),
    "num_beam_groups": ((None, 1), BEAMS),
    "constraints": ((None,), BEAMS),
    "force_words_ids": ((None,), BEAMS),
    "penalty_alpha": ((None, 0), OTHER_MODE),
    "dola_layers": ((None,), OTHER_MODE),
    "guidance_scale": ((None, 1), "it needs a second forward over every node, without the prompt"),
    "token_healing": ((None, False), "it rewrites the prompt's last tokens; pass the prompt that you mean"),
    "use_mtp": ((None, False), ASSISTED),
    "prompt_lookup_num_tokens": ((None,), f"{ASSISTED}; see stand.PromptLookupDrafter"),
    "assistant_early_exit": ((None,), ASSISTED),
    "assistant_ensemble_weight": ((None,), f"it changes the law, and {ASSISTED}"),
    "speculation_type": ((None,), ASSISTED),
    "is_assistant": ((None, False), "the engine's model is the target"),
    "cache_implementation": (
        (None, "dynamic", "static", "hybrid", "sliding_window", "offloaded", "offloaded_static", "hybrid_chunked"),
        "the engine keeps keys and values as the model computes them",
    ),
    "output_attentions": ((None, False), NOT_KEPT),
    "output_hidden_states": ((None, False), NOT_KEPT),
}
KEPT = frozenset("output_scores output_logits".split())  # told of every new token, see stand/laws/kept_scores.py
SPECIAL = frozenset("eos_token_id pad_token_id bos_token_id decoder_start_token_id".split())  # made tensors beside LAW
WITHOUT_EFFECT = frozenset(  # on tokens here: other modes' details, ways to compute, tokens that the engine never adds
    "early_stopping length_penalty diversity_penalty low_memory num_assistant_tokens num_assistant_tokens_schedule "
    "assistant_confidence_threshold max_matching_ngram_size assistant_lookbehind target_lookbehind use_cache "
    "cache_config max_cache_len prefill_chunk_size compile_config disable_compile continuous_batching_config "
    "return_dict_in_generate pad_token_id bos_token_id decoder_start_token_id transformers_version".split()
)
FLAGS = ("do_sample", "remove_invalid_values", "renormalize_logits")
NGRAMS = ("no_repeat_ngram_size", "encoder_no_repeat_ngram_size")
LONGEST_NGRAM = 1 << 16  # transformers makes so many lists of the prompt
PREPARED = "_stand_prepared"  # of a config that was filled already: what is None there was given as None
FRACTIONS = frozenset(  # settings for which transformers asks for a float
    "temperature top_p min_p top_h typical_p epsilon_cutoff eta_cutoff repetition_penalty encoder_repetition_penalty "
    "max_time".split()
)


@dataclass(frozen=True, slots=True)
class GenerationSettings:
    """One call's generation config, complete, checked, and with the tokens that end its rows."""

    config: GenerationConfig
    end_ids: tuple[int, ...] = ()
    has_max_length: bool = False  # whether anyone set it; transformers fills it in otherwise

    @classmethod
    def resolve(
        cls,
        model: PreTrainedModel,
        config: GenerationConfig | None = None,
        end_ids: object = None,
        default_end: int | None = None,
        /,
        **given: object,
    ) -> GenerationSettings:
        """Settings that are given, then those of `config`, then the model's, then transformers' defaults.

        given: any field of `GenerationConfig`, None where it is not given. A temperature above 0 among them switches
        sampling on; temperature 0, also in a config, is greedy.
        end_ids: tokens that end a row instead of the config's own; default_end where there are none of either kind.

        Raises ValueError for an unknown name, a value out of range, or a setting that the engine cannot honour.
        """
        given = {name: _plain(name, value) for name, value in given.items() if value is not None}
        _check_names(given)
        given.update(_sampling_switch(given))
        if config is not None and not isinstance(config, GenerationConfig):
            raise ValueError(
                f"generation_config must be a GenerationConfig, got {type(config).__name__}; "
                "make one with GenerationConfig(**settings)"
            )
        if config is not None:
            _warn_of_strangers(config)
        givers = (GenerationConfig(), model.generation_config) if config is None else (config, model.generation_config)
        has_max_length = given.get("max_length") is not None or any(giver.max_length is not None for giver in givers)
        is_prepared = getattr(config, PREPARED, False)
        resolved = copy.deepcopy(config) if is_prepared else model._prepare_generation_config(config)[0]
        for name, value in [*vars(resolved).items(), *given.items()]:
            setattr(resolved, name, _plain(name, value))
        resolved.do_sample = False if resolved.do_sample is None else resolved.do_sample
        if resolved.temperature == 0:
            resolved.do_sample, resolved.temperature = False, 1.0
        _refuse_unserved(resolved)
        _check_ranges(resolved)
        check_named_tokens(resolved, text_config(model).vocab_size)
        if not resolved.do_sample:
            _warn_of_greedy(given, resolved.num_return_sequences)
        if not is_prepared:
            _warn_of_lengths({**({} if config is None else vars(config)), **given}, resolved)
        ends = _end_ids(resolved.eos_token_id if end_ids is None else end_ids)
        if end_ids is not None or "eos_token_id" in given:  # those of a config are taken as transformers takes them
            _check_end_ids(ends, text_config(model).vocab_size)
        if end_ids is None and resolved.eos_token_id is None and default_end is not None:
            ends = (default_end,)
        resolved.eos_token_id = list(ends) or None
        if resolved.exponential_decay_length_penalty is not None and not ends:
            raise ValueError("exponential_decay_length_penalty needs an end token, got none; give stop_token_ids")
        return cls(resolved, ends, has_max_length)

    @property
    def num_return_sequences(self) -> int:
        return self.config.num_return_sequences

    @property
    def stop_strings(self) -> tuple[str, ...]:
        return as_strings(self.config.stop_strings)

    def limit(self, model: PreTrainedModel, length: int) -> int:
        """New tokens that rows of a prompt of `length` tokens may get: max_new_tokens, else max_length with the prompt
        in it, else as many as the model's context allows. Raises ValueError where that is none, or more than the
        context holds; warns where fewer tokens are allowed than asked for at least."""
        context = served_positions(model)
        name = f"context of {context} tokens"
        if longrope_border(model) == context:
            name += " (further on its LongRoPE factors are others)"
        name += getattr(text_config(model), "context_note", "")
        if context is not None and length >= context:
            raise ValueError(f"a prompt must be shorter than the model's {name}, got {length}; shorten it")
        most = self.config.max_new_tokens
        if most is None and self.has_max_length:
            if length >= self.config.max_length:
                raise ValueError(
                    f"max_length must be above the prompt's {length} tokens, which count, got "
                    f"{self.config.max_length}; raise it or give max_new_tokens"
                )
            most = self.config.max_length - length
        elif most is None:
            if context is None:
                raise ValueError(
                    "max_new_tokens must be given where the model's configuration has no limit, got None; "
                    "pass max_new_tokens="
                )
            most = context - length
        if context is not None and length + most > context:
            raise ValueError(
                f"prompt and new tokens must fit into the model's {name}, got {length} + "
                f"{most}; lower max_new_tokens to {context - length} or leave it out"
            )
        self._warn_of_least(most, length)
        return most

    def _warn_of_least(self, most: int, length: int) -> None:
        """Where no row can be as long as it is to be, as transformers warns. End tokens stay forbidden then."""
        name = "min_length" if self.config.min_new_tokens is None else "min_new_tokens"
        least, counted = getattr(self.config, name) or 0, length if name == "min_length" else 0
        if least > most + counted:
            prompt = f" and the prompt's {length}" if counted else ""
            warnings.warn(
                f"{name} must be at most the {most} new tokens that a row may get{prompt}, got {least}; lower it or "
                "raise max_new_tokens: as it is, no end token ends a row",
                stacklevel=3,
            )

    def law(self, processors: Sequence[LogitsProcessor]) -> TargetLaw:
        """What transformers would draw from with the `processors` of request 0."""
        return TargetLaw.of(processors, is_sampled=self.config.do_sample, end_ids=self.end_ids)

    def processors(
        self, model: PreTrainedModel, prompt: np.ndarray, limit: int, *, own: Sequence = (), **more: object
    ) -> list[LogitsProcessor]:
        """As `GenerationMixin.generate` makes them for this prompt alone, of the caller's `own`, checked, and `more`.

        Raises ValueError by name for settings that transformers fails at."""
        try:
            return self._processors(model, prompt, limit, own, **more)
        except Exception as error:  # transformers checks few values and says little of others
            values = {name: getattr(self.config, name, None) for name in sorted(LAW | SPECIAL)}
            asked = {name: value for name, value in values.items() if value not in (None, 0, 1)}
            got = ", ".join(f"{name}={value!r:.60}" for name, value in asked.items())
            raise ValueError(
                f"settings must be as transformers' processors take them, got {got} and from them "
                f"{type(error).__name__}: {error}; see the documentation of its GenerationConfig"
            ) from error

    def _processors(
        self, model: PreTrainedModel, prompt: np.ndarray, limit: int, own: Sequence, **more: object
    ) -> list[LogitsProcessor]:
        config = copy.deepcopy(self.config)
        config.max_new_tokens = limit
        device = input_device(model)
        input_ids = torch.from_numpy(prompt.astype(np.int64)).to(device)[None]
        model._prepare_special_tokens(config, device=device)
        model._prepare_generated_length(
            config, True, True, model_input_name="input_ids", input_ids_length=len(prompt), inputs_tensor=input_ids
        )
        return model._get_logits_processor(
            config,
            input_ids_seq_length=len(prompt),
            encoder_input_ids=input_ids,
            logits_processor=list(own),
            **{"device": device} | more,
        )


def _plain(name: str, value: object) -> object:
    """A value as transformers takes it: scalars as Python's numbers, arrays as lists, a watermarking dict as its
    config, floats where fractions are asked for."""
    if isinstance(value, np.generic) or (isinstance(value, torch.Tensor) and value.ndim == 0):
        value = value.item()
    if isinstance(value, (np.ndarray, torch.Tensor)):
        value = value.tolist()
    if name in FRACTIONS and isinstance(value, Real) and not isinstance(value, bool):
        return float(value)
    if name == "watermarking_config" and isinstance(value, dict):
        try:
            return WatermarkingConfig.from_dict(value)
        except TypeError as error:
            raise ValueError(
                f"watermarking_config must hold arguments of transformers' WatermarkingConfig, got {value!r:.80} and "
                f"from it {error}; make one"
            ) from error
    return value


def _warn_of_strangers(config: GenerationConfig) -> None:
    """Say which values of a config mean nothing: files of the hub may have such, and so may a slip of the pen.

    Private ones are transformers' own notes.
    """
    known, values = vars(GenerationConfig()), vars(config).items()
    strangers = [name for name, value in values if not (name.startswith("_") or name in known or value is None)]
    if strangers:
        warnings.warn(
            f"generation_config has values that mean nothing to transformers or to this engine: "
            f"{', '.join(strangers)}; check the spelling",
            stacklevel=2,
        )


def _check_names(given: Mapping[str, object]) -> None:
    unknown = sorted(set(given) - {name for name in vars(GenerationConfig()) if not name.startswith("_")})
    if "streamer" in unknown:
        raise ValueError(
            "streamer is a setting of engine.generate alone, got one in another call; engine.stream yields (row, piece "
            "of text) by itself, and engine.run trajectories as they end"
        )
    if unknown:
        raise ValueError(
            f"a setting must be a field of transformers' GenerationConfig, got {', '.join(unknown)}; "
            "check the spelling; presence and frequency penalties are OutputPenalties; model and tokenizer go to wrap, "
            "options of a chat template to tokenizer.apply_chat_template(chat, return_dict=True, ...) for a prompt"
        )


def _sampling_switch(given: Mapping[str, object]) -> dict[str, object]:
    """do_sample as a given temperature sets it."""
    temperature = given.get("temperature")
    if temperature is None:
        return {}
    SamplingParams(temperature=temperature)
    is_sampled = temperature > 0
    if given.get("do_sample", is_sampled) != is_sampled:
        raise ValueError(
            f"do_sample and temperature must agree, got do_sample={given['do_sample']} with temperature="
            f"{temperature:g}; leave do_sample out"
        )
    return {"do_sample": is_sampled}


def _warn_of_lengths(asked: Mapping[str, object], resolved: GenerationConfig) -> None:
    """Where a length is asked for that another one overrules, which may come from the model's own config."""
    for name, stronger in (("max_length", "max_new_tokens"), ("min_length", "min_new_tokens")):
        value, counts = asked.get(name), getattr(resolved, stronger)
        if value and counts is not None:
            warnings.warn(
                f"{name} has no effect beside {stronger}, which is {counts}, got {name}={value}; give {stronger} alone",
                stacklevel=2,
            )


def _warn_of_greedy(given: Mapping[str, object], num_return_sequences: int | None) -> None:
    """Where transformers warns or refuses; a temperature of 0 says that greedy decoding is meant."""
    filters = [] if "temperature" in given else [name for name in OF_SAMPLING if given.get(name, 0) not in (0, 1)]
    if filters:
        need = "needs" if len(filters) == 1 else "need"
        warnings.warn(
            f"{', '.join(filters)} {need} sampling, which is off; give a temperature, or do_sample=True", stacklevel=2
        )
    if (num_return_sequences or 1) > 1:
        warnings.warn(
            f"greedy rows of a prompt are all equal, got num_return_sequences={num_return_sequences}; give a "
            "temperature, or ask for one row",
            stacklevel=2,
        )


def _refuse_unserved(config: GenerationConfig) -> None:
    for name, (neutral, reason) in REFUSED.items():
        value = getattr(config, name, None)
        if value not in neutral:
            raise ValueError(
                f"{name} must be {' or '.join(map(repr, neutral))} here, got {value!r}: {reason}; "
                "leave it out, or call model.generate"
            )
    known = LAW | LIMITS | KEPT | WITHOUT_EFFECT | set(REFUSED)
    for name in sorted(vars(GenerationConfig())):
        if name not in known and not name.startswith("_") and getattr(config, name, None) is not None:
            raise ValueError(
                f"{name} must be None, got {getattr(config, name)!r}: this version of the engine does not know it; "
                "leave it out, or call model.generate"
            )


def _check_ranges(config: GenerationConfig) -> None:
    """Rules of the engine's own arguments; transformers' processors check theirs when they are made."""
    filters = {name: getattr(config, name) for name in ("temperature", "top_k", "top_p", "min_p")}
    SamplingParams(**{name: value for name, value in filters.items() if value is not None})
    check_positive("repetition_penalty", config.repetition_penalty, "use 1 to switch it off")
    check_positive("max_time", config.max_time, "give seconds")
    flags = {name: getattr(config, name) for name in (*FLAGS, *sorted(KEPT))}
    check_flags(**{name: value for name, value in flags.items() if value is not None})
    for name in ("min_length", "min_new_tokens", *NGRAMS):
        check_count(name, getattr(config, name), "0 asks for nothing", least=0)
    for name in ("encoder_repetition_penalty", "top_h", "typical_p", "epsilon_cutoff", "eta_cutoff"):
        check_number(name, getattr(config, name), "leave it out to switch it off")
    for name in ("typical_p", "epsilon_cutoff", "eta_cutoff"):
        value = getattr(config, name)
        if isinstance(value, Real) and not value <= 1:  # transformers leaves such out without a word
            raise ValueError(f"{name} must be at most 1, got {value!r}; leave it out to switch it off")
    for name in NGRAMS:
        if (getattr(config, name) or 0) > LONGEST_NGRAM:
            raise ValueError(
                f"{name} must be at most {LONGEST_NGRAM}, got {getattr(config, name)}; so long an n-gram hardly repeats"
            )
    check_count("num_return_sequences", config.num_return_sequences, "ask for at least one row")
    check_count("max_new_tokens", config.max_new_tokens, "ask for at least one")
    check_count("max_length", config.max_length, "the prompt's tokens count")


def _end_ids(given: object) -> tuple[int, ...]:
    """One token id or several, as plain integers."""
    if given is None:
        return ()
    ids = given.tolist() if isinstance(given, (torch.Tensor, np.ndarray, np.generic)) else given
    ids = list(ids) if isinstance(ids, Iterable) and not isinstance(ids, str) else [ids]
    if any(not isinstance(token, Integral) or isinstance(token, bool) for token in ids):
        raise ValueError(f"end tokens must be token ids, got {given!r}; give integers")
    return tuple(int(token) for token in ids)


def _check_end_ids(ends: Sequence[int], vocabulary_size: int) -> None:
    beyond = [token for token in ends if not 0 <= token < vocabulary_size]
    if beyond:
        raise ValueError(
            f"end tokens must be in [0, {vocabulary_size}), got {beyond}; no row would end by them: leave them out"
        )
