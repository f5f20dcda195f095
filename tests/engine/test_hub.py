"""`model.generate(..., custom_generate=stand_generate)` returns what `model.generate` returns, or refuses by name."""

import copy
import gc
import inspect
import re
import shutil
import warnings
import weakref
from pathlib import Path

import pytest
import torch
from letter_tokenizer import LETTERS, letter_tokenizer
from printed_page import run_page
from tiny_models import CONFIGS, tiny_model
from transformers import (
    AutoModelForCausalLM,
    DynamicCache,
    GenerationConfig,
    GenerationMixin,
    LogitsProcessor,
    MaxLengthCriteria,
    NoRepeatNGramLogitsProcessor,
    PrefixConstrainedLogitsProcessor,
    StoppingCriteria,
    StopStringCriteria,
)
from transformers.generation.streamers import BaseStreamer

import stand
from stand.forward.cache.cache_argument import cache_argument
from stand.laws.grammars.allowed_tokens import COUNTS_PROMPTS
from stand.plugins.generate import engine_of, stand_generate, use_engine
from stand.plugins.generate import generate as hub_generate

ROOT = Path(__file__).resolve().parents[2]
HUB = ROOT / "docs" / "hub"
PAGE = ROOT / "docs" / "transformers.md"
in_marked_caches = pytest.mark.skipif(
    "_is_user_defined" not in inspect.getsource(GenerationMixin._prepare_cache_for_generation),
    reason="this version of transformers does not tell an empty cache of the caller's from its own",
)
PADDED = {  # left-padded, prompts of 6, 4 and 2 tokens
    "input_ids": torch.tensor([[5, 9, 11, 4, 5, 9], [0, 0, 7, 8, 30, 21], [0, 0, 0, 0, 40, 41]]),
    "attention_mask": torch.tensor([[1] * 6, [0, 0, 1, 1, 1, 1], [0, 0, 0, 0, 1, 1]]),
}
PADDED_ENDS_AT = 33  # the greedy continuation of the first prompt holds it
ENDS = [*range(20, 26)]


class AfterLast(LogitsProcessor):
    """Forbids what lies shortly after the last token."""

    def __call__(self, input_ids, scores):
        scores = scores.clone()
        for row, last in enumerate(input_ids[:, -1].tolist()):
            scores[row, last : last + 25] = -float("inf")
        return scores


def few_after(number, tokens):
    """What may follow: other tokens for each prompt, by the last token alone, for the engine takes padding off."""
    last = int(tokens[-1])
    return [(last + 7) % 60, (3 * last + 11 * number) % 60, 20 + number]


class EndsAt(StoppingCriteria):
    """Ends a row at a token of its own."""

    def __call__(self, input_ids, scores, **kwargs):
        return torch.isin(input_ids[:, -1], torch.tensor([*range(40, 50)]))


class Recorder(BaseStreamer):
    def __init__(self):
        self.pieces, self.ended = [], False

    def put(self, value):
        self.pieces += value.flatten().tolist()

    def end(self):
        self.ended = True


@pytest.fixture(scope="module")
def model():
    """One of its own: the engine is kept in the model."""
    return copy.deepcopy(tiny_model("llama"))


