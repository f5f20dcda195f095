"""Costs that are timed on first use: filed for seeded calls, followed for the others, and never in a test's way."""

import copy
import logging
import math
import os
import platform
import tempfile
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from draft_requests import draft_request
from tiny_models import CONFIGS, tiny_model
from transformers import AutoModelForCausalLM
from transformers.models.dbrx.configuration_dbrx import DbrxFFNConfig

import stand
from stand.drafters import blended
from stand.drafters.costs import assumed as assumed_costs
from stand.drafters.costs import known as known_costs
from stand.drafters.costs.assumed import AssumedCosts
from stand.drafters.costs.followed import STEPS_BETWEEN, FollowedCost
from stand.drafters.costs.known import KnownCosts, processor_name
from stand.drafters.costs.step_cost import StepCost, StepTimer, measure_cost
from stand.forward.model import is_mixture
from stand.measured_files import keep_first, measured_folder
from stand.trees import BlendedLookup

CHEAP = StepCost(4, 32, tokens=(4, 8, 64), seconds=(1.0, 1.0, 1.1))
DEAR = StepCost(4, 32, tokens=(4, 8, 64), seconds=(1.0, 2.0, 16.0))
DEARER = StepCost(4, 32, tokens=(4, 8, 64), seconds=(1.0, 1.3, 2.4))  # than CHEAP, as machines are in a busy hour
PROMPT = {"input_ids": [[3, 4, 5, 3, 4]], "num_return_sequences": 4, "max_new_tokens": 24}


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Where costs are filed, as in a process that has timed nothing yet."""
    monkeypatch.setenv("STAND_COSTS", str(tmp_path / "costs"))
    monkeypatch.setattr(known_costs, "_IN_MEMORY", {})
    return tmp_path / "costs"


def new_engine(monkeypatch, cost=None):
    """An engine whose measurement gives `cost`, or must not be made, and whose own steps all seem to take as long."""
    asked = []

    def measure(self, *, num_rows, length, seconds):
        assert cost is not None, "nothing was to be timed"
        asked.append(num_rows)
        return cost

    monkeypatch.setattr(stand.Engine, "measure_cost", measure)
    monkeypatch.setattr(stand.Stats, "scoring_seconds", 0.0)
    return stand.wrap(tiny_model("qwen2")), asked


def test_steps_are_timed_once_and_said_once(folder, monkeypatch, caplog):
    with caplog.at_level(logging.WARNING, logger="stand"):
        engine, asked = new_engine(monkeypatch, CHEAP)
        assert asked == [] and not folder.exists()  # a wrap alone costs nothing
        engine.generate(**PROMPT)
        engine.generate(**{**PROMPT, "num_return_sequences": 3})  # the same power of two
        assert asked == [4, 1]  # rows end, and then there are fewer
        names = sorted(path.name for path in folder.iterdir())
        assert ["1-rows" in names[0], "4-rows" in names[1], len(names)] == [True, True, 2]
        monkeypatch.setattr(known_costs, "_IN_MEMORY", {})  # another process
        new_engine(monkeypatch)[0].generate(**PROMPT)
    assert [record.message.startswith("timed steps of 4 rows") for record in caplog.records] == [True] * 2
    KnownCosts(tiny_model("llama"), folder).prepare(1, StepTimer(lambda **_: replace(CHEAP, num_rows=1)))
    assert caplog.messages[2].startswith("timed steps of 1 row, so that")


@pytest.mark.parametrize("settings", [{"budget": 8}, {"costs": stand.CostTable((CHEAP,))}])
def test_what_is_given_is_not_timed(folder, monkeypatch, settings):
    new_engine(monkeypatch)
    engine = stand.wrap(tiny_model("qwen2"), drafter=stand.BlendedDrafter(**settings))
    engine.generate(**PROMPT)
    assert not folder.exists()


def test_nothing_is_timed_where_the_environment_says_so(monkeypatch, tmp_path):
    monkeypatch.setenv("STAND_COSTS", "off")
    engine, _ = new_engine(monkeypatch)
    engine.generate(**PROMPT)
    assert engine.drafter.budget == 32


def test_a_run_goes_on_after_its_drafter_was_wrapped_again(folder, monkeypatch):
    engine, _ = new_engine(monkeypatch, CHEAP)
    run = engine.run([[3, 4, 5]], max_new_tokens=4, temperature=1.0, stop_token_ids=[])
    stand.wrap(engine.model, drafter=engine.drafter, verifier="match")
    assert [len(trajectory.token_ids) for trajectory in run] == [4]


def test_a_seeded_run_goes_on_after_a_call_whose_steps_run_another_way(folder, monkeypatch):
    """Of fewer rows: an engine with the same drafter that fuses nothing, or a GPU's whose captured step has failed."""
    engine, _ = new_engine(monkeypatch, CHEAP)
    other = stand.wrap(engine.model, drafter=engine.drafter, fuse=False)
    requests = [stand.Request([3, 4, 5], max_new_tokens=limit) for limit in (2, 40, 40, 40)]
    run = engine.run(requests, stop_token_ids=[], temperature=1.0, seed=3)
    assert len(next(run).token_ids) == 2
    other.generate(input_ids=[[3, 4]], max_new_tokens=2)
    assert [len(trajectory.token_ids) for trajectory in run] == [40] * 3


