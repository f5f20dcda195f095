"""Replaying recordings, and training lookup files: what is counted is what happened."""

import gzip
import json
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import replay
import workloads.recordings as recordings
from replay_parts import drafters as replay_drafters
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit

from stand.trees import BlendedLookup, LookupFileError, TreeShape, vocabulary_fingerprint

SCRIPTS = Path(__file__).resolve().parents[2] / "scripts"
WORDS = [f"w{number}" for number in range(50)]


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """A tokenizer and recordings: two problems, three samples each that repeat the same walk with slips."""
    folder = tmp_path_factory.mktemp("replay")
    tokenizer = Tokenizer(WordLevel({word: number for number, word in enumerate(WORDS)}, unk_token="w0"))
    tokenizer.pre_tokenizer = WhitespaceSplit()
    tokenizer.save(str(folder / "tokenizer.json"))
    rng = np.random.default_rng(0)
    with gzip.open(folder / "walks.jsonl.gz", "wt") as file:
        for problem in range(2):
            walk = rng.integers(0, 50, 120)
            for sample in range(3):
                tokens = np.where(rng.random(120) < 0.05, rng.integers(0, 50, 120), walk)
                record = {"problem_id": f"p{problem}", "sample_id": sample, "problem": "w1 w2 w3"}
                file.write(json.dumps(record | {"text": " ".join(WORDS[token] for token in tokens)}) + "\n")
            file.write(json.dumps({"problem_id": f"p{problem}", "text": "w1 w2"}) + "\n")  # too short
    return folder


def run(name, *arguments):
    return subprocess.run([sys.executable, SCRIPTS / name, *arguments], capture_output=True, text=True, timeout=300)


class Oracle:
    """Guesses the next `ahead` tokens of what it was told."""

    nbytes = None

    def __init__(self, stream, ahead):
        self.stream, self.ahead, self.verbs = stream, ahead, []

    def forget(self):
        self.verbs.append("forget")

    def start(self, problem, prompt):
        self.verbs.append("start")

    def draft(self, history, budget):
        tokens = self.stream[len(history) : len(history) + min(budget, self.ahead)]
        return tokens, np.arange(-1, len(tokens) - 1, dtype=np.int32), np.ones(len(tokens), np.float32)

    def guess(self, draft):
        return draft

    def learn(self, history, num_new):
        self.verbs.append((len(history), num_new))

    def finish(self):
        self.verbs.append("finish")


@pytest.mark.parametrize(("ahead", "budget", "tau"), [(0, 8, 1.0), (3, 8, 4.0), (9, 4, 5.0)])
def test_tau_is_accepted_tokens_plus_one(ahead, budget, tau):
    prompt, tokens = np.arange(5, dtype=np.int32), np.arange(101, dtype=np.int32)
    drafter = Oracle(np.concatenate([prompt, tokens]), ahead)
    tally = replay.replay(drafter, [recordings.Recording(0, 0, prompt, tokens)], budget=budget, setting="same")
    figures = replay.summarise(tally, drafter, None)
    assert figures["tau"] == tau and figures["num_tokens"] == 100
    assert (
        figures["accepted_by_depth"] == [1.0] * int(tau - 2) + [figures["accepted_by_depth"][-1]] if tau > 1 else True
    )
    learned = [verb for verb in drafter.verbs if isinstance(verb, tuple)]
    assert learned[0] == (6, 6) and sum(new for _, new in learned) == 106 and learned[-1][0] == 106
    assert drafter.verbs[-1] == "finish"


def test_a_wrong_guess_is_not_accepted():
    tokens, parents = np.array([7, 4, 8, 9], np.int32), np.array([-1, -1, 1, 0], np.int32)
    assert replay_drafters.accepted_path((tokens, parents, None), np.array([4, 8, 9], np.int32)) == [1, 2]
    assert replay_drafters.accepted_path((tokens, parents, None), np.array([8, 4], np.int32)) == []
    assert replay_drafters.accepted_path((tokens, parents, None), np.array([7], np.int32)) == [0]


@pytest.mark.parametrize(("setting", "forgets"), [("alone", 1 + 4), ("same", 1 + 1), ("all", 1)])
def test_settings_forget_when_they_say(setting, forgets):
    tokens = np.arange(70, dtype=np.int32)
    drafter = Oracle(tokens, 3)
    samples = [recordings.Recording(problem, sample, tokens[:0], tokens) for problem in (0, 1) for sample in (0, 1)]
    replay.replay(drafter, samples, budget=4, setting=setting)
    assert drafter.verbs.count("forget") == forgets


