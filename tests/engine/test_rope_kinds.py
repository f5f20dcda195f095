"""Every kind of rotary positions, across the length that it was first trained for: transformers' tokens, or refused."""

import numpy as np
import pytest
import torch
from longrope_models import FACTORS, longrope_phi3
from plain_forwards import greedy_by_plain_forwards
from tiny_models import SHAPE
from transformers import AutoModelForCausalLM, LlamaConfig

import stand
from stand.forward import self_check
from stand.forward.model import max_positions

BORDER, CONTEXT = 32, 96
LONG = {"rope_type": "longrope", **FACTORS}
LLAMA3 = {"rope_type": "llama3", "factor": 3.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}


def llama(context: int = CONTEXT, **rope) -> LlamaConfig:
    rope = {"rope_theta": 10000.0, **rope} if rope else None
    return LlamaConfig(**{**SHAPE, "max_position_embeddings": context}, rope_parameters=rope)


KINDS = {
    "default": llama(),
    "linear": llama(rope_type="linear", factor=3.0),
    "dynamic": llama(rope_type="dynamic", factor=3.0),
    "yarn": llama(rope_type="yarn", factor=3.0, original_max_position_embeddings=BORDER),
    "llama3": llama(**LLAMA3, original_max_position_embeddings=BORDER),
    "dynamic_short": llama(BORDER, rope_type="dynamic", factor=3.0),
    "longrope": llama(**LONG, original_max_position_embeddings=BORDER),
    "longrope_phi3": longrope_phi3(BORDER, CONTEXT),
    "longrope_phi3_short": longrope_phi3(BORDER, BORDER),
}
SERVED = {kind: BORDER if "short" in kind or kind == "longrope" else CONTEXT for kind in KINDS}
LENGTHS = (6, BORDER - 6, BORDER - 2, BORDER + 8)  # far from the border, two that reach it, one that is over it


def model_of(kind: str):
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(KINDS[kind]).eval()


def prompt_of(length: int) -> list[int]:
    return np.random.default_rng(length).integers(3, SHAPE["vocab_size"], length).tolist()


def by_transformers(model, prompt: list[int], count: int) -> list[int]:
    output = model.generate(
        torch.tensor([prompt]), attention_mask=torch.ones(1, len(prompt)), do_sample=False, max_new_tokens=count
    )
    return output[0, len(prompt) :].tolist()


def by_plain_forwards(model, prompt: list[int], count: int) -> list[int]:
    """What `generate` of Phi-3 means to do; some versions of transformers lose the text's keys at the border."""
    return greedy_by_plain_forwards(model, prompt, count, end=SHAPE["eos_token_id"])


@pytest.mark.parametrize("kind", KINDS)
def test_rows_across_the_border_are_those_of_transformers_or_refused(kind):
    model = model_of(kind)
    engine = stand.wrap(model)
    served = [length for length in LENGTHS if length < SERVED[kind]]
    for length in LENGTHS[len(served) :]:
        with pytest.raises(ValueError, match=f"context of {BORDER} tokens.*, got {length}"):
            engine.generate(input_ids=prompt_of(length), temperature=0.0)
    count = min(20, SERVED[kind] - max(served))
    prompts = [prompt_of(length) for length in served]
    output = engine.generate(input_ids=prompts, max_new_tokens=count, temperature=0.0)  # short rows with long ones
    of_library = by_plain_forwards if kind == "longrope_phi3" else by_transformers
    expected = [of_library(model_of(kind), prompt, count) for prompt in prompts]
    assert output.token_ids == expected
    alone = engine.generate(input_ids=prompts[-1], max_new_tokens=count, temperature=0.0)
    assert alone.token_ids == expected[-1:]


@pytest.mark.parametrize("kind", ["longrope", "longrope_phi3_short", "dynamic_short"])
def test_new_tokens_past_the_border_are_refused(kind):
    reason = r"\(further on its LongRoPE factors are others\)" if "longrope" in kind else ", got"
    with pytest.raises(ValueError, match=f"must fit into the model's context of {BORDER} tokens ?{reason}"):
        stand.wrap(model_of(kind)).generate(input_ids=prompt_of(BORDER - 6), max_new_tokens=7, temperature=0.0)


@pytest.mark.parametrize("kind", KINDS)
def test_the_self_check_sees_factors_that_change_with_the_largest_position(kind, monkeypatch):
    """Served as far as the engine goes; negative control: taken for as long as the configuration says."""
    assert self_check.far_position_difference(model_of(kind)) < 1e-5
    monkeypatch.setattr(self_check, "max_positions", lambda model: CONTEXT)
    if "longrope" in kind or kind == "dynamic_short":
        assert self_check.far_position_difference(model_of(kind)) > 0.01
        with pytest.raises(stand.UnsupportedModelError, match="must not depend on later positions"):
            self_check.check_model(model_of(kind))
    else:
        self_check.check_model(model_of(kind))


def test_factors_by_kind_of_layer_are_found():
    """Gemma 3 and others hold one set of parameters for every kind of layer."""
    model = model_of("default")
    model.config.rope_parameters = {
        "full_attention": {**LONG, "original_max_position_embeddings": 24},
        "sliding_attention": {"rope_type": "default"},
    }
    assert max_positions(model) == 24
