"""The first-contact script on a CPU: pieces that are well, and pieces that fail or part from eager steps."""

import sys
import time
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("triton")

import gpu_bench
import gpu_first_contact
import profile_step
from gpu_parts.bench_model import BenchModel
from plain_kernels import use_plain_kernels
from workloads.model_shapes import SMOKE_SHAPE

from stand.gpu import step_body


@pytest.mark.usefixtures("interpreter")
@pytest.mark.parametrize("piece", ["unfused", "traversal", "grammar", "image", "growth", "head", "two_engines"])
def test_a_piece_is_well(monkeypatch, capsys, piece):
    """With the kernels in plain PyTorch: the interpreter takes half a minute for a piece."""
    use_plain_kernels(monkeypatch)
    assert gpu_first_contact.main(["--device", "cpu", "--only", piece]) == 0
    versions, line = capsys.readouterr().out.splitlines()
    assert torch.__version__ in versions and "triton" in versions and line.startswith(f"ok   {piece}: ")


def test_a_piece_that_fails_prints_its_traceback_and_stops_nobody(monkeypatch, capsys):
    def broken(contact):
        raise OSError("out of resource")

    monkeypatch.setattr(gpu_first_contact.Contact, "unfused", broken)
    monkeypatch.setattr(gpu_first_contact.Contact, "bf16", lambda contact: "well")
    assert gpu_first_contact.main(["--device", "cpu", "--only", "unfused,bf16"]) == 1
    printed = capsys.readouterr().out
    assert "FAIL unfused" in printed and "in broken" in printed and "ok   bf16: well" in printed
    assert gpu_first_contact.main(["--device", "cpu", "--only", "bf16"]) == 0


DYING = """
import os, sys
for name in sys.argv[1].split(","):
    if name == "top_p":
        os.abort()  # a destructor of torch's, in the middle of a piece
    print("FAIL" if name == "fused" else "ok  ", f"{name}: told", flush=True)
    if name == "fused":
        os.abort()  # the same once the piece has failed
"""


def test_the_others_go_on_where_a_piece_ends_its_process(capsys):
    """After an illegal access torch's destructors end the process (pytorch #178154)."""

    def command(names, seconds):
        started.append(seconds)
        return [sys.executable, "-c", DYING, ",".join(names)]

    started = []
    names = ["unfused", "fused", "bf16", "top_p", "head"]
    assert not gpu_first_contact.in_processes(names, command, 100)
    printed = capsys.readouterr().out
    assert [line.split(":")[0] for line in printed.splitlines()] == [
        "ok   unfused", "FAIL fused", "ok   bf16", "FAIL top_p", "ok   head",
    ]  # fmt: skip
    assert "top_p: its process ended with status -6" in printed and len(started) == 3 and 90 < started[-1] < 100
    assert gpu_first_contact.in_processes(["head"], command, 100)
    assert not gpu_first_contact.in_processes(["head"], command, 0)
    assert "left out, because 0 seconds were over: head" in capsys.readouterr().out


def test_pieces_on_a_gpu_get_a_process(monkeypatch):
    commands = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(
        gpu_first_contact, "in_processes", lambda names, command, seconds: commands.append(command(names, seconds))
    )
    assert gpu_first_contact.main(["--device", "cuda:1", "--only", "bf16,match", "--seconds", "100"]) == 1
    *options, started = commands[0][2:]
    given = ["--in-process", "--device", "cuda:1", "--only", "bf16,match", "--seconds", "100", "--started"]
    assert options == given and 0 <= time.time() - float(started) < 60


def test_seconds_count_from_the_start_that_is_told(monkeypatch):
    """Of the process that is ended, not from when its imports are over."""
    left = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(gpu_first_contact, "in_processes", lambda names, command, seconds: left.append(seconds))
    gpu_first_contact.main(["--only", "bf16", "--seconds", "100", "--started", f"{time.time() - 30:.1f}"])
    assert 40 < left[0] <= 70.1


def test_a_process_ends_where_a_piece_has_taken_the_gpu_with_it(monkeypatch, capsys):
    def broken(contact):
        raise RuntimeError("an illegal memory access was encountered")

    monkeypatch.setattr(gpu_first_contact.Contact, "fused", broken)
    monkeypatch.setattr(gpu_first_contact.Contact, "unfused", lambda contact: "well")
    monkeypatch.setattr(gpu_first_contact, "is_usable", lambda device: False)
    monkeypatch.setattr(gpu_first_contact.os, "_exit", sys.exit)
    with pytest.raises(SystemExit):
        gpu_first_contact.main(["--device", "cpu", "--only", "unfused,fused,match"])
    printed = capsys.readouterr().out
    assert "of no use to this process after fused" in printed and "match" not in printed


def test_a_gpu_that_answers_with_an_error_is_of_no_use(monkeypatch):
    def answer(device):
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    assert gpu_first_contact.is_usable(torch.device("cpu"))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    assert gpu_first_contact.is_usable(torch.device("cuda"))
    monkeypatch.setattr(torch.cuda, "synchronize", answer)
    assert not gpu_first_contact.is_usable(torch.device("cuda"))


