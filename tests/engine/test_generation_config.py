"""Every field of transformers' `GenerationConfig`: what `generate` makes of it, or refused, or without effect.

A field that a later version adds fails here until it is put into one of the groups of stand/generation_settings.py.
"""

import re
import warnings
from fractions import Fraction
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from letter_tokenizer import LETTERS, letter_tokenizer
from node_cases import draft_of
from tiny_models import tiny_model
from transformers import CompileConfig, ContinuousBatchingConfig, GenerationConfig, WatermarkingConfig

import stand
from stand import generation_settings as groups
from stand.generation_settings import GenerationSettings
from stand.row import Row
from stand.stats import Stats
from stand.trees import DraftBatch

PROMPT = [5, 9, 11, 4, 5, 9]
LENGTH = 12
FIELDS = {name for name in vars(GenerationConfig()) if not name.startswith("_")}

GREEDY = {  # seen in the tokens of greedy decoding too
    "repetition_penalty": {"repetition_penalty": 2.5},
    "encoder_repetition_penalty": {"encoder_repetition_penalty": 3.0},
    "no_repeat_ngram_size": {"no_repeat_ngram_size": 1},
    "encoder_no_repeat_ngram_size": {"encoder_no_repeat_ngram_size": 1},
    "bad_words_ids": {"bad_words_ids": [[token] for token in range(20, 50)]},
    "min_length": {"min_length": 14, "eos_token_id": [*range(20, 50)]},
    "min_new_tokens": {"min_new_tokens": 7, "eos_token_id": [*range(20, 50)]},
    "forced_bos_token_id": {"forced_bos_token_id": 8},
    "forced_eos_token_id": {"forced_eos_token_id": 8},
    "exponential_decay_length_penalty": {"exponential_decay_length_penalty": (2, 5.0)},
    "suppress_tokens": {"suppress_tokens": [*range(20, 50)]},
    "begin_suppress_tokens": {"begin_suppress_tokens": [*range(50)]},
    "sequence_bias": {"sequence_bias": [[[17], 40.0]]},
    "watermarking_config": {"watermarking_config": WatermarkingConfig(bias=60.0)},
    "max_length": {"max_length": 11},
    "max_new_tokens": {"max_new_tokens": 5},
    "eos_token_id": {"eos_token_id": [*range(20, 40)]},
    "stop_strings": {"stop_strings": [*LETTERS[20:40], "".join(LETTERS[50:53])]},
}
SAMPLED = {  # seen in the law of sampling alone
    "do_sample": {},
    "temperature": {"temperature": 0.4},
    "top_k": {"top_k": 3},
    "top_p": {"top_p": 0.6},
    "min_p": {"min_p": 0.3},
    "top_h": {"top_h": 0.4},
    "typical_p": {"typical_p": 0.5},
    "epsilon_cutoff": {"epsilon_cutoff": 0.1},
    "eta_cutoff": {"eta_cutoff": 0.4},
}
SILENT_PROCESSORS = {  # processors that change no law of a sound model: normalised, and finite
    "renormalize_logits": {"renormalize_logits": True},
    "remove_invalid_values": {"remove_invalid_values": True},
}
REFUSED = {
    "num_beams": 4,
    "num_beam_groups": 2,
    "constraints": [object()],
    "force_words_ids": [[3]],
    "penalty_alpha": 0.6,
    "dola_layers": "low",
    "guidance_scale": 1.5,
    "token_healing": True,
    "use_mtp": True,
    "prompt_lookup_num_tokens": 3,
    "assistant_early_exit": 1,
    "assistant_ensemble_weight": 0.5,
    "speculation_type": "dflash",
    "is_assistant": True,
    "cache_implementation": "quantized",
    "output_attentions": True,
    "output_hidden_states": True,
}
WITHOUT_EFFECT = {
    "early_stopping": True,
    "length_penalty": 2.0,
    "diversity_penalty": 1.0,
    "low_memory": True,
    "num_assistant_tokens": 3,
    "num_assistant_tokens_schedule": "heuristic",
    "assistant_confidence_threshold": 0.9,
    "max_matching_ngram_size": 4,
    "assistant_lookbehind": 3,
    "target_lookbehind": 3,
    "use_cache": False,
    "cache_config": {"nbits": 4},
    "max_cache_len": 64,
    "prefill_chunk_size": 2,
    "compile_config": CompileConfig(),
    "disable_compile": True,
    "continuous_batching_config": ContinuousBatchingConfig(),
    "return_dict_in_generate": True,
    "pad_token_id": 7,
    "bos_token_id": 7,
    "decoder_start_token_id": 7,
    "transformers_version": "4.0.0",
}
OTHER = {"max_time", "num_return_sequences", "output_scores", "output_logits"}  # tests of their own


