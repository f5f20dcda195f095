"""Streams behind captured steps: what they guess, draft and leave behind is what eager steps make of them."""

import copy
import logging
import weakref

import numpy as np
import pytest
import torch

pytest.importorskip("triton")

from failures import failing_after
from plain_kernels import use_plain_kernels
from plain_streams import plain_stream_logits, random_streams
from step_pair import OTHER_STEPS
from tiny_models import kernel_model

import stand
from stand.gpu import self_check, tails
from stand.gpu.captured_step import CapturedStep
from stand.gpu.pooled_step import PooledStep
from stand.gpu.tails import Chains, TailBody, Tails
from stand.scheduling import within_pages
from stand.scheduling.free_memory import bytes_per_token
from stand.verifiers import get_verifier

PROMPTS = [[3, 4, 5, 6, 7, 3, 4], [8, 9]]
SETTINGS = {"num_return_sequences": 2, "max_new_tokens": 24, "temperature": 0.6, "seed": 4}
GAMMA = 3


@pytest.fixture(autouse=True)
def plain_kernels(monkeypatch):
    use_plain_kernels(monkeypatch)


def alone(model, **settings):
    return stand.StreamingDrafter(random_streams(model), budget=12, **settings)


def blended(model, **settings):
    source = stand.StreamLaws(random_streams(model), always=True, **settings)
    return stand.BlendedDrafter(budget=12, source=source)


def decode(backend, new_drafter, *, family="qwen2", verifier="match", fuse=False, **settings):
    model = kernel_model(family)
    engine = stand.wrap(model, drafter=new_drafter(model), verifier=verifier, backend=backend, fuse=fuse)
    output = engine.generate(input_ids=PROMPTS, **SETTINGS | settings)
    assert str(engine.backend) == backend
    return output


def assert_same(one, other):
    assert one.token_ids == other.token_ids
    assert one.stats.num_steps == other.stats.num_steps
    assert one.stats.num_draft_tokens == other.stats.num_draft_tokens > 50


class CheckedDrafter(stand.StreamingDrafter):
    """Compares what streams guess with streams that are run plainly behind the row's tokens."""

    num_checked = 0

    def attach(self, model, fingerprint):
        super().attach(model, fingerprint)
        self._model = model

    def draft(self, request):
        laws = self.rider.laws_of(request)
        for history, steps, law in zip(request.histories, request.steps, laws, strict=True):
            assert (law is None) == (steps == 0)
            if law is not None and self.num_checked < 40:
                logits = plain_stream_logits(self.rider.streams, self._model, history[:-1].tolist())
                expected = torch.softmax(torch.from_numpy(logits), -1).topk(law[1].shape[1]).values
                np.testing.assert_allclose(law[1], expected.numpy(), atol=1e-5)
                self.num_checked += 1
        return super().draft(request)


@pytest.mark.parametrize("family", ["llama", pytest.param("qwen2", marks=pytest.mark.slow)])
def test_guesses_are_those_of_streams_run_plainly(family):
    model = kernel_model(family)
    drafter = CheckedDrafter(random_streams(model), budget=12)
    engine = stand.wrap(model, drafter=drafter, backend="triton", fuse=False)
    engine.generate(input_ids=PROMPTS, **SETTINGS, stop_token_ids=list(range(0, 61, 7)))
    assert drafter.num_checked > 8
    drafter.num_checked = 0
    engine.generate(input_ids=PROMPTS[:1], **SETTINGS, stop_token_ids=[])  # with what the first call has recorded
    assert drafter.num_checked > 8


@pytest.mark.parametrize("verifier", ["match", "traversal", "coupled"])
@pytest.mark.parametrize("settings", [{"temperature": 0.0}, {"temperature": 0.8, "top_p": 0.9}, {"learn": False}])
def test_drafts_and_tokens_are_those_of_eager_steps(verifier, settings):
    assert_same(*(decode(name, alone, verifier=verifier, **settings) for name in ("sdpa", "triton")))


