"""Log-probabilities behind captured steps: those of plain forwards, from graphs that calls of other kinds share."""

import copy
from functools import cache, partial

import numpy as np
import pytest
import torch

pytest.importorskip("triton")

from failures import failing_after
from plain_kernels import use_plain_kernels
from plain_logprobs import difference, largest_error, plain_log_laws
from step_pair import taught_lookup
from tiny_models import kernel_model
from transformers.generation import logits_process as library

import stand
from stand.gpu.captured_step import CapturedStep
from stand.gpu.runner import DirectRunner
from stand.laws.logprobs import MODES, PROCESSED, RAW

PROMPTS = [[3, 4, 5, 6, 7, 3, 4], [8, 9]]
SAMPLED = {"temperature": 0.6, "top_k": 9, "top_p": 0.9}
LAWS = {"greedy": {"temperature": 0}, "hot": {"temperature": 1.4, "top_k": 0}, "filtered": SAMPLED}
LOOKUP = cache(partial(taught_lookup, kernel_model("qwen2"), PROMPTS, 60))
TOLERANCE = 1e-3


@pytest.fixture(autouse=True)
def plain_kernels(monkeypatch):
    use_plain_kernels(monkeypatch)


def new_engine() -> stand.Engine:
    drafter = stand.BlendedDrafter(LOOKUP(), budget=16)
    return stand.wrap(kernel_model("qwen2"), backend="triton", drafter=drafter, fuse=False)


def processors_of(settings, penalty: float) -> list:
    """Those that transformers would make of a call's settings."""
    found = [library.RepetitionPenaltyLogitsProcessor(penalty)] if penalty != 1 else []
    temperature, top_k, top_p = (settings.get(name) for name in ("temperature", "top_k", "top_p"))
    found += [library.TemperatureLogitsWarper(float(temperature))] if temperature else []
    found += [library.TopKLogitsWarper(top_k)] if top_k else []
    return found + ([library.TopPLogitsWarper(top_p)] if top_p else [])


def error_of(engine, *, mode=RAW, penalty=1.0, **settings) -> float:
    """The largest of a call, whose drafts were often right."""
    asked = {"num_return_sequences": 2, "max_new_tokens": 24, "seed": 4, "learn": False, "logprobs": 3}
    output = engine.generate(PROMPTS, **asked, **settings, logprobs_mode=mode, repetition_penalty=penalty)
    assert output.stats.mean_acceptance_length > 1.1
    processors = processors_of(settings, penalty) if mode == PROCESSED else []
    return largest_error(output, engine.model, PROMPTS, processors)


@pytest.mark.filterwarnings("ignore:greedy rows of a prompt")
@pytest.mark.parametrize("penalty", [1.0, 1.3])
@pytest.mark.parametrize("law", LAWS)
@pytest.mark.parametrize("mode", MODES)
def test_logprobs_are_those_of_plain_forwards(mode, law, penalty):
    engine = new_engine()
    assert error_of(engine, mode=mode, penalty=penalty, **LAWS[law]) < TOLERANCE
    assert str(engine.backend) == "triton"


def test_calls_of_all_kinds_in_turn(monkeypatch):
    """The model's logits are kept from the first call on that asks for them; then one step serves all."""
    made, new = [], CapturedStep.__init__
    monkeypatch.setattr(
        CapturedStep, "__init__", lambda step, *given, **asked: made.append(1) or new(step, *given, **asked)
    )
    engine = new_engine()
    made.clear()
    plain = {"num_return_sequences": 2, "max_new_tokens": 24, "seed": 4, "learn": False}
    without = engine.generate(PROMPTS, **plain, **SAMPLED)
    assert without.logprobs is None
    counts = []
    for mode in (PROCESSED, RAW, PROCESSED, RAW):
        assert error_of(engine, mode=mode, **SAMPLED) < TOLERANCE
        counts.append(len(made))
    assert counts == [1, 2, 2, 2]
    assert engine.generate(PROMPTS, **plain, **SAMPLED).token_ids == without.token_ids and len(made) == 2


@pytest.mark.parametrize("penalty", [1.0, 1.3])
@pytest.mark.parametrize("mode", MODES)
def test_a_step_that_fails_is_noted_once(monkeypatch, mode, penalty):
    engine = new_engine()
    failing = failing_after(5, DirectRunner.step, torch.OutOfMemoryError("none is left"))
    monkeypatch.setattr(DirectRunner, "step", failing)
    with pytest.warns(UserWarning, match="decoding goes on with eager steps"):
        assert error_of(engine, mode=mode, penalty=penalty, **SAMPLED) < TOLERANCE


@pytest.mark.parametrize("penalty", [1.0, 1.3])
def test_what_is_too_unlikely_for_a_float32_is_told_all_the_same(penalty):
    model = copy.deepcopy(kernel_model("qwen2"))
    with torch.no_grad():
        model.get_output_embeddings().weight.mul_(80)
    engine = stand.wrap(model, backend="triton", drafter=stand.BlendedDrafter(budget=8), fuse=False)
    asked = {"max_new_tokens": 6, "logprobs": 9, "logprobs_mode": PROCESSED, "repetition_penalty": penalty}
    output = engine.generate(PROMPTS[:1], temperature=0, **asked)
    laws = plain_log_laws(model, PROMPTS[0], output.token_ids[0], processors_of({}, penalty))
    assert np.isfinite(output.logprobs[0].top).all() and output.logprobs[0].top.min() < -110
    assert difference(output.logprobs[0], output.token_ids[0], laws) < 80 * TOLERANCE


def test_calls_that_take_eager_steps_note_them_too():
    engine = new_engine()
    hot = {"temperature": 2e4, "top_k": 0, "top_p": 0.9}
    for mode in MODES:
        output = engine.generate(PROMPTS, **hot, max_new_tokens=9, seed=2, logprobs=2, logprobs_mode=mode)
        for prompt, tokens, found in zip(PROMPTS, output.token_ids, output.logprobs, strict=True):
            processors = processors_of(hot, 1.0) if mode == PROCESSED else []
            assert difference(found, tokens, plain_log_laws(engine.model, prompt, tokens, processors)) < TOLERANCE
