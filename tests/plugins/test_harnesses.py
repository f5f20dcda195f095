"""Harness doors: what they ask of the engine and what they hand back, with stand-ins where the library is absent."""

import asyncio
import contextlib
import copy
import importlib
import re
import subprocess
import sys
import types
from dataclasses import dataclass, field

import numpy as np
import pytest
import torch
from grammar_cases import grammar_tokenizer, take_patterns
from letter_tokenizer import LETTERS, letter_tokenizer
from tiny_models import tiny_model
from transformers import StoppingCriteria, StoppingCriteriaList, StopStringCriteria

import stand
from stand.forward.tree_attention import exclusive
from stand.plugins.generate import engine_of

PADDED = {  # left-padded, prompts of 6, 4 and 2 tokens
    "input_ids": torch.tensor([[5, 9, 11, 4, 5, 9], [0, 0, 7, 8, 30, 21], [0, 0, 0, 0, 40, 41]]),
    "attention_mask": torch.tensor([[1] * 6, [0, 0, 1, 1, 1, 1], [0, 0, 0, 0, 1, 1]]),
}


def fresh_model():
    """A copy without an engine of earlier tests."""
    return copy.deepcopy(tiny_model("llama"))


def module(name, **names):
    made = types.ModuleType(name)
    vars(made).update(names)
    return made


class PlainHFLM:
    """The part of lm-eval's class that `StandLM` builds upon."""

    backend, mixed_precision_dtype = "causal", None

    def __init__(self, pretrained, **settings):
        self.model, self.tokenizer = pretrained
        self.tokenizer.pad_token = LETTERS[0]
        self.settings = settings

    def get_model_info(self):
        return {"model_dtype": "float32"}


class NewTextCriteria(StoppingCriteria):
    """As lm-eval's `MultiTokenEOSCriteria`: one string in the last new tokens of every row."""

    def __init__(self, sequence, tokenizer, initial_decoder_input_length, batch_size):
        self.sequence, self.tokenizer, self.start = sequence, tokenizer, initial_decoder_input_length
        self.most = len(tokenizer.encode(sequence, add_special_tokens=False)) + 2
        self.done_tracker = [False] * batch_size

    def __call__(self, input_ids, scores, **kwargs):
        texts = self.tokenizer.batch_decode(input_ids[:, self.start :][:, -self.most :])
        self.done_tracker = [done or self.sequence in text for done, text in zip(self.done_tracker, texts, strict=True)]
        return False not in self.done_tracker


def stop_sequences_criteria(tokenizer, stop_sequences, initial_decoder_input_length, batch_size):
    sizes = initial_decoder_input_length, batch_size
    return StoppingCriteriaList([NewTextCriteria(sequence, tokenizer, *sizes) for sequence in stop_sequences])


@pytest.fixture
def lm_eval_door(monkeypatch):
    registered = {}
    stand_ins = {
        "lm_eval": module("lm_eval"),
        "lm_eval.api": module("lm_eval.api"),
        "lm_eval.api.registry": module(
            "lm_eval.api.registry", register_model=lambda name: lambda made: registered.setdefault(name, made)
        ),
        "lm_eval.models": module("lm_eval.models"),
        "lm_eval.models.huggingface": module(
            "lm_eval.models.huggingface", HFLM=PlainHFLM, stop_sequences_criteria=stop_sequences_criteria
        ),
    }
    for name, made in stand_ins.items():
        monkeypatch.setitem(sys.modules, name, made)
    monkeypatch.delitem(sys.modules, "stand.plugins.lm_eval", raising=False)
    yield importlib.import_module("stand.plugins.lm_eval")
    assert list(registered) == ["stand"]
    sys.modules.pop("stand.plugins.lm_eval")  # else the next test would have what was made of stand-ins