def test_every_field_of_the_installed_version_is_decided():
    tested = [set(GREEDY), set(SAMPLED), set(SILENT_PROCESSORS), set(REFUSED), set(WITHOUT_EFFECT), OTHER]
    assert sum(map(len, tested)) == len(set().union(*tested))
    assert set().union(*tested) == FIELDS
    decided = [set(groups.LAW), set(groups.LIMITS), set(groups.KEPT), set(groups.REFUSED), set(groups.WITHOUT_EFFECT)]
    assert sum(map(len, decided)) == len(set().union(*decided))
    assert set().union(*decided) == FIELDS


def engine() -> stand.Engine:
    return stand.wrap(tiny_model("qwen2"), letter_tokenizer())


def by_engine(prompt=PROMPT, **settings) -> list[int]:
    config = GenerationConfig(**{"max_new_tokens": LENGTH, **settings})
    return engine().generate(input_ids=prompt, generation_config=config).token_ids[0]


def by_transformers(prompt=PROMPT, **settings) -> list[int]:
    config = GenerationConfig(**{"max_new_tokens": LENGTH, **settings})
    prompt = torch.tensor([prompt])
    output = tiny_model("qwen2").generate(
        prompt, attention_mask=torch.ones_like(prompt), generation_config=config, tokenizer=letter_tokenizer()
    )
    return output[0, prompt.shape[1] :].tolist()


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("field", GREEDY)
def test_greedy_tokens_are_those_of_generate(field):
    settings = {"do_sample": False, **GREEDY[field]}
    settings |= {"max_new_tokens": None} if field == "max_length" else {}
    prompt = PROMPT[:1] if field == "forced_bos_token_id" else PROMPT  # it means the token after a single one
    expected = by_transformers(prompt, **settings)
    assert by_engine(prompt, **settings) == expected
    settings.pop(field)
    assert by_engine(prompt, **settings) != expected, "the field changes nothing here"


def laws(settings: dict, **run) -> tuple[torch.Tensor, torch.Tensor]:
    """The laws of 6 sampled tokens by `generate`, and by the engine under `run` along the same tokens."""
    model, prompt = tiny_model("qwen2"), torch.tensor([PROMPT])
    torch.manual_seed(4)
    with torch.inference_mode():
        output = model.generate(
            prompt, attention_mask=torch.ones_like(prompt), output_scores=True, output_logits=True,
            return_dict_in_generate=True, generation_config=GenerationConfig(max_new_tokens=6, **settings),
        )  # fmt: skip
    resolved = GenerationSettings.resolve(model, GenerationConfig(max_new_tokens=6, **run))
    history = np.array(PROMPT, dtype=np.int32)
    law = resolved.law(resolved.processors(model, history, 6))
    tokens = [PROMPT[-1], *output.sequences[0, len(PROMPT) : -1].tolist()]
    batch = DraftBatch.concatenate([draft_of(tokens, range(-1, len(tokens) - 1))])
    scores = law.process(torch.cat(output.logits), batch, [Row(0, history, 6)])
    return torch.softmax(torch.cat(output.scores), dim=-1), law.laws(scores).probabilities


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("field", {**SAMPLED, **SILENT_PROCESSORS, **GREEDY})
def test_sampled_laws_are_those_of_generate(field):
    settings = {"do_sample": True, **{**SAMPLED, **SILENT_PROCESSORS, **GREEDY}[field]}
    settings = {name: value for name, value in settings.items() if name not in ("stop_strings", "max_length")}
    settings = {name: value for name, value in settings.items() if name != "max_new_tokens"}
    expected, found = laws(settings, **settings)
    torch.testing.assert_close(found, expected)
    if field in SAMPLED:
        rest = {name: value for name, value in settings.items() if name != field}
        expected, found = laws(settings, **rest)
        assert float((found - expected).abs().sum(dim=-1).max()) > 0.05, "the field changes nothing here"


