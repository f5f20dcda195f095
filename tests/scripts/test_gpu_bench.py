"""The GPU benchmark in small: model shapes, one smoke run through the interpreter, records, checks, refusals."""

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import ClassVar

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

pytest.importorskip("triton")

SCRIPTS, ORACLES = (Path(__file__).resolve().parents[2] / folder for folder in ("scripts", "tests/oracles"))
import gpu_bench  # noqa: E402
import gpu_parts.bench_model as bench_model  # noqa: E402
import gpu_parts.decode_engines as decode_engines  # noqa: E402
import gpu_parts.gpu_checks as gpu_checks  # noqa: E402
import gpu_parts.kernel_bench as kernel_bench  # noqa: E402
import gpu_parts.step_bench as step_bench  # noqa: E402
from fake_events import use_fake_events  # noqa: E402
from gpu_parts.bench_model import BenchModel  # noqa: E402
from gpu_parts.bench_record import BenchRecord, Budget, Measurement  # noqa: E402
from gpu_parts.decode_engines import DecodeBench, DecodeTiming  # noqa: E402
from gpu_parts.part_process import PartRun, run_part  # noqa: E402
from gpu_parts.plain_float32 import use_plain_float32  # noqa: E402
from triton.runtime.errors import OutOfResources  # noqa: E402
from workloads.model_shapes import MIXTURES, SHAPES, SMOKE_SHAPE  # noqa: E402

pytestmark = pytest.mark.long

from stand.drafters.costs import step_cost  # noqa: E402
from stand.drafters.costs.step_cost import CostTable, StepCost, table_path  # noqa: E402
from stand.forward.model import size_name  # noqa: E402
from stand.gpu.tuning.device_timer import DeviceTimer  # noqa: E402
from stand.gpu.tuning.product_tiles import TILES  # noqa: E402
from stand.laws.sampling import TargetLaw  # noqa: E402

CPU = torch.device("cpu")


@dataclass(frozen=True)
class Smoke:
    """What one smoke run of everything printed and wrote."""

    lines: list[str]
    output: Path
    costs: Path

    @property
    def result(self) -> dict:
        (result,) = json.loads(self.output.read_text(encoding="utf-8"))["results"]
        return result


def seconds_of_one_run(timer: DeviceTimer, work: Callable[[], object]) -> list[float]:
    start = time.perf_counter()
    work()
    return [time.perf_counter() - start]


@pytest.fixture(scope="module")
def smoke(tmp_path_factory, interpreter) -> Smoke:
    folder = tmp_path_factory.mktemp("smoke")
    found = Smoke([], folder / "new" / "bench.json", folder / "costs")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            "builtins.print", lambda *values, file=None, **_: file or found.lines.append(" ".join(map(str, values)))
        )
        options = ["--in-process", "--device", "cpu", "--smoke", "--cost-folder", str(found.costs)]
        options += ["--output", str(found.output)]
        patch.setattr(step_cost, "REPEATS", 1)
        patch.setattr(DeviceTimer, "_on_cpu", seconds_of_one_run)
        patch.setattr(decode_engines, "SMOKE", replace(decode_engines.SMOKE, generated=2))
        patch.setattr(gpu_bench, "SMOKE_TOKENS", 2)
        # Two tokens take longer than one, but not on every busy machine.
        patch.setattr(DecodeBench, "_seconds", lambda self, work: (2.0 * (tokens := work()), tokens))
        status = gpu_bench.main(options)
    assert status == 0, found.result["failed"]
    return found


@pytest.fixture(scope="module")
def small(interpreter) -> BenchModel:
    return BenchModel(SMOKE_SHAPE, device=CPU, dtype=torch.float32, max_positions=256)


def test_smoke_prints_no_table_and_says_what_its_times_are(smoke):
    assert smoke.lines == []
    document = json.loads(smoke.output.read_text())
    assert document["is_smoke"] and "mean nothing" in document["note"]
    assert document["device"] == "cpu"


def test_smoke_leaves_nothing_beside_its_output(smoke):
    assert [path.name for path in smoke.output.parent.iterdir()] == ["bench.json"]


def test_nothing_imports_triton_before_the_interpreter_is_chosen():
    program = "import sys; import gpu_bench; sys.exit('triton' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], cwd=SCRIPTS, check=False).returncode == 0


def test_smoke_runs_every_part(smoke):
    names = {"checks": "name", "decoding": "engine", "replay": "drafts", "attention": "name", "products": "name"}
    parts = smoke.result["parts"]
    order = ["products", "laws", "checks", "costs", "steps", "attention", "decoding", "replay", "compiled"]
    assert list(parts) == order and parts["compiled"] == []
    assert {part: {figure[key] for figure in parts[part]} for part, key in names.items()} == {
        "checks": {
            "greedy tokens until the first difference, float32", "best tokens, float32",
            "traverse kernel, rows", "race kernel, rows",
        },
        "decoding": {
            "stand, no drafts", "generate, eager", "stand, top_p", "stand, repetition_penalty", "stand, logprobs",
            "stand, fuse=False", "stand, backend=sdpa",
        },
        "replay": {"no drafts", "3 nodes", "measured costs"},
        "attention": {"attention", "attention in pages"},
        "products": {
            f"{product}{tile}" for product in ("qkv", "o", "gate_up", "down", "lm_head")
            for tile in ("", *(f", tile {tile.rows} x {tile.depth}" for tile in TILES))
        },
    }  # fmt: skip
    laws = {"softmax", "softmax, top_p", "top rows", "race", "traverse", "compact"}
    assert {figure["name"] for figure in parts["laws"]} == laws
    assert {(figure["rows"], figure["nodes"]) for figure in parts["steps"]} == {(1, 0), (1, 3), (2, 0), (2, 3)}
    assert smoke.result["failed"] == smoke.result["left_out"] == []
    assert len(smoke.result["seconds"]) > 10


