"""Captured steps of models with recurrent states: the tokens of eager steps, whatever rows do."""

import copy
from functools import lru_cache

import pytest
import torch

pytest.importorskip("triton")

from every_day import every_day
from failures import failing_after
from plain_kernels import use_plain_kernels
from plain_scan import use_plain_scans
from recurrent_models import RECURRENT, new_recurrent_model, recurrent_kernel_model
from step_pair import OTHER_STEPS, PROMPTS, StepPair, growing_pools, put_back_after

import stand
from stand.drafters.blended import BlendedDrafter
from stand.forward.cache.key_shape import key_shape
from stand.fusion import fusion as fusion_module
from stand.fusion import kernels as kernels_module
from stand.gpu import kernel_scan
from stand.gpu.captured_step import CapturedStep
from stand.gpu.packets import page_table
from stand.scheduling import free_memory
from stand.scheduling.page_allocator import PageAllocator, PagesExhaustedError
from stand.scheduling.within_pages import WithinPages

PAIR = StepPair(recurrent_kernel_model, num_return_sequences=2, max_new_tokens=24, temperature=0.6, seed=4, learn=False)
EACH = [family for family in ("qwen3_5", "nemotron_h", "lfm2") if family in RECURRENT]  # of every kind


@pytest.fixture(autouse=True)
def plain_kernels(monkeypatch):
    use_plain_kernels(monkeypatch)
    use_plain_scans(monkeypatch)


@pytest.mark.parametrize("family", every_day(RECURRENT, "qwen3_5", "olmo_hybrid", "nemotron_h", "falcon_h1", "lfm2"))
def test_tokens_equal_the_eager_step(family):
    eager, captured = PAIR.both(family)
    assert captured.token_ids == eager.token_ids and captured.stats.num_steps == eager.stats.num_steps
    assert captured.stats.mean_acceptance_length > 1.1  # drafts are accepted, so states follow paths


@pytest.mark.parametrize("settings", [{"temperature": 0.0}, {"temperature": 1.0, "top_p": 0.9}])
@pytest.mark.parametrize("family", EACH)
def test_greedy_and_filtered_tokens_equal_the_eager_step(family, settings):
    eager, captured = PAIR.both(family, verifier="match", **settings)
    assert captured.token_ids == eager.token_ids


@pytest.mark.parametrize("family", EACH)
def test_rows_take_the_places_of_others(family):
    eager, captured = PAIR.both(family, verifier="match", captured={"max_rows": 2})
    assert captured.token_ids == eager.token_ids


@pytest.mark.parametrize("family", EACH)
def test_rows_that_are_put_back_come_again_with_their_states(family, monkeypatch):
    put_back_after(monkeypatch, 6)
    model = recurrent_kernel_model(family)
    page, states = page_table.PAGE_SIZE * key_shape(model).token_bytes, key_shape(model).row_bytes
    eager, captured = PAIR.both(family, verifier="match", captured={"max_cache_bytes": 20 * page + 4 * (states + page)})
    assert captured.token_ids == eager.token_ids and captured.stats.num_put_back > 0


def test_pools_that_grow_keep_the_states(monkeypatch):
    settings = {**PAIR.settings, "num_return_sequences": 1, "max_new_tokens": 150, "stop_token_ids": []}
    expected = PAIR.engine_of("lfm2").generate(PROMPTS, **settings).token_ids
    pools = growing_pools(monkeypatch)
    assert PAIR.engine_of("lfm2").generate(PROMPTS, **settings).token_ids == expected and pools


def test_a_second_call_begins_anew():
    engine = PAIR.engine_of("qwen3_5", verifier="match")
    first = engine.generate(PROMPTS, **PAIR.settings)
    step = engine.backend._previous.captured
    assert engine.generate(PROMPTS, **PAIR.settings).token_ids == first.token_ids
    assert engine.backend._previous.captured is step
    assert step.nbytes > step._num_rows * key_shape(engine.model).row_bytes > 0


@pytest.mark.parametrize("part", ["launch", "verdicts"])
@pytest.mark.parametrize("family", EACH)
def test_a_failure_goes_on_with_the_same_states(family, part, monkeypatch):
    """Where the verdict of a step does not come, its path is not known, but states have followed it."""
    expected = PAIR.engine_of(family, verifier="match").generate(PROMPTS, **PAIR.settings).token_ids
    monkeypatch.setattr(CapturedStep, part, failing_after(6, getattr(CapturedStep, part), RuntimeError("gone")))
    engine = PAIR.engine_of(family, verifier="match")
    with pytest.warns(UserWarning, match="decoding goes on with eager steps"):
        assert engine.generate(PROMPTS, **PAIR.settings, max_rows=4).token_ids == expected


@pytest.mark.parametrize("asked", OTHER_STEPS)
@pytest.mark.parametrize("family", EACH)
def test_steps_in_two_parts_and_eager_ones_over_the_pool(family, asked):
    eager, other = PAIR.both(family, **asked, captured={"max_rows": 3}, verifier="match")
    assert other.token_ids == eager.token_ids