@pytest.mark.parametrize("verifier", ["match", "coupled"])
def test_blended_with_the_lookup_they_write_the_same(verifier):
    """Where the lookup learns, a captured step's lesson comes one step late: drafts differ, tokens do not."""
    outputs = [decode(name, blended, verifier=verifier, **{"max_new_tokens": 60}) for name in ("sdpa", "triton")]
    assert outputs[0].token_ids == outputs[1].token_ids
    assert outputs[1].stats.num_accepted_draft_tokens > 20
    assert_same(*(decode(name, blended, verifier=verifier, learn=False) for name in ("sdpa", "triton")))


@pytest.mark.long
def test_fused_modules_change_nothing():
    few = {"num_return_sequences": 1, "max_new_tokens": 10}
    assert_same(decode("sdpa", alone, **few), decode("triton", alone, fuse=True, **few))


@pytest.mark.parametrize("asked", OTHER_STEPS)
def test_steps_in_two_parts_and_eager_ones_over_the_pool(asked):
    assert_same(*(decode(name, alone, **asked) for name in ("sdpa", "triton")))


def test_what_the_rider_sees_is_not_kept_with_it():
    """On a GPU it lies in memory of the graphs, which would stay as long."""
    model = copy.deepcopy(kernel_model("qwen2"))
    rider = alone(model).rider
    rider.attach(model)
    assert self_check.kernel_failure(model, get_verifier("match"), rider=rider) is None
    assert rider.hidden is None


def test_tails_of_many_rows_run_in_parts(monkeypatch):
    """As if a step held few tokens: two rows' tails at once."""
    expected = decode("triton", alone)
    monkeypatch.setattr(tails, "NUM_TOKENS", (1, 4, 8))
    sizes, part = [], Tails._part

    def counted(self, lengths, *rest):
        sizes.append(len(lengths))
        return part(self, lengths, *rest)

    monkeypatch.setattr(Tails, "_part", counted)
    assert_same(expected, decode("triton", alone))
    assert max(sizes) == 2 and len(sizes) > 20


@pytest.mark.long
def test_tails_run_as_rows_grow_and_pages_run_out(monkeypatch):
    """Rows are put back where pages run out, and with `match` no token changes."""
    monkeypatch.setattr(within_pages, "GROWTH", 0)
    model = kernel_model("qwen2")
    settings = {"num_return_sequences": 6, "max_new_tokens": 130, "temperature": 1.0, "top_k": 0, "seed": 3}
    settings["stop_token_ids"] = []
    written = []
    for share in (None, 0.3):
        engine = stand.wrap(model, drafter=alone(model), verifier="match", backend="triton", fuse=False)
        cap = None if share is None else (share * 6 * 136 + 400) * bytes_per_token(model)
        output = engine.generate(PROMPTS[0], **settings, max_cache_bytes=cap)
        written.append(output.token_ids)
    assert output.stats.num_put_back > 0 and written[0] == written[1]


def test_tails_that_fail_leave_the_verdict_and_go_on_with_eager_steps(monkeypatch):
    released, forward, release = [], PooledStep.forward, CapturedStep.release

    def watched_release(step, rows):
        released.append(weakref.ref(step))
        return release(step, rows)

    def watched_forward(step, *arguments):
        assert released[0]() is None, "the memory of the graphs is kept"
        return forward(step, *arguments)

    monkeypatch.setattr(CapturedStep, "release", watched_release)
    monkeypatch.setattr(PooledStep, "forward", watched_forward)
    monkeypatch.setattr(logging.getLogger("stand"), "disabled", True)  # pytest keeps tracebacks that are logged
    expected = decode("sdpa", alone)
    monkeypatch.setattr(TailBody, "run", failing_after(5, TailBody.run, RuntimeError("gone")))
    model = kernel_model("qwen2")
    engine = stand.wrap(model, drafter=alone(model), verifier="match", backend="triton", fuse=False)
    with pytest.warns(UserWarning, match="RuntimeError: gone; decoding goes on with eager steps"):
        output = engine.generate(input_ids=PROMPTS, **SETTINGS)
    assert output.token_ids == expected.token_ids
    assert engine.backend.name == "sdpa" and output.stats.num_draft_tokens > 50


