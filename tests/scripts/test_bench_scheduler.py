"""Blocks against places in small."""

import json
import signal

import bench_scheduler
import pytest
from workloads.problem_sets import Task


def test_both_ways_draw_the_same_rows(tmp_path, capsys):
    path = tmp_path / "occupancy.png"
    options = ["--num-problems", "1", "--trajectories", "5", "--rows", "2", "--max-new-tokens", "20", "--budget", "4"]
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


def test_the_first_draws_of_a_process_are_thrown_away(monkeypatch, capsys):
    drawn, real = [], bench_scheduler.Bench.draw

    def draw(self, arm, task, *, seed):
        drawn.append((arm, self.options.trajectories, self.options.max_new_tokens))
        return real(self, arm, task, seed=seed)

    monkeypatch.setattr(bench_scheduler.Bench, "draw", draw)
    options = ["--num-problems", "1", "--trajectories", "3", "--rows", "1", "--max-new-tokens", "33", "--budget", "4"]
    bench_scheduler.main([*options, "--verifier", "traversal"])
    assert drawn == [("blocks", 2, 32), ("places", 2, 32), ("blocks", 3, 33), ("places", 3, 33)]
    assert "with traversal the arms draw other texts" in capsys.readouterr().err


def test_an_interrupted_run_reports_the_problems_that_are_finished(monkeypatch, capsys):
    monkeypatch.setattr(bench_scheduler, "Bench", lambda options: Fake(iter(2 * ({0: [1]},))))
    monkeypatch.setattr(Fake, "tasks", 2 * Fake.tasks)
    assert bench_scheduler.main(["--num-problems", "2"]) == 143
    captured = capsys.readouterr()
    assert captured.err.endswith("bench_scheduler: ended early by SIGTERM\n")
    assert json.loads(captured.out.splitlines()[-1])["ratios"] == [1.0]


def test_a_plot_without_a_folder_is_refused_before_the_work(capsys):
    with pytest.raises(SystemExit, match="2"):
        bench_scheduler.main(["--plot", "no/such/folder/plot.png"])
    assert "argument --plot: it must name a file in an existing folder" in capsys.readouterr().err


def test_a_missing_model_is_one_line(capsys):
    assert bench_scheduler.main(["--model", "/no/such/model"]) == 2
    assert capsys.readouterr().err.startswith("bench_scheduler: --model must be an existing folder")


class Fake:
    tasks = (Task("one", "1 + 1", 2),)

    def __init__(self, tokens):
        self.tokens = tokens

    def warm_up(self):
        pass

    def draw(self, arm, task, *, seed):
        tokens = next(self.tokens, None)
        if tokens is None:
            signal.raise_signal(signal.SIGTERM)
        return bench_scheduler.Drawn(tokens, 1.0, 1.0, ((1.0, 1),), ((64, 16),))
