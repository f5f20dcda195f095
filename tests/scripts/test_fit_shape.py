"""The script that fits shapes: its defaults parse, it runs on the bundled model, its last line is JSON."""

import json
import signal
import sys

import fit_shape as script
import numpy as np
import pytest

from stand.trees import TreeShape, fit_shape

START = "branching:3,2,1"
SMALL = ["--num-problems", "2", "--trajectories", "1", "--max-new-tokens", "24", "--start", START]


def run(monkeypatch, capsys, *options):
    """(exit status, stdout, stderr) of the command."""
    monkeypatch.setattr(sys, "argv", ["fit_shape.py", *map(str, options)])
    status = script.main()
    return status, *capsys.readouterr()


def test_fits_the_bundled_model(tmp_path, monkeypatch, capsys):
    saved = tmp_path / "shape.txt"
    status, out, err = run(monkeypatch, capsys, *SMALL, "--nodes", "4,8,16", "--save", saved)
    assert status == 0 and "problem 2 of 2" in err
    document = json.loads(out.splitlines()[-1])
    counts, start = np.array(document["accepted_by_slot"]), TreeShape.parse(START)
    assert len(counts) == start.num_nodes and counts[0] == 0 and counts.sum() > 0
    for num_nodes in (4, 8, 16):
        fitted = document["fitted"][str(num_nodes)]
        assert TreeShape.parse(fitted["shape"]) == fit_shape(counts, start, num_nodes)
    assert fitted["predicted_tokens_per_step"] == 1.0 + counts.sum() / document["num_steps"]
    assert TreeShape.parse(saved.read_text().strip()) == start


def test_interrupted_run_fits_what_was_drawn(monkeypatch, capsys):
    real_draw = script.draw_with_engine

    def draw(*arguments, problem, **named):
        if problem == 1:
            signal.raise_signal(signal.SIGTERM)
        return real_draw(*arguments, problem=problem, **named)

    monkeypatch.setattr(script, "draw_with_engine", draw)
    status, out, err = run(monkeypatch, capsys, *SMALL, "--nodes", "4")
    assert status == 143 and "ended early by SIGTERM" in err
    assert json.loads(out.splitlines()[-1])["num_steps"] > 5


def test_outputs_are_checked_before_the_work(tmp_path, monkeypatch, capsys):
    status, out, err = run(monkeypatch, capsys, "--save", tmp_path / "missing" / "shape")
    assert (status, out) == (2, "") and "--save must name a file in an existing folder" in err


def test_refuses_more_nodes_than_the_start_has(capsys):
    with pytest.raises(SystemExit, match="2"):
        script.read_arguments(["--start", "chain:3", "--nodes", "5"])
    assert "at most 4" in capsys.readouterr().err