def test_lm_eval_gets_what_the_model_generates(lm_eval_door):
    model, tokenizer = fresh_model(), letter_tokenizer()
    lm = lm_eval_door.StandLM((model, tokenizer))
    stop = LETTERS[30:40]
    got = lm._model_generate(PADDED["input_ids"], 30, stop, attention_mask=PADDED["attention_mask"], until=None)
    expected = model.generate(
        **PADDED, max_length=30, do_sample=False, pad_token_id=tokenizer.pad_token_id,
        stopping_criteria=StoppingCriteriaList([StopStringCriteria(tokenizer, stop)]),
    )  # fmt: skip
    assert got.tolist() == expected.tolist()
    assert any(token in got[0, 6:] for token in range(30, 40)), "no stop string was met"
    assert lm.stats.num_tokens > 0
    assert lm.get_model_info()["stand_tokens_per_step"] == lm.stats.mean_acceptance_length >= 1.0


def test_lm_eval_stops_at_new_text_alone(lm_eval_door):
    """A stop string that begins in the prompt, such as an empty line behind a prompt that ends one, ends no answer."""
    model, tokenizer = fresh_model(), letter_tokenizer()
    prompt = torch.tensor([[5, 9, 11, 4]])
    settings = {"max_length": 30, "attention_mask": torch.ones_like(prompt)}
    free = model.generate(prompt, **settings, do_sample=False, pad_token_id=0)[0].tolist()
    text = [LETTERS[token] for token in free]
    stops = ["".join(text[3:5]), "".join(text[10:12])]
    first = min(place for place in range(4, 30) if "".join(text[place : place + 2]) in stops)
    got = lm_eval_door.StandLM((model, tokenizer))._model_generate(prompt, stop=stops, **settings)
    assert got[0].tolist() == free[: first + 2] and first > 4


def test_lm_eval_samples_by_torchs_generator(lm_eval_door):
    torch.manual_seed(7)
    settings = {"attention_mask": PADDED["attention_mask"], "do_sample": True, "temperature": 0.9}
    runs = []
    for _ in range(2):
        lm = lm_eval_door.StandLM((fresh_model(), letter_tokenizer()))
        torch.manual_seed(7)
        runs.append(lm._model_generate(PADDED["input_ids"], 30, LETTERS[30:31], **settings).tolist())
    assert runs[0] == runs[1]
    assert lm._model_generate(PADDED["input_ids"], 30, LETTERS[30:31], **settings).tolist() != runs[0]


def test_lm_eval_starts_from_a_saved_lookup(lm_eval_door, tmp_path):
    pair = fresh_model(), letter_tokenizer()
    first = lm_eval_door.StandLM(pair)
    first._model_generate(PADDED["input_ids"], 30, LETTERS[:1], attention_mask=PADDED["attention_mask"])
    first.save_lookup(str(tmp_path / "letters.lookup"))
    again = lm_eval_door.StandLM(pair, lookup=str(tmp_path / "letters.lookup"))
    again._model_generate(PADDED["input_ids"], 30, LETTERS[:1], attention_mask=PADDED["attention_mask"])
    assert again.stats.mean_acceptance_length > first.stats.mean_acceptance_length


def test_lm_eval_shares_what_it_learns(lm_eval_door, tmp_path):
    pair = fresh_model(), letter_tokenizer()
    lm = lm_eval_door.StandLM(pair, share=str(tmp_path / "shared"))
    lm._model_generate(PADDED["input_ids"], 30, LETTERS[:1], attention_mask=PADDED["attention_mask"])
    assert engine_of(pair[0]).drafter.exchange.num_sent > 0
    assert lm_eval_door.StandLM(pair) and engine_of(pair[0]).drafter.exchange is None


def test_lm_eval_tries_its_files_before_the_model(lm_eval_door):
    with pytest.raises(FileNotFoundError, match="no.lookup"):
        lm_eval_door.StandLM("no model", lookup="no.lookup")
    with pytest.raises(ValueError, match="share must be the path of a folder"):
        lm_eval_door.StandLM("no model", share="")


def test_lm_eval_refuses_what_the_engine_cannot_serve(lm_eval_door, monkeypatch):
    monkeypatch.setattr(PlainHFLM, "backend", "seq2seq")
    with pytest.raises(ValueError, match="decoder-only"):
        lm_eval_door.StandLM((None, letter_tokenizer()))


@dataclass
class Config:
    """inspect's settings that the provider reads."""

    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    stop_seqs: list[str] | None = None
    seed: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    num_choices: int | None = None
    reasoning_effort: str | None = None
    reasoning_tokens: int | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    response_schema: object = None
    timeout: int | None = None


