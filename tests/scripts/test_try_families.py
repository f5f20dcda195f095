"""The script that tries model classes: what it finds, what it says, and that it sees what must not be."""

import json
import signal
import time

import pytest
import try_families as script
from workloads import tiny_classes

import stand


def run(capsys, *options):
    """(exit status, results by configuration)."""
    status = script.main(list(options))
    last = capsys.readouterr().out.splitlines()[-1]
    return status, {family["kind"]: family for family in json.loads(last)["families"]}


def test_classes_are_served_refused_or_not_tried(capsys, tmp_path):
    page = tmp_path / "page.md"
    status, found = run(capsys, "--only", "llama,deepseek_v3,bloom,mamba,mllama", "--page", str(page))
    assert status == 0
    results = {kind: family["result"] for kind, family in found.items()}
    assert results == {
        "llama": "equal", "deepseek_v3": "equal", "bloom": "refused", "mamba": "refused", "mllama": "no tiny model",
    }  # fmt: skip
    assert found["llama"]["tokens_per_step"] > 1 and "AttentionInterface" in found["bloom"]["note"]
    text = page.read_text()
    assert "**2 of 5 are served.**" in text and "`llama`, `deepseek_v3`." in text
    assert "| `bloom` | computes its attention by itself" in text and "`mllama`." in text
    assert all(len(line) < 200 for line in text.splitlines())


def test_other_tokens_are_seen(capsys, monkeypatch, tmp_path):
    """Control."""
    monkeypatch.setattr(script, "generated", lambda model: [5] * script.NEW_TOKENS)
    status, found = run(capsys, "--only", "llama")
    assert status == 0 and found["llama"]["result"] == script.OF_FORWARDS
    monkeypatch.setattr(script, "by_whole_forwards", lambda model: [6] * script.NEW_TOKENS)
    page = tmp_path / "page.md"
    status, found = run(capsys, "--only", "llama", "--page", str(page))
    assert status == 1 and found["llama"]["result"] == script.DIFFERENT
    assert page.read_text().endswith("**Wrong**: `llama` (DIFFERENT).\n")


def test_an_error_that_is_no_refusal_is_seen(capsys, monkeypatch):
    def broken(model, **settings):
        raise RuntimeError("shapes differ")

    monkeypatch.setattr(stand, "wrap", broken)
    status, found = run(capsys, "--only", "llama")
    assert status == 1 and found["llama"]["note"] == "RuntimeError: shapes differ"


def test_a_class_may_not_take_for_ever(capsys, monkeypatch):
    monkeypatch.setattr(script, "tiny_model", lambda kind: time.sleep(5))
    status, found = run(capsys, "--only", "llama", "--seconds", "1")
    assert status == 0 and found["llama"]["note"] == "more than 1 seconds"


def test_what_is_tried_does_not_swallow_the_end_of_its_time(capsys, monkeypatch):
    """Settings that take for ever are not followed by others, which no time would limit."""
    tries = []

    def slow(configuration):
        tries.append(configuration)
        signal.raise_signal(signal.SIGALRM)

    monkeypatch.setattr(tiny_classes, "_made", slow)
    status, found = run(capsys, "--only", "llama")
    assert status == 0 and found["llama"]["note"] == "more than 60 seconds" and len(tries) == 1


def test_a_page_that_cannot_be_written_is_told_at_once(capsys, tmp_path):
    with pytest.raises(SystemExit):
        script.main(["--only", "llama", "--page", str(tmp_path / "missing" / "page.md")])
    assert "--page" in capsys.readouterr().err


def test_an_unknown_class_is_named(capsys):
    with pytest.raises(SystemExit):
        script.main(["--only", "llama,lama"])
    assert "got 'lama'" in capsys.readouterr().err


def test_large_models_are_not_made(monkeypatch):
    monkeypatch.setattr(tiny_classes, "MOST_WEIGHTS", 100)
    with pytest.raises(tiny_classes.NotTinyError, match="100 weights or fewer"):
        tiny_classes.tiny_model("llama")