@pytest.mark.parametrize("field", REFUSED)
def test_what_cannot_be_honoured_is_refused_by_name(field):
    with pytest.raises(ValueError, match=f"^{field} must be .*, got .*(leave it out|give)"):
        engine().generate(input_ids=PROMPT, max_new_tokens=3, **{field: REFUSED[field]})
    model = tiny_model("qwen2")
    with pytest.MonkeyPatch.context() as patch:  # the same from the model's own config; what asks for nothing is fine
        patch.setattr(model.generation_config, field, REFUSED[field])
        with pytest.raises(ValueError, match=f"^{field} must be"):
            engine().generate(input_ids=PROMPT, max_new_tokens=3)
        neutral = groups.REFUSED[field][0]
        if neutral != (None,):
            allowed = {field: next(value for value in neutral if value is not None)}
            assert len(engine().generate(input_ids=PROMPT, max_new_tokens=3, **allowed)) == 1


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize("field", WITHOUT_EFFECT)
def test_fields_without_effect_change_no_token(field):
    assert by_engine(**{field: WITHOUT_EFFECT[field]}) == by_transformers()


def test_a_field_that_nobody_decided_on_is_refused(monkeypatch):
    original = GenerationConfig.__init__

    def with_more(self, **kwargs):
        self.contrast = kwargs.pop("contrast", None)
        original(self, **kwargs)

    monkeypatch.setattr(GenerationConfig, "__init__", with_more)
    assert len(engine().generate(input_ids=PROMPT, max_new_tokens=2)) == 1
    with pytest.raises(ValueError, match="contrast must be None, got 0.5: this version of the engine does not know it"):
        engine().generate(input_ids=PROMPT, max_new_tokens=2, contrast=0.5)


def test_num_return_sequences_comes_from_the_config():
    config = GenerationConfig(num_return_sequences=3, do_sample=True, max_new_tokens=4)
    output = engine().generate(input_ids=[PROMPT, [7]], generation_config=config)
    assert output.num_return_sequences == 3 and len(output) == 6
    assert engine().generate(input_ids=PROMPT, generation_config=config, num_return_sequences=2).of_prompt(0) == [0, 1]


def test_max_time_ends_rows_with_the_step_that_runs(monkeypatch):
    decoder = engine()
    monkeypatch.setattr(Stats, "elapsed", property(lambda stats: stats.num_forwards + 0.5))
    output = decoder.generate(input_ids=PROMPT, max_time=3.0, max_new_tokens=50, draft=False, stop_token_ids=[])
    assert output.finish_reasons == ["time"] and len(output.token_ids[0]) == 4


@pytest.mark.parametrize(("method", "reason"), [("prepare", "length"), ("draft", "time")])
def test_max_time_begins_with_the_first_step(monkeypatch, method, reason):
    """And not with what times steps for the drafter. The clock moves in one method of the drafter alone."""
    decoder, now = engine(), [0.0]
    right = getattr(type(decoder.drafter), method)

    def slow(*given):
        now[0] += 1.0
        return None if method == "prepare" else right(*given)

    monkeypatch.setattr("stand.stats.time", SimpleNamespace(perf_counter=lambda: now[0]))
    monkeypatch.setattr(type(decoder.drafter), method, slow)
    output = decoder.generate(input_ids=PROMPT, max_time=0.9, max_new_tokens=2, stop_token_ids=[])
    assert now[0] > 0 and output.finish_reasons == [reason]


