"""Budgets replayed with times of steps: each step takes its time, and what is drafted follows from the times."""

import json
from pathlib import Path

import numpy as np
import pytest
from replay_budgets import Times, main

from stand.drafters.costs.assumed import AssumedCosts, ModelSizes
from stand.drafters.costs.step_cost import CostTable, StepCost

BENCH = Path(__file__).resolve().parents[2] / "docs" / "figures" / "gpu_h100.json"
STEPS = CostTable((StepCost(1, 100, (1, 4, 16), (1.0, 2.0, 6.0)), StepCost(4, 100, (4, 16), (3.0, 6.0))))
TIMES = Times(STEPS, AssumedCosts(ModelSizes(1000, ((1.0, 0),), 1), 206))


@pytest.fixture
def recordings(tmp_path):
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel

    Tokenizer(WordLevel({"w0": 0}, unk_token="w0")).save(str(tmp_path / "tokenizer.json"))
    walk = np.random.default_rng(0).integers(0, 200, 90)
    with open(tmp_path / "walks.jsonl", "w") as file:
        for sample in range(4):
            file.write(json.dumps({"problem_id": 0, "sample_id": sample, "token_ids": walk.tolist()}) + "\n")
    return [str(tmp_path / "walks.jsonl"), "--tokenizer", str(tmp_path / "tokenizer.json")]


def test_a_step_takes_the_time_of_the_next_size():
    assert TIMES.seconds(1, 100, 1) == 1.0 and TIMES.seconds(1, 100, 2) == TIMES.seconds(1, 100, 4) == 2.0
    assert TIMES.seconds(1, 100, 5) == pytest.approx(2.0 + 4.0 / 3)  # of 8 tokens
    assert TIMES.seconds(3, 100, 4) == 3.0  # of the nearest number of rows
    with pytest.raises(ValueError, match="at most 16 tokens, which were timed, got 17"):
        TIMES.seconds(1, 100, 17)


def test_every_way_of_drafting_has_its_limits():
    assert TIMES.limits("none", 1, 100) == {"budget": 0} and TIMES.limits("112", 1, 100) == {"budget": 15}
    curve, sizes, computed = (TIMES.limits(name, 1, 100)["rises"] for name in ("curve", "sizes", "computed"))
    assert np.count_nonzero(curve) == 15 and np.flatnonzero(sizes).tolist() == [0, 3, 7]
    assert np.flatnonzero(computed).tolist() == [0, 3, 7] and not np.allclose(computed, sizes)


def test_a_whole_replay_of_measured_steps(recordings, capsys):
    assert main([*recordings, "--bench", str(BENCH), "--rows", "1,2", "--lengths", "2048,32768", "--budget", "8"]) == 0
    document = json.loads(capsys.readouterr().out.splitlines()[-1])
    results = {(one["rows"], one["length"], one["drafts"]): one for one in document["results"]}
    assert len(results) == 2 * 2 * 5
    for (num_rows, length, drafts), one in results.items():
        assert one["speedup"] == pytest.approx(
            one["tokens_per_second"] / results[num_rows, length, "none"]["tokens_per_second"]
        )
        assert drafts != "none" or (one["tokens_per_step"], one["nodes_per_step"]) == (1.0, 0.0)
    assert results[1, 2048, "none"]["tokens_per_second"] == pytest.approx(1 / 6.778824999997823e-3)
    assert results[1, 2048, "8"]["speedup"] > 2  # samples are alike


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--bench", __file__], "must have step costs of qwen2.5-7b, as gpu_bench.py writes them"),
        (["--bench", str(BENCH), "--shape", "qwen3-8b"], "must have step costs of qwen3-8b"),
    ],
)
def test_a_file_without_times_is_refused(recordings, capsys, options, message):
    assert main([*recordings, *options]) == 2
    assert message in capsys.readouterr().err


def test_samples_are_cut_to_as_few_tokens_as_a_step_decodes(recordings, capsys):
    options = [*recordings, "--bench", str(BENCH), "--budget", "2", "--max-tokens"]
    assert main([*options, "10"]) == 0
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["results"][0]["tokens_per_step"] == 1.0
    with pytest.raises(SystemExit):
        main([*options, "1"])
    assert "--max-tokens must be at least 2, got 1" in capsys.readouterr().err