EQUAL = {
    "greedy": {},
    "twenty tokens by default": {"max_new_tokens": None},
    "max_length counts padding": {"max_new_tokens": None, "max_length": 15},
    "end tokens": {"eos_token_id": ENDS},
    "repetition_penalty": {"repetition_penalty": 2.5, "suppress_tokens": [0]},  # 5.16 counts padding as said before
    "no_repeat_ngram_size": {"no_repeat_ngram_size": 2, "max_new_tokens": 90},
    "min_new_tokens": {"min_new_tokens": 9, "eos_token_id": ENDS},
    "min_length counts padding": {"min_length": 14, "eos_token_id": ENDS},
    "suppress_tokens": {"suppress_tokens": [*range(20, 50)]},
    "begin_suppress_tokens": {"begin_suppress_tokens": [*range(50)]},
    "own processor": {"logits_processor": [AfterLast()]},
    "own processor among others": {
        "logits_processor": [AfterLast()], "repetition_penalty": 2.5, "min_new_tokens": 3, "suppress_tokens": [0],
    },
    "own in place of the config's": {
        "logits_processor": [AfterLast(), NoRepeatNGramLogitsProcessor(1)], "no_repeat_ngram_size": 2,
    },
    "all at once": {
        "logits_processor": [AfterLast()], "repetition_penalty": 1.5, "min_new_tokens": 3, "no_repeat_ngram_size": 3,
        "sequence_bias": [[[17], 9.0]], "bad_words_ids": [[token] for token in range(30, 40)], "forced_eos_token_id": 8,
        "exponential_decay_length_penalty": (6, 1.5), "suppress_tokens": [0, 44], "begin_suppress_tokens": [7, 23],
        "eos_token_id": ENDS, "remove_invalid_values": True, "max_time": 60, "stopping_criteria": [EndsAt()],
    },
    "own criterion": {"stopping_criteria": [EndsAt()]},
    "stop strings": {"stopping_criteria": [StopStringCriteria(letter_tokenizer(), LETTERS[30:40])]},
    "several rows per prompt": {"do_sample": True, "top_k": 1, "num_return_sequences": 2, "eos_token_id": ENDS},
    "allowed tokens": {"prefix_allowed_tokens_fn": few_after},
    "allowed tokens in several rows per prompt": {
        "prefix_allowed_tokens_fn": few_after, "do_sample": True, "top_k": 1, "num_return_sequences": 2,
    },
    "a processor of allowed tokens by rows": {
        "logits_processor": [PrefixConstrainedLogitsProcessor(few_after, 1)], "do_sample": True, "top_k": 1,
        "num_return_sequences": 2,
    },
    "a processor of allowed tokens in place of a function": {
        "logits_processor": [PrefixConstrainedLogitsProcessor(few_after, 1)],
        "prefix_allowed_tokens_fn": lambda number, tokens: [5],
    },
    "allowed tokens before forced ones": {
        "prefix_allowed_tokens_fn": few_after, "forced_eos_token_id": 8, "suppress_tokens": [22, 21],
        "repetition_penalty": 2.5,
    },
    "a processor of allowed tokens behind forced ones": {
        "logits_processor": [PrefixConstrainedLogitsProcessor(few_after, 1)], "forced_eos_token_id": 8,
    },
}  # fmt: skip
if not COUNTS_PROMPTS:  # earlier versions let a row go on that may write nothing
    del EQUAL["a processor of allowed tokens behind forced ones"]


def both(model, inputs, **settings) -> tuple[torch.Tensor, torch.Tensor]:
    settings = {"do_sample": False, "max_new_tokens": 24, **settings}
    return model.generate(**inputs, **settings), model.generate(**inputs, custom_generate=stand_generate, **settings)


@pytest.mark.parametrize("case", EQUAL)
def test_a_padded_batch_equals_generate(model, case):
    expected, got = both(model, PADDED, **EQUAL[case])
    assert expected.dtype == got.dtype and expected.tolist() == got.tolist()


WITHOUT = {  # a case without its setting, where the others are not the plain ones
    "no_repeat_ngram_size": {"max_new_tokens": 90},
    "repetition_penalty": {"suppress_tokens": [0]},
}


@pytest.mark.parametrize("case", [name for name in EQUAL if name not in ("greedy", "twenty tokens by default")])
def test_every_case_changes_the_tokens(model, case):
    """Otherwise the table would not see a setting that is dropped."""
    settings = {"do_sample": False, "max_new_tokens": 24}
    plain = model.generate(**PADDED, **{**settings, **WITHOUT.get(case, {})})
    assert plain.tolist() != model.generate(**PADDED, **{**settings, **EQUAL[case]}).tolist()