def test_smoke_says_how_the_model_ran(smoke):
    assert smoke.result["backend"] == {"name": "triton", "reason": "asked for"}
    assert any("merged q/k/v" in line and "kept" in line for line in smoke.result["fusion"])


def test_smoke_has_no_time_of_zero(smoke):
    parts = smoke.result["parts"]
    assert all(figure["seconds"] > 0 for part in ("steps", "attention", "products", "laws") for figure in parts[part])
    assert all(figure["floor"] > 0 and figure["ratio"] > 0 for figure in parts["steps"])
    assert all(figure["tokens_per_second"] > 0 for part in ("decoding", "replay") for figure in parts[part])


def test_smoke_checks_hold_and_compare_something(smoke):
    checks = smoke.result["parts"]["checks"]
    assert all(check["holds"] and check["agreeing"] == check["compared"] > 0 for check in checks)
    greedy = next(check["detail"] for check in checks if "greedy" in check["name"])
    assert float(greedy.removesuffix(" tokens per step").split(", then ")[1]) > 1  # drafts were accepted


def test_smoke_compares_the_attention_kernel_with_masked_attention(smoke):
    figures = smoke.result["parts"]["attention"]
    assert all(figure["difference"] < 1e-5 for figure in figures if figure["name"] == "attention")


def test_smoke_writes_its_cost_table_where_wrap_looks_and_only_if_told_to(smoke, small):
    path = table_path(smoke.costs, model=size_name(small.model), device="cpu", dtype="torch.float32")
    assert smoke.result["cost_table"] == str(path) and list(smoke.costs.iterdir()) == [path]
    costs, figures = CostTable.load(path).costs, smoke.result["parts"]["costs"]
    assert [(cost.num_rows, cost.length, cost.tokens) for cost in costs] == [(1, 70, (1, 2, 3)), (2, 70, (2, 3))]
    assert [list(cost.seconds) for cost in costs] == [figure["seconds"] for figure in figures]


def test_costs_are_measured_behind_such_lengths_as_are_to_come(monkeypatch):
    bench = step_bench.StepBench(SimpleNamespace(obstacle=lambda *sizes: None), step_bench.FULL, bytes_per_second=1.0)

    def lengths(longest):
        return [one.label.split("length ")[1] for one in bench.cost_measurements(longest=longest)]

    assert lengths(None) == ["2048", "2048", "2048", "8192", "16384", "16384", "32768"]
    assert lengths(1536) == ["2048"] * 3 and lengths(9000) == ["2048", "2048", "2048", "8192"]


@pytest.mark.parametrize(
    ("named", "folder"), [(None, Path.home() / ".cache" / "stand"), ("elsewhere", Path("elsewhere")), ("off", None)]
)
def test_a_cost_table_goes_where_wrap_looks(monkeypatch, named, folder):
    monkeypatch.delenv("STAND_COSTS")
    if named is not None:
        monkeypatch.setenv("STAND_COSTS", named)
    assert gpu_bench.read_arguments(["--smoke"]).cost_folder is None
    assert gpu_bench.read_arguments([]).cost_folder == folder


def test_knees_are_those_of_the_cost():
    cost = StepCost(num_rows=1, length=100, tokens=(1, 64, 128, 256), seconds=(4.0, 4.1, 4.9, 9.0))
    figure = step_bench.CostFigure.of(cost)
    assert figure.knees == (64, 64, 128) and figure.cells() == (1, 100, 4000.0, 64, 64, 128)


def test_a_step_is_compared_with_the_one_without_nodes_and_with_bandwidth():
    timing = step_bench.StepTiming(4, 2048, 80, seconds=5e-3, wall=5.1e-3, floor=4e-3, ratio=1.25)
    assert timing.cells() == (4, 2048, 80, 5.0, 1.25, pytest.approx(5.1), pytest.approx(100), 4.0, pytest.approx(80))


def test_a_step_on_the_device_is_a_share_of_a_queue_of_steps(monkeypatch):
    clock, verdicts = [], []
    use_fake_events(monkeypatch, clock, "cuda:1")
    step = SimpleNamespace(launch=lambda: clock.append("1 ms"), verdicts=lambda: verdicts.append(len(clock)))
    bench = step_bench.StepBench(SimpleNamespace(device="cuda:1"), step_bench.FULL, bytes_per_second=1.0)
    assert bench._device_seconds(step) == pytest.approx(1e-3)
    assert verdicts == [step_bench.FULL.repeats + 1]