@pytest.mark.parametrize("family", ["qwen3_5", "nemotron_h"])
def test_fused_modules_beside_states(family):
    few = {**PAIR.settings, "num_return_sequences": 1, "max_new_tokens": 5}  # fused modules are interpreted
    expected = PAIR.engine_of(family).generate(PROMPTS[:1], **few).token_ids
    engine = PAIR.engine_of(family, fuse=True)
    kept = {swap.kind for swap in engine.backend.fusion.report if swap.is_kept}
    assert "RMSNorm with a gate" in kept
    more = {
        "gated delta rule",
        "merged inputs of a recurrent layer",
        "attention with rotary cache write",
        "additions joined with norms",
    }
    assert more & kept == (more if family == "qwen3_5" else set())
    assert engine.generate(PROMPTS[:1], **few).token_ids == expected


def test_a_gate_in_the_wrong_place_is_noticed(monkeypatch):
    """Control: both orders are tried, and neither is kept where the kernel is wrong."""
    kernels = kernels_module.triton_kernels()
    own = kernels.gated_rms_norm
    wrong = kernels._replace(gated_rms_norm=lambda states, gate, *rest: own(states, gate.roll(1, -1), *rest))
    monkeypatch.setattr(fusion_module, "triton_kernels", lambda: wrong)
    model = copy.deepcopy(recurrent_kernel_model("qwen3_5"))
    (swap,) = (swap for swap in fusion_module.fuse(model).report if swap.kind == "RMSNorm with a gate")
    assert not swap.is_kept and swap.max_error > 1e-2 and "rounding" in swap.reason


def test_a_model_that_was_cast_is_recorded_anew():
    model = copy.deepcopy(recurrent_kernel_model("qwen3_5"))
    engine = stand.wrap(model, backend="triton", verifier="match", drafter=BlendedDrafter(budget=4), fuse=False)
    engine.generate(PROMPTS, **PAIR.settings)
    model.bfloat16()
    engine.generate([[8]], **PAIR.settings)
    states = engine.backend._previous.captured.states().layers[0]
    assert (states.tails.dtype, states.states.dtype) == (torch.bfloat16, torch.float32)


@pytest.mark.parametrize("kernel", ["keep_states", "keep_tails"])
def test_states_that_stay_behind_are_seen_by_the_check(kernel, monkeypatch):
    """Control: `wrap` compares the states of a replayed step with those of an eager one."""
    monkeypatch.setattr(kernel_scan, kernel, lambda *given: None)
    model = copy.deepcopy(recurrent_kernel_model("qwen3_5"))  # one that has not passed before
    with pytest.raises(ValueError, match="recurrent states must be those behind the kept path"):
        stand.wrap(model, backend="triton", fuse=False)


def test_a_state_that_is_of_another_row_is_noticed(monkeypatch):
    """Control: places matter."""
    expected = PAIR.engine_of("qwen3_5", verifier="match").generate(PROMPTS, **PAIR.settings).token_ids
    enter = page_table.PageTable.enter

    def wrong(table, place, row, keys, **options):
        enter(table, place, row, keys, **options)
        if place == 2:
            table.cache.recurrent.move(0, 2)

    monkeypatch.setattr(page_table.PageTable, "enter", wrong)
    assert PAIR.engine_of("qwen3_5", verifier="match").generate(PROMPTS, **PAIR.settings).token_ids != expected


def pages_of(num_pages: int, row_pages: float, *, is_asked_for: bool = True) -> WithinPages:
    pages = PageAllocator(64, num_pages)
    return WithinPages(pages, is_asked_for=is_asked_for, row_pages=row_pages, growth=0, most_slots=lambda rows: 0)


class Job:
    prompt, limit = [1] * 65, 10


def row(index: int) -> stand.row.Row:
    return stand.row.Row(index, torch.ones(65, dtype=torch.int32).numpy(), 10)


@pytest.mark.parametrize("is_asked_for", [True, False])
def test_states_count_as_pages_until_their_places_are_taken(is_asked_for):
    """A row has one page of keys, takes up to two more for a step, and ten pages' worth of states."""
    within = pages_of(30, 10, is_asked_for=is_asked_for)
    within.open(row(0))
    within.enter(row(0))
    assert within.fits([row(0)], row(1)) and not within.fits([row(0), row(1)], row(2))
    within.settle(2)
    assert within.pages.num_pages == 10 and within.fits([row(0)], row(1))
    assert not within.is_cramped(row(2))


def test_places_are_rounded_together():
    within = pages_of(30, 0.3)
    within.settle(7)
    assert within.pages.num_pages == 27


def test_who_is_alone_gets_no_pages_of_the_places():
    """Of the user's 20, four places take 12; control: 8 pages are the row's."""
    within = pages_of(20, 3)
    within.settle(4)
    within.open(row(0))
    within.enter(row(0))
    within.take([row(0)], [8 * 64 - 1])
    with pytest.raises(PagesExhaustedError):
        within.take([row(0)], [9 * 64])


def test_a_request_that_states_leave_no_room_for_is_refused():
    pages_of(12, 4.5).check(Job)  # 7 pages with its drafts, and 5
    for num_pages in (11, 5):
        with pytest.raises(ValueError, match=rf"must hold one row .* 12 pages of 64 tokens, got {num_pages};"):
            pages_of(num_pages, 4.5).check(Job)


