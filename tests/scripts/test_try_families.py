"""The script that tries model classes: what it finds, what it says, and that it sees what must not be."""

import json
import signal
import time

import pytest
import try_families as script
from transformers import CONFIG_MAPPING
from workloads import tiny_classes

import stand


def run(capsys, *options):
    """(exit status, results by configuration)."""
    status = script.main(list(options))
    last = capsys.readouterr().out.splitlines()[-1]
    return status, {family["kind"]: family for family in json.loads(last)["families"]}


def on_one_line(page):
    return " ".join(page.split())


@pytest.mark.long
def test_classes_are_served_refused_or_not_tried(capsys, tmp_path):
    page = tmp_path / "page.md"
    status, found = run(capsys, "--only", "llama,deepseek_v3,bloom,mamba,musicgen", "--page", str(page))
    assert status == 0
    results = {kind: family["result"] for kind, family in found.items()}
    assert results == {
        "llama": "equal", "deepseek_v3": "equal", "bloom": "refused", "mamba": "refused", "musicgen": "no tiny model",
    }  # fmt: skip
    assert found["llama"]["tokens_per_step"] > 1 and "AttentionInterface" in found["bloom"]["note"]
    text = page.read_text()
    assert "**2 of 5 are served.**" in text and "`llama`, `deepseek_v3`." in text
    assert "| `bloom` | computes its attention by itself" in text and "| `musicgen` | `AttributeError: " in text
    assert f"of 5 of the {len(tiny_classes.CLASSES)} causal language models of transformers was" in on_one_line(text)
    assert "try_families.py --only NAMES --page FILE" in text and "every" not in text
    assert all(len(line) < 200 for line in text.splitlines())


def test_a_page_of_all_classes_says_so():
    every = [script.Family(kind, name, script.EQUAL, 2.0) for kind, name in tiny_classes.CLASSES.items()]
    page = script.page_of(every)
    assert (
        "try_families.py --page FILE` wrote" in page
        and "of every causal language model of transformers was" in on_one_line(page)
    )
    assert "Refused" not in page and "Not tried" not in page
    assert max(map(len, page.splitlines())) <= 120
    assert "every" not in script.page_of(every[1:])


@pytest.mark.long
def test_models_of_images_and_sound_are_served_as_the_text_model_inside(capsys):
    """Their parts are made small as well, also one whose library is not installed (Gemma 3n's timm)."""
    kinds = ["gemma3", "gemma3n", "gemma4_unified", "mllama", "qwen3_5"]
    status, found = run(capsys, "--only", ",".join(kinds))
    assert status == 0 and {kind: found[kind]["result"] for kind in kinds} == dict.fromkeys(kinds, "equal")
    config = tiny_classes.tiny_model("gemma3").config
    assert config.text_config.hidden_size == config.vision_config.hidden_size == 32


@pytest.mark.parametrize("kind", ["gemma3", "gemma4_text", "opt", "llama"])
def test_a_tiny_model_does_not_repeat_one_token(kind):
    """Else positions and masks could be wrong unseen."""
    assert len(set(script.generated(tiny_classes.tiny_model(kind)))) > 4


def test_names_that_a_configuration_does_not_let_set_are_left_out():
    """XLNet has no length, and xLSTM computes sizes of heads."""
    for kind, name in (("xlnet", "max_position_embeddings"), ("xlstm", "v_head_dim")):
        assert not tiny_classes._takes(CONFIG_MAPPING[kind](), name, 8)
        tiny_classes.tiny_model(kind)


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