def test_caches_that_do_not_fit_are_named(monkeypatch):
    model = object.__new__(BenchModel)
    model.shape = SHAPES["qwen2.5-14b"]
    model.model = SimpleNamespace(device=SimpleNamespace(type="cuda"), dtype=torch.bfloat16)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (100 * 2**30, 140 * 2**30))
    assert model.obstacle(8, 32768) is None
    assert model.obstacle(16, 32768) == "its cache needs 98 GiB, 100 GiB are free"
    assert model.obstacle(8, 32768, copies=2) == "its cache needs 98 GiB, 100 GiB are free"


def test_a_step_reads_weights_and_keys_once(small):
    weights, per_token = SMOKE_SHAPE.weight_count(), SMOKE_SHAPE.cache_elements()
    assert small.step_bytes(3, 100) == 4 * (weights + 300 * per_token)


def test_decoding_is_compared_with_its_limit():
    timing = DecodeTiming("x", rows=4, length=10, tokens_per_second=200.0, limit=400.0)
    assert timing.cells() == ("x", 4, 10, 200.0, 20.0, 400.0, 50.0)


@pytest.mark.parametrize("shape", [*SHAPES.values(), SMOKE_SHAPE], ids=lambda shape: shape.name)
def test_shapes_count_the_weights_of_the_models_they_describe(shape):
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(shape.config(max_positions=128))
    matrices = sum(parameter.numel() for parameter in model.parameters() if parameter.ndim == 2)
    assert matrices == shape.weight_count() + shape.vocabulary * shape.hidden
    assert model.config.num_attention_heads == shape.groups * model.config.num_key_value_heads


def test_a_mixture_counts_the_experts_that_its_tokens_ask_for():
    shape = MIXTURES["qwen3-30b-a3b"]
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(shape.config(max_positions=128))
    weights = sum(parameter.numel() for parameter in model.parameters() if parameter.ndim > 1)
    assert shape.weight_count(100_000) == pytest.approx(weights - shape.vocabulary * shape.hidden)
    of_expert = 48 * 3 * 2048 * 768
    assert shape.weight_count(1) == pytest.approx(shape.weight_count(100_000) - 120 * of_expert)
    assert shape.weight_count(2) == pytest.approx(shape.weight_count(1) + 7.5 * of_expert)  # a half of one is shared


def test_shapes_need_the_bytes_that_are_published():
    """Bytes of bfloat16 weights per step, KiB of keys and values per token."""
    seven = SHAPES["qwen2.5-7b"]
    assert 2 * seven.weight_count() == pytest.approx(14.14e9, rel=1e-3)
    assert [2 * shape.cache_elements() / 1024 for shape in SHAPES.values()] == [28, 56, 192, 144, 128]


@dataclass(frozen=True)
class Number:
    HEADER: ClassVar = ("number",)
    number: int

    @property
    def double(self) -> int:
        return 2 * self.number

    def cells(self) -> tuple[object, ...]:
        return (self.number,)


def test_a_failure_takes_nothing_with_it_and_the_file_is_complete_before_the_next_one_begins(tmp_path):
    path = tmp_path / "bench.json"
    record = BenchRecord({"device": "x"}, path)
    record.begin({"name": "y"})

    def fail():
        seen.append(json.loads(path.read_text())["results"][0]["parts"]["p"])
        raise RuntimeError("broken")

    seen: list[list] = []
    measurements = [
        Measurement("one", lambda: [Number(1)]),
        Measurement("two", fail),
        Measurement("three", lambda: [Number(3)]),
        Measurement("four", lambda: [Number(4)], "no room"),
    ]
    told: list[str] = []
    runs = record.run("p", measurements, Budget(1), announce=told.append)
    assert [(figure.number, told[-1]) for figures in runs for figure in figures] == [(1, "one"), (3, "three")]
    assert told == ["one", "two", "three"] and seen == [[{"number": 1, "double": 2}]]
    (result,) = json.loads(path.read_text())["results"]
    assert result["parts"]["p"] == [{"number": 1, "double": 2}, {"number": 3, "double": 6}]
    assert result["left_out"] == [{"measurement": "four", "reason": "no room"}]
    assert [entry["measurement"] for entry in result["failed"]] == ["two"]
    assert "broken" in result["failed"][0]["error"] and "in fail" in result["failed"][0]["traceback"]
    assert set(result["seconds"]) == {"one", "three"}


def test_what_was_measured_before_a_failure_is_kept(tmp_path):
    record = BenchRecord({}, tmp_path / "bench.json")
    record.begin({})

    def half():
        yield Number(1)
        raise RuntimeError("broken")

    runs = record.run("p", [Measurement("half", half), Measurement("whole", lambda: [Number(2)])], Budget(1))
    assert list(runs) == [[Number(1)], [Number(2)]]
    (result,) = json.loads((tmp_path / "bench.json").read_text())["results"]
    assert [figure["number"] for figure in result["parts"]["p"]] == [1, 2]
    assert [entry["measurement"] for entry in result["failed"]] == ["half"]


@pytest.mark.usefixtures("interpreter")
def test_a_reference_that_fails_takes_no_figure_with_it(monkeypatch, caplog):
    """Such as a sort that cannot be captured."""
    bench = kernel_bench.KernelBench(SMOKE_SHAPE, kernel_bench.SMOKE, device=CPU, dtype=torch.float32)
    monkeypatch.setattr(TargetLaw, "warp", lambda self, logits: 1 / 0)
    timings = list(next(bench.laws()).work())
    assert [timing.name for timing in timings][:2] == ["softmax, top_p", "softmax"] and len(timings) == 6
    assert timings[0].reference is None and timings[1].reference > 0 and "ZeroDivisionError" in caplog.text


