"""The GPU benchmark in small: model shapes, knee table, floors, one smoke run through the interpreter, refusals."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

pytest.importorskip("triton")

SCRIPTS = Path(__file__).resolve().parents[1] / "scripts"
sys.path.insert(0, str(SCRIPTS))

import gpu_bench  # noqa: E402
import kernel_bench  # noqa: E402
from device_timer import DeviceTimer  # noqa: E402
from knee_table import KneeTable, table_path  # noqa: E402
from model_shapes import SHAPES, SMOKE_SHAPE  # noqa: E402

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def smoke(tmp_path_factory) -> tuple[list[str], Path]:
    """Printed lines and knee folder of one smoke run of everything."""
    folder = tmp_path_factory.mktemp("knee")
    lines: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            "builtins.print", lambda *values, file=None, **_: file or lines.append(" ".join(map(str, values)))
        )
        status = gpu_bench.main(["--device", "cpu", "--smoke", "--knee-folder", str(folder)])
    assert status == 0
    return lines, folder


def test_smoke_prints_no_table_and_says_what_its_times_are(smoke):
    lines, _ = smoke
    assert len(lines) == 1
    document = json.loads(lines[0])
    assert document["is_smoke"] and "mean nothing" in document["note"]
    assert document["device"] == "cpu"


def test_nothing_imports_triton_before_the_interpreter_is_chosen():
    program = "import sys; import gpu_bench; sys.exit('triton' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], cwd=SCRIPTS, check=False).returncode == 0


def test_smoke_runs_every_part(smoke):
    (result,) = json.loads(smoke[0][0])["results"]
    names = {part: {timing["name"] for timing in timings} for part, timings in result["timings"].items()}
    assert names == {
        "products": {"qkv", "o", "gate_up", "down", "lm_head"},
        "attention": {"attention"},
        "laws": {"softmax", "top rows", "race", "traverse", "compact"},
    }
    assert all(timing["seconds"] > 0 for timings in result["timings"].values() for timing in timings)


def test_smoke_compares_the_attention_kernel_with_masked_attention(smoke):
    (result,) = json.loads(smoke[0][0])["results"]
    assert all(timing["difference"] < 1e-5 for timing in result["timings"]["attention"])


def test_smoke_writes_its_table_only_where_it_is_told_to(smoke):
    table = KneeTable.load(table_path(smoke[1], "smoke", "cpu"))
    assert set(table.products) == set(kernel_bench.SMOKE.token_counts)
    assert gpu_bench.read_arguments(["--smoke"]).knee_folder is None


@pytest.mark.parametrize("shape", [*SHAPES.values(), SMOKE_SHAPE], ids=lambda shape: shape.name)
def test_shapes_count_the_weights_of_the_models_they_describe(shape):
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(shape.config(max_positions=128))
    matrices = sum(parameter.numel() for parameter in model.parameters() if parameter.ndim == 2)
    assert matrices == shape.weight_count() + shape.vocabulary * shape.hidden
    assert model.config.num_attention_heads == shape.groups * model.config.num_key_value_heads


def test_shapes_need_the_bytes_that_are_published():
    """Bytes of bfloat16 weights per step, KiB of keys and values per token."""
    seven = SHAPES["qwen2.5-7b"]
    assert 2 * seven.weight_count() == pytest.approx(14.14e9, rel=1e-3)
    assert [2 * shape.cache_elements() / 1024 for shape in SHAPES.values()] == [56, 192, 144, 128]


def knees(products: dict[int, float], attention: dict[int, dict[int, float]]) -> KneeTable:
    return KneeTable("a model", "A GPU", "bfloat16", products, attention)


def test_knee_is_the_last_number_of_tokens_within_the_ratio():
    flat = {1: 4.0, 64: 4.1, 128: 4.4, 256: 9.0}
    table = knees(flat, {100: {1: 0.0, 256: 0.0}, 9000: {1: 0.5, 128: 1.5, 256: 2.5}})
    assert [table.knee(100, ratio) for ratio in (1.0, 1.05, 1.10, 3.0)] == [1, 64, 128, 256]
    assert table.knee(9000, 1.15) == 64  # attention rises with the tokens: 4.1 + 1.0 against 1.15 * 4.5
    assert table.step(96, 100) == pytest.approx(4.25)
    with pytest.raises(ValueError, match="timed range"):
        table.step(300, 100)


def test_knee_table_survives_a_file_and_a_broken_one_is_refused(tmp_path):
    table = knees({1: 4.0, 64: 4.1}, {100: {1: 0.1, 64: 0.2}})
    path = table.save(tmp_path / "new")
    assert path.name == "a-model--a-gpu.json"
    assert KneeTable.load(path) == table
    path.write_text('{"model": "x"}', encoding="utf-8")
    with pytest.raises(ValueError, match="measure it again"):
        KneeTable.load(path)


def test_step_times_add_up_over_layers():
    timings = {
        "products": [kernel_bench.Timing(p.name, 1, 1, None, 1e-3, 1e-4) for p in SMOKE_SHAPE.products()],
        "attention": [kernel_bench.Timing("attention", 1, rows, 70, rows * 1e-3, 1e-4) for rows in (1, 4)],
    }
    arguments = gpu_bench.read_arguments(["--device", "cpu", "--smoke"])
    table = gpu_bench.knee_table(arguments, SMOKE_SHAPE, timings)
    assert table.products == {1: pytest.approx(4 * SMOKE_SHAPE.layers + 1)}
    assert table.attention == {70: {1: pytest.approx(SMOKE_SHAPE.layers)}}
    assert gpu_bench.knee_table(arguments, SMOKE_SHAPE, {"products": timings["products"]}) is None


def test_table_shows_percent_of_the_floor():
    timing = kernel_bench.Timing("o", 16, 1, None, 8e-6, 6e-6, reference=16e-6, difference=3e-3)
    lines = gpu_bench.timing_table([timing]).splitlines()
    assert lines[2].split() == ["o", "16", "1", "-", "8.00", "6.00", "75.00", "16.00", "2.00", "3.0e-03"]


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
    [(["--device", "cpu"], "need a GPU"), (["--device", "cuda"], "no GPU is visible")],
)
def test_refuses_to_time_what_is_no_gpu(options, message, capsys, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert gpu_bench.main(options) == 2
    captured = capsys.readouterr()
    assert message in captured.err and captured.out == ""


@pytest.mark.parametrize("options", [["--shapes", "gpt-5"], ["--parts", "products,hope"]])
def test_unknown_names_are_refused(options):
    with pytest.raises(SystemExit):
        gpu_bench.read_arguments(options)
