"""What runs start from: options' types, and new tokens that fit into the model's context."""

import argparse
import json

import pytest
import throughput
import transformers
from measuring import option_types
from measuring.setup import REASONER, fitting_length, from_model, load_tasks


@pytest.mark.parametrize(
    ("given", "longest", "context", "expected"),
    [(None, 100, 8192, 8092), (None, 100, 32768, 8192), (8092, 100, 8192, 8092), (None, 9, None, 8192), (7, 9, 64, 7)],
)
def test_new_tokens_fit_behind_the_longest_prompt(given, longest, context, expected):
    assert fitting_length(given, longest, context) == expected


def test_new_tokens_and_prompts_that_do_not_fit_are_refused():
    with pytest.raises(ValueError, match="--max-new-tokens .* context of 8192 .* 100, got 8093; give at most 8092"):
        fitting_length(8093, 100, 8192)
    with pytest.raises(ValueError, match="prompts must be shorter than .* context of 64 tokens, got one of 64"):
        fitting_length(None, 64, 64)


def test_problems_settle_the_length_and_the_model_is_looked_at_first(tmp_path):
    path = tmp_path / "problems.jsonl"
    path.write_text(json.dumps({"problem": "1 + 1 " * 400, "answer": 2}) + "\n")
    arguments = throughput.read_arguments(["--problems", str(path), "--model", "./scripts/../no/such/model"])
    assert arguments.max_new_tokens is None
    with pytest.raises((OSError, ValueError), match="no/such/model"):
        load_tasks(arguments)
    arguments.model = str(REASONER)
    load_tasks(arguments)
    assert 0 < arguments.max_new_tokens < 2048 - 400
    arguments.problems, arguments.model = "no/such/set.jsonl", "/no/such/model"
    with pytest.raises(ValueError, match="--model must be an existing folder, .* got '/no/such/model'"):
        load_tasks(arguments)


def test_a_model_that_outgrows_its_short_factors_has_its_whole_context(tmp_path):
    """LongRoPE of Phi-3, as the engine serves it."""
    ropes = {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 48, "long_factor": [4.0] * 48}
    config = transformers.Phi3Config(
        original_max_position_embeddings=1024, max_position_embeddings=4096, rope_parameters=ropes
    )
    config.save_pretrained(tmp_path)
    transformers.AutoTokenizer.from_pretrained(REASONER).save_pretrained(tmp_path)
    path = tmp_path / "problems.jsonl"
    path.write_text(json.dumps({"problem": "1 + 1", "answer": 2}) + "\n")
    asked = ["--problems", str(path), "--model", str(tmp_path), "--max-new-tokens", "3000"]
    arguments = throughput.read_arguments(asked)
    load_tasks(arguments)
    assert arguments.max_new_tokens == 3000


def test_a_model_that_cannot_be_loaded_is_named_with_its_option(tmp_path):
    with pytest.raises(ValueError, match="--model must be .* got '.*', from which no AutoConfig can be loaded: "):
        from_model(str(tmp_path), transformers.AutoConfig)


@pytest.mark.parametrize(
    ("kind", "good", "bad"),
    [
        (option_types.positive_integer, "1", "0 -1 1.5 x nan"),
        (option_types.whole_number, "0", "-1 1.5 x"),
        (option_types.positive_number, "0.5", "0 -1 nan inf x"),
        (option_types.probability, "1", "-0.1 1.1 nan x"),
        (option_types.device_name, "cpu", "foo meta cuda:99"),
    ],
)
def test_types_of_options(kind, good, bad):
    assert str(kind(good)) in (good, f"{good}.0")
    for text in bad.split():
        with pytest.raises(argparse.ArgumentTypeError, match=f"must be .*got '{text}'"):
            kind(text)


def test_errors_of_other_readers_keep_their_words(capsys):
    parser = argparse.ArgumentParser()

    def refuse(text):
        raise ValueError("must be ripe")

    parser.add_argument("--shape", type=option_types.worded(refuse))
    with pytest.raises(SystemExit):
        parser.parse_args(["--shape", "x"])
    assert "argument --shape: must be ripe" in capsys.readouterr().err