def test_defaults_are_those_of_transformers():
    """do_sample=True keeps 50 tokens where top_k is not given; a temperature switches sampling on and drops nothing."""
    model = tiny_model("qwen2")

    def filters_of(config=None, **given):
        resolved = GenerationSettings.resolve(model, config, **given)
        params = resolved.law(resolved.processors(model, np.array(PROMPT, dtype=np.int32), 3)).params
        return params.temperature, params.top_k, params.top_p

    assert filters_of()[0] == 0
    assert filters_of(do_sample=True) == (1.0, 50, 1.0)
    assert filters_of(temperature=0.6) == (0.6, 50, 1.0)
    assert filters_of(temperature=0.6, top_k=0) == (0.6, 0, 1.0)
    assert filters_of(GenerationConfig(top_k=7, top_p=0.8), temperature=0.6) == (0.6, 7, 0.8)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(model, "generation_config", GenerationConfig(do_sample=False, top_k=5, top_p=0.7))
        assert filters_of(temperature=0.6) == (0.6, 5, 0.7)
        assert filters_of(GenerationConfig(do_sample=True, top_k=9)) == (1.0, 9, 0.7)
        patch.setattr(model, "generation_config", GenerationConfig(do_sample=True, temperature=0.6))
        assert filters_of() == (0.6, 50, 1.0)
        assert filters_of(temperature=0)[0] == 0
    assert filters_of(GenerationConfig(temperature=0.0, do_sample=True))[0] == 0
    assert filters_of(temperature=np.float32(0.5), top_k=np.int64(4)) == (0.5, 4, 1.0)
    assert filters_of(temperature=torch.tensor(2)) == (2.0, 50, 1.0)


@pytest.mark.parametrize(
    ("asked", "rule"),
    [
        ({"temperature": 0.6, "do_sample": False}, "do_sample and temperature must agree.*leave do_sample out"),
        ({"temperature": "hot"}, "temperature must be >= 0, got 'hot'"),
        ({"temperature": True}, "temperature must be >= 0, got True"),
        ({"top_p": 1.7}, r"top_p must be in \(0, 1\], got 1.7; use 1"),
        ({"top_k": 2.5}, "top_k must be an integer in "),
        (
            {"repetition_penalty": 0.0},
            "repetition_penalty must be a finite number > 0, got 0.0; use 1",
        ),
        ({"max_time": -1}, "max_time must be a finite number > 0"),
        ({"num_return_sequences": 0}, "num_return_sequences must be an integer >= 1, got 0"),
        ({"max_new_tokens": 2.0}, "max_new_tokens must be an integer >= 1, got 2.0"),
        ({"max_length": 6}, "max_length must be above the prompt's 6 tokens, which count, got 6"),
        ({"max_length": 513}, "must fit into the model.s context.*got 6 . 507; lower max_new_tokens to 506"),
        ({"typical": 0.9}, "must be a field of transformers' GenerationConfig, got typical; check the spelling"),
        ({"logits_processor": []}, "got logits_processor"),
        ({"presence_penalty": 0.5}, "got presence_penalty; .* presence and frequency penalties are OutputPenalties"),
        ({"generation_config": {"top_k": 3}}, "must be a GenerationConfig, got dict"),
        (
            {"temperature": 1e-40},
            r"temperature must be 0 or in \[1e-30, 1e\+30\], got 1e-40; beyond them float32 overflows",
        ),
        ({"stop_token_ids": [2, 61]}, r"end tokens must be in \[0, 61\), got \[61\]; no row would end by them"),
        ({"eos_token_id": -7}, r"end tokens must be in \[0, 61\), got \[-7\]"),
        ({"stop_token_ids": 1.5}, "end tokens must be token ids, got 1.5"),
        ({"stop_token_ids": [True]}, "end tokens must be token ids"),
        ({"exponential_decay_length_penalty": (1, 2.0), "stop_token_ids": []}, "needs an end token, got none"),
        ({"stop": [3]}, "a stop string must be text"),
        ({"stop": "a\ud800"}, "a stop string must be whole characters, got .* with half of one, .*; drop it"),
        ({"do_sample": True, "top_k": 2**63}, r"integer in \[0, 2\*\*31\), got 9223372036854775808; use 0"),
        ({"forced_eos_token_id": 61}, r"forced_eos_token_id must be a token in \[0, 61\), got 61; leave it out"),
        ({"forced_eos_token_id": [2, -1]}, r"forced_eos_token_id must be a token in \[0, 61\), got \[2, -1\]"),
        ({"forced_bos_token_id": True}, r"forced_bos_token_id must be a token in \[0, 61\), got True"),
        ({"no_repeat_ngram_size": True}, "no_repeat_ngram_size must be an integer >= 0, got True"),
        ({"encoder_no_repeat_ngram_size": 2**31}, "encoder_no_repeat_ngram_size must be at most 65536, got"),
        ({"do_sample": True, "typical_p": 1.5}, "typical_p must be at most 1, got 1.5; leave it out"),
        ({"do_sample": True, "eta_cutoff": float("nan")}, "eta_cutoff must be at most 1, got nan"),
        ({"encoder_repetition_penalty": True}, "encoder_repetition_penalty must be a number, got True; leave it out"),
        ({"do_sample": True, "top_h": True}, "top_h must be a number, got True"),
        ({"do_sample": True, "epsilon_cutoff": "0.1"}, "epsilon_cutoff must be a number, got '0.1'"),
        ({"watermarking_config": 3}, "processors take them, got .*watermarking_config=3.* and from them Attr.*; see"),
        ({"exponential_decay_length_penalty": (1,)}, r"got .*_penalty=\(1,\).* and from them IndexError: .*; see"),
        ({"sequence_bias": [[]]}, r"got .*sequence_bias=\[\[\]\].* and from them IndexError: .*; see"),
        ({"watermarking_config": {"a": 1}}, "arguments of transformers' WatermarkingConfig, got .'a': 1. and from it"),
        ({"suppress_tokens": [True, False]}, r"suppress_tokens must be token ids, got \[True, False\]; give integers"),
        ({"suppress_tokens": [2.5]}, r"suppress_tokens must be token ids, got \[2.5\]"),
        ({"begin_suppress_tokens": [[3]]}, r"begin_suppress_tokens must be token ids, got \[\[3\]\]"),
        ({"bad_words_ids": [[3], [True]]}, r"bad_words_ids must hold lists of tokens in \[0, 61\), got \[True\] among"),
        ({"bad_words_ids": [[3, 61]]}, r"bad_words_ids must hold .*, got \[3, 61\] among them; give integers that"),
        ({"sequence_bias": {(3,): 1.0, (4, 99): 1.0}}, r"sequence_bias must hold .*, got \(4, 99\) among them"),
        ({"sequence_bias": [[[61], 1.0]]}, r"sequence_bias must hold .*, got \[61\] among them"),
        ({"pad_token_id": [1, 2]}, r"pad_token_id must be one token, got \[1, 2\]; give an integer"),
        ({"renormalize_logits": "false"}, "renormalize_logits must be True or False, got 'false'"),
        ({"remove_invalid_values": 0.5}, "remove_invalid_values must be True or False, got 0.5"),
        ({"suppress_tokens": 5}, "got .*suppress_tokens=5.* and from them TypeError: .*; see"),
        ({"pad_token_id": "x"}, "got .*pad_token_id=.x.,.* and from them TypeError: .*; see"),
    ],
)
def test_bad_settings_name_rule_value_and_remedy(asked, rule):
    with pytest.raises(ValueError, match=rule):
        engine().generate(input_ids=PROMPT, **asked)