@dataclass
class Message:
    role: str
    text: str
    content: object = ""


@dataclass
class Anything:
    """Keeps what it is made with."""

    given: dict = field(default_factory=dict)

    def __init__(self, **given):
        self.given = given


class PlainModelAPI:
    def __init__(self, model_name, base_url=None, api_key=None, config=None):
        self.model_name, self.config = model_name, config


@pytest.fixture
def inspect_door(monkeypatch):
    names = ["ChatCompletionChoice", "ChatMessageAssistant", "Logprob", "Logprobs", "ModelOutput", "ModelUsage"]
    names.append("TopLogprob")
    model = module("inspect_ai.model", ChatMessage=Message, GenerateConfig=Config, ModelAPI=PlainModelAPI)
    vars(model).update({name: type(name, (Anything,), {}) for name in names})
    model.modelapi = lambda name: lambda made: made
    stand_ins = {
        "inspect_ai": module("inspect_ai"),
        "inspect_ai.model": model,
        "inspect_ai.tool": module("inspect_ai.tool", ToolChoice=object, ToolInfo=object),
        "anyio": module(
            "anyio",
            sleep=asyncio.sleep,
            to_thread=types.SimpleNamespace(run_sync=asyncio.to_thread),
            CancelScope=lambda shield: contextlib.nullcontext(),
        ),
    }
    for name, made in stand_ins.items():
        monkeypatch.setitem(sys.modules, name, made)
    monkeypatch.delitem(sys.modules, "stand.plugins.inspect_ai", raising=False)
    yield importlib.import_module("stand.plugins.inspect_ai")
    sys.modules.pop("stand.plugins.inspect_ai")  # else the next test would have what was made of stand-ins


@pytest.fixture
def provider(inspect_door):
    """A provider around a tiny model, past the constructor that loads one."""
    tokenizer = letter_tokenizer()
    tokenizer.chat_template = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
    api = inspect_door.StandAPI.__new__(inspect_door.StandAPI)
    api.model_name = "letters"
    api._begin(stand.wrap(fresh_model(), tokenizer), 4, None, 3)
    yield api
    runs = list(api.runs._runs.values())
    api.close()
    assert not any(run._thread.is_alive() for run in runs)


@pytest.mark.parametrize("is_closed", [True, False])
def test_inspects_provider_saves_its_lookup(inspect_door, tmp_path, is_closed):
    """inspect closes no model that it was given by name: then the file is written when the provider is gone."""
    path, engine = tmp_path / "letters.lookup", stand.wrap(fresh_model(), letter_tokenizer())
    api = inspect_door.StandAPI.__new__(inspect_door.StandAPI)
    api._begin(engine, 2, str(path), None)
    engine.lookup.learn([1], [2, 3])
    assert not path.exists()
    if is_closed:
        api.close()
    else:
        del api
    assert len(stand.BlendedLookup.load(path)) == len(engine.lookup) > 0


def test_inspects_provider_tries_the_file_before_it_loads_a_model(inspect_door, tmp_path):
    path = tmp_path / "none" / "letters.lookup"
    with pytest.raises(ValueError, match="save_lookup must name a file that can be written"):
        inspect_door.StandAPI("no model", save_lookup=str(path))


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"lookup": "no.lookup"}, FileNotFoundError, "no.lookup"),
        ({"share": ""}, ValueError, "share must be the path of a folder"),
        ({"rows": 2.5}, ValueError, "rows must be a whole number, got 2.5"),
        ({"rows": "16"}, ValueError, "rows must be a whole number, got '16'"),
        ({"rows": 0}, ValueError, "rows must be at least 1, got 0"),
    ],
)
def test_inspects_provider_tries_its_options_before_it_loads_a_model(inspect_door, options, error, message):
    with pytest.raises(error, match=message):
        inspect_door.StandAPI("no model", **options)


LISTING = """
import sys, types
model = types.ModuleType("inspect_ai.model")
model.__getattr__ = lambda name: (lambda name: lambda made: made) if name == "modelapi" else object
tool = types.ModuleType("inspect_ai.tool")
tool.__getattr__ = lambda name: object
sys.modules |= {"inspect_ai": types.ModuleType("inspect_ai"), "inspect_ai.model": model, "inspect_ai.tool": tool}
sys.modules["anyio"] = types.ModuleType("anyio")
import stand.plugins.inspect_ai
print("torch" in sys.modules)
"""


