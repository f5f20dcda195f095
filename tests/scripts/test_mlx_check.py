"""The command that tries the door to MLX."""

import pytest

pytest.importorskip("mlx_lm", reason="mlx-lm is not installed (make test-mlx)")

import mlx_check
from measuring.beside_library import is_exact

SMALL = ["--num-problems", "2", "--samples", "2", "--max-new-tokens", "6"]


def test_the_arms_are_compared_and_wrong_answers_are_told(capsys):
    assert mlx_check.main(SMALL) == 1
    output = capsys.readouterr().out
    assert "greedy texts that equal mlx-lm's: 2 of 2 without drafts, 2 with" in output
    assert all(arm in output for arm in ("mlx-lm, one by one", "engine without drafts", "engine  "))
    assert "right answers: 0 of 4" in output and output.endswith("NOT as it must be\n")


def test_other_greedy_texts_are_told(capsys, monkeypatch):
    model = mlx_check.Model(mlx_check.read_arguments(SMALL))
    monkeypatch.setattr(model, "own_tokens", lambda prompt, temperature, seed: iter([5] * 500))
    assert not is_exact(model)
    assert "mlx-lm's: 0 of 2 without drafts, 0 with" in capsys.readouterr().out


def test_samples_of_mlx_lm_follow_the_law_and_the_seed():
    model = mlx_check.Model(mlx_check.read_arguments([*SMALL[:-1], "20"]))
    first = [model.one_by_one(model.prompts[0], 5.0, seed=seed) for seed in (1, 1, 2)]
    assert first[0] == first[1] != first[2]