def test_plain_decoding_is_not_timed(folder, monkeypatch):
    engine, asked = new_engine(monkeypatch, CHEAP)
    engine.generate(**PROMPT, draft=False)
    assert asked == [] and not folder.exists()
    engine.generate(**PROMPT)  # what drafts is timed
    assert asked and folder.exists()


def test_drafts_are_made_where_they_pay_and_only_there(folder, monkeypatch):
    counts = {}
    for cost in (CHEAP, DEAR):
        monkeypatch.setattr(known_costs, "_IN_MEMORY", {})
        for path in folder.glob("*"):
            path.unlink()
        output = new_engine(monkeypatch, cost)[0].generate(**PROMPT, seed=5)
        counts[cost] = output.stats.num_draft_tokens / output.stats.num_forwards
    assert counts[CHEAP] > 10 and counts[DEAR] < 1


def test_a_seeded_call_repeats_whatever_the_steps_took(folder, monkeypatch):
    """In a fresh engine, under another load, as long as the file stands; the control is a call without a seed."""

    def draft_counts(seconds, **settings):
        monkeypatch.setattr(known_costs, "_IN_MEMORY", {})
        engine, _ = new_engine(monkeypatch, CHEAP)
        for _ in range(4):
            engine.generate(**PROMPT, seed=3)
        live = draft_request([np.arange(3, dtype=np.int32)] * 4)
        for size in (4, 64) * 300:  # what was learned is the same in both; what was timed is not
            engine.drafter.record_time(live, size, seconds(size))
        output = engine.generate(**PROMPT, **settings)
        return output.stats.num_draft_tokens / output.stats.num_forwards, output.token_ids

    def slow(size):
        return 1.0 if size <= 4 else 16.0

    flat = draft_counts(lambda size: 1.0, seed=7)
    assert draft_counts(slow, seed=7) == flat
    monkeypatch.setattr(stand.engine, "checked_seed", lambda seed: 7 if seed is None else seed)
    assert draft_counts(slow)[0] < 0.5 * flat[0]  # the same seed, drawn


def test_a_folder_that_cannot_be_written_serves_the_process(folder, monkeypatch, caplog):
    folder.write_text("in the way")
    with caplog.at_level(logging.WARNING, logger="stand"):
        for _ in range(2):
            engine, asked = new_engine(monkeypatch, CHEAP)
            engine.generate(**PROMPT)
    assert asked == [] and "for this process only" in caplog.text  # the second engine found the first one's


def test_a_damaged_file_is_replaced_and_another_process_goes_first(folder, monkeypatch):
    known = KnownCosts(tiny_model("qwen2"), folder)
    path = known.path(4)
    folder.mkdir()
    path.write_text("{}")
    known.prepare(4, StepTimer(lambda **_: CHEAP))
    assert stand.CostTable.load(path).costs == (CHEAP,)
    monkeypatch.setattr(known_costs, "_IN_MEMORY", {})
    path.unlink()

    def beaten(**_):
        stand.CostTable((DEAR,)).save(path)
        return CHEAP

    other = KnownCosts(tiny_model("qwen2"), folder)
    other.prepare(4, StepTimer(beaten))
    assert other.seeded_cost(4, 4) == DEAR and stand.CostTable.load(path).costs == (DEAR,)