@pytest.mark.parametrize(("setting", "num_held"), [("alone", 70), ("same", 2 * 70), ("all", 4 * 70)])
def test_memory_is_told_over_the_tokens_that_it_holds(setting, num_held):
    """Those of problems that were forgotten counted too: with many problems a lookup seemed to need next to nothing."""
    tokens = np.arange(70, dtype=np.int32)
    drafter = Oracle(tokens, 3)
    samples = [recordings.Recording(problem, sample, tokens[:0], tokens) for problem in (0, 1) for sample in (0, 1)]
    tally = replay.replay(drafter, samples, budget=4, setting=setting)
    drafter.nbytes = 1000 + 90 * num_held
    assert replay.summarise(tally, drafter, 1000)["bytes_per_token"] == 90


def test_selection(files):
    tokenizer = Tokenizer.from_file(str(files / "tokenizer.json"))
    path = files / "walks.jsonl.gz"
    everything = recordings.read_recordings(path, tokenizer, recordings.Selection())
    assert [(one.problem, one.sample) for one in everything] == [(p, s) for p in (0, 1) for s in (0, 1, 2)]
    assert everything[0].prompt.tolist() == [1, 2, 3] and len(everything[0].tokens) == 120
    few = recordings.read_recordings(path, tokenizer, recordings.Selection(every=2, samples=2, max_tokens=64))
    assert [len(one.tokens) for one in few] == [64, 64]
    with pytest.raises(ValueError, match="problem_id"):
        (files / "bad.jsonl").write_text('{"text": "w1"}\n')
        recordings.read_recordings(files / "bad.jsonl", tokenizer, recordings.Selection())


def test_shallow_shapes_hang_together():
    for budget in (1, 8, 78, 79, 80, 500):
        shape = replay_drafters.shallow_first(TreeShape.paper(), budget)
        shape.check()
        assert shape.num_nodes == min(budget + 1, 80)
    assert replay_drafters.shallow_first(TreeShape.paper(), 80) == TreeShape.paper()