def test_a_part_that_cannot_go_on_keeps_what_it_has():
    record = BenchRecord({}, None)
    record.begin({})

    def measurements():
        yield Measurement("one", lambda: [Number(1)])
        raise RuntimeError("no memory left")

    assert list(record.run("p", measurements(), Budget(1))) == [[Number(1)]]
    assert [(entry["measurement"], entry["error"]) for entry in record.failed] == [
        ("p", "RuntimeError('no memory left')")
    ]


def test_nothing_begins_after_the_minutes():
    record, budget = BenchRecord({}, None), Budget(1e-9)
    record.begin({})
    assert list(record.run("p", [Measurement("late", lambda: [Number(1)])], budget)) == []
    assert record.left_out == [{"measurement": "late", "reason": "1e-09 minutes were over"}]
    assert not Budget(1, started=time.time() - 50).is_spent and Budget(1, started=time.time() - 61).is_spent
    with pytest.raises(ValueError, match="above 0"):
        Budget(0)


def test_tables_have_a_line_per_figure_except_in_smoke_runs(capsys):
    figures = [
        kernel_bench.Timing("o", 16, 1, None, 8e-6, 6e-6),
        step_bench.StepTiming(1, 2048, 0, 4e-3, 5e-3, 3e-3),
        step_bench.CostFigure(1, 2048, (1, 2), (1.0, 2.0), (1, 1, 1)),
        DecodeTiming("x", 1, 2048, 100.0, 300.0),
        gpu_checks.Check("c", 2, 1, False, 1e-3, "close"),
    ]
    for options, num_lines in (([], 3), (["--smoke"], 0)):
        arguments, record = gpu_bench.read_arguments(options), BenchRecord({}, None)
        record.begin({})
        for figure in figures:
            tables = [("p", iter([Measurement("m", lambda figure=figure: [figure])]))]
            bench = SimpleNamespace(tables=lambda part, tables=tables: tables, shape=SMOKE_SHAPE)
            gpu_bench.run_part(arguments, bench, "p", record, Budget(1))
            assert len(capsys.readouterr().out.splitlines()) == (num_lines + 1 if num_lines else 0)
            assert len(figure.cells()) == len(figure.HEADER)


def test_a_run_says_what_it_left_out_and_what_failed(capsys):
    record = BenchRecord({}, None)
    record.begin({})
    record.leave_out("a", "no time")
    record.fail("b", RuntimeError("broken"))
    gpu_bench.show_rest(gpu_bench.read_arguments([]), record)
    captured = capsys.readouterr()
    assert captured.out.splitlines()[:2] == ["a left out: no time", "b failed: RuntimeError('broken')"]


def test_a_run_with_a_failure_or_a_broken_check_ends_with_1(capsys, monkeypatch):
    options = ["--in-process", "--device", "cpu", "--smoke", "--parts", "products"]
    for name, status in (("good", 0), ("broken check", 1), ("failure", 1)):

        def tables(self, part, name=name):
            check = gpu_checks.Check("c", 2, 1 if name == "broken check" else 2, True, None, "")
            work = (lambda: 1 / 0) if name == "failure" else (lambda: [check])
            yield "checks", iter([Measurement("m", work)])

        monkeypatch.setattr(gpu_bench.ShapeBench, "tables", tables)
        assert gpu_bench.main(options) == status, name
        capsys.readouterr()


@pytest.mark.usefixtures("interpreter")
def test_without_a_model_the_kernels_are_measured_all_the_same(capsys, monkeypatch):
    def refuse(*arguments, **settings):
        raise ValueError("no back end")

    monkeypatch.setattr(bench_model, "BenchModel", refuse)
    assert gpu_bench.main(["--in-process", "--device", "cpu", "--smoke", "--parts", "steps,checks,products"]) == 1
    (result,) = json.loads(capsys.readouterr().out)["results"]
    assert list(result["parts"]) == ["products"] and len(result["parts"]["products"]) == 10 * (1 + len(TILES))
    assert [entry["measurement"] for entry in result["left_out"]] == ["checks", "steps"]
    assert [entry["error"] for entry in result["failed"]] == ["ValueError('no back end')"]


def with_commands(monkeypatch, programs: dict[str, str]) -> None:
    """Each part's process runs this program instead; its first argument is the file for its document."""

    def command(options, output):
        part = options[options.index("--parts") + 1]
        return [sys.executable, "-c", programs[part], str(output)]

    monkeypatch.setattr(gpu_bench, "part_command", command)


WRITES = """
import json, sys
print("a table")
document = {"format": "x", "results": [{"parts": {NAME: [{"name": NAME}]}, "seconds": {NAME: 1.0},
    "left_out": [], "failed": [], "machine": {"bytes_per_second": 5}}]}
open(sys.argv[1], "w").write(json.dumps(document))
"""