def test_of_two_that_file_at_once_the_first_is_kept(tmp_path, monkeypatch):
    """Threads of a process, or containers, whose processes have the same number."""
    path, link = tmp_path / "costs", os.link

    def keep(cost):
        keep_first(path, stand.CostTable((cost,)).save, is_sound=Path.exists)

    def overtaken(*names):
        monkeypatch.setattr(os, "link", link)
        keep(DEAR)
        link(*names)

    monkeypatch.setattr(os, "link", overtaken)
    keep(CHEAP)
    assert stand.CostTable.load(path).costs == (DEAR,) and list(tmp_path.iterdir()) == [path]


def test_a_file_system_without_hard_links_keeps_files_too(folder, monkeypatch):
    """FAT, drives of networks and of the cloud. The next process finds the file."""

    def refuse(*_):
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "link", refuse)
    for cost in (CHEAP, DEAR):
        monkeypatch.setattr(known_costs, "_IN_MEMORY", {})
        known = KnownCosts(tiny_model("qwen2"), folder)
        known.prepare(1, StepTimer(lambda cost=cost, **_: cost))
        assert known.seeded_cost(1, 1) == CHEAP
    assert list(folder.iterdir()) == [known.path(1)]


def test_without_a_folder_the_threads_of_a_process_share_the_first_costs(folder):
    folder.write_text("in the way")
    first, second = (KnownCosts(tiny_model("qwen2"), folder) for _ in range(2))

    def overtaken(**_):
        first.prepare(1, StepTimer(lambda **_: DEAR))
        return CHEAP

    second.prepare(1, StepTimer(overtaken))
    assert first.seeded_cost(1, 1) == second.seeded_cost(1, 1) == DEAR


def test_a_full_disk_is_left_as_it_was(tmp_path, monkeypatch):
    def fill(self, text, **_):
        self.write_bytes(text[:9].encode())
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_text", fill)
    with pytest.raises(OSError, match="No space"):
        keep_first(tmp_path / "costs", stand.CostTable((CHEAP,)).save, is_sound=Path.exists)
    assert not list(tmp_path.iterdir())


def test_another_build_of_torch_is_timed_anew(folder, monkeypatch):
    paths = set()
    for version in ("2.13.0+cpu", "2.14.0+cpu"):
        monkeypatch.setattr(torch, "__version__", version)
        paths.add(KnownCosts(tiny_model("qwen2"), folder).path(4))
    assert len(paths) == 2


def test_numbers_of_rows_share_the_next_power_of_two(folder):
    known, costs = KnownCosts(tiny_model("qwen2"), folder), {}

    def measure(*, num_rows, **_):
        costs[num_rows] = StepCost(num_rows, 32, (num_rows, 2 * num_rows), (1.0, 1.0))
        return costs[num_rows]

    for num_rows in (1, 3, 30, 1000):
        known.prepare(num_rows, StepTimer(measure))
    assert list(costs) == [1, 4, 32, 16, 256, 64]
    expected = {1: 1, 2: 4, 4: 4, 5: 16, 17: 32, 33: 64, 65: 256, 1000: 256}
    assert {rows: known.followed_cost(rows).num_rows for rows in expected} == expected


def test_a_seeded_call_has_its_own_tables_whatever_else_was_prepared(folder):
    """Rows that go on alone have the same one in an engine that made calls of other sizes."""
    known = KnownCosts(tiny_model("qwen2"), folder)

    def measure(*, num_rows, **_):
        return StepCost(num_rows, 32, (num_rows, 1000 - num_rows), (1.0, 1.0))

    known.prepare(8, StepTimer(measure))
    own = [known.seeded_cost(rows, 8).num_rows for rows in range(1, 9)]
    assert own == [1, 4, 4, 4, 8, 8, 8, 8]
    known.prepare(2, StepTimer(measure))
    assert [known.seeded_cost(rows, 8).num_rows for rows in range(1, 9)] == own
    assert known.followed_cost(2).num_rows == 2 and known.seeded_cost(2, 0).num_rows == 2
    for rows in range(1, 9):  # memory is kept free for whichever of them is asked
        costs = known.seeded_cost(rows, 8), known.followed_cost(rows)
        assert known.most_tokens(rows) >= max(cost.most_tokens for cost in costs)
    known.prepare(1000, StepTimer(measure))
    assert known.most_tokens(1) == 999  # and not for those of many rows


