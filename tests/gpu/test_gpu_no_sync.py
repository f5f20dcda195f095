"""No operation of a captured step waits for the device, nor does its launcher: shown on fake CUDA tensors.

A fake tensor has a device, a shape and a type but no values, so whatever would read a value raises; copies to the host,
which would not, are watched for. A custom operation runs its registered stand-in there; hence the launchers themselves
are run too, with their kernels cut out.
"""

from __future__ import annotations

import pytest
import torch
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode

pytest.importorskip("triton")

from no_host_copy import HostCopyError, NoHostCopy
from no_kernel import without_kernels

from stand.gpu.kernels import compact as compact_kernel
from stand.gpu.kernels.verification import draw as draw_kernel
from stand.gpu.kernels.verification import filter as filter_kernel
from stand.gpu.kernels.verification import follow as follow_kernel
from stand.gpu.kernels.verification import race as race_kernel
from stand.gpu.kernels.verification import softmax as softmax_kernel
from stand.gpu.kernels.verification import top_tokens as top_tokens_kernel
from stand.gpu.kernels.verification import traverse as traverse_kernel

M, V, S, B = 12, 3000, 5, 3  # nodes, tokens, candidates, rows


def race_arguments(device):
    return torch.full((M, V), 1.0 / V, device=device), torch.arange(M, device=device)


def traverse_arguments(device):
    integers = {"dtype": torch.int32, "device": device}
    parents = torch.tensor([-1, 0, 0, 1] * B, **integers)
    offsets = torch.arange(0, M + 1, M // B, **integers)
    support_ids = torch.arange(M * S, **integers).reshape(M, S)
    token_ids = torch.tensor([0, 0, 1, 6] * B, device=device)
    law = torch.full((M, S), 1.0 / S, device=device)
    uniforms = torch.full((M,), 0.5, dtype=torch.float64, device=device)
    words = torch.zeros(M, dtype=torch.int64, device=device), torch.zeros(M, 1, dtype=torch.int64, device=device)
    return race_arguments(device)[0], token_ids, parents, offsets, support_ids, law, uniforms, *words


def compact_arguments(device):
    storage = torch.zeros(2, 2, B, 2, 20, 16, device=device)
    path = torch.tensor([[2, 4, -1]] * B, device=device)
    pages = torch.tensor([[row] for row in range(B)], dtype=torch.int32, device=device)
    return storage, pages, torch.arange(B, device=device), torch.full((B,), 7, device=device), path


def top_tokens_arguments(device):
    return race_arguments(device)[0], 10


def softmax_arguments(device):
    return torch.empty(M, V, device=device), torch.zeros(M, V, dtype=torch.bfloat16, device=device), 0.6


def filter_arguments(device):
    return torch.full((2, V), 1.0 / V, device=device), 20, 0.95, 0.01


def verdict_arguments(device):
    """Rows of four nodes, and room for their verdicts."""
    integers, halves = {"dtype": torch.int64, "device": device}, {"dtype": torch.int32, "device": device}
    offsets = torch.arange(0, M + 1, M // B, **halves)
    return offsets, *(torch.zeros(B, **kind) for kind in (integers, integers, halves)), torch.zeros(B, 64, **integers)


def node_draw_arguments(device):
    return race_arguments(device)[0], torch.full((M,), 0.5, dtype=torch.float64, device=device)


def residual_arguments(device):
    reals = {"dtype": torch.float64, "device": device}
    laws, support_ids = race_arguments(device)[0], traverse_arguments(device)[4]
    stops = torch.zeros(B, dtype=torch.int64, device=device)
    owed = torch.ones(M, S, **reals), torch.ones(M, **reals), torch.full((B,), 0.5, **reals)
    nodes = torch.zeros(M, dtype=torch.int64, device=device)
    return laws, stops, support_ids, *owed, nodes, nodes.clone(), *verdict_arguments(device)


def follow_arguments(device):
    nodes = (torch.zeros(M, dtype=torch.int64, device=device) for _ in range(4))
    drawn, *rest = nodes
    return drawn, race_arguments(device)[0], *rest, *verdict_arguments(device)


OPERATIONS = {
    "draw_nodes": (draw_kernel, draw_kernel.draw_nodes, node_draw_arguments),
    "draw_residuals": (draw_kernel, draw_kernel.draw_residuals, residual_arguments),
    "follow": (follow_kernel, follow_kernel.follow, follow_arguments),
    "race": (race_kernel, race_kernel.race, race_arguments),
    "traverse": (traverse_kernel, traverse_kernel.traverse, traverse_arguments),
    "compact": (compact_kernel, compact_kernel.compact, compact_arguments),
    "top_tokens": (top_tokens_kernel, top_tokens_kernel.top_tokens, top_tokens_arguments),
    "softmax_rows": (softmax_kernel, softmax_kernel.softmax_rows, softmax_arguments),
    "filter_rows": (filter_kernel, filter_kernel.filter_rows, filter_arguments),
}


def tensors(results) -> list[torch.Tensor]:
    return [] if results is None else [results] if isinstance(results, torch.Tensor) else list(results)


@pytest.mark.parametrize("name", OPERATIONS)
def test_the_operation_runs_on_tensors_without_values(name):
    _, operation, arguments = OPERATIONS[name]
    with FakeTensorMode(), NoHostCopy():
        for result in tensors(operation(*arguments("cuda"))):
            assert result.device.type == "cuda"


@pytest.mark.parametrize("name", OPERATIONS)
def test_the_launcher_runs_on_tensors_without_values(name, monkeypatch):
    module, operation, arguments = OPERATIONS[name]
    grids = without_kernels(monkeypatch, module)
    with FakeTensorMode(), NoHostCopy():
        results = tensors(operation._init_fn(*arguments("cuda")))
    assert all(result.device.type == "cuda" for result in results)
    assert grids and all(isinstance(size, int) for grid in grids for size in grid)


@pytest.mark.parametrize("name", OPERATIONS)
def test_the_stand_in_agrees_with_the_operation(name):
    """Shapes, types and what is written to are as registered."""
    _, operation, arguments = OPERATIONS[name]
    torch.library.opcheck(operation, arguments("cpu"), test_utils=("test_schema", "test_faketensor"))


def test_reading_a_value_is_noticed(monkeypatch):
    """Controls: a launcher that reads a value, and one that copies to the host."""

    def read(probs, keys):
        return race_kernel.race._init_fn(probs.narrow(0, 0, int(keys.max().item())), keys)

    def copy(probs, keys):
        return race_kernel.race._init_fn(probs, keys.to("cpu", non_blocking=True))

    without_kernels(monkeypatch, race_kernel)
    for bad, error in ((read, DataDependentOutputException), (copy, HostCopyError)):
        with FakeTensorMode(), NoHostCopy(), pytest.raises(error):
            bad(*race_arguments("cuda"))
