"""The bench of a step's sizes in small."""

import json

import bench_steps
import pytest


@pytest.mark.parametrize("options", [["--dtype", "float32"], ["--dtype", "bfloat16", "--no-fuse"]])
def test_every_size_is_timed(capsys, options):
    sizes = ["--shape", "smoke", "--rows", "1,2", "--most-tokens", "3", "--length", "5", "--threads", "1"]
    bench_steps.main([*sizes, *options])
    found = json.loads(capsys.readouterr().out.strip().splitlines()[-1])
    assert [(each["rows"], each["tokens"]) for each in found] == [(1, 1), (1, 2), (1, 3), (2, 2), (2, 3), (2, 4)]
    assert all(0 < each["seconds"] < 1 and each["ratio"] >= 1.0 for each in found)
