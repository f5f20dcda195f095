"""What a step costs: interpolation, files, and a measurement on a real model."""

import copy
import itertools
import json
import math
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from tiny_models import tiny_model
from transformers import GPT2Config, GPT2LMHeadModel

import stand
import stand.engine as engine_module
from stand.drafters.costs import known as known_costs
from stand.drafters.costs import step_cost
from stand.drafters.costs.step_cost import CostTable, StepCost, clock_of, measure_cost, synthetic_drafts, table_path
from stand.step import EagerStep

FLAT_THEN_STEEP = StepCost(num_rows=1, length=100, tokens=(1, 64, 128), seconds=(4.0, 4.0, 8.0))


def test_a_flat_stretch_is_free_and_a_steep_one_is_not():
    rises = FLAT_THEN_STEEP.rises(1, 127)
    assert rises.shape == (127,) and not rises[:63].any()
    np.testing.assert_allclose(rises[63], (4 / 64) / 4.0, rtol=1e-5)
    assert np.all(np.diff(rises[63:]) < 0)  # a constant price is a falling share of a dearer step


def test_a_jump_is_shared_out_over_what_it_makes_room_for():
    stairs = StepCost(num_rows=1, length=1, tokens=(1, 8, 9, 16), seconds=(4.0, 4.0, 7.0, 7.0))
    rises = stairs.rises(1, 15)
    seconds = 4.0 * np.cumprod(1.0 + rises)
    np.testing.assert_allclose(seconds[-1], 7.0, rtol=1e-5)
    np.testing.assert_allclose(np.diff(seconds[7:]), 3.0 / 8, rtol=1e-4)  # one slope from 8 to 16
    assert not rises[:7].any()


def test_tables_are_saved_and_loaded(tmp_path):
    longer = StepCost(num_rows=1, length=10_000, tokens=(1, 64), seconds=(5.0, 6.0))
    table = CostTable((FLAT_THEN_STEEP, longer))
    path = table_path(tmp_path / "new", model="Qwen/Qwen3-8B", device="NVIDIA H200", dtype="torch.bfloat16")
    table.save(path)
    assert path.name == "qwen-qwen3-8b--nvidia-h200--torch.bfloat16.json" and CostTable.load(path) == table
    assert table.at(5) is table.at(900) is FLAT_THEN_STEEP and table.at(1100) is longer
    many = StepCost(num_rows=16, length=2_000, tokens=(16, 64), seconds=(6.0, 7.0))
    by_rows = CostTable((FLAT_THEN_STEEP, longer, many))  # rows before lengths
    assert by_rows.at(10_000, num_rows=3) is longer and by_rows.at(10_000, num_rows=5) is many
    for text in ('{"format": "stand cost table 1", "costs": 3}', '{"format": "other"}', "[]", "{}"):
        path.write_text(text)
        with pytest.raises(ValueError, match="measure it again"):
            CostTable.load(path)
    with pytest.raises(ValueError, match="at least one"):
        CostTable(())


@pytest.mark.parametrize(
    "wrong",
    [{"seconds": (1.0, math.inf)}, {"seconds": (1, 10**400)}, {"seconds": (1.0, math.nan)}, {"tokens": (1, 2.5)},
     {"tokens": (1, 10**400)}, {"tokens": (1, math.inf)}, {"num_rows": math.nan}, {"length": math.inf}],
)  # fmt: skip
def test_numbers_that_nothing_can_be_computed_with_are_refused(tmp_path, wrong):
    """Also from a file, which then counts as damaged and is timed anew."""
    fields = {"num_rows": 1, "length": 100, "tokens": (1, 64), "seconds": (4.0, 5.0)} | wrong
    with pytest.raises(ValueError, match="step cost"):
        StepCost(**fields)
    path = tmp_path / "table.json"
    path.write_text(json.dumps({"format": "stand cost table 1", "costs": [fields]}))
    with pytest.raises(ValueError, match="measure it again"):
        CostTable.load(path)
    assert known_costs._read(path) is None


