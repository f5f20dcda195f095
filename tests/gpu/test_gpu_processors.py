"""Logits processors between the two parts of a captured step: the tokens of eager steps, whatever they do and whatever
fails."""

import gc
import weakref
from functools import cache, partial

import numpy as np
import pytest
import torch
from grammar_cases import xgrammar_processor
from transformers import LogitsProcessor
from transformers.generation import logits_process as library

pytest.importorskip("triton")

from failures import failing_after
from plain_kernels import use_plain_kernels
from step_pair import taught_lookup
from tiny_models import kernel_model

import stand
from stand.gpu.captured_step import CapturedStep
from stand.gpu.pooled_step import PooledStep
from stand.gpu.runner import DirectRunner
from stand.laws.sampling import TargetLaw

PROMPTS = [[3, 4, 5, 6, 7, 3, 4], [8, 9]]
SETTINGS = {"num_return_sequences": 2, "max_new_tokens": 30, "temperature": 0.6, "top_k": 0, "seed": 4, "learn": False}


class Counting(LogitsProcessor):
    """Remembers its calls: each token that follows an odd number of them is raised."""

    def __init__(self):
        self.num_calls = 0

    def __call__(self, input_ids, scores):
        self.num_calls += 1
        raised = scores.clone()
        raised[:, self.num_calls % scores.shape[1]] += 2.0 + self.num_calls % 2
        return raised


class Failing(LogitsProcessor):
    """Ends in an error behind so many tokens."""

    def __init__(self, error, length):
        self.error, self.length = error, length

    def __call__(self, input_ids, scores):
        if input_ids.shape[1] >= self.length:
            raise self.error
        return scores


@pytest.fixture(autouse=True)
def plain_kernels(monkeypatch):
    use_plain_kernels(monkeypatch)


@pytest.fixture
def captured_only(monkeypatch):
    """No eager step runs in a captured backend's calls."""
    monkeypatch.setattr(PooledStep, "starting", None)


LOOKUP = cache(partial(taught_lookup, kernel_model("qwen2"), PROMPTS, 60))  # it learns no more: captured steps are late


def engine_of(name, *, verifier="match"):
    drafter = stand.BlendedDrafter(LOOKUP(), budget=16)
    return stand.wrap(kernel_model("qwen2"), verifier=verifier, backend=name, drafter=drafter, fuse=False)


def generate(name, *, verifier="match", **settings):
    engine = engine_of(name, verifier=verifier)
    output = engine.generate(input_ids=PROMPTS, **{**SETTINGS, **settings})
    assert str(engine.backend) == name
    return output


CHAINS = {
    "penalty": {"repetition_penalty": 1.3},
    "greedy": {"repetition_penalty": 1.3, "temperature": 0.0},
    "filters": {"repetition_penalty": 1.1, "temperature": 1.0, "top_p": 0.8, "top_k": 12},
    "forbidden": {"no_repeat_ngram_size": 2, "bad_words_ids": [[3], [4, 5]], "min_new_tokens": 5},
    "suppressed": {"suppress_tokens": [*range(10, 40)], "sequence_bias": [[[7], 4.0], [[9, 8], -9.0]]},
    "typical": {"typical_p": 0.8, "temperature": 1.2},
    "grammar": {"logits_processors": xgrammar_processor("[a-k]+"), "max_new_tokens": 24},
    "constrained": {"prefix_allowed_tokens_fn": lambda number, tokens: [9 + number, (int(tokens[-1]) + 7) % 61, 5]},
    "stateful": {"logits_processors": [Counting()], "repetition_penalty": 1.2},
    "output": {"logits_processors": stand.OutputPenalties(presence=0.6, frequency=0.4), "repetition_penalty": 1.2},
    "budget": {"logits_processors": stand.ThinkingBudget(7, begin=None, end=9, forced=[40, 41, 9])},
}


@pytest.mark.parametrize("chain", CHAINS)
@pytest.mark.parametrize("verifier", ["match", "coupled", "traversal"])
def test_tokens_are_those_of_eager_steps(captured_only, verifier, chain):
    eager, captured = (generate(name, verifier=verifier, **CHAINS[chain]) for name in ("sdpa", "triton"))
    assert captured.token_ids == eager.token_ids != generate("sdpa", verifier=verifier).token_ids
    assert captured.stats.num_steps == eager.stats.num_steps


def test_drafts_are_accepted(captured_only):
    output = generate("triton", num_return_sequences=8, repetition_penalty=1.05, temperature=0.3)
    assert output.stats.mean_acceptance_length > 1.1


def test_graphs_serve_calls_with_processors_and_without_in_turn(captured_only, monkeypatch):
    """Each call's own penalty; a call without any has graphs of its own, which stay beside the others."""
    made, recorded = [], []
    new, record = CapturedStep.__init__, CapturedStep._record
    engine = engine_of("triton")
    monkeypatch.setattr(
        CapturedStep, "__init__", lambda step, *given, **asked: made.append(1) or new(step, *given, **asked)
    )
    monkeypatch.setattr(CapturedStep, "_record", lambda step, size: recorded.append(size) or record(step, size))
    penalties = (1.2, 1.9, 1.0)
    expected = [generate("sdpa", repetition_penalty=penalty).token_ids for penalty in penalties]
    counts = []
    for _ in range(2):
        for penalty, tokens in zip(penalties, expected, strict=True):
            output = engine.generate(input_ids=PROMPTS, **SETTINGS, repetition_penalty=penalty)
            assert output.token_ids == tokens
        counts.append(len(recorded))
    assert len(made) == 1 and counts[0] == counts[1] > len(set(recorded))