def test_a_tail_that_fails_in_a_calls_last_step_makes_later_calls_eager(monkeypatch):
    model = kernel_model("qwen2")
    engine = stand.wrap(model, drafter=alone(model), verifier="match", backend="triton", fuse=False)
    monkeypatch.setattr(TailBody, "run", failing_after(0, TailBody.run, RuntimeError("gone")))
    with pytest.warns(UserWarning, match="RuntimeError: gone; decoding goes on with eager steps"):
        assert engine.generate(input_ids=PROMPTS, **SETTINGS | {"max_new_tokens": 1}).stats.num_forwards == 1
    assert engine.backend.name == "sdpa" and "gone" in engine.backend.reason


def test_streams_that_do_not_pay_are_not_run(monkeypatch):
    model = kernel_model("qwen2")
    source = stand.StreamLaws(random_streams(model))
    engine = stand.wrap(model, drafter=stand.BlendedDrafter(budget=12, source=source), backend="triton", fuse=False)
    monkeypatch.setattr(Tails, "guesses", None)
    monkeypatch.setattr(type(source._paying), "pays", lambda self, run, **kind: False)
    source.rider.is_idle = True
    assert engine.generate(input_ids=PROMPTS, **SETTINGS).stats.num_steps > 5


def test_graphs_are_kept_for_whom_they_serve():
    """A call without drafts takes over those of a call with streams; other streams do not."""
    model = kernel_model("qwen2")
    engine = stand.wrap(model, drafter=alone(model), backend="triton", fuse=False)
    engine.generate(input_ids=PROMPTS, **SETTINGS)
    captured = engine.backend._previous.captured
    for settings in ({"draft": False}, {}):
        engine.generate(input_ids=PROMPTS, **SETTINGS, **settings)
        assert engine.backend._previous.captured is captured
    engine.drafter.rider = copy.copy(engine.drafter.rider)
    engine.generate(input_ids=PROMPTS, **SETTINGS)
    assert engine.backend._previous.captured is not captured


def test_nobody_else_pays():
    model = kernel_model("qwen2")
    engine = stand.wrap(model, backend="triton", fuse=False)
    engine.generate(input_ids=PROMPTS, **SETTINGS)
    captured = engine.backend._previous.captured
    assert captured._tails is None and captured._output.watched is None


def test_streams_at_every_node_are_refused_by_name():
    model = kernel_model("qwen2")
    for drafter in (alone(model, placement="nodes"), blended(model, placement="nodes")):
        with pytest.raises(ValueError, match=r"'triton' cannot serve here: .*placement='nodes'.* use backend='sdpa'"):
            stand.wrap(model, drafter=drafter, backend="triton")


def test_the_check_sees_guesses_that_are_wrong(monkeypatch):
    model = copy.deepcopy(kernel_model("qwen2"))
    rider = alone(model).rider
    rider.attach(model)
    assert self_check.kernel_failure(model, get_verifier("match"), rider=rider) is None
    right = Chains.of
    monkeypatch.setattr(Chains, "of", lambda num_rows, length: apart(right(num_rows, length)))
    assert "a rider's guesses must be" in self_check.kernel_failure(model, get_verifier("match"), rider=rider)


def apart(chains: Chains) -> Chains:
    """Streams that see the first one and themselves."""
    return Chains(chains.token_ids, np.minimum(chains.parents, 0), chains.depths, chains.offsets)


def test_the_check_sees_hidden_states_of_other_nodes(monkeypatch):
    model = copy.deepcopy(kernel_model("qwen2"))
    rider = alone(model).rider
    rider.attach(model)
    guesses = Tails.guesses

    def one_on(self, rows, lengths, places, ends, **kwargs):
        return guesses(self, rows, lengths, places, ends + 1, **kwargs)

    monkeypatch.setattr(Tails, "guesses", one_on)
    assert "a rider's guesses must be" in self_check.kernel_failure(model, get_verifier("match"), rider=rider)
