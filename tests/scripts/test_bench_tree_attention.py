"""The bench of attention in small: both ways are timed, and one with other results is a fault."""

import json

import bench_tree_attention
import pytest
import torch

SMALL = ["--rows", "2", "--nodes", "1,3", "--lengths", "20", "--threads", "1", "--rounds", "2", "--megabytes", "1"]


def test_both_ways_are_timed(capsys):
    bench_tree_attention.main(SMALL)
    *_, document = capsys.readouterr().out.splitlines()
    found = json.loads(document)
    assert [(each["rows"], each["nodes"], each["length"]) for each in found] == [(2, 1, 20), (2, 3, 20)]
    assert all(0 < each[way] < 1 for each in found for way in ("torch", "ours"))


def test_a_way_with_other_results_is_a_fault(monkeypatch):
    own = bench_tree_attention.attend

    def attend(*arguments, stand_plan):
        mixed, _ = own(*arguments, stand_plan=stand_plan)
        return (mixed * 1.01 if stand_plan.has_few_tokens else mixed), None

    monkeypatch.setattr(bench_tree_attention, "attend", attend)
    with pytest.raises(AssertionError, match="not close"):
        bench_tree_attention.main(SMALL)


def test_the_ways_differ(monkeypatch):
    """Not one way under two names."""
    called = []
    own = torch.nn.functional.scaled_dot_product_attention
    monkeypatch.setattr(
        "stand.forward.tree_attention.scaled_dot_product_attention", lambda *a, **k: called.append(1) or own(*a, **k)
    )
    plans = bench_tree_attention.plans(2, 3, 20)
    keys, query = torch.randn(2, 3, 23, 64), torch.randn(1, 6, 9, 64).transpose(1, 2)
    with torch.inference_mode():
        bench_tree_attention.attend(torch.nn.Module(), query, keys, keys, None, stand_plan=plans["ours"])
        assert not called
        bench_tree_attention.attend(torch.nn.Module(), query, keys, keys, None, stand_plan=plans["torch"])
    assert called
