"""Gemma 4 E2B: its last layers reuse keys, and are run for those tokens alone whose logits are wanted."""

import copy

import numpy as np
import pytest
import torch
from unequal_models import unequal_model

import stand
from stand.drafters.blended import BlendedDrafter
from stand.forward import model as forward_model
from stand.forward.cache.tree_cache import TreeCache
from stand.forward.features import prefill_features
from stand.forward.packed_plan import StepPlan
from stand.forward.self_check import check_case, tree_logits
from stand.forward.tree_attention import tree_attention
from stand.fusion.on_cpu import fuse_on_cpu

PROMPTS = [[3, 4, 5, 6, 7, 3, 4], [8], [*range(9, 50), *range(20, 40)]]


@pytest.fixture
def model():
    return unequal_model("gemma4_e2b")


@pytest.mark.parametrize("fuse", [False, True])
def test_tokens_are_generates_own(model, fuse, monkeypatch):
    """Prompts are run in several chunks."""
    monkeypatch.setattr(forward_model, "PROMPT_CHUNK", 16)
    engine = stand.wrap(model, drafter=BlendedDrafter(budget=16), fuse=fuse)
    settings = {"max_new_tokens": 24, "temperature": 0, "stop_token_ids": []}
    for _ in range(2):
        output = engine.generate(PROMPTS, **settings)
    for prompt, tokens in zip(PROMPTS, output.token_ids, strict=True):
        expected = model.generate(torch.tensor([prompt]), do_sample=False, max_new_tokens=24, eos_token_id=None)
        assert tokens == expected[0, len(prompt) :].tolist()
    if fuse:
        kept = {swap.kind for swap in engine.backend.fusion.report if swap.is_kept}
        assert "attention with rotary cache write" in kept


@pytest.mark.parametrize("verifier", ["match", "coupled", "traversal"])
def test_sampled_tokens_are_those_without_fusion(model, verifier):
    settings = {"max_new_tokens": 40, "temperature": 1.0, "seed": 3, "num_return_sequences": 2, "stop_token_ids": []}
    tokens = [
        stand.wrap(model, verifier=verifier, drafter=BlendedDrafter(budget=16), fuse=fuse).generate(PROMPTS, **settings)
        for fuse in (False, True)
    ]
    assert tokens[0].token_ids == tokens[1].token_ids and len({*map(tuple, tokens[0].token_ids)}) > 3


@torch.inference_mode()
def test_features_of_a_prompt_are_those_of_all_its_tokens(model, monkeypatch):
    monkeypatch.setattr(forward_model, "PROMPT_CHUNK", 16)
    tokens = np.array(PROMPTS[2], dtype=np.int32)
    with tree_attention(model):
        features = prefill_features(model, TreeCache(1, 128), tokens, row=0)
    expected = model.get_decoder()(input_ids=torch.from_numpy(tokens.astype(np.int64))[None]).last_hidden_state[0]
    assert features.shape == expected.shape
    torch.testing.assert_close(features, expected, atol=2e-4, rtol=1e-4)


def test_a_prompt_has_a_plan_of_its_last_tokens():
    plan = StepPlan.for_prompt(np.arange(6, dtype=np.int32), 9, row=2)
    last = plan.last(2)
    assert last.input_ids.tolist() == [[4, 5]] and last.position_ids.tolist() == [[13, 14]]
    assert (last.first_row, last.kv_length, last.num_tokens) == (2, 15, 2) and last is plan.last(2)


@pytest.mark.parametrize("count", [0, 6, 7])
def test_other_numbers_of_tokens_are_refused(count):
    with pytest.raises(ValueError, match="a prompt's last ones, got"):
        StepPlan.for_prompt(np.arange(6, dtype=np.int32), 0, row=0).last(count)


def test_a_step_whose_layers_leave_tokens_out_is_refused():
    """Reading as many queries as the step has tokens would read behind them."""
    plan = StepPlan.for_prompt(np.arange(6, dtype=np.int32), 0, row=0)
    plan.is_prompt = False
    with pytest.raises(ValueError, match="attention must be asked for all tokens of a step"):
        plan.last(2)


@pytest.mark.parametrize("norm", ["q_norm", "k_norm", "v_norm"])
def test_a_setting_of_a_head_norm_that_changes_after_wrap_counts(model, norm):
    """The fused attention norms queries, keys and values with one constant, which was proven for what all had."""
    model = copy.deepcopy(model)
    fusion, case = fuse_on_cpu(model), check_case(model)
    with torch.inference_mode():
        before = tree_logits(model, *case, fusion=fusion)
        for layer in model.model.layers:
            if hasattr(layer.self_attn, norm):
                getattr(layer.self_attn, norm).eps = 9.0
        expected = tree_logits(model, *case)
        torch.testing.assert_close(tree_logits(model, *case, fusion=fusion), expected, atol=1e-4, rtol=1e-4)
    assert (expected - before).abs().max() > 1e-2
