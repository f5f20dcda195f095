"""Models of text, images and sound that are given text are served as the text model inside them: what
`AutoModelForCausalLM` makes of Gemma 3 and Gemma 4."""

from functools import lru_cache

import pytest
import torch
import transformers
from tiny_models import SHAPE
from transformers import AutoModelForCausalLM

import stand
from stand.forward import window_check
from stand.plugins.generate import stand_generate

PROMPTS = [[3, 4, 5, 6, 7, 3, 4, 5, 9, 11], [7, 8, 9], [*range(5, 20)]]
TEXT = {**SHAPE, "head_dim": 8, "sliding_window": 8}
VISION = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 4}
GEMMA4 = {
    **TEXT, "num_hidden_layers": 3, "layer_types": ["sliding_attention"] * 2 + ["full_attention"],
    "global_head_dim": 16, "hidden_size_per_layer_input": 0, "num_kv_shared_layers": 0,
}  # fmt: skip
CONFIGS = {  # configuration class, its arguments
    "gemma3": (
        "Gemma3Config", {"text_config": TEXT, "vision_config": {**VISION, "image_size": 56, "patch_size": 14}},
    ),
    "gemma4": ("Gemma4Config", {"text_config": GEMMA4}),
    # its masks have a table of which tokens belong to which image, also where there is none
    "gemma4_unified": (
        "Gemma4UnifiedConfig",
        {"text_config": {**GEMMA4, "use_bidirectional_attention": "vision"}, "vision_config": {"mm_embed_dim": 32}},
    ),
}  # fmt: skip


@lru_cache
def outer_model(family: str):
    class_name, arguments = CONFIGS[family]
    if not hasattr(transformers, class_name):
        pytest.skip(f"this version of transformers has no {class_name}")
    torch.manual_seed(1)
    config = getattr(transformers, class_name)(**arguments, tie_word_embeddings=False, eos_token_id=2)
    return AutoModelForCausalLM.from_config(config).eval()


def expected(model, prompt, count=20):
    settings = {"do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    return model.generate(torch.tensor([prompt]), max_new_tokens=count, **settings)[0, len(prompt) :].tolist()


@pytest.mark.parametrize("family", CONFIGS)
def test_rows_of_text_are_what_generate_says(family):
    model = outer_model(family)
    assert type(model).__name__.endswith("ForConditionalGeneration")
    engine = stand.wrap(model, drafter=stand.BlendedDrafter(budget=16))
    for _ in range(2):
        output = engine.generate(input_ids=PROMPTS, max_new_tokens=20, temperature=0, stop_token_ids=[])
    assert output.token_ids == [expected(model, prompt) for prompt in PROMPTS]
    assert output.stats.mean_acceptance_length > 1 and len(set(output.token_ids[0])) > 2


@pytest.mark.parametrize("family", CONFIGS)
def test_custom_generate_takes_text(family):
    """`generate` hands over the outputs of no image, and tokenizers the types of text."""
    model = outer_model(family)
    types = "token_type_ids" if family == "gemma3" else "mm_token_type_ids"
    prompt = torch.tensor(PROMPTS[:1])
    settings = {"do_sample": False, "max_new_tokens": 20, "eos_token_id": None, "pad_token_id": 0}
    for inputs in ({}, {types: torch.zeros_like(prompt)}):
        tokens = model.generate(prompt, **inputs, **settings, custom_generate=stand_generate)
        assert tokens[0, len(PROMPTS[0]) :].tolist() == expected(model, PROMPTS[0])
    with pytest.raises(ValueError, match=f"{types} cannot be given here, got Tensor"):
        model.generate(prompt, **{types: torch.ones_like(prompt)}, **settings, custom_generate=stand_generate)


def test_a_mask_by_images_is_probed_beyond_the_tokens_that_it_knows(monkeypatch):
    """Control: without the rule for tables the probe reads behind the end of one."""
    model = outer_model("gemma4_unified")
    assert window_check.window_disagreement(model) is None
    monkeypatch.setattr(window_check, "_within", lambda place, size: place)
    with pytest.raises(IndexError):
        window_check.window_disagreement(model)


def test_a_window_beside_images_is_still_seen():
    """Control: a layer that is told of one key less than its mask has."""
    model = outer_model("gemma4_unified")
    attention = model.get_decoder().layers[0].self_attn
    attention.sliding_window -= 1
    try:
        assert "is told of 7 keys, and its mask shows 8" in window_check.window_disagreement(model)
    finally:
        attention.sliding_window += 1


def test_what_is_no_window_is_told_from_one():
    """By which keys the last token sees, not by how many."""
    probe = window_check._Probe(10)
    assert probe.number_of(lambda batch, head, query, key: key > query - 4) == 4
    assert probe.number_of(lambda batch, head, query, key: key < 4) == window_check.OTHER


def test_tables_are_read_beyond_their_end_by_several_places_alone():
    with window_check._LastEntryStands():
        assert torch.arange(4)[(torch.tensor([1, 9]),)].tolist() == [1, 3]
        assert torch.arange(4)[torch.tensor([2, 3])].tolist() == [2, 3]
        assert torch.arange(4)[(slice(2, 9),)].tolist() == [2, 3]
        assert torch.arange(2)[(torch.tensor([True, False]),)].tolist() == [0]


def test_a_model_that_does_not_say_how_long_texts_may_be(monkeypatch):
    monkeypatch.setattr(window_check, "max_positions", lambda model: None)
    assert window_check.window_disagreement(outer_model("gemma3")) is None
