"""What trainings keep and what they remove: their own files, and nothing that someone else has put there."""

import argparse
import json
import os
import signal
import subprocess
import sys

import pytest
import torch
import train_reasoner
from tiny_models import tiny_model
from train_eagle import read_arguments
from training import checkpoint, head_command, trainer
from training.recipes.eagle import RECIPE
from transformers import AutoTokenizer

from stand.forward.recurrent.layers import recurrent_layers

REASONER = head_command.REASONER


def test_a_fresh_start_removes_the_commands_own_files_alone(tmp_path, monkeypatch):
    for name in ("thesis.txt", *head_command.FILES):
        (tmp_path / name).write_text("{}")
    (tmp_path / "tokenizer").mkdir()
    options = {"--checkpoints": tmp_path, "--model": tmp_path / "none", "--output": "head"}
    arguments = read_arguments(["--fresh", *(str(text) for option in options.items() for text in option)])
    with pytest.raises((ValueError, OSError)):  # before the model is there, nothing is removed
        head_command.run(RECIPE, arguments)
    assert (tmp_path / "state.pt").exists()
    checkpoint.forget_checkpoints(tmp_path, head_command.FILES)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["thesis.txt", "tokenizer"]


def test_a_fresh_model_removes_tokenizer_and_latest_where_they_are_its_own(tmp_path):
    for name in trainer.FOLDERS:
        (tmp_path / name).mkdir()
        (tmp_path / name / "tokenizer.json").write_text("{}")
    (tmp_path / "tokenizer" / "thesis.txt").write_text("years of work")
    with pytest.raises(ValueError, match="checkpoints' tokenizer must be new, empty or hold .* something else"):
        checkpoint.forget_checkpoints(tmp_path, trainer.FILES, trainer.FOLDERS)
    assert (tmp_path / "latest" / "tokenizer.json").exists()
    (tmp_path / "tokenizer" / "thesis.txt").unlink()
    checkpoint.forget_checkpoints(tmp_path, trainer.FILES, trainer.FOLDERS)
    assert not any(tmp_path.iterdir())


def test_an_output_that_holds_other_files_is_left_alone(tmp_path):
    (tmp_path / "thesis.txt").write_text("years of work")
    arguments = argparse.Namespace(output=tmp_path, fresh=True, checkpoints=tmp_path)
    with pytest.raises(ValueError, match="a trained model must be new, empty or hold a trained model, got"):
        trainer.train(arguments)
    with pytest.raises(ValueError, match="a trained model must be new"):
        checkpoint.save_folder(tmp_path, tiny_model("llama"), AutoTokenizer.from_pretrained(REASONER))
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.txt"]


def test_a_saved_model_replaces_the_earlier_one(tmp_path):
    tokenizer, folder = AutoTokenizer.from_pretrained(REASONER), tmp_path / "model"
    for _ in range(2):
        checkpoint.save_folder(folder, tiny_model("llama"), tokenizer)
        (folder / "training.json").write_text(json.dumps({}))
    checkpoint.check_output(folder)
    assert [path.name for path in tmp_path.iterdir()] == ["model"]
    (folder / "training.json").unlink()  # someone else's model
    with pytest.raises(ValueError, match="a trained model must be new"):
        checkpoint.check_output(folder)


def test_the_command_refuses_another_ones_folder_in_one_line(tmp_path, monkeypatch, capsys):
    (tmp_path / "thesis.txt").write_text("years of work")
    monkeypatch.setattr("sys.argv", ["train_reasoner.py", "--fresh", "--output", str(tmp_path)])
    assert train_reasoner.main() == 2
    assert capsys.readouterr().err.startswith("train_reasoner: the folder for a trained model must be new")
    monkeypatch.setattr("sys.argv", ["train_reasoner.py", "--evaluate", "--model", "/no/such"])
    assert train_reasoner.main() == 2
    assert capsys.readouterr().err.startswith("train_reasoner: --model must be a folder of a model, got /no/such")


