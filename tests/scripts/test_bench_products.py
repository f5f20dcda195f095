"""The bench of products in small: every way is timed, and one with other results is a fault."""

import json
from types import SimpleNamespace

import bench_products
import pytest
import torch

OPERATOR = {"_linear_pointwise": None}  # which would fail
SMALL = ["--shapes", "20x48,8x16", "--tokens", "1,3", "--threads", "1", "--rounds", "2", "--megabytes", "1"]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_every_way_is_timed(capsys, dtype):
    bench_products.main([*SMALL, "--dtype", dtype])
    *_, document = capsys.readouterr().out.splitlines()
    found = json.loads(document)
    assert [(each["rows"], each["depth"], each["tokens"]) for each in found] == [
        (20, 48, 1), (20, 48, 3), (8, 16, 1), (8, 16, 3)
    ]  # fmt: skip
    assert all(0 < each[way] < 1 for each in found for way in bench_products.ways(getattr(torch, dtype)))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_what_cannot_be_run_is_left_out(monkeypatch, capsys, dtype):
    without = object() if dtype == "float32" else SimpleNamespace(_is_mkldnn_bf16_supported=lambda: False, **OPERATOR)
    monkeypatch.setattr(bench_products.torch.ops, "mkldnn", without)
    bench_products.main([*SMALL, "--dtype", dtype])
    table, document = capsys.readouterr().out.strip().split("\n\n")
    assert "onednn" not in json.loads(document)[0] and " - " in table.splitlines()[2]


def test_a_way_with_other_results_is_a_fault(monkeypatch):
    monkeypatch.setattr(bench_products, "few_token_product", lambda x, weight: 1.1 * (x @ weight.T))
    with pytest.raises(AssertionError, match="not close"):
        bench_products.main(SMALL)


def test_shapes_are_pairs(capsys):
    with pytest.raises(SystemExit):
        bench_products.main(["--shapes", "20x48x3"])
    assert "as 576x1536" in capsys.readouterr().err