def test_room_is_for_the_tables_that_a_step_may_have_and_for_no_others(folder):
    """Of two rows that of four, too, in a call of eight."""
    known = KnownCosts(tiny_model("qwen2"), folder)

    def measure(*, num_rows, **_):
        return StepCost(num_rows, 32, (num_rows, 10 * num_rows), (1.0, 1.0))

    for num_rows in (8, 2):
        known.prepare(num_rows, StepTimer(measure))
    assert [known.most_tokens(rows) for rows in range(1, 9)] == [10, 40, 40, 40, 80, 80, 80, 80]


def test_a_seeded_call_that_teaches_nothing_repeats_itself_after_calls_of_other_sizes(folder, monkeypatch):
    engine, _ = new_engine(monkeypatch)
    by_rows = {8: CHEAP, 4: DEAR, 2: DEARER, 1: CHEAP}
    monkeypatch.setattr(stand.Engine, "measure_cost", lambda self, *, num_rows, **_: by_rows[num_rows])
    ends = {"max_new_tokens": 40, "stop_token_ids": [7, 8, 9]}
    prompt = {**PROMPT, **ends, "num_return_sequences": 8, "temperature": 1.0}

    def call():
        output = engine.generate(**prompt, seed=3, learn=False)
        return output.token_ids, output.stats.num_draft_tokens

    engine.generate(**prompt, seed=1)
    before = call()
    assert len({len(tokens) for tokens in before[0]}) > 2  # rows end one by one
    for num_rows in (4, 2, 1):
        engine.generate(**{**prompt, "num_return_sequences": num_rows}, learn=False)
    assert call() == before


def test_models_of_other_sizes_have_other_files(folder):
    """Also where layers, hidden size and vocabulary are the same; of one type and of quantised ones."""
    configs = [copy.deepcopy(CONFIGS["qwen2"]) for _ in range(2)]
    configs[1].intermediate_size *= 2
    models = [AutoModelForCausalLM.from_config(config) for config in configs]
    assert len({KnownCosts(model, folder).path(1) for model in models}) == 2


def test_files_are_in_the_users_cache(monkeypatch, tmp_path):
    monkeypatch.setattr(Path, "home", lambda: tmp_path)
    monkeypatch.delenv("STAND_COSTS", raising=False)
    assert measured_folder() == tmp_path / ".cache" / "stand"
    monkeypatch.setenv("STAND_COSTS", str(tmp_path / "other"))
    assert measured_folder() == tmp_path / "other"


def test_a_user_without_a_home_is_served(monkeypatch):
    """As in a container with a user of any number."""

    def no_home():
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", no_home)
    monkeypatch.delenv("STAND_COSTS", raising=False)
    assert measured_folder().parent == Path(tempfile.gettempdir())
    monkeypatch.setenv("STAND_COSTS", "off")
    assert measured_folder() is None


def follow(cost, steps):
    followed = FollowedCost(cost)
    for tokens, seconds in steps:
        followed.record(tokens, seconds)
    return followed.cost


def test_a_load_that_slows_everything_changes_no_ratio():
    steps = [(size, 10.0 * seconds) for size, seconds in zip(DEAR.tokens, DEAR.seconds, strict=True)] * 200
    np.testing.assert_allclose(follow(DEAR, steps).seconds, DEAR.seconds)
    alone = [(8, 2.0)] * 50 + [(8, 20.0)] * 400  # it begins while one size runs: nothing is known of the others
    np.testing.assert_allclose(follow(DEAR, alone).seconds, DEAR.seconds)
    mixed = steps[:90] + [(size, seconds / 10) for size, seconds in steps[:90]]
    np.testing.assert_allclose(follow(DEAR, mixed).rises(4, 60), DEAR.rises(4, 60), atol=0.01)