def test_checkpoints_of_other_settings_are_refused_by_name(tmp_path):
    files = ("state.pt", "settings.json")
    checkpoint.claim(tmp_path, {"model": "one", "seed": 0}, files)
    checkpoint.claim(tmp_path, {"model": "two"}, files)  # nothing was begun yet
    (tmp_path / "state.pt").touch()
    checkpoint.claim(tmp_path, {"model": "two", "seed": 3}, files)
    with pytest.raises(ValueError, match="model 'two' -> 'one', seed 3 -> 4; keep them, .* --checkpoints, .* --fresh"):
        checkpoint.claim(tmp_path, {"model": "one", "seed": 4}, files)
    with pytest.raises(ValueError, match="model 'two' -> 'one'; give those"):
        checkpoint.claim(tmp_path, {"model": "one"}, files, remedy="give those")
    (tmp_path / "settings.json").unlink()
    with pytest.raises(ValueError, match="settings.json beside them, got state.pt in"):
        checkpoint.claim(tmp_path, {"model": "two", "seed": 3}, files)


@pytest.mark.parametrize("option", ["--samples", "--problems", "--minutes", "--rows"])
def test_numbers_of_nothing_are_refused(option, monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["train_reasoner.py", "--evaluate", option, "0"])
    with pytest.raises(SystemExit, match="2"):
        train_reasoner.main()
    assert f"argument {option}: must be" in capsys.readouterr().err


@pytest.mark.parametrize("options", ["--model x", "--problems 3", "--samples 3 --minutes 1"])
def test_options_of_evaluation_are_not_taken_for_training(options, capsys):
    """They would train the bundled model."""
    with pytest.raises(SystemExit, match="2"):
        train_reasoner.read_arguments(options.split())
    assert f"{options.split()[0]} is for --evaluate, got a training" in capsys.readouterr().err


@pytest.mark.slow
def test_training_goes_on_from_its_end_and_tells_of_an_interrupt_once(tmp_path):
    command = [sys.executable, train_reasoner.__file__, "--rows", "2", "--layers", "1", "--hidden", "64"]
    command += ["--output", str(tmp_path / "model"), "--checkpoints", str(tmp_path / "checkpoints")]
    first = subprocess.run([*command, "--steps", "3"], capture_output=True, text=True, check=True)
    assert "from step 0\n" in first.stdout
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True, start_new_session=True) as run:
        line = run.stdout.readline()
        os.killpg(run.pid, signal.SIGINT)  # as a terminal sends it: to every process
        said = run.communicate()[1]
    assert line.endswith("from step 3\n")
    assert said == "train_reasoner: ended early by SIGINT\n" and run.returncode in (130, -signal.SIGINT)


@pytest.mark.parametrize(("layout", "num_recurrent"), [("llama", 0), ("qwen3_5", 3)])
def test_layouts_can_be_built_and_learn(layout, num_recurrent):
    words = f"--layout {layout} --hidden 64 --intermediate 96 --output {layout}"
    options = train_reasoner.read_arguments(words.split())
    model = trainer.build_model(options, AutoTokenizer.from_pretrained(REASONER))
    assert len(recurrent_layers(model)) == num_recurrent and len(model.model.layers) == 4
    input_ids = torch.arange(20, 60).view(2, 20)
    before = trainer.learn_batch(model, input_ids, input_ids, precision="float32")
    optimizers = trainer.build_optimizers(model, 1e-2)
    for _ in range(3):
        trainer.apply_step(model, optimizers, 1e-2)
        after = trainer.learn_batch(model, input_ids, input_ids, precision="float32")
    assert after < before - 0.5


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (
            "--layers 3 --output other",
            "--layers must be at least 4 for a hybrid, whose fourth layer has attention, got 3",
        ),
        ("--layers 4", "--output must be given with --layout qwen3_5, got none; the bundled model is a llama"),
    ],
)
def test_a_hybrid_has_attention_and_a_folder_of_its_own(words, said, capsys):
    with pytest.raises(SystemExit, match="2"):
        train_reasoner.read_arguments(["--layout", "qwen3_5", *words.split()])
    assert said in capsys.readouterr().err