def test_inspect_lists_providers_without_torch():
    listed = subprocess.run([sys.executable, "-c", LISTING], capture_output=True, text=True, check=True)
    assert listed.stdout == "False\n"


def ask_all(provider, texts, config):
    async def ask():
        asked = [provider.generate([Message("user", text)], [], "auto", config) for text in texts]
        return await asyncio.gather(*asked, return_exceptions=True)

    return asyncio.run(ask())


def test_inspect_gets_each_prompts_own_answer(provider):
    texts = ["ABC", "BCDE", "ZZ", "HIHI", "ABCABC", "QRS"]
    answers = ask_all(provider, texts, Config(max_tokens=12, temperature=0.0))
    for text, answer in zip(texts, answers, strict=True):
        alone = provider.engine.generate(text, max_new_tokens=12, temperature=0.0, draft=False)
        message = answer.given["choices"][0].given["message"]
        assert message.given["content"] == alone.texts[0]
        usage = answer.given["usage"].given
        assert (usage["input_tokens"], usage["output_tokens"]) == (len(text), len(alone.token_ids[0]))
        assert answer.given["metadata"]["stand_tokens_per_step"] >= 1
    (run,) = provider.runs._runs.values()
    assert run.stats.num_forwards < run.stats.num_steps, "requests that came together must be decoded together"


@pytest.mark.parametrize("count", [None, 2])
def test_inspect_gets_log_probabilities(provider, count):
    config = Config(max_tokens=9, temperature=0.7, logprobs=True, top_logprobs=count)
    (answer,) = ask_all(provider, ["ABC"], config)
    choice = answer.given["choices"][0].given
    places = [place.given for place in choice["logprobs"].given["content"]]
    engine = stand.wrap(provider.engine.model, provider.engine.tokenizer)
    alone = engine.generate("ABC", max_new_tokens=9, temperature=0.7, seed=3, logprobs=2)
    letters = [letter_tokenizer().decode([token]) for token in alone.token_ids[0]]
    assert [place["token"] for place in places] == letters and len(letters) > 3
    assert [bytes(place["bytes"]).decode() for place in places] == letters
    assert np.allclose([place["logprob"] for place in places], alone.logprobs[0].of_tokens, atol=1e-4)
    for place, ids, values in zip(places, alone.logprobs[0].top_ids, alone.logprobs[0].top, strict=True):
        found = [] if count is None else [top.given for top in place["top_logprobs"]]
        assert (place["top_logprobs"] is None) == (count is None)
        assert [top["token"] for top in found] == [letter_tokenizer().decode([token]) for token in ids[: len(found)]]
        assert np.allclose([top["logprob"] for top in found], values[: len(found)], atol=1e-4)
    (answer,) = ask_all(provider, ["ABC"], Config(max_tokens=9))
    assert answer.given["choices"][0].given["logprobs"] is None


class Schema:
    """As inspect's ResponseSchema, of a pattern."""

    def __init__(self, pattern):
        self.json_schema, self.pattern = self, pattern

    def model_dump(self, *, exclude_none):
        assert exclude_none
        return {"type": "string", "pattern": self.pattern}


def with_grammar(inspect_door, **settings):
    """A provider whose tokenizer xgrammar can read."""
    tokenizer = grammar_tokenizer()
    tokenizer.chat_template = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
    api = inspect_door.StandAPI.__new__(inspect_door.StandAPI)
    api.model_name = "letters"
    api._begin(stand.wrap(copy.deepcopy(tiny_model("qwen2")), tokenizer), 4, None, 3, **settings)
    return api