def test_a_step_without_scores_serves_no_processors(captured_only):
    """They take memory, which is taken when a call first asks."""
    engine = engine_of("triton")
    for penalty in (1.0, 1.3, 1.0):
        output = engine.generate(input_ids=PROMPTS, **SETTINGS, repetition_penalty=penalty)
        assert output.token_ids == generate("sdpa", repetition_penalty=penalty).token_ids


def test_requests_have_their_own_processors(captured_only):
    requests = [
        stand.Request(input_ids, stop_token_ids=ends)
        for input_ids, ends in zip([*PROMPTS, [9, 9, 9]], ([3], [4], [5]), strict=True)
    ]
    settings = {**SETTINGS, "min_new_tokens": 6, "repetition_penalty": 1.2, "max_rows": 2}
    found = {
        name: sorted((one.row, one.token_ids) for one in engine_of(name).run(requests, **settings))
        for name in ("sdpa", "triton")
    }
    assert found["triton"] == found["sdpa"]


@pytest.mark.parametrize("error", [KeyError("theirs"), RuntimeError("theirs"), ValueError("theirs")])
def test_an_error_of_a_processor_is_raised_and_is_none_of_the_steps(captured_only, error):
    engine = engine_of("triton")
    with pytest.raises(type(error), match="theirs"):
        engine.generate(input_ids=PROMPTS, **SETTINGS, logits_processors=[Failing(error, 12)])
    assert str(engine.backend) == "triton"
    again = engine.generate(input_ids=PROMPTS, **SETTINGS, repetition_penalty=1.2)
    assert len(again.token_ids) == 4


def test_processors_that_forbid_every_token_are_named(captured_only):
    everything = {"suppress_tokens": [*range(kernel_model("qwen2").config.vocab_size)]}
    for settings in ({}, {"temperature": 0.0}):
        with pytest.raises(ValueError, match="only -inf; check .* and processors that forbid every token"):
            engine_of("triton").generate(input_ids=PROMPTS, **SETTINGS | settings, **everything)


def test_a_lack_of_memory_for_processors_is_a_failure_of_the_step(monkeypatch):
    expected = generate("sdpa", **CHAINS["penalty"])
    engine = engine_of("triton")
    lacking = failing_after(5, TargetLaw.process, torch.OutOfMemoryError("none is left"), times=1)
    monkeypatch.setattr(TargetLaw, "process", lacking)
    with pytest.warns(UserWarning, match="none is left; decoding goes on with eager steps"):
        found = engine.generate(input_ids=PROMPTS, **SETTINGS, **CHAINS["penalty"])
    assert found.token_ids == expected.token_ids and str(engine.backend) == "sdpa"


@pytest.mark.parametrize("chain", ["stateful", "forbidden"])
@pytest.mark.parametrize("part", ["forward", "step"])
def test_a_step_that_fails_is_done_again(monkeypatch, part, chain):
    """Also behind its processors, which have seen its nodes then."""
    expected = generate("sdpa", **CHAINS[chain])
    engine = engine_of("triton")
    failing = failing_after(6, getattr(DirectRunner, part), RuntimeError("gone"))
    monkeypatch.setattr(DirectRunner, part, failing)
    with pytest.warns(UserWarning, match="decoding goes on with eager steps"):
        found = engine.generate(input_ids=PROMPTS, **SETTINGS, **CHAINS[chain])
    assert found.token_ids == expected.token_ids


def test_a_processor_is_not_kept_behind_its_call(captured_only):
    engine, processor = engine_of("triton"), Counting()
    engine.generate(input_ids=PROMPTS, **SETTINGS, logits_processors=[processor])
    left = weakref.ref(processor)
    del processor
    gc.collect()
    assert left() is None


def test_what_the_step_before_showed_is_learned_before_processors_wait(captured_only, monkeypatch):
    """They may wait for the scores; the lesson does not."""
    events, engine, asked = [], engine_of("triton"), {"input_ids": PROMPTS, **SETTINGS, **CHAINS["penalty"]}
    expected = engine.generate(**asked)  # checked and recorded
    process, finish, forward = TargetLaw.process, CapturedStep.finish, DirectRunner.forward
    monkeypatch.setattr(TargetLaw, "process", lambda *given: events.append("process") or process(*given))
    monkeypatch.setattr(CapturedStep, "finish", lambda step: events.append("finish") or finish(step))
    monkeypatch.setattr(DirectRunner, "forward", lambda *given: events.append("forward") or forward(*given))
    assert engine.generate(**asked).token_ids == expected.token_ids
    assert events[:9] == ["forward", "finish", "process"] * 3


def test_a_penalty_takes_few_bytes_up(captured_only, monkeypatch):
    """Not whole texts, node by node."""
    sizes = []
    up = torch.from_numpy
    monkeypatch.setattr(torch, "from_numpy", lambda array: sizes.append(array.nbytes) or up(array))
    prompt = np.random.default_rng(0).integers(0, 50, 300).tolist()
    engine = engine_of("triton")
    monkeypatch.setattr(engine.model.config, "max_position_embeddings", 2048)
    engine.generate(input_ids=[prompt], **SETTINGS, **CHAINS["penalty"])
    of_steps = sizes[len(sizes) // 2 :]
    assert of_steps and max(of_steps) < 8 * 300


def test_transformers_penalty_asks_which_tokens_a_prefix_holds_and_no_more():
    """What lets distinct tokens stand for a text."""
    scores = torch.linspace(-2, 2, 50)[None]
    penalty = library.RepetitionPenaltyLogitsProcessor(1.7)
    text = torch.tensor([[3, 41, 3, 3, 9, 41]])
    assert torch.equal(penalty(text, scores), penalty(torch.tensor([[41, 9, 3, 3, 3]]), scores))
