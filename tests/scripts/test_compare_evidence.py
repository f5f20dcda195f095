"""Laws against tokens as evidence: both arms run, learn what they say, and are reported."""

import argparse
import json
import sys

import compare_evidence
import numpy as np
from measuring.setup import REASONER, load_model

import stand
from stand.trees import BlendedLookup


def test_both_arms_are_measured(monkeypatch, capsys):
    words = "--num-problems 2 --trajectories 2 --rows 2 --budget 8 --max-new-tokens 60"
    monkeypatch.setattr(sys, "argv", ["compare_evidence.py", *words.split()])
    compare_evidence.main()
    results = json.loads(capsys.readouterr().out.splitlines()[-1])["results"]
    assert [one["arm"] for one in results] == ["laws", "tokens"]
    assert all(len(one["by_problem"]) == 2 and one["tokens_per_step"] > 1 for one in results)


def test_the_second_arm_learns_the_committed_tokens_alone():
    learned = []

    class Recorder(BlendedLookup):
        def learn(self, context, token_ids, rows=None, *, scope=0):
            assert rows is None
            learned.append((len(context), token_ids.tolist()))
            super().learn(context, token_ids, scope=scope)

        def learn_batch(self, *arguments, **named):
            raise AssertionError("the laws must not be learned")

    options = argparse.Namespace(model=str(REASONER), device="cpu", dtype="float32")
    model, tokenizer = load_model(options)
    engine = stand.wrap(model, tokenizer, drafter=compare_evidence.TokenDrafter(Recorder(), budget=8))
    prompt = np.arange(5, 25).tolist()
    output = engine.generate(input_ids=prompt, max_new_tokens=40, seed=1)
    assert learned[0] == (1, prompt[1:])  # the prompt
    runs = learned[1:]
    tokens = [token for _, run in runs for token in run]
    assert len(runs) > 3 and tokens == output.token_ids[0][: len(tokens)]
    lengths = np.cumsum([len(prompt), *(len(run) for _, run in runs[:-1])])
    assert [length for length, _ in runs] == np.minimum(lengths, 32).tolist()