@pytest.mark.parametrize("thoughts_end", [None, "z"])
def test_inspects_schemas_give_answers_their_form(inspect_door, monkeypatch, thoughts_end):
    take_patterns(monkeypatch)
    api = with_grammar(inspect_door, thoughts_end=thoughts_end)
    try:
        asked = {"max_tokens": 200, "temperature": 1.0, "seed": 5}
        prompts = [letter * 3 for letter in "abcdefghijklmnopqrstuvwxy"]
        answers = ask_all(api, prompts, Config(**asked, response_schema=Schema("(ab|c){3}")))
        texts = [answer.given["choices"][0].given["message"].given["content"] for answer in answers]
        if thoughts_end is not None:  # some end in their thoughts, by the end token
            texts = [text.partition(thoughts_end)[2] for text in texts if thoughts_end in text]
        assert len(texts) > 1 and all(re.fullmatch("(ab|c){3}", text) for text in texts)
        (free,) = ask_all(api, ["abc"], Config(**asked))
        assert not re.fullmatch("(ab|c){3}", free.given["choices"][0].given["message"].given["content"])
    finally:
        api.close()


def test_inspects_thoughts_must_end_in_text_of_the_tokenizer(inspect_door):
    with pytest.raises(ValueError, match="thoughts_end must be text that always has the same tokens, got .</think>."):
        with_grammar(inspect_door, thoughts_end="</think>")


def test_inspects_schemas_need_xgrammar(provider, monkeypatch):
    monkeypatch.setitem(sys.modules, "xgrammar", None)
    monkeypatch.delitem(sys.modules, "xgrammar.contrib.hf", raising=False)
    (answer,) = ask_all(provider, ["ABC"], Config(max_tokens=2, response_schema=Schema("a")))
    assert isinstance(answer, ImportError) and "response_schema needs xgrammar" in str(answer)
    assert "pip install xgrammar" in str(answer)


def test_inspects_penalties_and_budgets_of_thoughts(inspect_door):
    """A budget needs to know how thoughts end, and a prompt may end them."""
    api = with_grammar(inspect_door, thoughts_end="z")
    asked = {"max_tokens": 25, "temperature": 0.0}
    try:
        penalties = Config(**asked, presence_penalty=1.5, frequency_penalty=0.5)
        budgets = Config(**asked, reasoning_tokens=4, presence_penalty=0.5)
        found = [ask_all(api, [prompt], config)[0] for config in (penalties, budgets) for prompt in ("abc", "abcz")]
        texts = [one.given["choices"][0].given["message"].given["content"] for one in found]
    finally:
        api.close()
    engine = stand.wrap(api.engine.model, api.engine.tokenizer)

    def alone(prompt, *processors):
        return engine.generate(prompt, max_new_tokens=25, temperature=0.0, logits_processors=processors).texts[0]

    both, slight = stand.OutputPenalties(presence=1.5, frequency=0.5), stand.OutputPenalties(presence=0.5)
    end = api.engine.tokenizer.encode("z", add_special_tokens=False)
    budget = stand.ThinkingBudget(4, begin=None, end=end)
    assert texts == [alone("abc", both), alone("abcz", both), alone("abc", slight, budget), alone("abcz", slight)]
    assert texts[2] != alone("abc", slight) and texts[3] != alone("abcz", slight, budget)


def test_inspects_budgets_need_the_end_of_thoughts(provider):
    (answer,) = ask_all(provider, ["ABC"], Config(max_tokens=2, reasoning_tokens=7))
    assert isinstance(answer, ValueError) and "a thinking budget needs to know how thoughts end" in str(answer)


def test_inspect_is_told_no_bytes_of_a_part_of_a_character(inspect_door):
    places = [[("\N{REPLACEMENT CHARACTER}", -1.0), ("é", -0.5)]]
    (place,) = inspect_door._logprobs(places).given["content"]
    assert place.given["bytes"] is None and place.given["top_logprobs"][0].given["bytes"] == [195, 169]


def test_inspect_gets_the_engines_errors_and_goes_on(provider):
    wrong, right = Config(max_tokens=4, temperature=-1.0), Config(max_tokens=4)
    assert isinstance(ask_all(provider, ["ABC"], wrong)[0], ValueError)
    assert not isinstance(ask_all(provider, ["ABC"], right)[0], Exception)


def test_one_request_that_cannot_be_served_does_not_fail_its_neighbours(provider):
    texts = ["ABC", "BCDE", "A" * 2000, "HIHI"]
    answers = ask_all(provider, texts, Config(max_tokens=4, temperature=0.0))
    assert [isinstance(answer, ValueError) for answer in answers] == [False, False, True, False]


