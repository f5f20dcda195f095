"""Checkpoints as epochs: their order, what is left out, and what a kept lookup is worth where it must be worth much."""

import json
import re

import numpy as np
import pytest
from replay_epochs import main, read_epochs, replay_epochs, summarise
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

PATTERN = re.compile(r"checkpoint-(\d+)")


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    """Two problems at checkpoints 5, 20 and 100, in another order; every checkpoint says nearly the same."""
    folder = tmp_path_factory.mktemp("epochs")
    rng = np.random.default_rng(0)
    walks = rng.integers(0, 400, (2, 150))
    records = []
    for number in (100, 5, 20):
        for problem, walk in enumerate(walks):
            tokens = np.where(rng.random(150) < 0.03, rng.integers(0, 400, 150), walk)
            tokens[0] = number
            name = {"problem_id": f"p{problem}", "model": f"m checkpoint-{number}"}
            records.append(name | {"token_ids": tokens.tolist()})
    for model in ("other", 7):
        records.append({"problem_id": "p0", "model": model, "token_ids": [1] * 100})
    records.append({"problem_id": "p0", "model": "m checkpoint-7", "loop": True, "token_ids": [1] * 100})
    (folder / "walks.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    Tokenizer(WordLevel({"w0": 0}, unk_token="w0")).save(str(folder / "tokenizer.json"))
    return folder / "walks.jsonl"


def epochs_of(file, max_tokens=None):
    return read_epochs(file, Tokenizer.from_file(str(file.parent / "tokenizer.json")), PATTERN, max_tokens)


def test_checkpoints_are_in_the_order_of_their_numbers(file):
    numbers, epochs = epochs_of(file, max_tokens=100)
    assert numbers == [5.0, 20.0, 100.0]
    assert [[one.tokens[0] for one in epoch] for epoch in epochs] == [[5, 5], [20, 20], [100, 100]]
    assert [[one.problem for one in epoch] for epoch in epochs] == [[0, 1]] * 3
    assert all(len(one.tokens) == 100 for epoch in epochs for one in epoch)


def test_a_kept_lookup_knows_earlier_epochs_and_a_fresh_one_does_not(file):
    _, epochs = epochs_of(file)
    tau = {lookup: summarise(replay_epochs(epochs, lookup, 0.95, 8)[0]) for lookup in ("fresh", "kept", "renamed")}
    assert tau["fresh"]["tau"] < 1.2  # random walks: nothing repeats within an epoch
    assert tau["kept"]["tau"] > 3 and tau["renamed"]["tau"] > 3
    assert tau["kept"]["tau_by_epoch"][0] == tau["fresh"]["tau_by_epoch"][0]
    assert tau["kept"]["num_tokens"] == 2 * 149  # both later epochs of the even problem


def test_the_command_prints_a_table_and_a_document(file, capsys):
    tokenizer = str(file.parent / "tokenizer.json")
    assert main([str(file), "--tokenizer", tokenizer, "--lookup", "kept", "--fade", "0.9", "1"]) == 0
    lines = capsys.readouterr().out.splitlines()
    results = json.loads(lines[-1])["results"]
    assert [(one["fade"], one["half"]) for one in results] == [(0.9, "even"), (0.9, "odd"), (1.0, "even"), (1.0, "odd")]
    assert main([str(file), "--tokenizer", tokenizer, "--checkpoint", r"step-(\d+)"]) == 2
    assert "at least two checkpoints" in capsys.readouterr().err
    assert main([str(file), "--tokenizer", tokenizer, "--checkpoint", "(m) check"]) == 2
    assert "must have a number in its first group, got 'm' in 'm checkpoint-100'" in capsys.readouterr().err
    nameless = file.with_name("nameless.jsonl")
    nameless.write_text('{"model": "checkpoint-5"}\n')
    assert main([str(nameless), "--tokenizer", tokenizer]) == 2
    assert "must have problem_id in every record, got fields ['model']" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "message"),
    [(["--checkpoint", "("], "must be a regular expression, got '('"), (["--max-tokens", "63"], "at least 64, got 63")],
)
def test_options_without_meaning_are_refused(file, options, message, capsys):
    with pytest.raises(SystemExit, match="2"):
        main([str(file), "--tokenizer", str(file.parent / "tokenizer.json"), *options])
    assert message in capsys.readouterr().err
