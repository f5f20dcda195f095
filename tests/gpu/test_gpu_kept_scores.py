"""Scores and logits behind captured steps: those of plain forwards, from what steps hold for log-probabilities too."""

from functools import cache, partial

import numpy as np
import pytest
import torch

pytest.importorskip("triton")

from failures import failing_after
from plain_kernels import use_plain_kernels
from plain_tensors import largest_errors
from step_pair import taught_lookup
from tiny_models import kernel_model
from transformers.generation import logits_process as library

import stand
from stand.gpu.captured_step import CapturedStep
from stand.gpu.runner import DirectRunner
from stand.laws.kept_scores import KeptScores

PROMPTS = [[3, 4, 5, 6, 7, 3, 4], [8, 9]]
BOTH = {"output_scores": True, "output_logits": True}
FILTERED = {"temperature": 0.6, "top_k": 9, "top_p": 0.9}
LAWS = {  # settings, and the processors that transformers makes of them
    "greedy": ({"temperature": 0}, []),
    "hot": ({"temperature": 1.4, "top_k": 0}, [library.TemperatureLogitsWarper(1.4)]),
    "top_k": ({"temperature": 1.0, "top_k": 5}, [library.TopKLogitsWarper(5)]),
    "filtered": (
        FILTERED,
        [library.TemperatureLogitsWarper(0.6), library.TopKLogitsWarper(9), library.TopPLogitsWarper(0.9)],
    ),
    "eager": (
        {"temperature": 2e4, "top_k": 0, "top_p": 0.9},
        [library.TemperatureLogitsWarper(2e4), library.TopPLogitsWarper(0.9)],
    ),
}
LOOKUP = cache(partial(taught_lookup, kernel_model("qwen2"), PROMPTS, 60))
TOLERANCE = 1e-3


@pytest.fixture(autouse=True)
def plain_kernels(monkeypatch):
    use_plain_kernels(monkeypatch)


def new_engine() -> stand.Engine:
    drafter = stand.BlendedDrafter(LOOKUP(), budget=16)
    return stand.wrap(kernel_model("qwen2"), backend="triton", drafter=drafter, fuse=False)


def output_of(engine, settings, **asked):
    asked = {"num_return_sequences": 2, "max_new_tokens": 24, "seed": 4, "learn": False, **asked}
    return engine.generate(PROMPTS, **settings, **asked)


def errors_of(engine, law: str, penalty: float) -> tuple[float, float]:
    """Of logits and scores."""
    settings, warpers = LAWS[law]
    processors = [*([library.RepetitionPenaltyLogitsProcessor(penalty)] if penalty != 1 else []), *warpers]
    output = output_of(engine, settings, repetition_penalty=penalty, **BOTH)
    assert output.stats.mean_acceptance_length > 1.0  # drafts were right now and then
    return largest_errors(output, engine.model, PROMPTS, processors)


@pytest.mark.filterwarnings("ignore:greedy rows of a prompt")
@pytest.mark.parametrize("penalty", [1.0, 1.3])
@pytest.mark.parametrize("law", LAWS)
def test_they_are_those_of_plain_forwards(law, penalty):
    engine = new_engine()
    assert max(errors_of(engine, law, penalty)) < TOLERANCE
    assert str(engine.backend) == "triton"


def test_numbers_of_other_nodes_would_be_seen(monkeypatch):
    """The negative control."""
    keep = KeptScores.keep

    def at_the_roots(kept, scored, batch, accepted, rows, counts):
        keep(kept, scored, batch, [np.zeros_like(path) for path in accepted], rows, counts)

    monkeypatch.setattr(KeptScores, "keep", at_the_roots)
    assert min(errors_of(new_engine(), "hot", 1.0)) > 0.1


@pytest.mark.parametrize("penalty", [1.0, 1.3])
def test_a_step_that_fails_is_told_once(monkeypatch, penalty):
    engine = new_engine()
    failing = failing_after(5, DirectRunner.step, torch.OutOfMemoryError("none is left"))
    monkeypatch.setattr(DirectRunner, "step", failing)
    with pytest.warns(UserWarning, match="decoding goes on with eager steps"):
        assert max(errors_of(engine, "filtered", penalty)) < TOLERANCE


def test_one_step_serves_calls_of_all_kinds(monkeypatch):
    """Logits are held from the first call on that asks for them, and no tokens change."""
    made, new = [], CapturedStep.__init__
    monkeypatch.setattr(
        CapturedStep, "__init__", lambda step, *given, **asked: made.append(1) or new(step, *given, **asked)
    )
    engine = new_engine()
    made.clear()
    without = output_of(engine, FILTERED)
    with_scores = output_of(engine, FILTERED, **BOTH)
    told = output_of(engine, FILTERED, logprobs=0)
    assert without.scores is None and told.scores is None and len(made) == 2
    assert without.token_ids == with_scores.token_ids == told.token_ids
    assert output_of(engine, FILTERED, output_scores=True).logits is None and len(made) == 2
