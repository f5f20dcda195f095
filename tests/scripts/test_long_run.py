"""Runs of trajectories that are stopped: what was finished is in the file, and the rest comes as it would have come."""

import io
import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import throughput
import train_lookup
from long_runs import trajectory_run
from measuring import progress
from measuring.output_file import JsonLines
from measuring.progress import RunProgress
from workloads import recordings
from workloads.answers import is_decided, majority_answer

import stand
from stand.trees import BlendedLookup

SCRIPT = Path(throughput.__file__)
SMALL = ["--only", "drafted", "--num-problems", "2", "--trajectories", "6", "--rows", "3", "--budget", "8"]
SMALL += ["--max-new-tokens", "60", "--verifier", "match", "--seed", "5"]


def run(monkeypatch, path: Path, *options: str) -> int:
    monkeypatch.setattr(sys, "argv", ["throughput.py", *SMALL, "--output", str(path), *options])
    return throughput.main()


def trajectories(path: Path) -> list[tuple]:
    """What does not depend on time and drafts, of every line but the first; in the file's order."""
    names = ("problem_id", "row", "sample", "seed", "finish_reason", "found", "num_tokens", "text")
    lines = [json.loads(line) for line in path.read_text().splitlines()[1:]]
    return [(*(line[name] for name in names), tuple(line["token_ids"])) for line in lines]


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory) -> list[tuple]:
    path = tmp_path_factory.mktemp("run") / "whole.jsonl"
    with pytest.MonkeyPatch.context() as patch:
        assert run(patch, path) == 0
    found = trajectories(path)
    assert [line[1] for line in found] != sorted(line[1] for line in found)
    assert len({line[-1] for line in found}) == len(found) == 12  # rows that were numbered anew would be others
    return found


def test_a_run_is_a_file_of_recordings(tmp_path, monkeypatch):
    """Samples by row, though they stand in the order of their ends; the line with settings is none."""
    path = tmp_path / "run.jsonl"
    assert run(monkeypatch, path) == 0
    monkeypatch.setattr(recordings, "SHORTEST", 1)
    tokenizer = recordings.read_tokenizer(SCRIPT.parent / "reasoner" / "tokenizer.json")
    found = recordings.read_recordings(path, tokenizer, recordings.Selection())
    by_row = sorted(trajectories(path), key=lambda line: line[1])
    by_row.sort(key=lambda line: line[1] % 2)  # two problems, sample by sample
    assert [tuple(one.tokens.tolist()) for one in found] == [line[-1] for line in by_row]
    assert [one.problem for one in found] == [0] * 6 + [1] * 6 and all(len(one.prompt) for one in found)
    assert len(list(train_lookup.read_runs(path, tokenizer))) == len(found) == 12


@pytest.mark.slow
def test_a_killed_run_goes_on_as_if_nothing_had_happened(tmp_path, monkeypatch, capsys, uninterrupted):
    path = tmp_path / "killed.jsonl"
    command = [sys.executable, str(SCRIPT), *SMALL, "--output", str(path)]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        while process.poll() is None and (not path.exists() or path.read_bytes().count(b"\n") < 3):
            time.sleep(0.005)
        process.kill()
    before = trajectories(path)
    assert 2 <= len(before) < 12
    with path.open("ab") as file:
        file.write(b'{"row": 11, "tex')  # as a kill may leave it
    assert run(monkeypatch, path, "--resume") == 0
    after = trajectories(path)
    assert after[: len(before)] == before and sorted(after) == sorted(uninterrupted)
    document = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert document["is_complete"] and document["num_tokens"] == sum(line[6] for line in after)
    assert run(monkeypatch, path, "--resume") == 0 and trajectories(path) == after  # nothing is left to do


def raise_in_a_finalizer() -> None:
    """Python swallows what is raised there."""

    class Swallows:
        def __del__(self):
            signal.raise_signal(signal.SIGTERM)

    Swallows()