def test_a_call_warns_of_nothing(model):
    """transformers leaves notes of its own in the config that it passes on."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model.generate(**PADDED, do_sample=False, max_new_tokens=2, custom_generate=stand_generate)


def test_an_end_token_outside_the_vocabulary_ends_nothing(model):
    expected, got = both(model, PADDED, eos_token_id=-1)
    assert torch.equal(expected, got)


@pytest.mark.parametrize("family", ["qwen3", "gemma3"])
def test_families(family):
    expected, got = both(copy.deepcopy(tiny_model(family)), PADDED, eos_token_id=ENDS)
    assert expected.tolist() == got.tolist()


@pytest.mark.parametrize(
    ("name", "own"),
    [("repetition_penalty", 2.5), ("no_repeat_ngram_size", 2), ("suppress_tokens", [*range(20, 50)]),
     ("sequence_bias", [[[17], 40.0]]), ("min_new_tokens", 8), ("forced_eos_token_id", 4), ("min_length", 11)],
)  # fmt: skip
def test_an_explicit_none_switches_the_models_own_setting_off(name, own):
    """And what is left out does not: a config that `generate` has prepared must not be filled a second time."""
    model = copy.deepcopy(tiny_model("qwen2"))
    setattr(model.generation_config, name, own)
    settings = {"eos_token_id": [*range(10, 50)]} if name.startswith("min") else {}
    # Penalties of transformers count padding, which the engine takes off.
    given = PADDED if name == "min_length" else {key: value[:1] for key, value in PADDED.items()}
    off_expected, off = both(model, given, **settings, **{name: None})
    on_expected, on = both(model, given, **settings)
    assert off.tolist() == off_expected.tolist() and on.tolist() == on_expected.tolist()
    assert off.tolist() != on.tolist() or name == "min_length"  # the padding uses it up


@pytest.mark.parametrize("least", ["min_new_tokens", "min_length"])
def test_a_least_length_that_no_row_can_have_is_told_by_transformers_alone(least):
    settings = {**PADDED, least: 30, "max_new_tokens": 9, "do_sample": False, "eos_token_id": ENDS}
    rows, messages = [], []
    for drafted in ({}, {"custom_generate": stand_generate}):
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            rows.append(tiny_model("llama").generate(**settings, **drafted).tolist())
        messages.append([str(one.message) for one in told if least in str(one.message)])
    assert rows[0] == rows[1] and messages[0] == messages[1] != []


@pytest.mark.parametrize("count", [0.5, True])
def test_a_number_of_rows_that_is_none_is_refused_by_name(count):
    with pytest.raises(ValueError, match="num_return_sequences must be an integer >= 1, got .*;"):
        tiny_model("llama").generate(**PADDED, num_return_sequences=count, custom_generate=stand_generate)


def test_an_explicit_none_switches_the_default_top_k_off():
    model = copy.deepcopy(tiny_model("llama"))
    with torch.no_grad():
        model.lm_head.weight.mul_(0.05)
    settings = {"do_sample": True, "num_return_sequences": 600, "max_new_tokens": 1, "eos_token_id": -1}
    prompt, drawn = torch.tensor([[3, 5, 1]]), []
    for top_k in ({"top_k": None}, {}):
        tokens = model.generate(prompt, custom_generate=stand_generate, stand_seed=0, **settings, **top_k)[:, -1]
        drawn.append(len(set(tokens.tolist())))
    assert drawn[0] > 50 >= drawn[1]


def test_a_seed_decides_and_generators_are_left_alone_when_greedy(model):
    def sampled(seed: int) -> list:
        torch.manual_seed(seed)
        use_engine(stand.wrap(model))
        settings = {"do_sample": True, "max_new_tokens": 12, "num_return_sequences": 3}
        return model.generate(**PADDED, custom_generate=stand_generate, **settings).tolist()

    first = sampled(0)
    assert first == sampled(0) and first != sampled(1) and len(first) == 9
    assert len({tuple(row) for row in first}) == 9
    state = torch.get_rng_state()
    both(model, PADDED)
    assert torch.equal(state, torch.get_rng_state())


def test_a_given_seed(model):
    def sampled(**settings) -> list:
        use_engine(stand.wrap(model))
        return model.generate(**PADDED, custom_generate=stand_generate, do_sample=True, **settings).tolist()

    assert sampled(stand_seed=3) == sampled(stand_seed=3) != sampled(stand_seed=4)


@pytest.mark.parametrize(
    "settings", [{"typical_p": 0.6, "temperature": 0.7}, {"top_p": 0.8, "top_k": 0, "sequence_bias": [[[17], 4.0]]}]
)
def test_sampling_settings_reach_the_engine(model, settings):
    settings = {"do_sample": True, "max_new_tokens": 12, "num_return_sequences": 2, **settings}
    use_engine(stand.wrap(model))
    got = model.generate(**PADDED, custom_generate=stand_generate, stand_seed=5, **settings)
    output = stand.wrap(model).generate(input_ids=PADDED, seed=5, **settings)
    assert got[:, 6:].tolist() == output.padded(0).tolist()


def test_calls_share_a_lookup_that_helps():
    model = copy.deepcopy(tiny_model("llama"))
    settings = {"do_sample": False, "max_new_tokens": 40, "return_dict_in_generate": True}
    first, second = (model.generate(**PADDED, custom_generate=stand_generate, **settings) for _ in range(2))
    assert first.sequences.tolist() == second.sequences.tolist() == model.generate(**PADDED, **settings)[0].tolist()
    assert second.stats.mean_acceptance_length > 1.5 * first.stats.mean_acceptance_length
    assert len(engine_of(model).lookup) > 0 and engine_of(model) is engine_of(model)


def test_an_engine_of_ones_own_is_used(model, monkeypatch):
    """Its tokenizer's end token ends nothing: `generate` does not know it."""
    tokenizer = letter_tokenizer()
    tokenizer.eos_token = LETTERS[PADDED_ENDS_AT]
    engine = stand.wrap(model, tokenizer, drafter=stand.PromptLookupDrafter())
    use_engine(engine)
    monkeypatch.setattr(model.generation_config, "eos_token_id", None)
    expected, got = both(model, PADDED)
    assert PADDED_ENDS_AT in expected[0, 6:-1].tolist()
    assert engine_of(model) is engine and expected.tolist() == got.tolist()
    use_engine(stand.wrap(model))
    with pytest.raises(ValueError, match="stand.wrap"):
        use_engine(model)