def test_a_change_of_shape_is_followed():
    found = follow(CHEAP, [(4, 1.0), (64, 4.0)] * 300)
    assert found.seconds[2] / found.seconds[0] == pytest.approx(4.0, rel=0.1)
    assert follow(CHEAP, [(64, 4.0)] * (STEPS_BETWEEN - 1)) is CHEAP  # drafts see it in turns
    busy = follow(CHEAP, [(4, 1.0)] * (STEPS_BETWEEN - 1) + [(64, 1000.0)])
    assert busy.seconds[2] / busy.seconds[0] < 1.2  # one busy moment
    between = follow(DEAR, [(8, 2.0), (36, math.sqrt(2 * 16))] * 50)  # as expected
    np.testing.assert_allclose(between.seconds, DEAR.seconds)


def noisy_steps(cost, num_steps, *, noise, seed=0):
    """Steps of 6 to 40 tokens that take what `cost` says, but for noise and a busy moment in thirty steps."""
    rng = np.random.default_rng(seed)
    sizes = rng.integers(6, 41, num_steps)
    places = np.arange(len(cost.tokens))
    logs = np.interp(np.interp(sizes, cost.tokens, places), places, np.log(cost.seconds))
    busy = np.where(rng.random(num_steps) < 1 / 30, rng.exponential(1.0, num_steps), 0.0)
    return list(zip(sizes.tolist(), np.exp(logs + rng.normal(0.0, noise, num_steps) + busy).tolist(), strict=True))


def error(followed, cost):
    """Of the largest ratio, in logs."""
    return abs(math.log(followed.seconds[-1] / followed.seconds[0] / cost.seconds[-1] * cost.seconds[0]))


@pytest.mark.parametrize(("noise", "num_steps", "most"), [(0.01, 64, 0.4), (0.1, 192, 0.4)])
def test_noise_decides_how_fast_a_step_is_believed(noise, num_steps, most):
    assert error(CHEAP, DEARER) > 0.7
    for seed in range(5):
        assert error(follow(CHEAP, noisy_steps(DEARER, num_steps, noise=noise, seed=seed)), DEARER) < most
        assert error(follow(DEARER, noisy_steps(DEARER, 1600, noise=noise, seed=seed)), DEARER) < 0.15  # and stays


def test_a_change_that_comes_late_is_followed():
    for seed in range(5):
        before = noisy_steps(CHEAP, 4800, noise=0.05, seed=seed)
        assert error(follow(CHEAP, before), CHEAP) < 0.1
        assert error(follow(CHEAP, before + noisy_steps(DEARER, 800, noise=0.05, seed=seed)), DEARER) < 0.3


def test_one_step_of_a_size_that_was_long_unseen_moves_little():
    times = np.exp(np.random.default_rng(0).normal(0.0, 0.3, 20_000)).tolist()
    found = follow(CHEAP, [(8, seconds) for seconds in times] + [(64, 1.1 * math.e)] * STEPS_BETWEEN)
    assert 0.0 < error(found, CHEAP) < 0.1


def test_steps_of_a_millisecond_are_followed_like_those_of_a_second():
    short = follow(CHEAP, [(4, 0.001), (64, 0.004)] * 300)
    np.testing.assert_allclose(short.rises(4, 60), follow(CHEAP, [(4, 1.0), (64, 4.0)] * 300).rises(4, 60))
    unmeasurable = follow(CHEAP, [(4, 0.0), (64, 0.0)] * 300)  # shorter than the clock's tick
    np.testing.assert_allclose(unmeasurable.rises(4, 60), CHEAP.rises(4, 60), atol=0.2)


def test_machines_of_one_name_with_other_instruction_sets_have_files_of_their_own(tmp_path, monkeypatch):
    known, paths = KnownCosts(tiny_model("qwen2"), tmp_path), set()
    for instruction_set in ("portable", "avx512", "amx"):
        monkeypatch.setattr(known_costs, "INSTRUCTION_SET", instruction_set)
        paths.add(known.path(4))
    assert len(paths) == 3


def test_a_system_that_says_nothing_of_its_processor_is_named_by_its_machine(monkeypatch):
    def refuse(self, **_):
        raise OSError

    monkeypatch.setattr(Path, "read_text", refuse)
    monkeypatch.setattr(known_costs, "kernel_value", {"machdep.cpu.brand_string": ""}.__getitem__)
    monkeypatch.setattr(platform, "machine", lambda: "some machine")
    monkeypatch.setattr(platform, "processor", lambda: "")
    assert processor_name() == "some machine"
    monkeypatch.setattr(platform, "processor", lambda: "some processor")
    assert processor_name() == "some processor"
    monkeypatch.setattr(known_costs, "kernel_value", {"machdep.cpu.brand_string": "Apple M4 Pro"}.__getitem__)
    assert processor_name() == "Apple M4 Pro"  # the processor of all of Apple's chips is "arm"


