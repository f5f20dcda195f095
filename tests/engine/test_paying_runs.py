"""How often a head runs: as often as its laws are worth their time, by a clock or, with a seed, by weights."""

import itertools
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from draft_requests import draft_request
from plain_eagle import random_head
from tiny_models import tiny_model

import stand
from stand.drafters import paying_runs
from stand.drafters.paying_runs import FADE, FIRST_TRIES, RETRY, FadingMean, PayingRuns, expected_tokens
from stand.drafters.streams import rider as streams_rider
from stand.drafters.streams.weights import Streams
from stand.trees import DraftBatch, DraftTree

PROMPTS = [[5, 9, 11, 4, 5, 9], [7, 8]]


def decide(gains, seconds, *, step=1.0, share=0.1, is_seeded=False, num_steps=200):
    """Runs made in each step, where run k gains gains[k] of the expected tokens and takes seconds[k]."""
    paying, made = PayingRuns(share, most=len(gains)), []
    for _ in range(num_steps):
        run, tokens = 0, 1.0
        while paying.pays(run, is_seeded=is_seeded):
            paying.record_run(run, seconds[run])
            paying.record_gain(run, tokens, tokens * (1 + gains[run]))
            tokens, run = tokens * (1 + gains[run]), run + 1
        paying.end_step(run)
        paying.record_step(step)
        made.append(run)
    return made