def test_a_model_that_moved_gets_a_new_engine_with_the_same_lookup():
    model = copy.deepcopy(tiny_model("llama"))
    engine = engine_of(model)
    moved = engine_of(model.double())
    assert moved is not engine and moved.lookup is engine.lookup
    assert engine_of(model) is moved
    use_engine(engine)
    with pytest.raises(ValueError, match="use_engine again"):
        engine_of(model.float())


def test_an_engine_ends_with_its_model_and_copies_start_without():
    model = copy.deepcopy(tiny_model("llama"))
    engine = weakref.ref(engine_of(model))
    twin = copy.deepcopy(model)
    assert engine_of(twin) is not engine() and engine_of(twin).model is twin
    del model, twin
    gc.collect()
    assert engine() is None


@pytest.mark.parametrize("argument", ["streamer", "stand_streamer"])
def test_a_streamer_of_the_callable_form(model, argument):
    """A reader of a `TextIteratorStreamer` waits for its end."""
    streamer, inputs = Recorder(), {"input_ids": PADDED["input_ids"][:1]}
    settings = {"do_sample": False, "max_new_tokens": 12, "custom_generate": stand_generate}
    got = model.generate(**inputs, **{argument: streamer}, **settings)
    assert streamer.pieces == got[0].tolist() and streamer.ended
    with pytest.raises(ValueError, match="leave stand_streamer out"):
        model.generate(**inputs, streamer=Recorder(), stand_streamer=Recorder(), **settings)


