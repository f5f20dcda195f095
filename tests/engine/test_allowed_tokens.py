"""`prefix_allowed_tokens_fn` at every node of a draft: asked as plain decoding asks, with the prompt's number."""

import numpy as np
import pytest
import torch
from tiny_models import tiny_model
from transformers import PrefixConstrainedLogitsProcessor

import stand
from stand.laws.grammars import allowed_tokens
from stand.laws.grammars.allowed_tokens import AllowedInCall

PROMPTS = [[5, 9, 11, 4], [7, 8]]
ASKED = {"input_ids": PROMPTS, "num_return_sequences": 3, "max_new_tokens": 30, "stop_token_ids": [60], "seed": 2}
SAMPLED = {"temperature": 1.0, "top_k": 0}


class Steps:
    """A token follows the one before it by 1, 2 or 4, or 3 for the second prompt; the end always may. It knows no other
    texts, and nothing behind an end."""

    def __init__(self, prompt_of_row=(0, 0, 0, 1, 1, 1)):
        """prompt_of_row: what it knows of numbers where this transformers counts rows."""
        self.asked, self.prompt_of_row = [], prompt_of_row

    def __call__(self, number, tokens):
        number = number if allowed_tokens.COUNTS_PROMPTS else self.prompt_of_row[number]
        text = tokens.tolist()[len(PROMPTS[number]) :]
        before = [PROMPTS[number][-1], *text]
        steps = (1, 2, 4) if number == 0 else (1, 2, 3)
        known = [token in ((last + step) % 30 for step in steps) for last, token in zip(before, text, strict=False)]
        assert all(known), "no text of this function"
        self.asked.append((number, tuple(text)))
        return [*((before[-1] + step) % 30 for step in steps), 60]


@pytest.mark.parametrize("verifier", ["match", "coupled"])
@pytest.mark.parametrize("settings", [SAMPLED, {}])
def test_tokens_are_those_without_drafts_and_no_other_text_is_asked_about(verifier, settings):
    engine = stand.wrap(tiny_model("qwen2"), verifier=verifier, drafter=stand.BlendedDrafter(budget=24))
    engine.generate(**{**ASKED, "stop_token_ids": []}, temperature=1.5)  # other texts, which are drafted
    expected = engine.generate(**ASKED, **settings, prefix_allowed_tokens_fn=Steps(), draft=False)
    function = Steps()
    for _ in range(2):
        drafted = engine.generate(**ASKED, **settings, prefix_allowed_tokens_fn=function)
        assert drafted.token_ids == expected.token_ids
    assert drafted.stats.num_accepted_draft_tokens > 3
    assert {number for number, _ in function.asked} == {0, 1}


def test_the_number_is_that_of_the_request_in_a_run():
    engine = stand.wrap(tiny_model("qwen2"), drafter=stand.BlendedDrafter(budget=8))
    requests = [
        stand.Request(torch.tensor(prompt), num_return_sequences=count)
        for prompt, count in zip(PROMPTS, (1, 3), strict=True)
    ]
    asked = {"max_new_tokens": 20, "stop_token_ids": [60], "seed": 2, **SAMPLED}
    asked["prefix_allowed_tokens_fn"] = Steps(prompt_of_row=(0, 1, 1, 1))
    assert len(list(engine.run(requests, **asked))) == 4


@pytest.mark.skipif(not allowed_tokens.COUNTS_PROMPTS, reason="from transformers 5.24 on")
def test_a_function_that_gets_another_number_is_seen(monkeypatch):
    """Negative control."""
    engine = stand.wrap(tiny_model("qwen2"), verifier="match")
    expected = engine.generate(**ASKED, **SAMPLED, prefix_allowed_tokens_fn=Steps())
    monkeypatch.setattr(AllowedInCall, "__call__", lambda self, number, prefix: self.ask(0, prefix))
    assert engine.generate(**ASKED, **SAMPLED, prefix_allowed_tokens_fn=Steps()).token_ids != expected.token_ids


@pytest.mark.parametrize(("counts_prompts", "expected"), [(True, {0, 1}), (False, {*range(6)})])
def test_the_number_is_what_this_transformers_counts(monkeypatch, counts_prompts, expected):
    """tests/engine/test_hub.py compares with the installed one."""
    monkeypatch.setattr(allowed_tokens, "COUNTS_PROMPTS", counts_prompts)
    numbers = set()
    engine = stand.wrap(tiny_model("qwen2"))
    if not counts_prompts:  # as up to 5.23, which makes it for so many beams
        one = property(lambda processor: 1, lambda *_: None)
        monkeypatch.setattr(PrefixConstrainedLogitsProcessor, "_num_beams", one, raising=False)
    engine.generate(**ASKED, prefix_allowed_tokens_fn=lambda number, tokens: numbers.add(number) or [5, 6, 7])
    assert numbers == expected


def test_a_function_that_allows_nothing_is_told():
    engine = stand.wrap(tiny_model("qwen2"))
    with pytest.raises(ValueError, match="must allow a token behind every text that it allows, got an empty list"):
        engine.generate(**ASKED, prefix_allowed_tokens_fn=lambda number, tokens: [])


@pytest.mark.parametrize("value", [3, [1, 2]])
def test_what_is_no_function_is_refused(value):
    with pytest.raises(ValueError, match="must be callable with a prompt's number and a row's tokens, got"):
        stand.wrap(tiny_model("qwen2")).generate(**ASKED, prefix_allowed_tokens_fn=value)


def test_a_processor_of_ones_own_gets_rows_by_beams():
    """As in a batch of `generate`, where it is made for so many beams."""
    numbers = set()

    def asked_with(number, tokens):
        numbers.add(number)
        return np.arange(20)

    engine = stand.wrap(tiny_model("qwen2"))
    engine.generate(**ASKED, logits_processors=PrefixConstrainedLogitsProcessor(asked_with, 1))
    assert numbers == {*range(6)}
    numbers.clear()
    engine.generate(**ASKED, logits_processors=PrefixConstrainedLogitsProcessor(asked_with, 2))
    assert numbers == {0, 1, 2}