@pytest.mark.parametrize(
    ("asked", "rule"),
    [
        ({"top_p": 0.95, "top_k": 40}, "top_k, top_p need sampling, which is off; give a temperature"),
        ({"min_p": 0.1, "do_sample": False}, "min_p needs sampling"),
        ({"num_return_sequences": 2}, "rows of a prompt are all equal, got num_return_sequences=2; give a temperature"),
        ({"top_p": 0.95, "temperature": 0.6}, None),
        ({"top_p": 0.95, "temperature": 0}, None),
        ({"top_p": 1.0, "top_k": 0}, None),
    ],
)
def test_settings_of_sampling_without_sampling_are_told(asked, rule):
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        GenerationSettings.resolve(tiny_model("qwen2"), **asked)
    assert bool(told) == (rule is not None)
    assert rule is None or re.search(rule, str(told[0].message))


@pytest.mark.parametrize(
    ("own", "asked", "told"),
    [
        ({"max_new_tokens": 9}, {"max_length": 7}, "max_length has no effect beside max_new_tokens, which is 9, got"),
        ({"max_new_tokens": 9}, {"generation_config": GenerationConfig(max_length=7)}, "max_length has no effect"),
        ({}, {"max_length": 7, "max_new_tokens": 9}, "max_length has no effect beside max_new_tokens, which is 9, got"),
        ({}, {"min_length": 7, "min_new_tokens": 2}, "min_length has no effect beside min_new_tokens, which is 2"),
        ({"max_length": 7}, {"max_new_tokens": 9}, None),  # the model's own, overruled on purpose
        ({}, {"max_length": 7}, None),
    ],
)
def test_lengths_that_are_overruled_are_told(own, asked, told, monkeypatch):
    monkeypatch.setattr(tiny_model("qwen2"), "generation_config", GenerationConfig(**own))
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        engine().generate(input_ids=PROMPT, **asked)
    seen = [str(one.message) for one in seen if "no effect" in str(one.message)]
    assert (told is None and not seen) or re.search(told, seen[0])