def test_requests_that_nobody_waits_for_are_not_decoded(provider, monkeypatch):
    submitted = []
    submit = provider.runs.submit
    monkeypatch.setattr(
        provider.runs, "submit", lambda *told, **how: submitted.append(submit(*told, **how)) or submitted[-1]
    )

    async def ask():
        chat, config = [Message("user", "ABC")], Config(max_tokens=4)
        await provider.generate(chat, [], "auto", config)  # a run is open
        with exclusive(provider.engine.model):
            asked = asyncio.create_task(provider.generate(chat, [], "auto", config))
            while len(submitted) < 2:
                await asyncio.sleep(0.001)
            await asyncio.sleep(0.05)
            asked.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await asked
        return await provider.generate(chat, [], "auto", config)

    answer = asyncio.run(ask())
    assert [future.cancelled() for future in submitted] == [False, True, False]
    assert 0 < answer.given["usage"].given["output_tokens"] <= 4


@pytest.mark.parametrize(("own", "of_call"), [(7, None), (None, 7), (3, 7)])
def test_inspects_seed_may_be_the_providers_or_the_calls(inspect_door, own, of_call):
    tokenizer = letter_tokenizer()
    tokenizer.chat_template = "{{ messages[0]['content'] }}"
    api = inspect_door.StandAPI.__new__(inspect_door.StandAPI)
    api.model_name = "letters"
    api._begin(stand.wrap(fresh_model(), tokenizer), 4, None, own)
    config = Config(max_tokens=12, temperature=1.0, seed=of_call)
    first, second = (
        ask_all(api, ["ABC"], config)[0].given["choices"][0].given["message"].given["content"] for _ in range(2)
    )
    api.close()
    engine = stand.wrap(fresh_model(), tokenizer)
    assert first == engine.generate("ABC", max_new_tokens=12, temperature=1.0, seed=7).texts[0]
    assert second != first, "calls with one seed must not repeat each other"


def test_inspects_provider_takes_nothing_after_its_end(provider):
    provider.close()
    (answer,) = ask_all(provider, ["ABC"], Config(max_tokens=4))
    assert isinstance(answer, RuntimeError) and "before close(), got one after it" in str(answer)


def test_inspect_refuses_what_would_be_ignored(provider):
    (answer,) = ask_all(provider, ["ABC"], Config(top_logprobs=2))
    assert isinstance(answer, ValueError) and "top_logprobs needs logprobs=True, got 2 alone" in str(answer)
    for config in (Config(num_choices=3), Config(num_choices=2), Config(reasoning_effort="low")):
        (answer,) = ask_all(provider, ["ABC"], config)
        assert isinstance(answer, ValueError) and "must be left out" in str(answer)
    (answer,) = ask_all(
        provider, ["ABC"], Config(max_tokens=2, timeout=9, num_choices=1, logprobs=False, top_logprobs=0)
    )
    assert not isinstance(answer, Exception)
    image = Message("user", "look", content=[types.SimpleNamespace(type="image")])
    with pytest.raises(ValueError, match="must be text"):
        asyncio.run(provider.generate([image], [], "auto", Config()))
    with pytest.raises(ValueError, match="tools"):
        asyncio.run(provider.generate([], [types.SimpleNamespace(name="bash")], "auto", Config()))


def test_the_libraries_have_what_the_stand_ins_stand_for():
    """Where they are installed: the doors open, and the names that they use are there."""
    pytest.importorskip("lm_eval", reason="lm-eval is not installed")
    pytest.importorskip("inspect_ai", reason="inspect-ai is not installed")
    from lm_eval.models.huggingface import HFLM

    from stand.plugins.inspect_ai import NOT_THE_MODELS, SERVED, GenerateConfig
    from stand.plugins.lm_eval import StandLM

    assert issubclass(StandLM, HFLM) and StandLM._model_generate is not HFLM._model_generate
    assert {*NOT_THE_MODELS, *SERVED} <= set(GenerateConfig.model_fields)
    assert set(vars(GenerateConfig())) == set(GenerateConfig.model_fields)