def test_a_part_that_hangs_or_crashes_costs_itself_alone(monkeypatch, capsys, tmp_path):
    writes = {part: f"NAME = {part!r}" + WRITES for part in gpu_bench.PARTS}
    hangs = writes["checks"] + "import time; sys.stdout.flush(); time.sleep(60)"
    crashes = writes["steps"] + "import os, signal; os.write(2, b'its stack\\n'); os.kill(os.getpid(), signal.SIGKILL)"
    with_commands(monkeypatch, {**writes, "checks": hangs, "steps": crashes, "attention": "raise SystemExit(2)"})
    monkeypatch.setitem(gpu_bench.LIMITS, "checks", 1.0)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(gpu_bench, "device_name", lambda device: "x")
    output = tmp_path / "bench.json"
    assert gpu_bench.main(["--parts", "laws,checks,steps,attention,decoding", "--output", str(output)]) == 1
    printed, progress = capsys.readouterr()
    (result,) = json.loads(output.read_text())["results"]
    assert "its stack" in progress and "its stack" in json.dumps(result["failed"])  # where crashes say what they were
    assert '"format"' not in printed
    assert list(result["parts"]) == ["laws", "checks", "steps", "decoding"]  # of what hung or crashed, what there was
    assert {entry["measurement"] for entry in result["failed"]} == {"checks", "steps", "attention"}
    errors = " ".join(entry["error"] for entry in result["failed"])
    assert "more than 1 seconds" in errors and "status -9" in errors and "status 2" in errors
    assert printed.count("a table") == 4 and result["machine"] == {"bytes_per_second": 5}


@dataclass
class Started:
    """A part's process that was asked for, with a limit in seconds."""

    arguments: list[str]
    output: Path
    limit: float

    @property
    def options(self) -> argparse.Namespace:
        """Of a part of the bench itself; the first contact is another command."""
        return gpu_bench.read_arguments(self.arguments)


@pytest.fixture
def started(monkeypatch) -> list[Started]:
    """Parts on a machine with a GPU, none of which really runs."""
    found: list[Started] = []

    def start(command, output, *, limit, fine):
        found.append(Started(list(command.args[0]), output, limit))
        return PartRun(None, "", None)

    monkeypatch.setattr(gpu_bench, "run_part_process", start)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(gpu_bench, "device_name", lambda device: "x")
    return found


def test_a_part_is_told_to_end_before_it_is_killed(started, tmp_path):
    """So that it says itself what it left out, and writes down what it knows."""
    for minutes in ("28", "2"):
        options = ["--parts", "steps", "--minutes", minutes, "--output", str(tmp_path / "bench.json")]
        gpu_bench.main(options)
        newest = started[-1]
        own, limit = 60 * newest.options.minutes, newest.limit
        assert newest.options.parts == ["steps"]
        assert own <= limit - gpu_bench.MARGIN and limit <= min(240, 60 * float(minutes) + gpu_bench.LAST_SECONDS)


def test_nothing_is_started_that_would_end_before_its_first_figure(started, tmp_path):
    output = tmp_path / "bench.json"
    gpu_bench.main(["--parts", "laws,steps,replay", "--minutes", "0.9", "--output", str(output)])
    (result,) = json.loads(output.read_text())["results"]
    assert [one.options.parts for one in started] == [["laws"]]
    assert [entry["measurement"] for entry in result["left_out"]] == ["steps", "replay"]
    reasons = [entry["reason"] for entry in result["left_out"]]
    assert reasons[0].endswith(" seconds were left of 0.9 minutes") and reasons[1] == "no --replay FILE was given"


def test_pieces_that_know_no_shape_run_once(started, tmp_path):
    output = tmp_path / "b.json"
    gpu_bench.main(["--parts", "contact,laws", "--shapes", "qwen2.5-7b,qwen3-8b", "--output", str(output)])
    names = [one.output.name for one in started]
    assert names == ["b.qwen2.5-7b.contact.json", "b.qwen2.5-7b.laws.json", "b.qwen3-8b.laws.json"]
    left_out = [result["left_out"] for result in json.loads(output.read_text())["results"]]
    assert left_out[0] == [] and [entry["measurement"] for entry in left_out[1]] == ["contact"]


def test_parts_that_need_a_model_share_a_process_where_asked():
    def groups(*options):
        return gpu_bench.part_groups(gpu_bench.read_arguments(list(options)))

    assert groups("--parts", "steps,decoding,replay") == [["steps"], ["decoding"], ["replay"]]
    assert groups("--parts", "replay,contact,steps,decoding", "--together") == [
        ["contact"], ["steps", "decoding", "replay"],
    ]  # fmt: skip
    assert groups("--parts", "steps,attention,replay", "--together") == [["steps"], ["attention"], ["replay"]]