@pytest.mark.parametrize(
    ("asked", "told"),
    [
        (
            {"min_new_tokens": 4, "max_new_tokens": 3},
            "min_new_tokens must be at most the 3 new tokens .* may get, got 4",
        ),
        ({"min_length": 10, "max_new_tokens": 3}, "at most the 3 new tokens .* and the prompt's 6, got 10; lower it"),
        ({"min_new_tokens": 5, "max_length": 10}, "min_new_tokens must be at most the 4 new tokens"),
        ({"min_length": 10, "max_length": 9}, "min_length must be at most the 3 new tokens"),
        ({"min_length": 9, "max_new_tokens": 3}, None),
        ({"min_length": 99, "min_new_tokens": 3, "max_new_tokens": 3}, None),
    ],
)
def test_lengths_that_no_row_can_have_are_told(asked, told):
    """And no end token ends a row, as in transformers. Of a run, the request's own lengths count."""
    ends = [*range(20, 50)]
    with pytest.warns() as seen:
        warnings.warn("one at least", stacklevel=1)
        output = engine().generate(input_ids=PROMPT, stop_token_ids=ends, **asked)
        list(engine().run([stand.Request(PROMPT, max_new_tokens=2)], **{**asked, "max_new_tokens": 9}))
    seen = [str(one.message) for one in seen if "must be at most" in str(one.message)]
    assert (told is None and len(seen) == 1) or (len(seen) == 2 and re.search(told, seen[0]))
    config = GenerationConfig(eos_token_id=ends, **asked)
    with warnings.catch_warnings(action="ignore"):
        expected = tiny_model("qwen2").generate(torch.tensor([PROMPT]), generation_config=config)
    assert output.token_ids[0] == expected[0, len(PROMPT) :].tolist()


def test_limits_count_each_prompt_by_itself():
    output = engine().generate(input_ids=[PROMPT, [7]], max_length=12, stop_token_ids=[])
    assert [len(tokens) for tokens in output.token_ids] == [6, 11]
    short = GenerationConfig(max_new_tokens=3, max_length=12)  # max_new_tokens counts, as in transformers
    output = engine().generate(input_ids=[PROMPT, [7]], generation_config=short, stop_token_ids=[])
    assert [len(tokens) for tokens in output.token_ids] == [3, 3]


def test_end_tokens_may_be_one_number():
    free = engine().generate(input_ids=PROMPT, max_new_tokens=9, stop_token_ids=None, stop=None).token_ids[0]
    for end in (free[4], np.int64(free[4]), torch.tensor([free[4]])):
        output = engine().generate(input_ids=PROMPT, max_new_tokens=9, stop_token_ids=end)
        assert output.token_ids[0] == free[: free.index(free[4]) + 1]


@pytest.mark.parametrize(
    "name", ["tokenizer", "model", "problems", "config", "default_end", "end_ids", "cls", "on_commit"]
)
def test_names_that_mean_something_inside_are_refused_like_others(name):
    """`tokenizer=` beside `stop_strings=` is what transformers' own generate wants."""
    model = tiny_model("qwen2")
    for call in (stand.wrap(model).generate, stand.wrap(model, letter_tokenizer()).stream):
        with pytest.raises(
            ValueError, match=f"a setting must be a field of transformers' GenerationConfig, got {name}"
        ):
            list(call(input_ids=PROMPT, max_new_tokens=2, **{name: 5}))


def test_a_slip_of_the_pen_in_a_config_is_said():
    config = GenerationConfig(max_new_tokens=2)
    config.temprature = 0.2
    with pytest.warns(UserWarning, match="values that mean nothing to transformers or to this engine: temprature"):
        stand.wrap(tiny_model("qwen2")).generate(input_ids=PROMPT, generation_config=config)


def test_fractions_are_numbers():
    settings = {"input_ids": PROMPT, "do_sample": True, "max_new_tokens": 5, "seed": 0}
    fraction, number = (engine().generate(**settings, top_h=share) for share in (Fraction(2, 5), 0.4))
    assert fraction.token_ids == number.token_ids