def usual(made):
    return int(np.median(made[len(made) // 2 :]))


def test_runs_are_made_while_they_gain_more_than_they_cost():
    costs = [0.1] * 6
    assert usual(decide([0.5, 0.3, 0.05, 0.04, 0.03, 0.02], costs)) == 2
    assert usual(decide([0.05] * 6, costs)) == 0
    assert usual(decide([0.5] * 6, costs)) == 6
    # The third run's tenth of a step is a twelfth of what the step takes by then.
    assert usual(decide([0.5, 0.3, 0.09, 0.0, 0.0, 0.0], costs)) == 3


def test_a_step_twice_as_long_pays_for_more():
    gains, seconds = [0.3, 0.08, 0.0, 0.0, 0.0, 0.0], [0.1] * 6
    assert usual(decide(gains, seconds, step=1.0)) == 1
    assert usual(decide(gains, seconds, step=2.0)) == 2


def test_with_a_seed_no_clock_matters():
    gains = [0.3, 0.08, 0.0, 0.0, 0.0, 0.0]
    slow, fast = (decide(gains, [seconds] * 6, share=0.05, is_seeded=True) for seconds in (9.0, 1e-9))
    assert slow == fast and usual(slow) == 2


def test_a_gain_as_large_as_the_cost_does_not_pay():
    assert usual(decide([0.5, 0.5], [9.0] * 2, share=0.5, is_seeded=True)) == 0
    assert usual(decide([0.5, 0.5], [9.0] * 2, share=0.499, is_seeded=True)) == 2


def test_what_does_not_pay_is_tried_again():
    made = decide([0.0] * 6, [0.1] * 6, num_steps=FIRST_TRIES + 4 * RETRY)
    assert made[:FIRST_TRIES] == [1] * FIRST_TRIES  # and none after it is tried
    assert 2 <= sum(made[FIRST_TRIES:]) <= 4
    assert set(np.diff(np.flatnonzero(made[FIRST_TRIES:]))) == {RETRY + 1}  # so many steps without it in between


def test_a_fading_mean_is_a_mean_until_the_newest_weighs_its_share():
    values, mean = np.random.default_rng(0).normal(size=40), FadingMean()
    assert (mean.value, mean.count) == (0.0, 0)
    expected = 0.0
    for number, value in enumerate(values, start=1):
        mean.add(value)
        expected = values[:number].mean() if number <= 1 / FADE else (1 - FADE) * expected + FADE * value
        assert mean.value == pytest.approx(expected) and mean.count == number


def test_expected_tokens_count_the_one_after_the_path():
    tree = DraftTree.chain([3, 4, 5])
    batch = DraftBatch.concatenate([tree, tree])
    batch = replace(batch, path_probabilities=np.array([1, 0.5, 0.25, 1, 0.1, 0.0], np.float32))
    assert expected_tokens(batch) == pytest.approx(2.85)


def test_a_run_takes_as_long_as_the_clock_goes_on(monkeypatch):
    """A tenth of a step for half a token more: it pays, whatever time of day it is."""
    ticks = itertools.count(1000)
    monkeypatch.setattr(paying_runs, "time", SimpleNamespace(perf_counter=lambda: float(next(ticks))))
    paying, request = PayingRuns(9.0, most=1), replace(draft_request([np.array([3], np.int32)]), is_seeded=False)
    pair = DraftBatch.concatenate([DraftTree.chain([3, 4])])

    def plan(laws):
        return replace(pair, path_probabilities=np.array([1.0, 0.2 if laws is None else 0.8], np.float32))

    for _ in range(2 * FIRST_TRIES):
        paying.record_step(10.0)
        assert paying.laws(request, plan, lambda run, planned: f"laws of run {run}") == "laws of run 0"


def engine_with(source):
    return stand.wrap(tiny_model("llama"), drafter=stand.BlendedDrafter(budget=6, source=source))


class Counting(stand.EagleLaws):
    num_runs = num_steps = 0

    def laws(self, request, plan):
        self.num_steps += 1
        return super().laws(request, plan)

    def _added(self, trees, places, laws):
        self.num_runs += 1
        return super()._added(trees, places, laws)


def test_an_untrained_head_is_seldom_run():
    """Its laws are of no worth, and the lookup's draft loses nothing but a few tries."""
    source = Counting(random_head(tiny_model("llama"), scale=1.5))
    engine = engine_with(source)
    settings = {"input_ids": PROMPTS, "num_return_sequences": 4, "max_new_tokens": 200, "temperature": 0.3}
    engine.generate(**settings, seed=1)
    assert source.num_steps > 100 and FIRST_TRIES <= source.num_runs < 0.5 * source.num_steps
    always = Counting(random_head(tiny_model("llama"), scale=1.5), runs=1)
    engine_with(always).generate(**settings, seed=1)
    assert always.num_runs == always.num_steps


@pytest.mark.parametrize("left_out", [0, RETRY])
def test_where_nothing_is_learned_a_head_that_has_not_paid_neither_runs_nor_holds_rows(left_out, monkeypatch):
    """What it would hold grows with the text, and nobody ever asks for it. Greedy tokens stay."""
    source = untrained("head")
    engine, settings = engine_with(source), {"input_ids": PROMPTS, "max_new_tokens": 40, "stop_token_ids": []}
    for _ in range(FIRST_TRIES):
        source._paying.record_gain(0, 1.0, 1.0)
    source._paying._left_out[0] = left_out
    monkeypatch.setattr(source.head, "forward", None)
    output = engine.generate(**settings, learn=False)
    assert source._rows._fresh == [] and source._rows._prompts == {}
    assert output.token_ids == engine.generate(**settings, draft=False).token_ids
    monkeypatch.undo()
    assert engine.generate(**settings).token_ids == output.token_ids  # which learns, and so tries it again


@pytest.mark.parametrize("source", ["head", "streams"])
def test_a_seed_repeats_a_call_whatever_runs_take(monkeypatch, source):
    outputs = []
    for slowness in (1e-9, 1.0):
        engine = engine_with(untrained(source))
        ticks = itertools.count()
        for module in (paying_runs, streams_rider):
            clock = SimpleNamespace(perf_counter=lambda ticks=ticks, slowness=slowness: slowness * next(ticks))
            monkeypatch.setattr(module, "time", clock)
        outputs.append(engine.generate(input_ids=PROMPTS, max_new_tokens=60, temperature=0.8, seed=3))
    assert outputs[0].token_ids == outputs[1].token_ids
    assert outputs[0].stats.num_draft_tokens == outputs[1].stats.num_draft_tokens


def test_streams_that_are_of_no_worth_are_seldom_run(monkeypatch):
    counts = {}
    for always in (False, True):
        source = untrained("streams", always=always)
        runs, work = [], source.rider.guesses
        source.rider.guesses = lambda *arguments, runs=runs, work=work: runs.append(1) or work(*arguments)
        output = engine_with(source).generate(
            input_ids=PROMPTS, num_return_sequences=4, max_new_tokens=200, temperature=0.3, seed=1
        )
        counts[always] = len(runs) / output.stats.num_forwards
    assert counts[True] == 1.0 and 0 < counts[False] < 0.5


def untrained(source, **settings):
    torch.manual_seed(0)
    if source == "head":
        return stand.EagleLaws(random_head(tiny_model("llama"), scale=1.5))
    return stand.StreamLaws(Streams(tiny_model("llama"), num_layers=1), **settings)


@pytest.mark.parametrize(("has_laws", "is_learning"), [(True, True), (True, False), (False, True)])
def test_runs_of_streams_are_judged_where_they_gave_laws_in_calls_that_teach(has_laws, is_learning, monkeypatch):
    source, told = untrained("streams"), []
    source.attach(tiny_model("llama"))
    monkeypatch.setattr(source._paying, "record_gain", lambda *given: told.append(given))
    monkeypatch.setattr(source, "_known_laws", lambda request: "laws" if has_laws else None)
    request = replace(draft_request([np.array([5, 9], dtype=np.int32)]), is_learning=is_learning)
    planned = replace(DraftBatch.concatenate([DraftTree.pending(5)]), path_probabilities=np.ones(1, np.float32))
    source.laws(request, lambda laws: planned)
    assert len(told) == int(has_laws and is_learning)
