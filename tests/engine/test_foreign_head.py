"""Heads of other people: docs/learned_drafters.md's examples run, and read the hidden states that it says."""

import re
from pathlib import Path

import numpy as np
import pytest
import torch
from tiny_models import tiny_model

import stand

PAGE = Path(__file__).resolve().parents[2] / "docs" / "learned_drafters.md"
PROMPTS = [[5, 9, 11, 4, 5, 9], [7], [8, 30, 31, 32]]
MOST_LINES = 40

pytestmark = pytest.mark.skipif(not PAGE.exists(), reason="docs are not part of the wheel's tests")


EXAMPLES = ("drafters", "TableHeads", "HeadsDrafter")  # what each one makes, in the order of the page


def examples() -> list[str]:
    return re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)


@pytest.mark.long
def test_the_bundled_head_and_streams_are_tried_as_printed(monkeypatch, capsys):
    monkeypatch.chdir(PAGE.parents[1])
    exec(examples()[0], {})
    lines = capsys.readouterr().out.splitlines()
    gains = {what: float(gain.split()[0]) for what, gain in (line.split(": ") for line in lines)}
    assert len(gains) == 5 and all(gain > 1 for gain in gains.values())


def example_class(name: str) -> type:
    namespace: dict[str, object] = {}
    exec(examples()[EXAMPLES.index(name)], namespace)
    return namespace[name]


def heads_drafter(heads) -> stand.Drafter:
    return example_class("HeadsDrafter")(heads)


def test_the_examples_are_short():
    assert len(examples()) == len(EXAMPLES)
    assert all(len(example.splitlines()) <= MOST_LINES for example in examples())


@pytest.mark.parametrize("learn", [True, False])
def test_the_example_of_the_docs_runs(learn):
    """Random heads; greedy tokens stay what they are."""
    model = tiny_model("qwen2")
    torch.manual_seed(0)
    heads = [torch.nn.Linear(model.config.hidden_size, model.config.vocab_size) for _ in range(3)]
    settings = {"input_ids": PROMPTS, "num_return_sequences": 2, "max_new_tokens": 20, "temperature": 0.0}
    drafted = stand.wrap(model, drafter=heads_drafter(heads)).generate(**settings, learn=learn)
    plain = stand.wrap(model, drafter=stand.BlendedDrafter(budget=0)).generate(**settings)
    assert drafted.token_ids == plain.token_ids
    assert drafted.stats.num_draft_tokens > 100


def test_the_last_known_hidden_state_is_that_of_the_token_before_the_pending_one():
    """The target's own LM head on it must guess the pending token, which greedy decoding has chosen by it."""
    model = tiny_model("llama")
    drafter = heads_drafter([model.get_output_embeddings()])
    seen = []

    def draft(request):
        batch = type(drafter).draft(drafter, request)
        seen.extend(batch[row].token_ids.tolist() for row in range(len(batch)) if request.steps[row])
        return batch

    drafter.draft = draft
    stand.wrap(model, drafter=drafter).generate(input_ids=PROMPTS, max_new_tokens=12, temperature=0.0)
    assert len(seen) > 20
    assert all(tokens[1:] == tokens[:1] for tokens in seen if len(tokens) > 1)
    assert any(len(tokens) > 1 for tokens in seen)


def test_a_table_is_blended_where_it_is_right():
    """A table that knows which token greedy decoding takes after which is drafted from; a wrong one is given up."""
    model = tiny_model("qwen2")
    size = model.config.vocab_size
    settings = {"input_ids": PROMPTS[:1], "num_return_sequences": 2, "max_new_tokens": 40, "temperature": 0.0}
    plain = stand.wrap(model, drafter=stand.BlendedDrafter(budget=0)).generate(**settings)
    follow = np.full((size, size), 0.1 / size, np.float32)
    for one, other in zip(plain.token_ids[0][:-1], plain.token_ids[0][1:], strict=True):
        follow[one, other] = 0.9
    follow /= follow.sum(axis=1, keepdims=True)
    lengths = {}
    for name, table in (("right", follow), ("wrong", np.roll(follow, 7, axis=1))):
        drafter = stand.BlendedDrafter(budget=8, source=example_class("TableHeads")(table))
        output = stand.wrap(model, drafter=drafter).generate(**settings)
        assert output.token_ids == plain.token_ids
        lengths[name] = output.stats.mean_acceptance_length
    assert lengths["right"] > lengths["wrong"]
