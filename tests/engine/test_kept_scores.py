"""`output_scores` and `output_logits`: numbers over the vocabulary as transformers gives them, whatever was drafted."""

import copy
from functools import cache

import numpy as np
import pytest
import torch
from every_day import every_day
from measuring.setup import REASONER
from plain_logprobs import plain_scores
from plain_tensors import differing, largest_errors
from recurrent_models import RECURRENT, recurrent_model
from step_pair import taught_lookup
from tiny_models import CONFIGS, VOCABULARY_SIZE, kernel_model, tiny_model
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig, GenerationMixin
from transformers.generation import logits_process as library
from with_pages import needs_pages

import stand
from stand.backend import EagerBackend
from stand.laws.kept_scores import KeptScores
from stand.plugins.generate import draft_always, stand_generate, use_engine
from stand.scheduling import within_pages
from stand.scheduling.free_memory import bytes_per_token

PROMPTS = [[3, 4, 5, 6, 7, 3, 4], [8], [9, 10, 9]]
PADDED = {  # left-padded, prompts of 6, 4 and 2 tokens
    "input_ids": torch.tensor([[5, 9, 11, 4, 5, 9], [0, 0, 7, 8, 30, 21], [0, 0, 0, 0, 40, 41]]),
    "attention_mask": torch.tensor([[1] * 6, [0, 0, 1, 1, 1, 1], [0, 0, 0, 0, 1, 1]]),
}
END = [*range(20, 26)]
BOTH = {"output_scores": True, "output_logits": True}
AS_DICT = {"return_dict_in_generate": True, **BOTH}
FILTERS = {  # settings, and the processors that transformers makes of them
    "temperature": ({"temperature": 1.7, "top_k": 0}, [library.TemperatureLogitsWarper(1.7)]),
    "top_k": ({"top_k": 7}, [library.TopKLogitsWarper(7)]),
    "top_p": ({"top_k": 0, "top_p": 0.6}, [library.TopPLogitsWarper(0.6)]),
    "min_p": ({"top_k": 0, "min_p": 0.08}, [library.MinPLogitsWarper(0.08)]),
    "all": (
        {"temperature": 0.7, "top_k": 20, "top_p": 0.9, "min_p": 0.02, "repetition_penalty": 1.3},
        [
            library.RepetitionPenaltyLogitsProcessor(1.3), library.TemperatureLogitsWarper(0.7),
            library.TopKLogitsWarper(20), library.TopPLogitsWarper(0.9), library.MinPLogitsWarper(0.02),
        ],
    ),
}  # fmt: skip
TOLERANCE = 1e-3


@cache
def model_of(family: str):
    return tiny_model(family) if family in CONFIGS else recurrent_model(family)


@cache
def engine_of(family: str, verifier: str = "traversal") -> stand.Engine:
    """Drafts much, and often rightly."""
    model = model_of(family)
    drafter = stand.BlendedDrafter(taught_lookup(model, PROMPTS, 40), budget=16)
    return stand.wrap(model, drafter=drafter, verifier=verifier, backend="sdpa")


@pytest.fixture(scope="module")
def reasoner():
    tokenizer = AutoTokenizer.from_pretrained(REASONER, padding_side="left")
    model = AutoModelForCausalLM.from_pretrained(REASONER, dtype=torch.float32).eval()
    texts = ("Find 8^34 mod 5.", "Find 7^45 mod 9.", "Find 3^2 mod 2.")
    chats = [[{"role": "user", "content": text}] for text in texts]
    asked = {"add_generation_prompt": True, "padding": True, "return_tensors": "pt", "return_dict": True}
    return model, tokenizer.apply_chat_template(chats, **asked)


def lengths_of(sequences: torch.Tensor, begun: int, ends: list[int]) -> list[int]:
    """New tokens of each row, its end token included."""
    rows = [torch.isin(row, torch.tensor(ends)).nonzero().flatten().tolist() for row in sequences[:, begun:]]
    return [found[0] + 1 if found else sequences.shape[1] - begun for found in rows]


def check_equal(plain, drafted, lengths: list[int], *, tolerance: float) -> None:
    """Up to each row's end those of transformers, and zeros behind it."""
    assert torch.equal(plain.sequences, drafted.sequences)
    for kind in ("logits", "scores"):
        right, found = getattr(plain, kind), getattr(drafted, kind)
        assert len(found) == len(right) and {type(found), type(right)} == {tuple}
        assert all(
            (one.shape, one.dtype, one.device) == (other.shape, other.dtype, other.device)
            for one, other in zip(found, right, strict=True)
        )
        assert differing(found, torch.stack(right, dim=1), lengths) < tolerance
        behind = [one[row] for place, one in enumerate(found) for row, length in enumerate(lengths) if place >= length]
        assert not any(values.any() for values in behind)


