"""The script that fits shapes: its defaults parse, it runs on the bundled model, its last line is JSON."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np

from stand.trees import TreeShape, fit_shape

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "fit_shape.py"
START = "branching:3,2,1"


def run_script(*arguments):
    return subprocess.run([sys.executable, SCRIPT, *arguments], capture_output=True, text=True, timeout=300)


def test_fits_the_bundled_model(tmp_path):
    saved = tmp_path / "shape.txt"
    settings = ["--num-problems", "1", "--trajectories", "1", "--max-new-tokens", "24", "--start", START]
    done = run_script(*settings, "--nodes", "4,8,16", "--save", saved)
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout.splitlines()[-1])
    counts, start = np.array(document["accepted_by_slot"]), TreeShape.parse(START)
    assert len(counts) == start.num_nodes and counts[0] == 0 and counts.sum() > 0
    for num_nodes in (4, 8, 16):
        fitted = document["fitted"][str(num_nodes)]
        assert TreeShape.parse(fitted["shape"]) == fit_shape(counts, start, num_nodes)
    assert fitted["predicted_tokens_per_step"] == 1.0 + counts.sum() / document["num_steps"]
    assert TreeShape.parse(saved.read_text().strip()) == start


def test_refuses_more_nodes_than_the_start_has():
    done = run_script("--start", "chain:3", "--nodes", "5")
    assert done.returncode == 2 and "at most 4" in done.stderr
