"""Requests of a run whose rows nobody needs any more."""

import gc
import warnings

import numpy as np
import pytest
from tiny_models import tiny_model
from with_pages import needs_pages

import stand
from stand.forward.cache.paged_cache import PagedCache, PromptRoom

PROMPTS = [[5, 9, 11, 4, 5, 9], [7], [8, 30, 31, 32, 33, 34, 35, 36, 37, 30, 31, 32]]
SETTINGS = {"max_new_tokens": 24, "temperature": 0.9, "seed": 3, "stop_token_ids": [4, 9, 17]}  # unlike lengths


def engine_of(**settings) -> stand.Engine:
    return stand.wrap(tiny_model("qwen2"), verifier="match", drafter=stand.BlendedDrafter(budget=12), **settings)


def requests() -> list[stand.Request]:
    return [stand.Request(prompt, num_return_sequences=4, id=name) for prompt, name in zip(PROMPTS, "abc", strict=True)]


def tokens_of(trajectories) -> dict[int, list[int]]:
    return {one.row: one.token_ids for one in trajectories}


@pytest.mark.parametrize("max_rows", [1, 2, 5, 12])
@pytest.mark.parametrize("num_wanted", [1, 2, 4])
def test_rows_that_nobody_needs_end_and_the_others_are_as_they_were(max_rows, num_wanted):
    """After so many trajectories of each request. Those that end in the same step are still given."""
    whole = list(engine_of().run(requests(), max_rows=max_rows, **SETTINGS))
    run, found = engine_of().run(requests(), max_rows=max_rows, **SETTINGS), []
    for one in run:
        found.append(one)
        if sum(other.id == one.id for other in found) == num_wanted:
            run.cancel(one.id)
    wanted = tokens_of(whole)
    assert all(wanted[one.row] == one.token_ids and one.finish_reason != "cancelled" for one in found)
    counts = [sum(one.id == name for one in found) for name in "abc"]
    assert min(counts) >= num_wanted and run.num_live == 0
    if max_rows == 1:
        assert counts == [num_wanted] * 3
        assert run.stats.num_tokens == sum(len(one.token_ids) for one in found)
    if num_wanted == 1 and max_rows > 2:
        assert len(found) < 12


@pytest.mark.filterwarnings("ignore:an id to cancel")
@pytest.mark.parametrize("at_step", [1, 2, 7])
def test_requests_are_cancelled_after_any_step(at_step):
    """The one whose rows run, and the one that waits with others of its rows; what is read later is not meant."""
    num_steps, live = 0, []

    def on_step(run: stand.Run) -> None:
        nonlocal num_steps
        num_steps += 1
        live.append({row.request for row in run._call.scheduler.live})
        if num_steps == at_step:
            for name in ("a", "c", "d"):
                run.cancel(name)

    settings = {**SETTINGS, "stop_token_ids": []}
    found = list(engine_of().run(requests(), max_rows=3, on_step=on_step, **settings))
    assert sorted(one.id for one in found) == ["b"] * 4 + ["c"] * 4
    assert set().union(*live[:at_step]) == {0} and 0 not in set().union(*live[at_step:])
    assert tokens_of(found) == {
        row: tokens for row, tokens in tokens_of(engine_of().run(requests(), **settings)).items() if row > 3
    }


@pytest.mark.filterwarnings("ignore:an id to cancel")
def test_all_may_be_cancelled_and_an_id_may_be_anything():
    for id in (None, [1], 2.0):
        run = engine_of().run([stand.Request([7], id=id)], on_step=lambda run, id=id: run.cancel(id), **SETTINGS)
        assert len(list(run)) <= 1 and run.stats.num_forwards == 1
    pair = np.array([1, 2])
    others = [stand.Request([5], id=pair), stand.Request([9], id="a")]
    for id, kept in ((pair, ["a"]), ("a", [pair]), (np.array([1, 2]), [pair, "a"])):
        run = engine_of().run(others, on_step=lambda run, id=id: run.cancel(id), **{**SETTINGS, "stop_token_ids": []})
        found = sorted((one.row, one.id) for one in run)
        assert all(one is other for (_, one), other in zip(found, kept, strict=True))


def test_ids_that_no_request_had_are_told():
    """Those of requests that have ended are none of them; those of requests that come later are."""
    run = engine_of().run([], **SETTINGS)
    with pytest.warns(UserWarning, match="must be that of a request that was read so far, got 'a'; nothing ends by it"):
        run.cancel("a")
    assert list(run) == []
    run = engine_of().run([stand.Request([5], id="a"), stand.Request([7], id=2)], max_rows=1, **SETTINGS)
    next(run)
    with warnings.catch_warnings(action="error"):
        run.cancel("a")
        run.cancel(2.0)
    for id in ([2], "b", None):
        with pytest.warns(UserWarning, match="read so far"):
            run.cancel(id)
    assert list(run) == []


def test_log_probabilities_of_cancelled_rows_go_with_them():
    run = engine_of().run(requests(), max_rows=3, logprobs=2, **SETTINGS)
    for one in run:
        run.cancel(one.id)
        assert len(one.logprobs) == len(one.token_ids)
    assert not run._call.logprobs._noted


@needs_pages
def test_the_memory_of_cancelled_rows_is_free_for_others():
    """With memory for two rows. At the end no keys are left."""
    gc.collect()
    settings = {**SETTINGS, "stop_token_ids": [], "max_new_tokens": 60}
    engine = engine_of()
    num_used: list[int] = []

    def on_step(run: stand.Run) -> None:
        num_used.append(run.num_slots)
        if len(num_used) == 3:
            run.cancel("a")

    run = engine.run(requests(), max_rows=2, on_step=on_step, **settings)
    found = list(run)
    assert {one.id for one in found} == {"b", "c"} and max(num_used[3:6]) <= max(num_used[:3])
    run.close()
    gc.disable()
    try:
        assert not [kept for kept in gc.get_objects() if type(kept) in (PagedCache, PromptRoom)]
    finally:
        gc.enable()