@pytest.mark.long
@pytest.mark.parametrize(
    "settings",
    [{}, {"repetition_penalty": 1.2}, {"min_new_tokens": 230, "no_repeat_ngram_size": 12}],
    ids=["plain", "penalty", "minimum"],
)
def test_greedy_ones_of_the_bundled_model_are_those_of_generate(reasoner, settings):
    model, inputs = reasoner
    asked = {**inputs, **AS_DICT, "do_sample": False, "max_new_tokens": 260, **settings}
    drafted = model.generate(**asked, custom_generate=stand_generate)
    lengths = lengths_of(drafted.sequences, inputs["input_ids"].shape[1], [model.generation_config.eos_token_id])
    assert drafted.stats.mean_acceptance_length > 1.3 and len(set(lengths)) > 1
    check_equal(model.generate(**asked), drafted, lengths, tolerance=1e-4)


@pytest.mark.parametrize("family", every_day([*CONFIGS, *RECURRENT], "llama", "gemma3", "qwen3_next"))
def test_every_family_has_those_of_plain_forwards(family):
    """Rows of padded prompts that end apart."""
    model = model_of(family)
    use_engine(engine_of(family))
    asked = {**PADDED, **AS_DICT, "do_sample": False, "max_new_tokens": 24, "eos_token_id": END, "pad_token_id": 0}
    drafted = model.generate(**asked, repetition_penalty=1.4, custom_generate=stand_generate)
    lengths = lengths_of(drafted.sequences, 6, END)
    processors = [library.RepetitionPenaltyLogitsProcessor(1.4)]
    for row, length in enumerate(lengths):
        prompt = PADDED["input_ids"][row][PADDED["attention_mask"][row].bool()].tolist()
        new = drafted.sequences[row, 6 : 6 + length].tolist()
        for kind, made in (("logits", []), ("scores", processors)):
            found = torch.stack([values[row] for values in getattr(drafted, kind)])[:length]
            assert torch.allclose(found, plain_scores(model, prompt, new, made), atol=TOLERANCE)


@pytest.mark.parametrize("name", FILTERS)
def test_sampled_ones_are_those_of_plain_forwards(name):
    """Filters take the same tokens out. Control: without the first of the processors they are others."""
    settings, processors = FILTERS[name]
    engine = engine_of("llama")
    asked = {"max_new_tokens": 24, "seed": 5, "learn": False, "num_return_sequences": 2}
    output = engine.generate(PROMPTS, do_sample=True, **{"temperature": 1.0, **settings}, **asked, **BOTH)
    assert output.stats.mean_acceptance_length > 1.1
    assert max(largest_errors(output, engine.model, PROMPTS, processors)) < TOLERANCE
    assert largest_errors(output, engine.model, PROMPTS, processors[1:])[1] > 0.1
    drawn = zip(output.token_ids, range(len(output)), strict=True)
    assert all(
        output.scores[place][row, token] > -torch.inf for tokens, row in drawn for place, token in enumerate(tokens)
    )


@pytest.mark.parametrize("verifier", ["match", "coupled", "rrs"])
def test_every_rule_tells_of_the_path_that_it_keeps(verifier):
    engine = engine_of("llama", verifier)
    output = engine.generate(PROMPTS, temperature=0.7, top_k=20, max_new_tokens=24, seed=2, learn=False, **BOTH)
    processors = [library.TemperatureLogitsWarper(0.7), library.TopKLogitsWarper(20)]
    assert output.stats.mean_acceptance_length > 1.2
    assert max(largest_errors(output, engine.model, PROMPTS, processors)) < TOLERANCE


def test_nodes_of_other_tokens_would_be_seen(monkeypatch):
    """The negative control: every token has the numbers of the root of its row's draft."""
    keep = KeptScores.keep

    def at_the_roots(kept, scored, batch, accepted, rows, counts):
        keep(kept, scored, batch, [np.zeros_like(path) for path in accepted], rows, counts)

    monkeypatch.setattr(KeptScores, "keep", at_the_roots)
    engine = engine_of("llama")
    output = engine.generate(PROMPTS, temperature=0, max_new_tokens=24, learn=False, **BOTH)
    assert min(largest_errors(output, engine.model, PROMPTS)) > 0.1


def test_a_law_that_top_k_leaves_without_a_probability_keeps_its_scores():
    """Behind a very sure model most of the best tokens have a probability of 0 in float32."""
    model = copy.deepcopy(tiny_model("llama"))
    with torch.no_grad():
        model.get_output_embeddings().weight.mul_(80)
    output = stand.wrap(model).generate(PROMPTS[:1], temperature=1.0, top_k=20, max_new_tokens=6, seed=0, **BOTH)
    assert all(torch.isfinite(values).sum() == 20 for values in output.scores)
    assert min(values[0][torch.isfinite(values[0])].min() - values.max() for values in output.scores) < -110
    assert max(largest_errors(output, model, PROMPTS, [library.TopKLogitsWarper(20)])) < 80 * TOLERANCE


