"""Hidden states from captured steps: those of eager ones, in time for the next draft, whoever asks."""

import copy
from dataclasses import replace
from itertools import product

import numpy as np
import pytest
import torch

pytest.importorskip("triton")

from failures import failing_after
from plain_eagle import random_head
from plain_eagle3 import random_eagle3
from plain_kernels import use_plain_kernels
from random_dflash import CONVOLUTIONS, SELECTOR, random_dflash
from step_pair import OTHER_STEPS
from tiny_models import kernel_model

import stand
from stand.forward.features import feature_width
from stand.gpu import self_check, step_body
from stand.gpu.captured_step import CapturedStep
from stand.verifiers import get_verifier

PROMPTS = [[3, 4, 5, 6, 7, 3, 4], [8, 9]]
SETTINGS = {"num_return_sequences": 2, "max_new_tokens": 24, "temperature": 0.6, "seed": 4}
LAYERS = (1, 0, 1)  # whose inputs `random_eagle3` reads


@pytest.fixture(autouse=True)
def plain_kernels(monkeypatch):
    use_plain_kernels(monkeypatch)


def source_of(model, make):
    if make is random_dflash:
        return stand.DFlashLaws(random_dflash(model, head_size=16, **CONVOLUTIONS, **SELECTOR), always=True)
    return stand.EagleLaws(make(model, scale=1.5), runs=3)


class Watched(stand.BlendedDrafter):
    """Drafts with a random head's laws in front, and keeps every lesson."""

    def __init__(self, family="qwen2", make=random_head):
        super().__init__(budget=8, source=source_of(kernel_model(family), make))
        self.lessons = []

    def follow(self, lesson):
        self.lessons.append(lesson)
        super().follow(lesson)


def decode(backend, drafter, *, family="qwen2", verifier="match", **settings):
    engine = stand.wrap(kernel_model(family), drafter=drafter, verifier=verifier, backend=backend, fuse=False)
    output = engine.generate(input_ids=PROMPTS, **SETTINGS | settings)
    assert str(engine.backend) == backend
    return output


def assert_same_lessons(drafters):
    """Read after the last step, when every step has had the chance to write over what an earlier one gave."""
    eager, captured = (drafter.lessons for drafter in drafters)
    assert len(eager) > 8
    for one, other in zip(eager, captured, strict=True):
        assert one.batch.token_ids.tolist() == other.batch.token_ids.tolist()
        width = feature_width(kernel_model("qwen2"), drafters[0].feature_layers)
        assert one.features.shape == (one.batch.num_nodes, width)
        torch.testing.assert_close(other.features, one.features, atol=1e-4, rtol=1e-3)
        assert other.top_ids.tolist() == one.top_ids.tolist()


@pytest.mark.parametrize("make", [random_head, random_eagle3, random_dflash])
@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_features_are_those_of_eager_steps(family, make):
    drafters = [Watched(family, make) for _ in range(2)]
    outputs = [decode(name, drafter, family=family) for name, drafter in zip(("sdpa", "triton"), drafters, strict=True)]
    assert outputs[0].token_ids == outputs[1].token_ids
    assert outputs[0].stats.num_steps == outputs[1].stats.num_steps
    assert_same_lessons(drafters)


def test_neighbours_remember_what_eager_steps_show():
    """The same entries in the same order, and so the same drafts."""
    drafters = [stand.BlendedDrafter(budget=8, source=stand.NeighbourLaws(dim=16)) for _ in range(2)]
    one, other = (decode(name, each) for name, each in zip(("sdpa", "triton"), drafters, strict=True))
    assert one.token_ids == other.token_ids and one.stats.num_steps == other.stats.num_steps
    held = [drafter.source.memory._entries for drafter in drafters]
    assert held[0].tokens.tolist() == held[1].tokens.tolist()
    np.testing.assert_allclose(held[1].afters, held[0].afters, atol=1e-2)


@pytest.mark.parametrize(
    ("verifier", "make"), [*product(("match", "traversal", "coupled"), [random_head]), ("traversal", random_eagle3)]
)
@pytest.mark.parametrize("settings", [{"temperature": 0.0}, {"temperature": 0.8, "top_p": 0.9}, {"learn": False}])
def test_a_heads_drafts_are_those_of_eager_steps(verifier, make, settings):
    outputs = []
    for name in ("sdpa", "triton"):
        drafter = stand.EagleDrafter(make(kernel_model("qwen2"), scale=1.5), budget=8, runs=3)
        outputs.append(decode(name, drafter, verifier=verifier, **settings))
    assert outputs[0].token_ids == outputs[1].token_ids
    assert outputs[0].stats.num_steps == outputs[1].stats.num_steps
    assert outputs[0].stats.num_draft_tokens == outputs[1].stats.num_draft_tokens > 50