@pytest.mark.long
def test_lookup_learns_from_sample_to_sample(files):
    done = run(
        "replay.py", files / "walks.jsonl.gz", "--tokenizer", files / "tokenizer.json", "--budget", "4", "16",
        "--setting", "alone", "same", "all", "--plot", files / "tau.png",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    results = json.loads(done.stdout.splitlines()[-1])["results"]
    assert len(results) == 2 * 2 * 3 and (files / "tau.png").stat().st_size > 1000
    by = {(one["drafter"], one["budget"], one["setting"]): one for one in results}
    for drafter in ("lookup", "stand"):
        assert by[drafter, 16, "same"]["tau"] > 1.5 * by[drafter, 16, "alone"]["tau"]
    one = by["lookup", 16, "same"]
    assert one["tau"] > 2 and one["tau_by_sample"][-1] > 4 and one["tau"] >= by["lookup", 4, "same"]["tau"]
    assert one["tau_by_sample"][0] < one["tau_by_sample"][2] and one["num_tokens"] == 6 * 119
    assert one["mean_nodes"] <= 16 and 0 < one["coverage"] <= 1 and one["bytes_per_token"] > 0
    assert one["calibration"] and by["stand", 16, "same"]["calibration"] is None


def test_trained_files_help_and_are_bound_to_their_vocabulary(files, tmp_path):
    warm = tmp_path / "warm.blend"
    trained = run(
        "train_lookup.py", files / "walks.jsonl.gz", "--tokenizer", files / "tokenizer.json", "--output", warm
    )
    assert trained.returncode == 0, trained.stderr
    figures = json.loads(trained.stdout.splitlines()[-1])
    assert figures["num_tokens"] == 6 * 123 + 2 * 2 and figures["file_bytes"] == warm.stat().st_size
    lookup = BlendedLookup.load(warm)
    assert len(lookup) == figures["num_contexts"] > 500
    taus = []
    for extra in ([], ["--lookup", warm]):
        done = run(
            "replay.py", files / "walks.jsonl.gz", "--tokenizer", files / "tokenizer.json", "--drafter", "lookup",
            "--budget", "16", "--setting", "alone", *extra,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        taus.append(json.loads(done.stdout.splitlines()[-1])["results"][0]["tau"])
    assert taus[1] > 2 * taus[0]
    with pytest.raises(LookupFileError, match="vocabulary"):
        BlendedLookup.load(warm, fingerprint=vocabulary_fingerprint({"another": 0}))
    other = Tokenizer(WordLevel({word: number for number, word in enumerate(reversed(WORDS))}, unk_token="w0"))
    other.pre_tokenizer = WhitespaceSplit()
    other.save(str(tmp_path / "other.json"))
    refused = run("replay.py", files / "walks.jsonl.gz", "--tokenizer", tmp_path / "other.json", "--lookup", warm)
    assert refused.returncode == 2 and "vocabulary" in refused.stderr and "tau" not in refused.stderr


def test_plain_texts_train_too(files, tmp_path):
    (tmp_path / "text.txt").write_text(" ".join(WORDS))
    output = tmp_path / "text.blend"
    done = run("train_lookup.py", tmp_path / "text.txt", "--tokenizer", files / "tokenizer.json", "--output", output)
    assert done.returncode == 0 and json.loads(done.stdout.splitlines()[-1])["num_tokens"] == 50
    assert BlendedLookup.load(output).predict([7, 8], limit=1)[0].tolist() == [9]


def test_outputs_are_checked_before_the_work(files, tmp_path, monkeypatch, capsys):
    import train_lookup

    def fail(*arguments, **named):
        raise AssertionError("this is the work")

    monkeypatch.setattr(train_lookup, "read_runs", fail)
    monkeypatch.setattr(replay, "read_recordings", fail)
    common = [str(files / "walks.jsonl.gz"), "--tokenizer", str(files / "tokenizer.json")]
    missing = str(tmp_path / "missing" / "file")
    assert train_lookup.main([*common, "--output", missing]) == 2
    assert "--output must name a file in an existing folder" in capsys.readouterr().err
    for path, message in ((missing + ".png", "it must name a file in an existing folder"), ("a.xyz", "must end in")):
        with pytest.raises(SystemExit, match="2"):
            replay.main([*common, "--plot", path])
        assert f"--plot: {message}" in capsys.readouterr().err


def test_bad_options_are_refused(files):
    common = ["replay.py", files / "walks.jsonl.gz", "--tokenizer", files / "tokenizer.json"]
    cases = {
        "must be an integer >= 1": ["--budget", "0"],
        "--max-tokens must be at least 2": ["--max-tokens", "1"],
        "--samples: must be": ["--samples", "0"],
        "--every: must be": ["--every", "-1"],
        "--tokenizer must be a tokenizer.json": ["--tokenizer", __file__],
        "must not be given with": ["--lookup", __file__, "--max-bytes", "5"],
        "invalid choice": ["--drafter", "oracle"],
        "--floor has no effect without one of lookup in --drafter": ["--drafter", "stand", "--floor", "0.1"],
        "--max-bytes has no effect": ["--drafter", "stand", "--max-bytes", "5"],
    }
    for message, extra in cases.items():
        done = run(*common, *extra)
        assert done.returncode == 2 and message in done.stderr


def test_ids_beyond_int32_and_files_without_tokens_are_refused(files, tmp_path, capsys):
    import train_lookup

    path, empty, output = tmp_path / "big.jsonl", tmp_path / "empty.jsonl", tmp_path / "out.blend"
    path.write_text(json.dumps({"problem_id": 0, "token_ids": [1] * 99 + [2**31]}) + "\n")
    empty.touch()
    tokenizer = ["--tokenizer", str(files / "tokenizer.json")]
    for main, options in ((replay.main, []), (train_lookup.main, ["--output", str(output)])):
        assert main([str(path), *tokenizer, *options]) == 2
        assert "token_ids must be integers from 0 to 2147483647, got 2147483648" in capsys.readouterr().err
    assert train_lookup.main([str(empty), *tokenizer, "--output", str(output)]) == 2
    assert "files must hold tokens to learn, got none" in capsys.readouterr().err and not output.exists()
    with pytest.raises(SystemExit, match="2"):
        train_lookup.main([str(path), *tokenizer, "--output", str(output), "--max-tokens", "0"])


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("cut.jsonl.gz", gzip.compress(b"{}\n", mtime=0)[:-9], "must hold text in UTF-8, whole"),
        ("picture.jsonl", b"\x89PNG", "must hold text in UTF-8, whole"),
        ("table.jsonl", b"{}\nname,text\n", "must hold JSON lines, got another line 2"),
    ],
)
def test_a_file_that_holds_no_recordings_is_named(name, content, message, files, tmp_path, capsys):
    import train_lookup

    (tmp_path / name).write_bytes(content)
    for command, options in ((replay, []), (train_lookup, ["--output", str(tmp_path / "x")])):
        assert command.main([str(tmp_path / name), "--tokenizer", str(files / "tokenizer.json"), *options]) == 2
        assert f"{tmp_path / name} {message}" in capsys.readouterr().err


