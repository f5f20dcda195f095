"""The bundled model: small enough, loads as any other folder, splits digits, mostly right on held-out problems."""

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import stand

SCRIPTS = Path(__file__).resolve().parents[2] / "scripts"
from workloads.answers import extract_answer  # noqa: E402
from workloads.problems import END_TOKEN, THINK_END, held_out_problems, write_prompt  # noqa: E402

REASONER = SCRIPTS / "reasoner"


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(REASONER)


@pytest.fixture(scope="module")
def model():
    return AutoModelForCausalLM.from_pretrained(REASONER, dtype=torch.float32).eval()


def test_folder_is_small():
    assert sum(path.stat().st_size for path in REASONER.iterdir()) <= 12 * 2**20


def test_description_fits_the_model(model):
    facts = json.loads((REASONER / "training.json").read_text(encoding="utf-8"))
    assert facts["parameters"] == sum(parameter.numel() for parameter in model.parameters())


def test_numbers_are_single_digits(tokenizer):
    assert len(tokenizer) <= 1024
    assert tokenizer.tokenize("12 + 345 = 357") == ["1", "2", "Ġ+Ġ", "3", "4", "5", "Ġ=Ġ", "3", "5", "7"]


@pytest.mark.parametrize("text", ["Find x, if 7x = 89.", "  two  spaces\n\ttab", "Größe 北京 🙂", ""])
def test_every_text_survives(tokenizer, text):
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text


def test_chat_template_writes_the_prompt(tokenizer):
    messages = [{"role": "user", "content": "Find gcd(4, 6)."}]
    assert tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False) == write_prompt(
        "Find gcd(4, 6)."
    )
    assert tokenizer.eos_token == END_TOKEN


@pytest.mark.long
def test_most_held_out_problems_are_solved(model, tokenizer):
    """At temperature 1, one sample each; the measured accuracy is far above the limit."""
    problems = held_out_problems(26, seed=7)
    engine = stand.wrap(model, tokenizer)
    prompts = [write_prompt(item.problem) for item in problems]
    output = engine.generate(prompts, max_new_tokens=1024, temperature=1.0, seed=3)
    right = [extract_answer(text) == item.answer for text, item in zip(output.texts, problems, strict=True)]
    assert sum(right) >= 0.6 * len(problems)
    assert all(reason == "eos" for reason in output.finish_reasons)
    assert all(THINK_END in text for text in output.texts)