@pytest.mark.parametrize("make", [random_head, random_eagle3])
@pytest.mark.parametrize("asked", OTHER_STEPS)
def test_steps_in_two_parts_and_eager_ones_have_features(asked, make):
    drafters = [Watched(make=make) for _ in range(2)]
    for name, drafter in zip(("sdpa", "triton"), drafters, strict=True):
        decode(name, drafter, **asked)
    assert_same_lessons(drafters)


def test_a_step_that_fails_goes_on_with_features(monkeypatch):
    drafters = [Watched() for _ in range(2)]
    expected = decode("sdpa", drafters[0])
    monkeypatch.setattr(CapturedStep, "launch", failing_after(5, CapturedStep.launch, RuntimeError("gone")))
    engine = stand.wrap(kernel_model("qwen2"), drafter=drafters[1], verifier="match", backend="triton", fuse=False)
    with pytest.warns(UserWarning, match="decoding goes on with eager steps"):
        assert engine.generate(input_ids=PROMPTS, **SETTINGS).token_ids == expected.token_ids
    assert_same_lessons(drafters)


def test_nobody_else_pays(monkeypatch):
    """No room for them, no hook; and a call without drafts takes over the graphs of one with them."""

    def refuse(*_):
        raise AssertionError("features were taken")

    engine = stand.wrap(kernel_model("qwen2"), drafter=Watched(), backend="triton", fuse=False)
    engine.generate(input_ids=PROMPTS, **SETTINGS)
    captured = engine.backend._previous.captured
    engine.generate(input_ids=PROMPTS, **SETTINGS, draft=False)
    assert engine.backend._previous.captured is captured
    monkeypatch.setattr("stand.forward.features._hooks", refuse)
    other = stand.wrap(kernel_model("qwen2"), backend="triton", fuse=False)
    other.generate(input_ids=PROMPTS, **SETTINGS)
    assert other.backend._previous.captured._output.features is None


def test_a_call_for_features_of_other_layers_takes_no_graphs_over(monkeypatch):
    """What was recorded gives those that its first call asked for."""
    starts, begin = [], CapturedStep.begin
    monkeypatch.setattr(CapturedStep, "begin", lambda step, start: starts.append(start) or begin(step, start))
    engine = stand.wrap(kernel_model("qwen2"), drafter=Watched(make=random_eagle3), backend="triton", fuse=False)
    engine.generate(input_ids=PROMPTS, **SETTINGS)
    captured, start = engine.backend._previous.captured, starts[-1]
    taken_over = {
        layers: captured.serves(replace(start, feature_layers=layers)) for layers in (LAYERS, None, (), (1, 1, 0))
    }
    assert taken_over == {LAYERS: True, None: True, (): False, (1, 1, 0): False}
    engine.drafter.feature_layers = (1, 0, 0)
    engine.generate(input_ids=PROMPTS, **SETTINGS)
    assert engine.backend._previous.captured is not captured


def test_the_check_sees_small_features_beside_large_ones(monkeypatch):
    """Embeddings are: what the first layer reads must be right by its own measure."""
    model = copy.deepcopy(kernel_model("qwen2"))
    with torch.no_grad():
        model.get_input_embeddings().weight.mul_(1e-3)
    right = step_body.StepOutput.features_of

    def without_embeddings(output, target):
        with right(output, target):
            yield
        output.features[:, 32:64] = 0.0

    assert self_check.kernel_failure(model, get_verifier("match"), feature_layers=LAYERS) is None
    monkeypatch.setattr(step_body.StepOutput, "features_of", step_body.contextmanager(without_embeddings))
    assert "hidden states must equal" in self_check.kernel_failure(model, get_verifier("match"), feature_layers=LAYERS)


@pytest.mark.parametrize("layers", [(), LAYERS])
def test_the_check_sees_features_that_are_wrong(layers, monkeypatch):
    model = copy.deepcopy(kernel_model("qwen2"))
    assert self_check.kernel_failure(model, get_verifier("match"), feature_layers=layers) is None
    right = step_body.StepOutput.features_of

    def one_place_on(output, target):
        with right(output, target):
            yield
        output.features.copy_(output.features.roll(1, 0))

    monkeypatch.setattr(step_body.StepOutput, "features_of", step_body.contextmanager(one_place_on))
    assert "hidden states must equal" in self_check.kernel_failure(model, get_verifier("match"), feature_layers=layers)