def test_the_traversal_has_drafts_or_says_that_it_had_none(monkeypatch):
    contact = gpu_first_contact.Contact(torch.device("cpu"))
    monkeypatch.setattr(contact, "_engine", lambda *arguments, **settings: None)
    monkeypatch.setattr(contact, "_decoded", lambda *arguments, **law: [[1, 2], [3]])
    monkeypatch.setattr(contact, "_compared", lambda *arguments, **settings: "equal")
    with pytest.raises(AssertionError, match="must have drafts, got none"):
        contact.traversal()


@pytest.mark.usefixtures("interpreter")
def test_a_kernel_that_fails_is_named(monkeypatch, capsys):
    """By the traceback of the step that tried it, not by wrap's refusal alone."""

    def broken(*arguments):
        raise RuntimeError("an illegal memory access was encountered")

    use_plain_kernels(monkeypatch)
    monkeypatch.setattr(step_body, "compact", broken)
    assert gpu_first_contact.main(["--device", "cpu", "--only", "unfused"]) == 1
    printed = capsys.readouterr().out
    assert "in broken" in printed and "cannot serve here" in printed


class FakeBackend:
    reason, fusion = "for a reason", None

    def __init__(self, name):
        self.name = name

    def __str__(self):
        return self.name


def contact_with(tokens, *, backend="triton", dtype=torch.float32):
    """A contact whose engines give these tokens, captured ones first."""
    contact = gpu_first_contact.Contact(torch.device("cpu"))
    answers = iter(tokens)
    contact._engine = lambda *arguments, **settings: SimpleNamespace(backend=FakeBackend(backend), tokens=next(answers))
    contact._decoded = lambda engine, **law: engine.tokens
    return contact, SimpleNamespace(dtype=dtype)


def test_other_tokens_than_eager_ones_are_noticed():
    contact, model = contact_with([[[1, 2], [3]], [[1, 2], [3]]])
    assert contact._compared(model) == "6/6 tokens as eager; for a reason"
    contact, model = contact_with([[[1, 2], [3]], [[1, 9], [3]]])
    with pytest.raises(AssertionError, match="must be those of eager steps, got 4 of 6"):
        contact._compared(model)
    contact, model = contact_with([[[1, 2], [3]], [[1, 9], [3]]], dtype=torch.bfloat16)
    assert contact._compared(model).startswith("4/6")
    contact, model = contact_with([[[1]], [[1]]], backend="sdpa")
    with pytest.raises(AssertionError, match="must be captured to the end"):
        contact._compared(model)


@pytest.mark.parametrize("options", [["--only", "hope", "--device", "cpu"], ["--device", "cuda"]])
def test_what_cannot_be_run_is_refused(options, monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit):
        gpu_first_contact.main(options)
    assert "--only must be some of" in (error := capsys.readouterr().err) or "no GPU is visible" in error


def test_sizes_of_a_profile():
    assert profile_step.read_sizes(profile_step.STEPS)[1] == (80, 1, 2048)
    with pytest.raises(SystemExit):
        profile_step.main(["--smoke", "--steps", "80@1"])


def test_a_profile_is_of_the_device_and_type_that_are_asked_for(monkeypatch):
    asked = []

    def model(shape, *, device, dtype, max_positions):
        raise InterruptedError(asked.append((shape.name, device, dtype)))

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr("gpu_parts.bench_model.BenchModel", model)
    for options in ([], ["--device", "cuda:1", "--dtype", "float16", "--shape", "qwen3-8b"]):
        with pytest.raises(InterruptedError):
            profile_step.main(options)
    assert asked == [
        ("qwen2.5-7b", torch.device("cuda"), torch.bfloat16),
        ("qwen3-8b", torch.device("cuda:1"), torch.float16),
    ]


@pytest.mark.usefixtures("interpreter")
def test_a_profile_names_its_operations(monkeypatch):
    use_plain_kernels(monkeypatch)
    bench = BenchModel(SMOKE_SHAPE, device=torch.device("cpu"), dtype=torch.float32, max_positions=256)
    assert "aten::mm" in profile_step.profiled(bench, 1, 1, 5, repeats=1)


@pytest.mark.parametrize("command", [gpu_first_contact.main, gpu_bench.main, profile_step.main])
@pytest.mark.parametrize(("device", "rule"), [("cdua", "must be cpu, cuda or"), ("cuda:1", "one of the 1 GPUs")])
def test_a_device_that_is_not_there_is_refused_in_a_line(monkeypatch, capsys, command, device, rule):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(SystemExit, match="2"):
        command(["--device", device])
    assert rule in capsys.readouterr().err


@pytest.mark.parametrize("command", [gpu_first_contact.main, gpu_bench.main, profile_step.main])
def test_a_gpu_of_amd_is_refused_in_a_line(monkeypatch, capsys, command):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.version, "hip", "7.2")
    with pytest.raises(SystemExit, match="2"):
        command(["--device", "cuda"])
    assert "must be an NVIDIA GPU or cpu, got 'cuda' of a torch for ROCm" in capsys.readouterr().err
