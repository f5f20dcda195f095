"""The bench of a step's sizes in small."""

import json

import bench_steps
import pytest


@pytest.mark.parametrize("options", [["--dtype", "float32"], ["--dtype", "bfloat16", "--no-fuse"]])
def test_every_size_is_timed(capsys, options):
    sizes = ["--shape", "smoke", "--rows", "1,2", "--most-tokens", "3", "--length", "5", "--threads", "1"]
    bench_steps.main([*sizes, *options])
    found = json.loads(capsys.readouterr().out.strip().splitlines()[-1])
    assert [(each["rows"], each["tokens"]) for each in found] == [(1, 1), (1, 2), (1, 3), (2, 2), (2, 3)]
    assert all(0 < each["seconds"] < 1 and each["ratio"] >= 1.0 for each in found)


@pytest.mark.parametrize("given", [["--most-tokens", "4"], ["--length", "8192"]])
def test_sizes_that_would_be_changed_are_refused(given, capsys):
    with pytest.raises(SystemExit) as refusal:
        bench_steps.read_options(given)
    assert refusal.value.code == 2 and given[0] in capsys.readouterr().err.splitlines()[-1]
