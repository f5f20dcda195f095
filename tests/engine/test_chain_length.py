"""Leviathan's formulas against sums and simulation, and the two estimators."""

import numpy as np
import pytest
from tiny_models import tiny_model

import stand
from stand import ModelDrafter, Stats
from stand.drafters.chain_length import best_gamma, estimate_alpha, estimate_cost, expected_tokens, walltime_factor


@pytest.mark.parametrize("alpha", [0.0, 0.3, 0.8, 0.999])
@pytest.mark.parametrize("gamma", [0, 1, 4, 20])
def test_expected_tokens_is_the_closed_form(alpha, gamma):
    assert expected_tokens(alpha, gamma) == pytest.approx((1 - alpha ** (gamma + 1)) / (1 - alpha), rel=1e-9)


def test_expected_tokens_of_a_perfect_drafter():
    assert expected_tokens(1.0, 7) == 8.0


def test_walltime_factor_by_hand():
    assert walltime_factor(0.5, 1, 0.5) == pytest.approx(1.5 / 1.5)
    assert walltime_factor(0.8, 5, 0.05) == pytest.approx(3.68928 / 1.25)


@pytest.mark.parametrize(
    ("alpha", "cost", "gamma"),
    [(0.0, 0.0, 0), (0.1, 0.2, 0), (0.5, 0.5, 0), (0.5, 0.1, 2), (0.8, 0.05, 8), (1.0, 0.5, 9), (0.9, 0.0, 9)],
)
def test_the_best_gamma(alpha, cost, gamma):
    plan = best_gamma(alpha, cost, longest=9)
    best = max(walltime_factor(alpha, length, cost) for length in range(10))
    assert plan.gamma == gamma
    assert plan.walltime_factor == best == walltime_factor(alpha, gamma, cost)
    assert plan.expected_tokens == expected_tokens(alpha, gamma)


@pytest.mark.parametrize("alpha", [0.2, 0.7, 0.95])
def test_alpha_is_recovered_from_counts(alpha):
    gamma, steps = 5, 20_000
    kept = np.minimum(np.random.default_rng(0).geometric(1 - alpha, steps) - 1, gamma)
    stats = Stats(
        num_steps=steps,
        num_accepted_draft_tokens=int(kept.sum()),
        num_tokens=int(kept.sum()) + steps,
        accepted_by_depth=np.array([np.count_nonzero(kept >= depth) for depth in range(1, gamma + 1)]),
    )
    assert estimate_alpha(stats, gamma) == pytest.approx(alpha, abs=0.01)
    assert stats.mean_acceptance_length == pytest.approx(expected_tokens(estimate_alpha(stats, gamma), gamma), rel=0.02)


def test_alpha_where_the_last_depth_was_never_reached():
    stats = Stats(num_steps=10, num_accepted_draft_tokens=5, accepted_by_depth=np.array([4, 1]))
    assert estimate_alpha(stats, 3) == pytest.approx(5 / 15)


def test_cost_is_a_ratio_of_measured_times():
    stats = Stats(num_steps=1)
    stats.seconds |= {"draft": 2.0, "forward": 5.0}
    assert estimate_cost(stats, 4) == pytest.approx(0.1)


def test_a_real_generation_can_be_planned():
    engine = stand.wrap(tiny_model("llama"), verifier="token", drafter=ModelDrafter(tiny_model("qwen2"), gamma=4))
    stats = engine.generate(input_ids=[[3, 4, 5]], max_new_tokens=40, temperature=1.0, seed=0).stats
    assert 0 < estimate_alpha(stats, 4) < 1
    assert best_gamma(estimate_alpha(stats, 4), estimate_cost(stats, 4)).walltime_factor >= 1


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: best_gamma(1.1, 0.1), "alpha must be in"),
        (lambda: best_gamma(float("nan"), 0.1), "alpha must be in"),
        (lambda: best_gamma(0.5, -0.1), "cost must be finite"),
        (lambda: best_gamma(0.5, float("inf")), "cost must be finite"),
        (lambda: expected_tokens(0.5, -1), "at least 0 tokens"),
        (lambda: estimate_alpha(Stats(), 4), "at least one step"),
        (lambda: estimate_alpha(Stats(num_steps=3), 0), "gamma must be at least 1"),
        (lambda: estimate_cost(Stats(num_steps=3), 4), "measured forward passes"),
    ],
)
def test_nonsense_is_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call()
