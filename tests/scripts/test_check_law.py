"""The end-to-end check as a command: misuse is refused with status 2, which a failed law never gives."""

import json
import re
from collections import Counter
from pathlib import Path

import check_law
import pytest
from law_parts.kept_counts import KeptCounts

import stand


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["law", "--verifiers", "traversal,hope"], "--verifiers of `law` must be among traversal, .*, got hope"),
        (["tokens", "--verifiers", "traversal"], "--verifiers of `tokens` must be among match, coupled, got traversal"),
        (["law", "--kinds", "sweet"], "--kinds of `law` must be among sampled, .*, got sweet"),
        (["law", "--continuations", "0"], "--continuations: must be an integer >= 1"),
        (["tokens", "--prompts", "0"], "--prompts: must be an integer >= 1"),
        (["tokens", "--continuations", "5"], "--continuations has no effect on `tokens`"),
        (["law", "--rows", "5"], "--rows has no effect on `law`"),
        (["law", "--drafter", "eagle", "--kinds", "mixed"], "--kinds must be sampled with --drafter eagle, got mixed"),
        (["law", "--head", "folder"], "--head has no effect without a --drafter"),
        (["law", "--head", "folder", "--drafter", "neighbours"], "--head has no effect without a --drafter"),
    ],
)
def test_misuse_is_refused(options, message, capsys):
    with pytest.raises(SystemExit, match="2"):
        check_law.main(options)
    assert re.search(message, capsys.readouterr().err)


def test_defaults_are_those_of_the_check():
    law, tokens = check_law.arguments(["law"]), check_law.arguments(["tokens"])
    assert (law.continuations, law.kinds, law.prompts, law.level) == (20_000, ["sampled", "mixed"], 10, 1e-4)
    assert (tokens.rows, tokens.budget, tokens.prompts, tokens.verifiers) == (16, 32, 50, ["match", "coupled"])


@pytest.mark.parametrize(("wrong", "status"), [([], 0), (["match", "typical"], 1), (["typical"], 2)])
def test_a_blind_test_is_no_failed_law(wrong, status, monkeypatch, capsys):
    arms = [{"verifier": name, "as_it_should": name not in wrong} for name in ("match", "typical")]
    monkeypatch.setattr(check_law, "check_law", lambda *_: {"arms": arms})
    assert check_law.main(["law", "--continuations", "3"]) == status
    said = capsys.readouterr()
    assert json.loads(said.out)["arms"] == arms
    assert ("the test is blind; raise --continuations (3)" in said.err) == (status == 2)


def test_a_law_that_was_not_compared_is_not_confirmed(monkeypatch, capsys):
    arms = [{"verifier": "match", "as_it_should": True, "degrees_of_freedom": 0}]
    monkeypatch.setattr(check_law, "check_law", lambda *_: {"arms": arms})
    assert check_law.main(["law", "--continuations", "3"]) == 2
    assert "got one of match: nothing was tested; raise --continuations (3)" in capsys.readouterr().err


@pytest.mark.parametrize(("drafter", "head"), [("eagle", "streams"), ("streams-blended", "eagle"), ("blended", "no")])
def test_a_head_of_another_kind_is_named_with_its_option(drafter, head, capsys):
    """Before anything is decoded."""
    path = str(Path(check_law.__file__).parent / "drafters" / head)
    assert check_law.main(["law", "--drafter", drafter, "--head", path]) == 2
    assert f"--head must name what was trained for --model {check_law.REASONER}, got {path}" in capsys.readouterr().err


def test_counts_are_kept_and_a_line_that_was_cut_off_is_counted_anew(tmp_path):
    path, stats = tmp_path / "kept.jsonl", stand.Stats(num_steps=3, num_tokens=5)
    KeptCounts(path, {"tokens": 4}).add(["match", "sampled"], 0, Counter({(1, 2): 7}), stats)
    kept = path.read_bytes()
    path.write_bytes(kept + kept[:20])
    counts = KeptCounts(path, {"tokens": 4})
    assert counts.get(["match", "sampled"], 0)["cells"] == [[[1, 2], 7]] and counts.get(["match", "mixed"], 0) is None
    assert path.read_bytes() == kept
    path.write_text("[1]\n")
    with pytest.raises(ValueError, match=r"--kept must hold JSON objects, got \[1\] in"):
        KeptCounts(path, {})


def test_a_missing_model_is_one_line(capsys):
    assert check_law.main(["tokens", "--model", "/no/such/model"]) == 2
    assert capsys.readouterr().err.startswith("check_law: --model must be an existing folder")