def test_who_is_killed_while_it_saves_leaves_the_old_table(tmp_path, monkeypatch):
    path = tmp_path / "table.json"
    CostTable((FLAT_THEN_STEEP,)).save(path)
    write = Path.write_text

    def killed(self, text, **settings):
        write(self, text[: len(text) // 2], **settings)
        raise KeyboardInterrupt

    monkeypatch.setattr(Path, "write_text", killed)
    with pytest.raises(KeyboardInterrupt):
        CostTable((FLAT_THEN_STEEP, FLAT_THEN_STEEP)).save(path)
    assert CostTable.load(path).costs == (FLAT_THEN_STEEP,)


def test_a_damaged_table_of_a_gpu_is_none_and_so_is_one_that_may_not_be_read(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H200")
    model = SimpleNamespace(device=torch.device("cuda"), dtype=torch.bfloat16)
    monkeypatch.setattr(known_costs, "size_name", lambda model: "small")
    path = table_path(tmp_path, model="small", device="NVIDIA H200", dtype="torch.bfloat16")
    table = CostTable((FLAT_THEN_STEEP,))
    assert known_costs.saved_costs(model, tmp_path) is None and not caplog.records
    table.save(path)
    assert known_costs.saved_costs(model, tmp_path) == table
    path.write_text(path.read_text()[:20])
    assert known_costs.saved_costs(model, tmp_path) is None and "measure it again" in caplog.text

    def refuse(self, **_):
        raise PermissionError(13, "Permission denied")  # another user's home

    monkeypatch.setattr(Path, "stat", refuse)
    monkeypatch.setattr(Path, "exists", lambda path: bool(path.stat()))  # Python 3.14 says no
    assert known_costs.saved_costs(model, tmp_path) is None and "Permission denied" in caplog.text


def test_a_step_that_fills_its_size_pays_for_the_next_one_with_its_first_node():
    cost = StepCost(1, 0, (1, 4, 16), (1.0, 1.0, 4.0))
    rises = {rows: cost.rises(rows, 6, (1, 4, 16)) for rows in (2, 4)}
    assert rises[4][0] > 0 and not rises[4][1:].any()
    assert rises[2][2] == rises[4][0] and not np.delete(rises[2], 2).any()


def test_the_knee_is_the_largest_cheap_size():
    assert FLAT_THEN_STEEP.knee(1.0) == 64 and FLAT_THEN_STEEP.knee(2.0) == 128


def test_noise_below_a_smaller_step_is_raised_to_it():
    cost = StepCost.measured([8, 1, 4], [5.0, 3.0, 2.0], num_rows=1, length=10)
    assert cost.tokens == (1, 4, 8) and cost.seconds == (3.0, 3.0, 5.0)
    assert cost.most_tokens == 8


@pytest.mark.parametrize(
    "tokens, seconds", [((1,), (1.0,)), ((2, 1), (1.0, 1.0)), ((1, 2), (2.0, 1.0)), ((1, 2), (0.0, 1.0))]
)
def test_what_is_no_cost_is_refused(tokens, seconds):
    with pytest.raises(ValueError, match="two or more sizes"):
        StepCost(1, 1, tokens, seconds)


def test_numbers_that_no_step_has_are_refused():
    with pytest.raises(ValueError, match="of one row or more behind 0 tokens or more .* got 0, 1 and 1"):
        StepCost(0, 1, (1, 2), (1.0, 2.0))
    for length, tokens in ((-1, (1, 2)), (0, (0, 2))):
        with pytest.raises(ValueError, match=f"of 1 token or more, got 1, {length} and {tokens[0]}"):
            StepCost(1, length, tokens, (1.0, 2.0))
    assert StepCost(1, 0, (1, 2), (1.0, 2.0)).length == 0
    with pytest.raises(ValueError, match=r"got one by itself; write CostTable\(\(cost,\)\)"):
        stand.CostTable(StepCost(1, 1, (1, 2), (1.0, 2.0)))


@pytest.mark.parametrize("wrong", [None, 5, {}, [None], (5,), (cost for cost in ())])
def test_what_holds_no_costs_is_no_table(wrong):
    with pytest.raises(ValueError, match="a cost table .*, got .*;"):
        CostTable(wrong)


@pytest.mark.parametrize(
    "wrong", [{"tokens": None}, {"seconds": 3}, {"seconds": ("a", "b")}, {"num_rows": True}, {"tokens": (-5, 2)}]
)
def test_fields_of_other_kinds_are_refused(wrong):
    with pytest.raises(ValueError, match="step cost .*, got .*;"):
        StepCost(**({"num_rows": 1, "length": 9, "tokens": (1, 2), "seconds": (1.0, 2.0)} | wrong))


@pytest.mark.parametrize("kind", [list, np.array])
def test_sizes_and_times_may_be_lists_and_arrays(kind, tmp_path):
    """Drafts are made by them, too: the first call ended in an unhashable list."""
    cost = StepCost(1, 9, kind([1, 4]), kind([1.0, 1.1]))
    assert cost == StepCost(1, 9, (1, 4), (1.0, 1.1))
    CostTable([cost]).save(tmp_path / "table.json")
    assert CostTable.load(tmp_path / "table.json") == CostTable((cost,))
    drafter = stand.BlendedDrafter(costs=CostTable([cost]))
    output = stand.wrap(tiny_model("llama"), drafter=drafter).generate(input_ids=[5, 9, 5], max_new_tokens=3)
    assert len(output.token_ids[0]) == 3


def test_a_brief_measurement_has_two_sizes_where_there_are_two():
    cost = measure_cost(lambda batch: None, num_rows=4, length=4, most_tokens=5, seconds=0.1, clock=iter_clock())
    assert cost.tokens == (4, 5)


def test_a_brief_measurement_without_room_for_two_sizes_is_refused():
    """Rather than to time the one for ever."""
    clock = itertools.islice(itertools.count(), 100)
    with pytest.raises(ValueError, match="a step cost needs two or more sizes"):
        measure_cost(
            lambda batch: None, num_rows=4, length=4, most_tokens=4, seconds=0.1, clock=lambda: float(next(clock))
        )


def iter_clock():
    """It goes on by a second with every look."""
    numbers = itertools.count()
    return lambda: float(next(numbers))


def test_synthetic_drafts_are_drafts_of_the_asked_size():
    batch = synthetic_drafts(23, 3)
    batch.check()
    assert batch.num_nodes == 23 and len(batch) == 3


def test_steps_of_a_real_model_are_timed(monkeypatch):
    model, lengths, forward = tiny_model("llama"), set(), EagerStep.forward

    def watched(step, batch, live, noise):
        lengths.add(tuple(live.lengths.tolist()))
        forward(step, batch, live, noise)

    monkeypatch.setattr(EagerStep, "forward", watched)
    before = [parameter.clone() for parameter in model.parameters()]
    cost = stand.wrap(model).measure_cost(num_rows=2, length=20, most_tokens=40)
    assert cost.tokens == (2, 3, 4, 6, 8, 12, 16, 24, 32, 40) and min(cost.seconds) > 0
    assert lengths == {(20, 20)}
    assert all(torch.equal(left, right) for left, right in zip(before, model.parameters(), strict=True))
    assert model.config._attn_implementation != "stand_tree"


@pytest.mark.parametrize(
    ("asked", "rule"),
    [
        ({"num_rows": 4, "most_tokens": 4}, "most_tokens must be above num_rows, got 4 and 4"),
        ({"num_rows": True}, "num_rows must be an integer >= 1, got True"),
        ({"num_rows": 1.5}, "num_rows must be an integer >= 1, got 1.5"),
        ({"length": "a"}, "length must be an integer >= 1, got 'a'"),
        ({"length": 0}, "length must be an integer >= 1, got 0"),
        ({"most_tokens": 3.5}, "most_tokens must be an integer >= 1, got 3.5"),
        ({"seconds": math.nan}, "seconds must be a number >= 0, got nan; leave it out"),
        ({"seconds": math.inf}, "seconds must be a number >= 0, got inf"),
        ({"seconds": "1"}, "seconds must be a number >= 0, got '1'"),
    ],
)
def test_steps_that_cannot_be_timed_are_refused(asked, rule):
    with pytest.raises(ValueError, match=rule):
        stand.wrap(tiny_model("llama")).measure_cost(**asked)


def test_sizes_may_be_numbers_of_numpy():
    sizes = {"num_rows": np.int64(2), "length": np.int64(4), "most_tokens": np.int64(4)}
    cost = stand.wrap(tiny_model("llama")).measure_cost(**sizes, seconds=np.float32(0.01))
    assert (cost.num_rows, cost.length, cost.tokens[0]) == (2, 4, 2)


@pytest.mark.parametrize(("num_rows", "most_tokens"), [(1, 256), (255, 256), (256, 257)])
def test_steps_of_many_rows_are_timed_on_a_gpu(monkeypatch, num_rows, most_tokens):
    """A call of more than 128 rows of a mixture asks for 256."""
    asked = stand.wrap(tiny_model("llama"))
    monkeypatch.setattr("stand.scheduling.sample_steps.input_device", lambda model: torch.device("cuda"))
    monkeypatch.setattr("stand.engine.measure_cost", lambda run_step, **sizes: sizes["most_tokens"])
    assert asked.measure_cost(num_rows=num_rows, length=2) == most_tokens


def test_a_short_context_leaves_room_for_the_timed_drafts():
    """Learned positions end with the context."""
    torch.manual_seed(0)
    config = GPT2Config(vocab_size=61, n_positions=24, n_embd=32, n_layer=1, n_head=2)
    engine = stand.wrap(GPT2LMHeadModel(config).eval(), drafter=stand.BlendedDrafter(budget=4))
    for most_tokens, length in ((2, 22), (31, 19), (32, 18)):
        assert engine.measure_cost(most_tokens=most_tokens).length == length
    assert engine.measure_cost(length=7).length == 7


def test_settings_that_a_call_replaces_do_not_matter_to_timings():
    model = copy.deepcopy(tiny_model("llama"))
    model.generation_config.num_beams = 4
    engine = stand.wrap(model)
    assert engine.measure_cost(most_tokens=2, length=4).tokens == (1, 2)


@pytest.mark.parametrize("length", [0, 1, 20, 21, 22, 30, 500])
def test_the_nearest_length_is_by_ratio(length):
    lengths = (1, 10, 45)
    table = CostTable(tuple(StepCost(1, at, tokens=(1, 2), seconds=(1.0, 1.0)) for at in lengths))
    expected = min(lengths, key=lambda at: max((at + 1) / (length + 1), (length + 1) / (at + 1)))
    assert table.at(length).length == expected


@pytest.mark.parametrize(("is_elsewhere", "clock"), [(False, "thread_time"), (True, "perf_counter")])
def test_a_thread_that_computes_steps_itself_counts_its_own_time(monkeypatch, is_elsewhere, clock):
    seen = []
    monkeypatch.setattr(step_cost, "parallel_region", lambda: 1)

    def measured(run_step, *, clock, warms, **sizes):
        (told,) = clock.args  # as ranks agree on it
        seen.append((told.__name__, warms))
        return StepCost(1, 4, tokens=(1, 2), seconds=(1.0, 1.0))

    monkeypatch.setattr(engine_module, "measure_cost", measured)
    engine = stand.wrap(tiny_model("qwen2"))
    assert not engine.backend.computes_elsewhere
    monkeypatch.setattr(type(engine.backend), "computes_elsewhere", is_elsewhere)
    engine.measure_cost(most_tokens=2, length=4)
    assert seen == [(clock, is_elsewhere)]


def test_processor_time_is_not_counted_where_a_thread_may_sleep_while_others_compute(monkeypatch):
    """As on macOS, where torch has no GNU OpenMP and hands its products to Apple's library."""
    monkeypatch.setattr(step_cost, "parallel_region", lambda: 0)
    assert clock_of(False) is time.perf_counter


@pytest.mark.parametrize("tick", [0.01, math.inf])
def test_processor_time_that_is_told_too_coarsely_is_not_counted(monkeypatch, tick):
    """As in gVisor, where a small model's steps would take no time at all, or of a clock that stands."""
    fine = time.thread_time
    monkeypatch.setattr(step_cost, "parallel_region", lambda: 1)
    monkeypatch.setattr(time, "thread_time", lambda: fine() // tick * tick if tick < math.inf else 0.0)
    assert clock_of(False) is time.perf_counter
    cost = stand.wrap(tiny_model("qwen2")).measure_cost(num_rows=1, length=4, most_tokens=4, seconds=0.01)
    assert cost.seconds[0] > 0


def test_a_clock_that_stands_for_a_moment_is_waited_for(monkeypatch):
    """Its tick is as long as it is; only one that stands for ten of the longest has none."""
    looks = iter([1.0, 1.0, 1.25])
    with monkeypatch.context() as patch:
        patch.setattr(time, "perf_counter", lambda: 5.0)
        assert step_cost._tick(lambda: next(looks)) == 0.25


@pytest.mark.parametrize(
    ("seconds", "expected"),
    [
        (0.5, [1, 1, 2, 4, 8, 1, 2, 3]),  # sixteen of the smallest in any case; what is next may take twice as long
        (17.0, [1, 1, 2, 4, 8, 1, 2, 3, 4]),
        (22.0, [1, 1, 2, 4, 8, 16, 16]),  # a size that is dear is tried again where that fills the time
        (29.0, [1, 1, 2, 4, 8, 16, 16, 1, 2, 3, 4]),  # once more, and no further: 32 may cost more than eight of 1
    ],
)
def test_a_brief_measurement_goes_as_far_as_pays(seconds, expected):
    """Sizes double; what is left goes to those that cost up to three of the smallest, and to those between them."""
    clock = SimpleNamespace(now=0.0, sizes=[])
    steps = {1: 1.0, 2: 1.0, 3: 2.0, 4: 3.0, 8: 4.0, 16: 6.0}

    def run_step(batch):
        clock.sizes.append(batch.num_nodes)
        clock.now += steps.get(batch.num_nodes, math.inf)

    cost = measure_cost(run_step, num_rows=1, length=4, most_tokens=64, seconds=seconds, clock=lambda: clock.now)
    assert clock.sizes == expected and cost.tokens == tuple(sorted(set(expected)))
    assert cost.seconds == tuple(steps[size] for size in cost.tokens)


def test_rises_are_of_the_curve_below_all_timings():
    rng = np.random.default_rng(4)
    for _ in range(20):
        sizes = np.sort(rng.choice(np.arange(1, 30), 6, replace=False))
        seconds = np.sort(rng.uniform(1.0, 3.0, 6))
        cost = StepCost(1, 4, tuple(sizes.tolist()), tuple(seconds.tolist()))
        first, last = int(sizes[0]), int(sizes[-1])
        below = [
            min(
                np.interp(at, sizes[[left, right]], seconds[[left, right]])
                for left in range(6)
                for right in range(left, 6)
                if sizes[left] <= at <= sizes[right]
            )
            for at in range(first, last + 1)
        ]
        expected = np.diff(below) / below[:-1]
        np.testing.assert_allclose(cost.rises(first, last - first), expected, rtol=1e-4, atol=1e-7)


def test_the_knee_is_measured_from_the_smallest_step():
    assert StepCost(1, 4, tokens=(1, 2, 4, 8), seconds=(1.0, 1.5, 2.0, 2.9)).knee(2.0) == 4


def test_sizes_that_repeat_are_refused():
    with pytest.raises(ValueError, match="ascending"):
        StepCost(1, 4, tokens=(2, 2), seconds=(1.0, 1.0))


def test_synthetic_drafts_are_sound():
    batch = synthetic_drafts(9, 2)
    batch.check()
    leaves = np.setdiff1d(np.arange(batch.num_nodes), batch.parents + np.repeat(batch.offsets[:-1], batch.sizes))
    assert (batch.support_ids[leaves] == -1).all()


def test_synthetic_tokens_come_from_all_over_the_vocabulary():
    """Two tokens alone would go to the same few experts of a mixture."""
    for vocab_size in (97, 7919, 151_936):
        batch = synthetic_drafts(64, 4, vocab_size)
        batch.check()
        assert len(set(batch.token_ids.tolist())) == 64 and batch.token_ids.max() < vocab_size
    assert set(synthetic_drafts(64, 4).token_ids.tolist()) == {0, 1}


def test_the_first_step_of_a_size_may_be_left_out():
    """It records a graph, which takes a hundred times as long as a step."""
    clock, seen = SimpleNamespace(now=0.0), []

    def run_step(batch):
        clock.now += 1.0 if batch.num_nodes in seen else 100.0
        seen.append(batch.num_nodes)

    sizes = {"num_rows": 2, "length": 4, "most_tokens": 64, "clock": lambda: clock.now}
    cost = measure_cost(run_step, **sizes, warms=True, seconds=20.0)
    assert set(cost.seconds) == {1.0} and cost.tokens[-1] == 64 and len(seen) <= 20 + len(cost.tokens)
    seen.clear()
    assert measure_cost(run_step, **sizes, seconds=20.0).tokens[-1] < 64  # control