@pytest.mark.parametrize("settings", [{"do_sample": False}, {"do_sample": True, "temperature": 0.7, "top_p": 0.9}])
def test_transition_scores_are_the_engine_s_own_log_probabilities(settings):
    model = copy.deepcopy(tiny_model("llama"))
    asked = {**PADDED, **AS_DICT, "max_new_tokens": 24, "eos_token_id": END, "pad_token_id": 0, **settings}
    told = {"stand_seed": 1, "stand_logprobs": 0, "stand_logprobs_mode": "processed_logprobs"}
    count = 1 if settings == {"do_sample": False} else 3
    output = model.generate(**asked, **told, num_return_sequences=count, custom_generate=stand_generate)
    found = model.compute_transition_scores(output.sequences, output.scores, normalize_logits=True)
    assert found.shape == (3 * count, len(output.scores)) and len({len(one) for one in output.logprobs}) > 1
    for row, own in enumerate(output.logprobs):
        assert np.allclose(found[row, : len(own)], own.of_tokens, atol=1e-5)
        assert np.allclose(found[row, len(own) :], -np.log(VOCABULARY_SIZE))  # of zeros: they tell nothing
    raw = model.compute_transition_scores(output.sequences, output.logits, normalize_logits=True)
    assert torch.equal(raw, found) == (settings == {"do_sample": False})


def test_all_calls_of_a_trainer_have_them():
    """Tensors of their own, outside of inference mode, so that gradients may be taken with them."""
    model = copy.deepcopy(tiny_model("llama"))
    draft_always(model)
    asked = {**PADDED, **AS_DICT, "do_sample": False, "max_new_tokens": 12, "eos_token_id": END, "pad_token_id": 0}
    first = model.generate(**asked)
    copies = [values.clone() for values in (*first.logits, *first.scores)]
    model.generate(**{**asked, "input_ids": PADDED["input_ids"].flip(0), "attention_mask": None})
    assert all(map(torch.equal, copies, (*first.logits, *first.scores)))
    check_equal(GenerationMixin.generate(model, **asked), first, lengths_of(first.sequences, 6, END), tolerance=1e-4)
    weight = torch.ones(VOCABULARY_SIZE, requires_grad=True)
    (torch.stack(first.scores) * weight).sum().backward()
    assert torch.allclose(weight.grad, torch.stack(first.scores).sum(dim=(0, 1)), rtol=1e-4, atol=1e-3)


def test_each_is_given_alone_and_nothing_is_kept_unasked(monkeypatch):
    held, new_step = [], EagerBackend.new_step
    monkeypatch.setattr(EagerBackend, "new_step", lambda backend, start: held.append(start) or new_step(backend, start))
    engine = engine_of("llama")
    for asked in ({}, {"output_logits": True}, {"output_scores": True}):
        output = engine.generate(PROMPTS, temperature=0, max_new_tokens=3, learn=False, **asked)
        assert (output.logits is not None, output.scores is not None) == (
            "output_logits" in asked, "output_scores" in asked,
        )  # fmt: skip
    assert [set(start.held) for start in held] == [set(), {"logits"}, {"scores"}]
    model = copy.deepcopy(tiny_model("llama"))
    plain = model.generate(**PADDED, return_dict_in_generate=True, max_new_tokens=2, custom_generate=stand_generate)
    assert plain.scores is None and plain.logits is None


def test_without_drafts_and_with_rows_that_wait():
    engine = engine_of("llama")
    asked = {"temperature": 0.7, "top_k": 0, "max_new_tokens": 12, "seed": 2, "num_return_sequences": 2, **BOTH}
    for how in ({"draft": False}, {"max_rows": 2, "learn": False}):
        output = engine.generate(PROMPTS, **asked, **how)
        assert max(largest_errors(output, engine.model, PROMPTS, [library.TemperatureLogitsWarper(0.7)])) < TOLERANCE


@needs_pages
def test_rows_that_are_put_back_keep_theirs(monkeypatch):
    monkeypatch.setattr(within_pages, "GROWTH", 0)
    model = kernel_model("qwen2")
    engine = stand.wrap(model, verifier="match", drafter=stand.BlendedDrafter(budget=24))
    asked = {"num_return_sequences": 32, "max_new_tokens": 72, "temperature": 1.0, "top_k": 0, "seed": 3}
    cap = 32 * 78 * bytes_per_token(model) / 4
    output = engine.generate([5, 9, 11, 4, 5, 9], **asked, max_cache_bytes=cap, **BOTH)
    assert output.stats.num_put_back > 0
    assert max(largest_errors(output, model, [[5, 9, 11, 4, 5, 9]])) < TOLERANCE


@pytest.mark.parametrize("name", BOTH)
def test_calls_that_give_rows_one_by_one_refuse_them(name):
    engine = engine_of("llama")
    with pytest.raises(ValueError, match=f"{name} must be None or False in a run or a stream, got True"):
        engine.run(PROMPTS, max_new_tokens=3, **{name: True})
    with pytest.raises(ValueError, match=f"{name} must be None or False in a run or a stream, got True"):
        engine.open_run(generation_config=GenerationConfig(**{name: True}))
    with pytest.raises(ValueError, match=f"{name} must be True or False, got 1"):
        engine.generate(PROMPTS, max_new_tokens=3, **{name: 1})