def interrupt_at(monkeypatch, step: int, interrupt=lambda: signal.raise_signal(signal.SIGINT)) -> None:
    steps, real = iter(range(10**6)), RunProgress.step

    def stopped(self, a_run):
        if next(steps) == step:
            interrupt()
        real(self, a_run)

    monkeypatch.setattr(RunProgress, "step", stopped)


def test_an_interrupted_run_ends_politely(tmp_path, monkeypatch, capsys, uninterrupted):
    path, saved = tmp_path / "run.jsonl", tmp_path / "lookup"
    with monkeypatch.context() as patch:
        interrupt_at(patch, 60)
        assert run(patch, path, "--save-lookup", str(saved)) == 130
    said = capsys.readouterr()
    before = trajectories(path)
    assert 0 < len(before) < 12 and f"{len(before)} of 12 trajectories, " in said.err
    assert json.loads(said.out.splitlines()[-1])["trajectories"] == len(before)
    learned = len(BlendedLookup.load(saved))
    assert learned > 0
    sizes = []
    monkeypatch.setattr(throughput.LongRun, "draw", watched(throughput.LongRun.draw, sizes))
    assert run(monkeypatch, path, "--resume", "--save-lookup", str(saved)) == 0
    assert sizes == [learned]  # the second session began with what the first had learned
    assert sorted(trajectories(path)) == sorted(uninterrupted)


def watched(draw, sizes: list[int]):
    def call(self, engine, *rest, **named):
        sizes.append(len(engine.lookup))
        draw(self, engine, *rest, **named)

    return call


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_an_interruption_in_a_finalizer_ends_the_run_and_the_next_goes_on_with_its_lookup(tmp_path, monkeypatch):
    path, base, saved = tmp_path / "run.jsonl", tmp_path / "base.lookup", tmp_path / "run.lookup"
    with monkeypatch.context() as patch:
        interrupt_at(patch, 0)
        assert run(patch, tmp_path / "other.jsonl", "--save-lookup", str(base)) == 130
    files = ["--lookup", str(base), "--save-lookup", str(saved)]
    with monkeypatch.context() as patch:
        interrupt_at(patch, 60, raise_in_a_finalizer)
        assert run(patch, path, *files) == 143
    before, sizes = trajectories(path), []
    assert 0 < len(before) < 12
    monkeypatch.setattr(throughput.LongRun, "draw", watched(throughput.LongRun.draw, sizes))
    learned = len(BlendedLookup.load(saved))
    interrupt_at(monkeypatch, 0)
    assert run(monkeypatch, path, *files, "--resume") == 130
    assert sizes == [learned] and learned > len(BlendedLookup.load(base))


def test_changed_problems_are_refused(tmp_path, monkeypatch, capsys):
    path, problems = tmp_path / "run.jsonl", tmp_path / "problems.jsonl"
    options = ["--num-problems", "1", "--problems", str(problems)]
    problems.write_text('{"problem": "Find 8^34 mod 5.", "answer": 4}\n')
    with monkeypatch.context() as patch:
        interrupt_at(patch, 0)
        assert run(patch, path, *options) == 130
    for changed in ('{"problem": "Find 3^3 mod 7.", "answer": 4}', '{"problem": "Find 8^34 mod 5.", "answer": 5}'):
        problems.write_text(changed + "\n")
        assert run(monkeypatch, path, *options, "--resume") == 2
        assert "problems that the run began with" in capsys.readouterr().err


def test_a_run_goes_on_with_more_trajectories(tmp_path, monkeypatch, capsys, uninterrupted):
    """As if all had been asked for at once; fewer are refused."""
    path = tmp_path / "run.jsonl"
    assert run(monkeypatch, path, "--trajectories", "2") == 0 and len(trajectories(path)) == 4
    assert run(monkeypatch, path, "--resume") == 0
    assert sorted(trajectories(path)) == sorted(uninterrupted)
    assert run(monkeypatch, path, "--trajectories", "5", "--resume") == 2
    assert "not for fewer, got 5 after 6; give 6 or more" in capsys.readouterr().err


