"""Blocks against places in small."""

import json

import bench_scheduler
import pytest


def test_both_ways_draw_the_same_rows(tmp_path, capsys):
    path = tmp_path / "occupancy.png"
    options = ["--num-problems", "1", "--trajectories", "6", "--rows", "2", "--max-new-tokens", "30", "--budget", "4"]
    bench_scheduler.main([*options, "--plot", str(path)])
    document = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert len(document["ratios"]) == 1 and document["median_cpu_ratio"] > 0 and path.stat().st_size > 1000


def test_occupancy_is_the_mean_over_time():
    drawn = bench_scheduler.Drawn({0: [1]}, 9.0, 4.0, ((1.0, 4), (3.0, 2), (4.0, 1)))
    assert drawn.occupancy(4) == pytest.approx((4 + 2 * 2 + 1) / 16)


def test_other_tokens_are_a_fault(monkeypatch):
    tokens = iter(({0: [1]}, {0: [2]}))
    monkeypatch.setattr(bench_scheduler, "Bench", lambda options: Fake(tokens))
    with pytest.raises(RuntimeError, match="must draw the same tokens"):
        bench_scheduler.main(["--num-problems", "1"])


class Fake:
    def __init__(self, tokens):
        self.tokens = tokens

    def draw(self, arm, task, *, seed):
        return bench_scheduler.Drawn(next(self.tokens), 1.0, 1.0, ((1.0, 1),))