QUICK_FILE = """
import quick_interpreter, runpy, sys
quick_interpreter.make_quick()
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


@pytest.fixture
def quick_parts(monkeypatch, interpreter) -> None:
    """Parts of their own are the very file and options, interpreted as the other tests are."""
    real = gpu_bench.part_command

    def command(options, output):
        python, *words = real(options, output)
        return [python, "-c", QUICK_FILE, *words]

    monkeypatch.setattr(gpu_bench, "part_command", command)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(SCRIPTS), str(ORACLES)]))


@pytest.mark.slow  # the same work as of the smoke run, in a process of its own
@pytest.mark.usefixtures("quick_parts")
def test_parts_in_one_process_give_all_their_figures(capfd):
    options = ["--device", "cpu", "--smoke", "--parts", "checks,decoding", "--together"]
    status = gpu_bench.main(options)
    (result,) = json.loads(capfd.readouterr().out)["results"]
    assert status == 0 and list(result["parts"]) == ["checks", "decoding"] and not result["failed"]


def test_what_hangs_says_where():
    program = (
        "import time; import gpu_bench\n"
        "def hanging(*arguments): time.sleep(60)\n"
        "gpu_bench.run_shape, gpu_bench.MARGIN, gpu_bench.STACKS = hanging, 1.5, 0.5\n"
        "options = ['--in-process', '--device', 'cpu', '--smoke', '--parts', 'products', '--minutes', '0.02']\n"
        "gpu_bench.main([*options, '--started', str(time.time())])\n"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(SCRIPTS), str(SCRIPTS.parent)])}
    with subprocess.Popen(
        [sys.executable, "-c", program], stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True, env=environment
    ) as process:
        told = next(line for line in process.stderr if "in hanging" in line)
        process.kill()
    assert told.startswith("  File ")


def test_what_a_killed_part_has_started_ends_too(tmp_path):
    """A child that outlives its parent would hold the GPU, and the pipe."""
    program = (
        "import subprocess, sys, time; child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)']);"
        "print(child.pid, flush=True); time.sleep(60)"
    )
    run = run_part(lambda output: [sys.executable, "-c", program], tmp_path / "part.json", limit=2.0)
    assert "more than 2 seconds" in run.failure
    with pytest.raises(ProcessLookupError):
        for _ in range(200):  # until the system has taken it in
            os.kill(int(run.printed), 0)
            if Path(f"/proc/{run.printed}/stat").read_text().split()[2] == "Z":
                raise ProcessLookupError
            time.sleep(0.01)


def test_what_rounds_float32_products_is_undone(monkeypatch):
    monkeypatch.setenv("NVIDIA_TF32_OVERRIDE", "1")
    torch.set_float32_matmul_precision("high")
    assert use_plain_float32() == "NVIDIA_TF32_OVERRIDE" and "NVIDIA_TF32_OVERRIDE" not in os.environ
    assert torch.backends.cuda.matmul.fp32_precision in {"none", "ieee"} and use_plain_float32() == ""


def test_what_runs_when_the_bench_is_killed_is_left_beside_its_output(monkeypatch, capsys, tmp_path):
    """And taken in by a later run of other parts."""
    writes = {part: f"NAME = {part!r}" + WRITES for part in gpu_bench.PARTS}
    dies = writes["steps"] + "import os, signal, sys; sys.stdout.flush(); os.kill(os.getppid(), signal.SIGUSR1)"
    with_commands(monkeypatch, {**writes, "steps": dies + "; import time; time.sleep(60)"})
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(gpu_bench, "device_name", lambda device: "x")

    def killed(number, frame):
        raise KeyboardInterrupt  # nothing catches it, as nothing would a kill

    before = signal.signal(signal.SIGUSR1, killed)
    output = tmp_path / "new" / "bench.json"
    try:
        with pytest.raises(KeyboardInterrupt):
            gpu_bench.main(["--parts", "laws,steps", "--output", str(output)])
    finally:
        signal.signal(signal.SIGUSR1, before)
    names = sorted(path.name for path in output.parent.iterdir())
    assert names == ["bench.json", *(f"bench.qwen2.5-7b.steps.{kind}" for kind in ("err", "json", "txt"))]
    assert gpu_bench.main(["--parts", "laws", "--output", str(output)]) == 0
    (result,) = json.loads(output.read_text())["results"]
    assert list(result["parts"]) == ["steps", "laws"] and list(output.parent.iterdir()) == [output]
    capsys.readouterr()


@pytest.mark.parametrize("other", [{"dtype": "float16"}, {"device": "y"}, {"dtype": "bfloat16", "device": "x"}])
def test_what_was_left_is_taken_in_only_beside_figures_of_the_same_settings(monkeypatch, capsys, tmp_path, other):
    with_commands(monkeypatch, {"laws": "NAME = 'laws'" + WRITES})
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(gpu_bench, "device_name", lambda device: "x")
    left, output = tmp_path / "bench.qwen2.5-7b.steps.json", tmp_path / "bench.json"
    left.write_text(json.dumps({**other, "results": [{"parts": {"steps": [{"name": "steps"}]}}]}))
    is_same = len(other) == 2
    assert gpu_bench.main(["--parts", "laws", "--output", str(output)]) == 0
    (result,) = json.loads(output.read_text())["results"]
    assert list(result["parts"]) == [*(["steps"] if is_same else []), "laws"] and left.exists() is not is_same
    reason = f"bench.qwen2.5-7b.steps.json is of another {next(iter(other))}; it stays there"
    assert result["left_out"] == ([] if is_same else [{"measurement": "steps", "reason": reason}])
    capsys.readouterr()


@pytest.mark.slow  # two parts in one process of their own take the same way
@pytest.mark.usefixtures("quick_parts")
def test_a_part_of_its_own_gives_what_the_process_itself_would(capfd):
    status = gpu_bench.main(["--device", "cpu", "--smoke", "--parts", "laws"])
    (result,) = json.loads(capfd.readouterr().out)["results"]
    assert status == 0 and len(result["parts"]["laws"]) == 2 * 6 and not result["failed"]


def test_parts_of_their_own_know_the_options_and_the_measured_costs():
    arguments = gpu_bench.read_arguments(
        ["--shapes", "qwen3-8b", "--dtype", "float16", "--replay", "a", "b", "--tokenizer", "t", "--cost-folder", "c"]
    )
    options = gpu_bench.part_options(arguments, SHAPES["qwen3-8b"], "replay", minutes=2, costs="table.json")
    read = gpu_bench.read_arguments(options)
    assert read.in_process and read.parts == ["replay"] and read.shapes == ["qwen3-8b"] and read.minutes == 2
    assert [str(path) for path in (*read.replay, read.tokenizer, read.costs)] == ["a", "b", "t", "table.json"]
    assert read.dtype == "float16" and str(read.cost_folder) == "c"
    options = gpu_bench.part_options(arguments, SHAPES["qwen3-8b"], "steps", minutes=2, costs="table.json")
    assert gpu_bench.read_arguments(options).replay == [] and gpu_bench.read_arguments(options).costs is None


PRINTS = "print('ok   match: equal tokens')"


@pytest.mark.parametrize(
    ("program", "failures"),
    [(PRINTS, []), (PRINTS + "; raise SystemExit(1)", ["status 1"]), (PRINTS + "; 1 / 0", ["status 1"])],
)
def test_parts_that_are_commands_keep_what_they_print(monkeypatch, tmp_path, capsys, program, failures):
    (tmp_path / "command.py").write_text(program)
    monkeypatch.setitem(gpu_bench.SCRIPTS, "contact", str(tmp_path / "command.py"))
    output = tmp_path / "bench.json"
    status = gpu_bench.main(["--device", "cpu", "--smoke", "--parts", "contact", "--output", str(output)])
    capsys.readouterr()
    (result,) = json.loads(output.read_text())["results"]
    assert status == len(failures) and result["contact"] == ["ok   match: equal tokens"]
    errors = [entry["error"] for entry in result["failed"]]
    assert len(errors) == len(failures) and all(part in text for part, text in zip(failures, errors, strict=True))


def test_commands_know_device_type_and_shape():
    arguments = gpu_bench.read_arguments(["--device", "cuda:1", "--dtype", "float16"])
    contact = gpu_bench.script_options(arguments, SHAPES["qwen3-8b"], "contact", 240)
    assert contact[:4] == ["--device", "cuda:1", "--seconds", "225"]  # it ends by itself, and tells where it hung
    assert contact[4] == "--started" and 0 <= time.time() - float(contact[5]) < 60 and len(contact) == 6
    some = gpu_bench.read_arguments(["--pieces", "bf16,match"])
    assert gpu_bench.script_options(some, SHAPES["qwen3-8b"], "contact", 240)[-2:] == ["--only", "bf16,match"]
    profile = gpu_bench.script_options(arguments, SHAPES["qwen3-8b"], "profile", 150)
    assert profile == ["--shape", "qwen3-8b", "--device", "cuda:1", "--dtype", "float16"]
    assert all((SCRIPTS / script).is_file() for script in gpu_bench.SCRIPTS.values())


def test_an_arm_of_another_back_end_gives_the_engines_own_back(small):
    bench = DecodeBench(small, decode_engines.SMOKE, bytes_per_second=1.0)
    own = small.engine.backend
    assert bench._engines[decode_engines.SDPA]([[1, 2, 3]], 2) == 2 and small.engine.backend is own

    class Failing(type(bench._engines[decode_engines.SDPA].keywords["backend"])):
        def new_step(self, start):
            self.name = "other"
            return super().new_step(start)

    with pytest.raises(RuntimeError, match="must stay sdpa, got"):
        bench._with_stand([[1, 2, 3]], 2, backend=Failing(small.model, "x"))
    assert small.engine.backend is own


def test_the_whole_list_in_order_and_within_half_an_hour():
    assert gpu_bench.read_arguments([]).parts == list(gpu_bench.PARTS)
    assert gpu_bench.PARTS[:4] == ("contact", "products", "laws", "checks") and gpu_bench.PARTS[-1] == "compiled"
    assert gpu_bench.MINUTES + gpu_bench.LAST_SECONDS / 60 <= 30
    assert all(engine != "generate, static + compile" for engine, _, _ in decode_engines.FULL.cells)
    assert [engine for engine, _, _ in decode_engines.FULL.compiled_cells] == ["generate, static + compile"]


def test_versions_name_what_a_figure_depends_on(smoke):
    versions = json.loads(smoke.output.read_text())["versions"]
    assert set(versions) == {"python", "cuda", "driver", "torch", "triton", "transformers", "numpy"}
    assert versions["torch"] == torch.__version__ and versions["triton"] and versions["transformers"]


@pytest.mark.parametrize("part", ["steps", "products"])
def test_errors_of_triton_are_failures_and_no_end(monkeypatch, capsys, part):
    """They derive from Exception alone."""

    def refuse(*arguments, **settings):
        raise OutOfResources(114688, 101376, "shared memory")

    names = {"steps": (bench_model, "BenchModel"), "products": (kernel_bench.KernelBench, "products")}
    monkeypatch.setattr(*names[part], refuse)
    monkeypatch.setattr(kernel_bench.KernelBench, "laws", lambda bench: iter(()))
    assert gpu_bench.main(["--in-process", "--device", "cpu", "--smoke", "--parts", f"{part},laws"]) == 1
    (result,) = json.loads(capsys.readouterr().out)["results"]
    assert ["OutOfResources" in entry["error"] for entry in result["failed"]] == [True]
    assert "laws" in result["parts"]


def test_a_replay_without_steps_measures_its_costs_and_one_without_files_is_left_out():
    def tables(*options):
        bench = gpu_bench.ShapeBench(gpu_bench.read_arguments(["--parts", "replay", *options]), SMOKE_SHAPE)
        bench.__dict__["step_bench"] = SimpleNamespace(cost_measurements=lambda **_: iter(()), costs=[])
        return dict(bench.tables("replay"))

    assert list(tables("--smoke", "--costs", "table")) == ["replay"]
    assert list(tables("--smoke")) == list(tables("--replay", "file")) == ["costs", "replay"]
    (measurement,) = tables()["replay"]
    assert measurement.obstacle == "no --replay FILE was given"


def test_checks_in_16_bits_may_differ():
    assert gpu_checks.Check("c", 2, 1, False, None, "").holds


@pytest.mark.parametrize("name", ["traverse", "race"])
def test_a_broken_kernel_is_noticed(small, monkeypatch, name):
    def broken(*arguments):
        result = getattr(kernel_bench, name)(*arguments)
        return result + 1 if name == "race" else (torch.zeros_like(result[0]), *result[1:])

    checks = gpu_checks.ChecksBench(small, gpu_checks.SMOKE)
    (sound,) = checks.kernels(name)
    monkeypatch.setattr(gpu_checks, name, broken)
    (check,) = checks.kernels(name)
    assert sound.holds and not check.holds


def test_other_logits_and_other_tokens_are_noticed(small, monkeypatch):
    checks = gpu_checks.ChecksBench(small, gpu_checks.SMOKE)
    captured = checks._captured
    monkeypatch.setattr(checks, "_captured", lambda tokens: [part.flip(1) for part in captured(tokens)])
    (check,) = checks.logits()
    assert not check.holds and "margin where they differ" in check.quantiles
    assert gpu_checks.common_prefix([1, 2, 3], [1, 2, 4]) == 2 and gpu_checks.common_prefix([1], [1]) == 1


def test_laws_of_the_checks_lean_towards_the_drafts():
    batch, laws = gpu_checks.leaning_step(gpu_checks.SMOKE, 0)
    np.testing.assert_allclose(laws.sum(dim=1), 1, rtol=1e-5)
    children = batch.token_ids[[1, 2]].astype(np.int64)
    assert laws[0, children].sum() > 0.8


def test_table_shows_percent_of_the_floor():
    timing = kernel_bench.Timing("o", 16, 1, None, 8e-6, 6e-6, reference=16e-6, difference=3e-3)
    expected = ("o", 16, 1, None, 8.0, 6.0, 75.0, 16.0, 2.0, "3.0e-03")
    assert timing.cells() == pytest.approx(expected) and len(timing.HEADER) == len(expected)


def test_floor_is_the_longer_of_moving_and_computing():
    machine = kernel_bench.Machine(bytes_per_second=1e12, flops_per_second=1e15)
    assert machine.floor(nbytes=2e9, flops=1e12) == pytest.approx(2e-3)
    assert machine.floor(nbytes=2e9, flops=4e12) == pytest.approx(4e-3)


def test_tree_of_the_attention_part_is_a_heap():
    parents = kernel_bench.heap_parents(70)
    words = kernel_bench.ancestor_words(parents).view(np.uint64)
    seen = {node for node in range(70) if int(words[69, node // 64]) >> (node % 64) & 1}
    assert seen == {69, 34, 16, 7, 3, 1, 0}
    assert kernel_bench.depths_of(parents)[69] == 6


def test_timer_runs_the_work_as_often_as_asked():
    calls = []
    assert DeviceTimer(CPU, repeats=3).seconds(lambda: calls.append(1)) > 0
    assert len(calls) == 4  # one to warm up
    with pytest.raises(ValueError, match="at least 1"):
        DeviceTimer(CPU, repeats=0)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--device", "cpu"], "need a GPU"),
        (["--device", "cuda"], "no GPU is visible"),
        (["--smoke", "--device", "cpu", "--replay", __file__], "made-up"),
        (["--replay", __file__], "need a tokenizer"),
        (["--replay", __file__, "--tokenizer", "/nowhere.json"], "must be a file"),
        (["--replay-tokens", "0"], "at least 1"),
        (["--smoke", "--device", "cpu", "--minutes", "0"], "above 0"),
    ],
)
def test_refuses_what_would_give_no_figures(options, message, capsys, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert gpu_bench.main(options) == 2
    captured = capsys.readouterr()
    assert message in captured.err and captured.out == ""


@pytest.mark.parametrize("options", [["--shapes", "gpt-5"], ["--parts", "products,hope"]])
def test_unknown_names_are_refused(options):
    with pytest.raises(SystemExit):
        gpu_bench.read_arguments(options)