class Steps:
    """Steps that take `cost` seconds of a clock of their own."""

    def __init__(self, cost):
        self.now, self.sizes, self._cost = 0.0, [], cost

    def run(self, batch):
        self.sizes.append(batch.num_nodes)
        self.now += self._cost(batch.num_nodes)

    def measure(self, **settings):
        return measure_cost(self.run, length=32, clock=lambda: self.now, **settings)


def test_a_brief_measurement_keeps_to_its_time():
    quick = Steps(lambda size: 0.01 + 0.0001 * size)
    cost = quick.measure(num_rows=4, most_tokens=128, seconds=1.5)
    assert cost.tokens == (4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128) and 1.0 < quick.now < 1.5
    np.testing.assert_allclose(cost.seconds, 0.01 + 0.0001 * np.array(cost.tokens))
    slow = Steps(lambda size: 2.0 + 0.1 * size)  # a large model's: sixteen of its smallest steps, of 2.4 seconds
    cost = slow.measure(num_rows=4, most_tokens=128, seconds=1.5)
    assert cost.tokens == (4, 6, 8, 12, 16, 32, 64) and slow.now <= 16 * 2.4
    steeper = Steps(lambda size: 0.3 * size / 4)
    assert steeper.measure(num_rows=4, most_tokens=128, seconds=1.5).tokens == (4, 8, 16, 32) and steeper.now < 4.81
    steep = Steps(lambda size: 0.001 * size**2)
    assert steep.measure(num_rows=1, most_tokens=32, seconds=9.0).tokens == (1, 2, 4)  # more never pays


def test_the_shortest_run_counts():
    stalls = iter([0.0, 0.0, 0.5, 0.0])  # a busy moment while the second size is timed first
    noisy = Steps(lambda size: 0.01 + next(stalls, 0.0))
    assert noisy.measure(num_rows=1, most_tokens=4, seconds=1.5).seconds == pytest.approx((0.01,) * 4)


def test_foreign_drafters_are_told():
    told = []

    class Telling(stand.BlendedDrafter):
        def prepare(self, num_rows, measure):
            told.append(num_rows)

        def record_time(self, request, num_tokens, seconds):
            assert seconds > 0 and num_tokens >= len(request.histories)
            told.append(num_tokens)

    engine = stand.wrap(tiny_model("qwen2"), drafter=Telling(BlendedLookup(), budget=8))
    output = engine.generate(**PROMPT, seed=1)
    assert told[0] == 4 and len(told) == 1 + output.stats.num_forwards
    assert sum(told[1:]) == output.stats.num_draft_tokens + output.stats.num_steps


def test_requests_are_seeded_unless_said_otherwise():
    assert draft_request([np.array([1], dtype=np.int32)]).is_seeded


def on_a_gpu(monkeypatch) -> None:
    """What drafters ask of a model's place says so."""
    for module in (blended, known_costs, assumed_costs):
        monkeypatch.setattr(module, "input_device", lambda model: torch.device("cuda"))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H100")
    monkeypatch.setattr(assumed_costs, "capability_of", lambda model: (9, 0))


@pytest.mark.parametrize(("family", "untimed"), [("qwen3_moe", 8), ("gpt_oss", 8), ("qwen2", None)])
def test_a_gpu_times_steps_of_a_mixture_alone(folder, monkeypatch, family, untimed):
    on_a_gpu(monkeypatch)
    model = tiny_model(family)
    drafter = stand.BlendedDrafter()
    drafter.attach(model, b"")
    asked = []

    def measure(*, num_rows, length, seconds):
        asked.append(num_rows)
        return CHEAP

    drafter.prepare(4, StepTimer(measure, "triton"))
    assert asked == ([] if family == "qwen2" else [4, 1])
    assert drafter.budget is None and isinstance(drafter.costs, AssumedCosts) == (family == "qwen2")
    names = [path.name for path in folder.iterdir()] if folder.exists() else []
    assert all("nvidia-h100-triton" in name and "threads" not in name for name in names) and len(names) == len(asked)
    monkeypatch.setenv("STAND_COSTS", "off")
    drafter = stand.BlendedDrafter()
    drafter.attach(model, b"")
    assert drafter.budget == untimed and isinstance(drafter.costs, AssumedCosts) == (untimed is None)


