"""The benchmark of the lookup: runs alike, of which each call's shortest time counts."""

import json
import sys

import bench_lookup as bench
import numpy as np
import pytest
from tokenizers import Tokenizer
from tokenizers.models import WordLevel


@pytest.fixture
def arguments(tmp_path):
    """Recordings enough for one group and sixteen rows, of a walk that repeats itself."""
    Tokenizer(WordLevel({"w0": 0}, unk_token="w0")).save(str(tmp_path / "tokenizer.json"))
    rng = np.random.default_rng(0)
    walk = rng.integers(0, 200, 400)
    with open(tmp_path / "walks.jsonl", "w") as file:
        for problem in range(22):
            tokens = np.where(rng.random(400) < 0.1, rng.integers(0, 200, 400), walk).tolist()
            file.write(json.dumps({"problem_id": problem, "token_ids": tokens}) + "\n")
    return [str(tmp_path / "walks.jsonl"), "--tokenizer", str(tmp_path / "tokenizer.json"), "--groups", "1"]


def test_of_runs_alike_each_calls_shortest_time_counts():
    runs = [{"a": [[3.0, 1.0], [5.0]], "b": [[2.0]]}, {"a": [[2.0, 4.0], [6.0]], "b": [[1.0]]}]
    assert bench.shortest(runs) == {"a": [[2.0, 1.0], [5.0]], "b": [[1.0]]}
    with pytest.raises(ValueError):  # not alike
        bench.shortest([{"a": [[3.0, 1.0]]}, {"a": [[3.0]]}])


def test_the_quietest_group_counts_with_its_own_tail():
    figures = bench.summary([[1.0, 1.0, 100.0], [2.0, 2.0, 2.0]])
    assert figures["median"] == 1.0 and figures["p99"] > 90 and figures["median_all"] == 2.0


def test_the_same_calls_are_made_in_every_run(arguments, monkeypatch, capsys):
    calls = []
    shortest = bench.shortest
    monkeypatch.setattr(bench, "shortest", lambda runs: calls.append(runs) or shortest(runs))
    monkeypatch.setattr(bench, "SMALL_CAP", 1 << 20)
    monkeypatch.setattr(bench, "MANY_EVICTED", 2000)
    monkeypatch.setattr(sys, "argv", ["bench_lookup.py", *arguments, "--contexts", "2000", "--repeats", "2"])
    bench.main()
    figures = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert set(figures) == {"lookup, 2,000", "lookup, 16 MB"}
    lookup = figures["lookup, 2,000"]
    assert lookup["contexts"] >= 2000 and lookup["evicted"] == 0
    assert all(lookup[name]["median"] > 0 for name in ("draft_8", "draft_80", "draft_16_rows"))
    assert len(calls) == 2
    for first, second in calls:
        assert {name: [len(group) for group in groups] for name, groups in first.items()} == {
            name: [len(group) for group in groups] for name, groups in second.items()
        }


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--groups", "9"], "more than 43 recordings"),
        (["--max-tokens", "100"], "must be longer than 129 tokens, got one of 100"),
        (["--arctic"], "pip install arctic-inference"),
    ],
)
def test_what_cannot_be_measured_is_refused_before_anything_is_timed(options, message, arguments, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "arctic_inference", None)
    monkeypatch.setattr(bench, "repeated", None)
    monkeypatch.setattr(sys, "argv", ["bench_lookup.py", *arguments[1:], *options, arguments[0]])
    assert bench.main() == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("option", ["--contexts", "--max-tokens", "--samples", "--groups", "--max-bytes", "--repeats"])
def test_numbers_below_one_are_refused(option, arguments, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["bench_lookup.py", *arguments, option, "0"])
    with pytest.raises(SystemExit, match="2"):
        bench.main()
    assert f"{option}: must be an integer >= 1, got '0'" in capsys.readouterr().err
