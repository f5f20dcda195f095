"""Throughput runs that end early: whatever was finished is in the output file, and the tables tell of it."""

import json
import random
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import throughput
from measuring.interruption import Interrupted, Interruption
from measuring.trajectories import ARMS

from stand.trees import BlendedLookup

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "throughput.py"
SMALL = ["--num-problems", "2", "--trajectories", "1,2", "--max-new-tokens", "24", "--budget", "4"]
SAID = re.compile(r"^N = (\d+), problem (\d+) of \d+: (\w+) ", re.MULTILINE)


def finished_arms(path: Path) -> list[tuple[int, int, str]]:
    """(trajectories, number of the problem, arm) of every line but the first, which holds the settings."""
    if not path.exists():
        return []
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    return [(line["trajectories"], 1 + int(line["name"].split()[0]), line["arm"]) for line in lines[1:]]


def whole_problems(arms: list[tuple[int, int, str]]) -> list[tuple[int, int]]:
    done = dict.fromkeys((count, problem) for count, problem, _ in arms)
    return [key for key in done if all((*key, arm) in arms for arm in ARMS)]


@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_interrupted_run_keeps_what_was_finished(tmp_path, monkeypatch, capsys, number, status):
    output, saved = tmp_path / "results.jsonl", tmp_path / "lookup"
    draws, real_draw = [], throughput.draw

    def draw(*arguments, **named):
        draws.append(arguments[1])
        if len(draws) == 3 + 3 + 2:  # the warm-up, one problem, and in the second arm of the next one
            signal.raise_signal(number)
        return real_draw(*arguments, **named)

    monkeypatch.setattr(throughput, "draw", draw)
    files = ["--output", str(output), "--texts", "--save-lookup", str(saved)]
    monkeypatch.setattr(sys, "argv", ["throughput.py", *SMALL, *files])
    handlers = [signal.getsignal(one) for one in (signal.SIGINT, signal.SIGTERM)]
    assert throughput.main() == status
    assert [signal.getsignal(one) for one in (signal.SIGINT, signal.SIGTERM)] == handlers
    assert finished_arms(output) == [(1, 1, arm) for arm in ARMS] + [(1, 2, "plain")]
    texts = [json.loads(line)["texts"] for line in output.read_text().splitlines()[1:]]
    assert all(len(one) == 1 and len(one[0]) > 10 for one in texts)
    document = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert not document["is_complete"] and [item["name"] for item in document["problems"]] == ["0 remainder"]
    assert len(BlendedLookup.load(saved)) > 0


def test_errors_keep_what_was_finished_too(tmp_path, monkeypatch, capsys):
    real_draw = throughput.draw

    def draw(*arguments, problem):
        if problem == 1:
            raise OSError("the disk is gone")
        return real_draw(*arguments, problem=problem)

    monkeypatch.setattr(throughput, "draw", draw)
    monkeypatch.setattr(sys, "argv", ["throughput.py", *SMALL, "--output", str(tmp_path / "results.jsonl")])
    assert throughput.main() == 2
    said = capsys.readouterr()
    assert "the disk is gone" in said.err and len(json.loads(said.out.splitlines()[-1])["problems"]) == 1


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_swallowed_interruption_is_raised_again():
    class Swallows:
        def __del__(self):
            signal.raise_signal(signal.SIGTERM)

    with Interruption() as interruption:
        interruption.check()
        swallows = Swallows()
        del swallows
        with pytest.raises(Interrupted, match="SIGTERM") as caught:
            interruption.check()
    assert caught.value.exit_status == 143


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_ten_random_moments(tmp_path, number):
    rng = random.Random(int(number))
    reached = 0
    for attempt in range(10):
        output = tmp_path / f"{attempt}.jsonl"
        options = [*SMALL, "--trajectories", "1,2,3", "--output", str(output)]
        run = subprocess.Popen(
            [sys.executable, SCRIPT, *options], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        for line in run.stderr:
            if "warming up" in line:
                break
        try:
            out, err = run.communicate(timeout=rng.uniform(0.5, 7.0))
        except subprocess.TimeoutExpired:
            run.send_signal(number)
            out, err = run.communicate()
        arms = finished_arms(output)
        said = [(int(count), int(problem), arm) for count, problem, arm in SAID.findall(err)]
        assert arms[: len(said)] == said and len(arms) <= len(said) + 1
        if number == signal.SIGINT:
            assert run.returncode in (0, 130), err
            problems = json.loads(out.splitlines()[-1])["problems"] if out else []
            told = [(item["trajectories"], 1 + int(item["name"].split()[0])) for item in problems]
            assert told == whole_problems(arms)[: len(told)] and len(whole_problems(arms)) <= len(told) + 1
        reached += 0 < len(arms) < 2 * 3 * len(ARMS)
    assert reached >= 3, "the moments must fall into the run"