def test_a_saved_table_goes_before_timing(folder, monkeypatch):
    on_a_gpu(monkeypatch)
    monkeypatch.setattr(blended, "saved_costs", lambda model, folder: stand.CostTable((CHEAP,)))
    drafter = stand.BlendedDrafter()
    drafter.attach(tiny_model("qwen3_moe"), b"")
    drafter.prepare(4, None)
    assert drafter.most_nodes(4) == 60 and not folder.exists()


def test_costs_that_are_set_count_from_the_next_wrap_on(folder):
    model, drafter = tiny_model("qwen2"), stand.BlendedDrafter()
    drafter.attach(model, b"")
    drafter.prepare(4, StepTimer(lambda **_: DEAR, "sdpa"))
    drafter.costs = stand.CostTable((CHEAP,))
    drafter.attach(model, b"")
    drafter.prepare(4, StepTimer(lambda **_: pytest.fail("timed"), "sdpa"))
    assert drafter.most_nodes(4) == 60


def test_a_drafter_of_two_engines_keeps_their_tables_apart(folder, monkeypatch):
    on_a_gpu(monkeypatch)
    model, drafter = tiny_model("qwen3_moe"), stand.BlendedDrafter()
    for way, cost in (("triton", CHEAP), ("sdpa", DEAR), ("triton", CHEAP)):
        drafter.attach(model, b"")
        drafter.prepare(4, StepTimer(lambda cost=cost, **_: cost, way))
        assert drafter._known.seeded_cost(4, 4) == cost
    assert len(list(folder.iterdir())) == 4  # of four rows and of one, each way


def test_unfused_steps_have_tables_of_their_own(folder, monkeypatch):
    asked = []
    monkeypatch.setattr(stand.Engine, "measure_cost", lambda self, **sizes: asked.append(self.backend.fusion) or CHEAP)
    for fuse in (True, False, True):
        stand.wrap(tiny_model("qwen3_moe"), fuse=fuse).generate(**{**PROMPT, "num_return_sequences": 1})
    assert [fusion is not None for fusion in asked] == [True, False]
    assert ["unfused" in path.name for path in sorted(folder.iterdir())] == [False, True]


def test_a_drafter_may_hand_on_a_function_of_its_own(folder, monkeypatch):
    seen = []

    class Counting(stand.BlendedDrafter):
        def prepare(self, num_rows, measure):
            super().prepare(num_rows, lambda **sizes: seen.append(sizes) or measure(**sizes))

    monkeypatch.setattr(stand.Engine, "measure_cost", lambda self, **sizes: CHEAP)
    stand.wrap(tiny_model("qwen2"), drafter=Counting()).generate(**PROMPT)
    assert [sizes["num_rows"] for sizes in seen] == [4, 1]


def test_tables_of_mixtures_are_told_apart_by_their_experts(folder):
    """How many a token takes changes no weight, but what a further token costs."""
    model = tiny_model("qwen3_moe")
    other = copy.deepcopy(model)
    other.config.num_experts_per_tok += 1
    assert KnownCosts(model, folder).path(1) != KnownCosts(other, folder).path(1)


def test_a_mixture_is_told_by_its_configuration():
    model = tiny_model("llama")
    assert not is_mixture(model) and is_mixture(tiny_model("gpt_oss")) and is_mixture(tiny_model("qwen3_moe"))
    nested = copy.deepcopy(model)
    nested.config.ffn_config = DbrxFFNConfig(moe_num_experts=4)
    assert is_mixture(nested)


def test_a_file_nested_without_end_is_a_damaged_one(folder):
    known = KnownCosts(tiny_model("qwen2"), folder)
    folder.mkdir()
    known.path(1).write_text("[" * 100_000, encoding="utf-8")
    known.prepare(1, StepTimer(lambda **_: DEAR))
    assert known.seeded_cost(1, 1) == DEAR