REFUSED = {
    "num_beams": {"num_beams": 2},
    "penalty_alpha": {"penalty_alpha": 0.6, "top_k": 4},
    "output_hidden_states": {"output_hidden_states": True, "return_dict_in_generate": True},
    "guidance_scale": {"guidance_scale": 2.0},
    "assistant_model": {"assistant_model": tiny_model("llama")},
    "negative_prompt_ids": {"negative_prompt_ids": torch.tensor([[5, 6]] * 3)},
    "synced_gpus": {"synced_gpus": True},
    "position_ids": {"position_ids": torch.arange(3, 9).expand(3, 6)},
    "inputs_embeds": {"inputs_embeds": torch.zeros(3, 6, 32)},
    "MaxLengthCriteria": {"stopping_criteria": [MaxLengthCriteria(9)]},
    "pad_token_id": {"stopping_criteria": [EndsAt()], "pad_token_id": None, "eos_token_id": None},
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_served_is_refused_by_name(model, name, monkeypatch):
    for token in ("pad_token_id", "eos_token_id") if name == "pad_token_id" else ():
        monkeypatch.setattr(model.generation_config, token, None)
    with pytest.raises(ValueError, match=name):
        model.generate(**PADDED, custom_generate=stand_generate, **{"max_new_tokens": 4, **REFUSED[name]})


def test_input_ids_of_three_dimensions_are_refused(model):
    with pytest.raises(ValueError, match=r"input_ids must be \[rows, tokens\], got \[2, 3, 4\]; pass one row"):
        model.generate(torch.ones(2, 3, 4, dtype=torch.long), custom_generate=stand_generate, max_new_tokens=2)


def test_inputs_that_another_object_makes_are_refused(model, monkeypatch):
    """As peft's are, which puts learned prompts before the tokens."""
    monkeypatch.setattr(model, "prepare_inputs_for_generation", model.prepare_inputs_for_generation, raising=False)
    model.generate(torch.tensor([[5, 6, 7]]), custom_generate=stand_generate, max_new_tokens=2)
    owner = copy.deepcopy(model)
    monkeypatch.setattr(model, "prepare_inputs_for_generation", owner.prepare_inputs_for_generation, raising=False)
    with pytest.raises(ValueError, match=f"got those of {type(owner).__name__}.*call generate without custom_generate"):
        model.generate(torch.tensor([[5, 6, 7]]), custom_generate=stand_generate, max_new_tokens=2)


def test_a_mask_of_another_shape_is_refused(model):
    with pytest.raises(ValueError, match="as long as input_ids, got 2 for 3 tokens; pass both"):
        model.generate(
            torch.tensor([[5, 6, 7]]), attention_mask=torch.ones(1, 2), max_new_tokens=2, custom_generate=stand_generate
        )


@pytest.mark.parametrize("num_filled", [3, pytest.param(0, marks=in_marked_caches)])
def test_a_cache_of_ones_own_is_refused(model, num_filled):
    cache, argument = DynamicCache(), cache_argument(model)
    if num_filled:
        model(PADDED["input_ids"][:, :num_filled], **{argument: cache})
    with pytest.raises(ValueError, match=f"{argument} must be left out here"):
        model.generate(**PADDED, custom_generate=stand_generate, max_new_tokens=4, **{argument: cache})


@pytest.fixture
def recipe(tmp_path, monkeypatch) -> str:
    """The folder as it would lie on the hub."""
    if not HUB.is_dir():
        pytest.skip("needs the source tree, docs included")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    return str(shutil.copytree(HUB, tmp_path / "recipe"))


def test_a_hub_folder_serves_streamer_and_stop_strings(model, recipe):
    inputs, streamer = {"input_ids": PADDED["input_ids"][:1]}, Recorder()
    settings = {"do_sample": False, "max_new_tokens": 24, "stop_strings": LETTERS[30:40]}
    settings["tokenizer"] = letter_tokenizer()
    expected = model.generate(**inputs, **settings)
    got = model.generate(**inputs, custom_generate=recipe, trust_remote_code=True, streamer=streamer, **settings)
    assert expected.tolist() == got.tolist() and expected.shape[1] < 30
    assert streamer.pieces == got[0].tolist() and streamer.ended
    with pytest.raises(ValueError, match="assistant_model"):
        model.generate(**inputs, custom_generate=recipe, trust_remote_code=True, assistant_model=model)
    with pytest.raises(ValueError, match="cache_implementation must not be 'paged'"):
        model.generate(**inputs, custom_generate=recipe, trust_remote_code=True, cache_implementation="paged")


def test_a_hub_folder_serves_a_function_of_allowed_tokens(model, recipe):
    settings = {"do_sample": False, "max_new_tokens": 24, "prefix_allowed_tokens_fn": few_after}
    expected = model.generate(**PADDED, **settings)
    got = model.generate(**PADDED, custom_generate=recipe, trust_remote_code=True, **settings)
    assert expected.tolist() == got.tolist()


@pytest.mark.parametrize(
    "given", [{}, {"stop_strings": None}, {"config": LETTERS[20:30]}, {"config": None}, {"stop_strings": LETTERS[50:]}]
)
def test_the_models_own_stop_strings_are_served_by_the_folders_form(given):
    model, config = copy.deepcopy(tiny_model("llama")), GenerationConfig(max_new_tokens=24, do_sample=False)
    model.generation_config.stop_strings = LETTERS[30:40]
    settings = {"max_new_tokens": 24, "do_sample": False, **given}
    if "config" in given:
        config.stop_strings = given["config"]
        settings = {"generation_config": config}
    settings |= {"input_ids": PADDED["input_ids"][:1], "tokenizer": letter_tokenizer()}
    expected = model.generate(**settings)
    assert hub_generate(model=model, **settings).tolist() == expected.tolist()
    assert (expected.shape[1] < 30) == (given != {"stop_strings": None})


def test_a_model_folder_with_the_recipe_generates_by_it(recipe):
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(CONFIGS["llama"]).save_pretrained(recipe)
    plain = AutoModelForCausalLM.from_pretrained(recipe)
    model = AutoModelForCausalLM.from_pretrained(recipe, trust_remote_code=True)
    settings = {"do_sample": False, "max_new_tokens": 24, "eos_token_id": ENDS}
    expected = plain.generate(**PADDED, **settings).tolist()
    assert model.generate(**PADDED, **settings).tolist() == expected
    config = GenerationConfig(**settings)
    assert model.generate(PADDED["input_ids"], config, attention_mask=PADDED["attention_mask"]).tolist() == expected
    with pytest.raises(TypeError, match="multiple values for argument 'inputs'"):
        model.generate(PADDED["input_ids"], inputs=PADDED["input_ids"])
    assert len(engine_of(model).lookup) > 0
    assert model.generate(**PADDED, custom_generate=None, **settings).tolist() == expected
    assert model.generate(**PADDED, custom_generate=lambda *_, **__: "another's") == "another's"


def shortened(code: str) -> str:
    return code.replace("300", "40").replace("num_rows=16", "num_rows=4")


@pytest.mark.long
@pytest.mark.skipif(not PAGE.is_file(), reason="needs the source tree, docs included")
def test_the_page_runs_as_printed(tmp_path, monkeypatch, capsys):
    """Its blocks one after the other, in a folder with the bundled model alone; fewer tokens, and fewer steps timed."""
    namespace = run_page(PAGE, tmp_path, monkeypatch, shortened)
    printed = capsys.readouterr().out
    assert float(re.search(r"(\d+\.\d\d) tokens per step and row", printed)[1]) > 1.5
    assert re.search(r"\d+ tokens per second without drafts, \d+ with: x \d+\.\d\d", printed)
    assert (tmp_path / "power.lookup").is_file() and namespace["stopped"].shape[0] == 2


@pytest.mark.parametrize("name", ["output_scores", "output_logits"])
def test_scores_that_a_bare_tensor_has_no_room_for_are_left_out(name):
    model, settings = tiny_model("llama"), {"max_new_tokens": 3, "do_sample": False, name: True}
    prompt = torch.tensor([[1, 2, 3]])
    expected = model.generate(prompt, **settings)
    assert model.generate(prompt, custom_generate=stand_generate, **settings).equal(expected)
