"""The command that trains by TRL with drafts, with a stand-in for TRL that calls what TRL calls."""

import sys
import types
from types import SimpleNamespace

import pytest
import torch
import trl_check

SMALL = ["--steps", "3", "--problems", "2", "--samples", "2", "--max-new-tokens", "6"]


class Trainer:
    """Draws rollouts, asks for their rewards and moves the weights."""

    rate = 1e-3

    def __init__(self, *, model, args, train_dataset, processing_class, reward_funcs):
        self.model, self.args, self.rows, self.tokenizer, self.reward = (
            model, args, train_dataset, processing_class, reward_funcs
        )  # fmt: skip
        self.state = SimpleNamespace(log_history=[{"train_loss": 0.0}])

    def train(self) -> None:
        optimizer = torch.optim.SGD(self.model.parameters(), lr=self.rate)
        for number in range(self.args.max_steps):
            row = self.rows[number % len(self.rows)]
            given = self.tokenizer([row["prompt"]] * self.args.num_generations, return_tensors="pt")
            with torch.no_grad():
                texts = self.model.generate(**given, do_sample=True, max_new_tokens=self.args.max_completion_length)
            answers = texts[:, given["input_ids"].shape[1] :].tolist()
            rewards = self.reward(completion_ids=answers, answer=[row["answer"]] * len(answers), prompts=None)
            self.state.log_history.append({"reward": sum(rewards) / len(rewards)})
            self.model.train()
            self.model(input_ids=texts, labels=texts).loss.backward()
            optimizer.step()


@pytest.fixture
def trainer(monkeypatch):
    datasets = types.SimpleNamespace(Dataset=types.SimpleNamespace(from_list=list))
    trl = types.SimpleNamespace(__version__="0", GRPOConfig=SimpleNamespace, GRPOTrainer=Trainer)
    monkeypatch.setitem(sys.modules, "datasets", datasets)
    monkeypatch.setitem(sys.modules, "trl", trl)
    monkeypatch.setenv("TRL_EXPERIMENTAL_SILENCE", "1")
    monkeypatch.setenv("STAND_COSTS", "off")
    return Trainer


def test_steps_are_told_and_greedy_answers_compared(trainer, capsys):
    assert trl_check.main(SMALL) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines if line[:1].isdigit()] == ["1", "2", "3"]
    assert lines[-1] == "weights moved: True; greedy answers that differ: 0 of 2"


def test_weights_that_have_not_moved_are_told(trainer, capsys, monkeypatch):
    monkeypatch.setattr(trainer, "rate", 0.0)
    assert trl_check.main(SMALL) == 1
    assert "weights moved: False" in capsys.readouterr().out


def test_other_greedy_answers_are_told(trainer, capsys, monkeypatch):
    monkeypatch.setattr(
        trl_check, "draft_always", lambda model: setattr(model, "generate", lambda **given: given["input_ids"])
    )
    monkeypatch.setattr(trl_check.Watched, "_both", lambda self, **given: self._drafted(**given))
    monkeypatch.setattr(trl_check, "train", lambda *given: [])
    assert trl_check.main(SMALL) == 1
    assert "greedy answers that differ: 2 of 2" in capsys.readouterr().out
