"""Runs by settings: opened as requests come, closed where nobody needs them, and never more than so many."""

import time
from concurrent.futures import ThreadPoolExecutor, wait

import numpy as np
import pytest
import torch
from tiny_models import tiny_model

import stand
from stand.forward.tree_attention import exclusive
from stand.plugins.open_runs import MOST_OPEN, OpenRuns
from stand.seeds import call_seed


def test_runs_that_nobody_needs_are_closed():
    engine = stand.wrap(tiny_model("qwen2"), verifier="match")
    runs = OpenRuns(engine, num_rows=2, seed=0)
    settings = [{"temperature": 1 + place / 10, "max_new_tokens": 2, "seed": None} for place in range(12)]
    for one in settings:
        assert len(runs.submit([5, 6], one).result(60)[0].token_ids) <= 2
    assert len(runs._runs) == MOST_OPEN and not runs._waiting
    assert [run.seed for run in runs._runs.values()] == [call_seed(0, place) for place in range(12 - MOST_OPEN, 12)]
    before = list(runs._runs.values())
    runs.submit([5, 6], settings[-1]).result(60)
    assert list(runs._runs.values()) == before, "an open run is used again"
    runs.close()
    assert not any(run._thread.is_alive() for run in before)


@pytest.fixture
def busy_runs():
    """As many runs as may be open, each with a request that cannot begin until the block ends; and one more."""
    engine = stand.wrap(tiny_model("qwen2"), verifier="match")
    runs = OpenRuns(engine, num_rows=2, seed=0)
    settings = [{"temperature": 1 + place / 10, "max_new_tokens": 2} for place in range(MOST_OPEN + 1)]
    for one in settings[:-1]:
        runs.submit([5, 6], one).result(60)
    with ThreadPoolExecutor(2) as pool, exclusive(engine.model):
        futures = [runs.submit([5, 6], one) for one in settings[:-1]]
        further = pool.submit(runs.submit, [5, 6], settings[-1])
        time.sleep(0.2)
        assert not further.done() and len(runs._runs) == MOST_OPEN
        yield runs, pool, further
    assert not wait(futures, 60).not_done
    runs.close()


def test_runs_in_use_are_not_closed_for_a_further_one(busy_runs):
    runs, pool, further = busy_runs
    pool.submit(lambda: further.result(60).result(60))
    assert not further.done()


def test_whoever_waits_for_a_run_is_told_that_all_are_closed(busy_runs):
    runs, pool, further = busy_runs
    pool.submit(runs.close, cancel=True)
    with pytest.raises(RuntimeError, match=r"requests must come before close\(\)"):
        further.result(60)


def test_a_run_that_has_failed_is_followed_by_another():
    runs = OpenRuns(stand.wrap(tiny_model("qwen2")), num_rows=2, seed=0)
    failed = runs.submit([5], {"max_new_tokens": 3})
    failed.result(60)
    (run,) = runs._runs.values()
    run._arrivals.fail(ArithmeticError())
    assert len(runs.submit([5], {"max_new_tokens": 3}).result(60)) == 1
    (other,) = runs._runs.values()
    assert other is not run and other.seed == call_seed(0, 1) != run.seed
    run.close()
    runs.close()


def test_settings_tell_runs_apart_and_what_a_request_has_does_not():
    runs = OpenRuns(stand.wrap(tiny_model("qwen2"), verifier="match"), num_rows=2)
    law = {"temperature": 0.9, "max_new_tokens": 3}
    for settings in (law, {**law, "max_new_tokens": 5}, {**law, "stop_token_ids": [4]}, {**law, "top_p": None}):
        runs.submit([5, 6], settings).result(60)
    assert len(runs._runs) == 1
    for settings in ({**law, "top_p": 0.5}, {**law, "draft": False}):
        runs.submit([5, 6], settings).result(60)
    assert len(runs._runs) == 3
    runs.submit([5, 6], law, processors=list, of_processors="other").result(60)
    assert len(runs._runs) == 4
    runs.close()


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ({"bad_words_ids": [[3, 4]]}, {"bad_words_ids": [[3], [4]]}),
        ({"sequence_bias": {(3,): 1.0}}, {"sequence_bias": {(3,): 2.0}}),
        ({"suppress_tokens": np.array([3, 4])}, {"suppress_tokens": torch.tensor([3])}),
        ({"draft": True}, {"draft": False}),
    ],
)
def test_settings_of_any_form_tell_runs_apart(one, other):
    engine = stand.wrap(tiny_model("llama"))
    runs = OpenRuns(engine, num_rows=1)
    for settings in (one, other, one):
        runs.submit([5, 9], {"max_new_tokens": 2, **settings}).result(60)
    assert len(runs._runs) == 2
    runs.close()


def test_what_is_equal_and_yet_no_value_is_refused_beside_a_run_too():
    runs = OpenRuns(stand.wrap(tiny_model("llama")), num_rows=1)
    runs.submit([5, 9], {"max_new_tokens": 2, "draft": True}).result(60)
    with pytest.raises(ValueError, match="draft must be True or False, got 1"):
        runs.submit([5, 9], {"max_new_tokens": 2, "draft": 1})
    runs.close()


def test_seeds_of_runs_are_theirs():
    """The first run of a seed has it, later ones follow from it, and those of other seeds have other numbers."""
    runs = OpenRuns(stand.wrap(tiny_model("qwen2"), verifier="match"), num_rows=2, seed=7)
    seeds = []
    for place, seed in enumerate((None, 7, 6, 5, 5)):
        runs.submit([5, 6], {"temperature": 1 + place / 10, "max_new_tokens": 2, "seed": seed}).result(60)
        seeds.append(list(runs._runs.values())[-1].seed)
    assert seeds == [7, call_seed(7, 1), 6, 5, call_seed(5, 1)]
    for seed in (-1, 2**80, 1.5):
        with pytest.raises(ValueError, match="seed must be an integer in"):
            runs.submit([5, 6], {"seed": seed})
    runs.close()


def test_settings_that_do_not_fit_open_no_run():
    runs = OpenRuns(stand.wrap(tiny_model("qwen2")), num_rows=2)
    with pytest.raises(ValueError, match="temperature must be >= 0"):
        runs.submit([5, 6], {"temperature": -1.0})
    assert not runs._runs and not runs._waiting
    assert runs.submit([5, 6], {"max_new_tokens": 2}).result(60)
    runs.close()


def test_callbacks_may_ask_their_own_run():
    """While another thread waits for a further run."""
    engine = stand.wrap(tiny_model("qwen2"), verifier="match")
    runs, followed = OpenRuns(engine, num_rows=2), []
    law = {"temperature": 0.9, "max_new_tokens": 30, "stop_token_ids": []}

    def tell(row: int, token_ids: list[int]) -> None:
        if len(followed) < 5:
            followed.append(runs.submit([7], law))

    with ThreadPoolExecutor(4) as pool:
        first = pool.submit(runs.submit, [5, 6], law, on_tokens=tell)
        others = [pool.submit(runs.submit, [5], {**law, "top_k": place}) for place in range(1, 8)]
        assert first.result(60).result(60) and all(future.result(60) for future in followed)
        assert all(other.result(60).result(60) for other in others)
    runs.close()