def test_rows_leave_the_last_one_room_beside_all_places():
    for num_pages, fits in ((14, False), (15, True)):  # two places take 8; one row alone comes to 7
        within = pages_of(num_pages, 4)
        within.open(row(0))
        within.enter(row(0))
        assert within.fits([row(0)], row(1)) == fits


def test_places_are_given_back_for_a_longer_row():
    within = pages_of(20, 3)
    within.settle(4)
    within.check(Job)  # however many places there are
    longer = stand.row.Row(5, torch.ones(65, dtype=torch.int32).numpy(), 300)
    assert not within.is_cramped(row(4)) and within.is_cramped(longer)
    within.unsettle()
    assert within.pages.num_pages == 20 and not within.is_cramped(longer)
    rows = [stand.row.Row(5, torch.ones(65, dtype=torch.int32).numpy(), limit) for limit in range(8, 900, 16)]
    assert not any(map(within.is_cramped, rows))
    fits = [within.fits([row(0)], one) for one in rows]
    assert fits == [pages_of(20, 3).fits([row(0)], one) for one in rows] and len(set(fits)) == 2


@lru_cache
def model_of_large_states():
    """Those of a row take as much as keys of seven pages."""
    config = copy.deepcopy(RECURRENT["qwen3_5"])
    config.head_dim, config.linear_num_value_heads, config.linear_num_key_heads = 64, 8, 4
    config.linear_key_head_dim, config.linear_value_head_dim = 32, 128
    return new_recurrent_model(config)


@pytest.mark.parametrize("num_short", [2, 8])
@pytest.mark.parametrize("is_first", [True, False], ids=["long, then short", "short, then long"])
def test_the_order_of_requests_decides_nothing_under_a_cap(is_first, num_short, monkeypatch):
    """Places of short rows leave no room for a long one, which fits alone: the step is made anew for it."""
    unsettled, unsettle, long = [], WithinPages.unsettle, list(range(3, 40)) * 12
    monkeypatch.setattr(WithinPages, "unsettle", lambda within: (unsettled.append(1), unsettle(within)))
    model, drafter = model_of_large_states(), BlendedDrafter(budget=8)
    engine = stand.wrap(model, backend="triton", verifier="match", drafter=drafter, fuse=False)
    shape, size = key_shape(engine.model), page_table.PAGE_SIZE
    of_long = [stand.Request(long, max_new_tokens=8)]
    of_short = [stand.Request([5, 6], num_return_sequences=num_short, max_new_tokens=8)]
    requests = [*of_long, *of_short] if is_first else [*of_short, *of_long]
    settings = {"temperature": 0.6, "seed": 4, "learn": False, "stop_token_ids": []}
    needed = -(-(len(long) + 8 + 256) // size) + 1
    cap = needed * size * shape.token_bytes + shape.row_bytes + size * shape.token_bytes
    assert shape.row_bytes > 6 * size * shape.token_bytes
    expected = {one.row: one.token_ids for one in engine.run(requests, **settings)}
    found = {one.row: one.token_ids for one in engine.run(requests, **settings, max_cache_bytes=cap)}
    assert found == expected and str(engine.backend) == "triton"
    assert engine.backend.held_bytes <= cap and bool(unsettled) != is_first


def test_a_step_with_more_places_is_not_taken_over():
    """A call holds what it was allowed, states included."""
    engine = PAIR.engine_of("qwen3_5", verifier="match")
    page = page_table.PAGE_SIZE * key_shape(engine.model).token_bytes
    for max_rows in (6, 4, 3):
        cap = (20 + 3 * max_rows) * page + max_rows * key_shape(engine.model).row_bytes
        engine.generate(PROMPTS, **PAIR.settings, max_rows=max_rows, max_cache_bytes=cap)
        assert engine.backend._previous.captured.states().num_rows == max_rows and engine.backend.held_bytes <= cap


def test_what_layers_would_change_is_not_held_after_a_step():
    """Its tensors lie in the graphs' memory."""
    engine = PAIR.engine_of("qwen3_5", verifier="match")
    engine.generate(PROMPTS, **PAIR.settings)
    step = engine.backend._previous.captured
    with pytest.raises(RuntimeError, match="begin"):
        step._table.cache.scan()


def test_states_are_counted_in_the_dtype_of_today():
    model = copy.deepcopy(recurrent_kernel_model("lfm2")).bfloat16()
    stand.wrap(model)
    narrow = key_shape(model).row_bytes
    assert key_shape(model.float()).row_bytes == 2 * narrow > 0


def test_what_is_free_counts_the_states(monkeypatch):
    model, pages = recurrent_kernel_model("qwen3_5"), PageAllocator(64, 999)
    page, states = 64 * key_shape(model).token_bytes, key_shape(model).row_bytes
    monkeypatch.setattr(free_memory, "available_bytes", lambda device: (50 * page + 3 * states) / free_memory.SHARE + 1)
    free_memory.lower_limit(pages, [row(0)], model, num_tokens=64, num_places=3)
    assert pages.num_pages == 50