def test_records_may_have_settings_and_rows_of_their_own(files):
    """Neither is a line with a text a run's header, nor is `row` a number wherever it stands."""
    path, texts = files / "own.jsonl", [" ".join(WORDS[first] for _ in range(70)) for first in range(3)]
    for rows in ((None, 2, 1), ("b", "a", "c"), (3, 1, 2)):
        lines = [
            {"problem_id": 1, "text": text, "row": row, "settings": 1} for text, row in zip(texts, rows, strict=True)
        ]
        path.write_text("".join(json.dumps(line) + "\n" for line in lines))
        tokenizer = recordings.read_tokenizer(files / "tokenizer.json")
        found = [one.tokens[0] for one in recordings.read_recordings(path, tokenizer, recordings.Selection())]
        assert found == ([1, 2, 0] if rows == (3, 1, 2) else [0, 1, 2])


@pytest.mark.parametrize("field", ["text", "problem"])
def test_a_field_that_is_no_text_is_named(field, tmp_path):
    path = tmp_path / "recordings.jsonl"
    path.write_text(json.dumps({"problem_id": 1, "text": "a", "problem": "b", field: 3}) + "\n")
    with pytest.raises(ValueError, match=f"must hold {field} as text, got 3 in line 1"):
        list(recordings.read_records(path))


@pytest.mark.parametrize(
    ("record", "message"),
    [
        ({"problem_id": [1], "text": "w1"}, "must hold problem_id as text or a number, got [1] in line 1"),
        ({"problem_id": 1, "token_ids": 5}, "must hold token_ids as a list, got 5 in line 1"),
        ({"problem_id": 1, "text": None}, "must have text or token_ids, got neither in one of problem 1"),
        ({"problem_id": 1, "token_ids": []}, "must have text or token_ids, got neither in one of problem 1"),
        ({"problem_id": 1, "text": "w1 \ud83d"}, "must hold whole characters, got '\\ud83d' at place 3"),
    ],
)
def test_what_no_record_can_be_ends_in_one_line(record, message, files, tmp_path, capsys):
    """As recordings of servers have it: no answer, or half of a character. It was a traceback."""
    path = tmp_path / "recordings.jsonl"
    path.write_text(json.dumps(record) + "\n")
    assert replay.main([str(path), "--tokenizer", str(files / "tokenizer.json")]) == 2
    assert message in capsys.readouterr().err


def test_a_missing_package_is_told_before_anything_is_replayed(files, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "arctic_inference", None)
    monkeypatch.setattr(replay, "replay", None)
    command_line = [str(files / "walks.jsonl.gz"), "--tokenizer", str(files / "tokenizer.json")]
    assert replay.main([*command_line, "--drafter", "lookup", "arctic"]) == 2
    assert "pip install arctic-inference" in capsys.readouterr().err


@pytest.mark.parametrize(("error", "status"), [(None, 128 + signal.SIGINT), (ValueError("no"), 2)])
def test_a_run_that_ends_early_shows_what_was_finished(error, status, files, monkeypatch, capsys):
    replayed, done = replay.replay, []

    def ended(*arguments, **named):
        if done and error is not None:
            raise error
        if done:
            signal.raise_signal(signal.SIGINT)
        done.append(replayed(*arguments, **named))
        return done[-1]

    monkeypatch.setattr(replay, "replay", ended)
    command_line = [str(files / "walks.jsonl.gz"), "--tokenizer", str(files / "tokenizer.json"), "--max-tokens", "80"]
    assert replay.main(command_line) == status
    assert [one["budget"] for one in json.loads(capsys.readouterr().out.splitlines()[-1])["results"]] == [8]