@pytest.mark.long
def test_trajectories_end_with_the_vote(tmp_path, monkeypatch, capsys):
    """Stopped and gone on with, too: the votes are those of all trajectories, and what was drawn is as it was."""
    path, limit = tmp_path / "run.jsonl", ("--max-new-tokens", "400")
    assert run(monkeypatch, tmp_path / "whole.jsonl", *limit) == 0
    uninterrupted = trajectories(tmp_path / "whole.jsonl")
    with monkeypatch.context() as patch:
        interrupt_at(patch, 150)
        assert run(patch, path, *limit, "--until-decided") == 130
    assert not json.loads(capsys.readouterr().out.splitlines()[-1])["is_complete"]
    assert run(monkeypatch, path, *limit, "--until-decided", "--resume") == 0
    output = capsys.readouterr().out.splitlines()
    document, found = json.loads(output[-1]), trajectories(path)
    assert set(found) < set(uninterrupted) and document["is_complete"]
    assert document["num_given_up"] == 12 - len(found) > 0
    for place in range(2):
        own, whole = [[line[5] for line in sorted(lines, key=lambda line: line[1]) if line[1] % 2 == place]
                      for lines in (found, uninterrupted)]  # fmt: skip
        assert len(own) == len(whole) or is_decided(own, len(whole) - len(own))
        assert majority_answer(own) == majority_answer(whole)
    assert [line.split()[-2] for line in output if " of 6 " in line] == ["-", "-"]
    assert run(monkeypatch, path, *limit, "--until-decided", "--resume") == 0 and trajectories(path) == found
    assert run(monkeypatch, path, *limit, "--resume") == 0  # the others are wanted after all
    assert sorted(trajectories(path)) == sorted(uninterrupted)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--resume", "--seed", "6"], "run.jsonl, got seed 5 -> 6; keep them, or begin another file"),
        (["--resume", "--verifier", "traversal"], "--resume needs a rule that draws a row's tokens again"),
        ([], "which holds earlier results"),
    ],
)
def test_what_cannot_go_on_is_refused(tmp_path, monkeypatch, capsys, options, message):
    path = tmp_path / "run.jsonl"
    settings = vars(throughput.read_arguments([*SMALL, "--output", str(path)]))
    settings = {name: trajectory_run.plain_setting(value) for name, value in settings.items()}
    path.write_text(json.dumps({"settings": settings}) + "\n")
    assert run(monkeypatch, path, *options) == 2 and message in capsys.readouterr().err


@pytest.mark.parametrize(
    "options",
    [
        ["--resume"],
        ["--until-decided"],
        ["--only", "drafted"],
        ["--only", "plain", "--trajectories", "1,2", "--output", "x"],
    ],
)
def test_options_that_do_not_belong_together_are_refused(options):
    with pytest.raises(SystemExit):
        throughput.read_arguments(options)


def test_lines_that_are_no_json_are_refused(tmp_path):
    path = tmp_path / "notes.txt"
    path.write_text("first\nsecond\n")
    with pytest.raises(ValueError, match="must hold JSON lines"):
        JsonLines(path, "--output", goes_on=True)
    assert path.read_text() == "first\nsecond\n"


class FakeRun:
    """Two rows live, 100 tokens in 40 steps and 4 seconds."""

    num_live = 2
    stats = stand.Stats(num_tokens=100, num_steps=40, wall_seconds=4.0)


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_progress_is_lines_in_a_file_and_a_bar_on_a_terminal(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    file, terminal = io.StringIO(), Terminal()
    for stream in (file, terminal):
        now[0] = 0.0
        told = RunProgress(10, 4, stream=stream, every=10.0)
        for now[0] in (3.0, 6.0, 9.0, 12.0):
            told.count(5 + int(now[0] > 7))
            told.step(FakeRun())
        told.close(FakeRun())
    lines = file.getvalue().splitlines()
    assert lines[0] == "6 of 10 trajectories, 2 rows live, 25 tokens/s, 2.50 tokens/step, 24 s left" and len(lines) == 2
    assert "6/10" in terminal.getvalue() and "2 rows live, 25 tokens/s, 2.50 tokens/step" in terminal.getvalue()
