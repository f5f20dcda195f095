"""On a CPU with the engine's own kernels drafts change no bit of a step's logits."""

import copy

import numpy as np
import pytest
import torch
from plain_forwards import path_to, ragged_case
from tiny_models import kernel_model

import stand
from stand.forward.cache.tree_cache import TreeCache
from stand.forward.few_tokens.product import DTYPES, IS_FASTER
from stand.forward.model import run_plan
from stand.forward.packed_plan import StepPlan
from stand.forward.tree_attention import tree_attention
from stand.fusion.on_cpu import fuse_on_cpu
from stand.trees import DraftBatch

FAMILIES = ("llama", "qwen2", "qwen3", "mistral", "gemma3", "phi3")
pytestmark = pytest.mark.skipif(not IS_FASTER, reason="the kernels are for x86-64 with AVX2")


def prefilled(model, prompts, fusion) -> TreeCache:
    cache = TreeCache(num_rows=len(prompts), room=1, fusion=fusion)
    for row, prompt in enumerate(prompts):
        run_plan(model, cache, StepPlan.for_prompt(prompt, 0, row=row))
    return cache


def differing_nodes(family: str, *, is_fused: bool = True, dtype: torch.dtype = torch.float32) -> int:
    """Nodes of a drafted step whose logits have other bits than the steps without drafts along their paths."""
    model = copy.deepcopy(kernel_model(family)).to(dtype)
    fusion = fuse_on_cpu(model) if is_fused else None
    prompts, drafts = ragged_case(1)
    batch = DraftBatch.concatenate(drafts)
    found = 0
    with torch.inference_mode(), tree_attention(model):
        lengths = np.array([len(prompt) for prompt in prompts])
        together = run_plan(model, prefilled(model, prompts, fusion), StepPlan.for_drafts(batch, lengths))
        for row, (prompt, draft) in enumerate(zip(prompts, drafts, strict=True)):
            for node in range(draft.num_nodes):
                cache = prefilled(model, [prompt], fusion)
                for place, token in enumerate(draft.token_ids[path_to(draft, node)].tolist()):
                    plan = StepPlan.for_drafts(DraftBatch.pending([token]), np.array([len(prompt) + place]))
                    alone = run_plan(model, cache, plan)
                found += not torch.equal(alone[0], together[batch.offsets[row] + node])
    return found


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("family", FAMILIES)
def test_a_drafted_step_has_the_bits_of_plain_steps(family, dtype):
    assert differing_nodes(family, dtype=dtype) == 0


def test_other_bits_would_be_seen(monkeypatch):
    monkeypatch.setattr("stand.forward.packed_plan.IS_FASTER", False)
    assert differing_nodes("llama") > 0


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("verifier", ("match", "coupled"))
def test_tokens_are_those_without_drafts(verifier, dtype):
    """With the same seed, without a border between two tokens to fall off."""
    model = copy.deepcopy(kernel_model("llama")).to(dtype)
    engine = stand.wrap(model, verifier=verifier, drafter=stand.BlendedDrafter(budget=24))
    how = {
        "num_return_sequences": 6,
        "max_new_tokens": 60,
        "temperature": 1.0,
        "top_k": 0,
        "eos_token_id": 1,
        "seed": 3,
    }
    drafted = engine.generate(input_ids=[[5, 9, 11, 5, 9, 11]], **how)
    assert drafted.token_ids == engine.generate(input_ids=[[5, 9, 11, 5, 9, 11]], **how, draft=False).token_ids
    assert drafted.stats.num_accepted_draft_tokens > 0
