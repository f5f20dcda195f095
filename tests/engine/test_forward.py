"""The packed tree forward: every node's logits equal a plain forward over the path to it, for every family."""

import numpy as np
import pytest
import torch
from plain_forwards import (
    assert_equals_plain_forwards,
    keep,
    path_to,
    plain_logits,
    prefilled,
    ragged_case,
    random_draft,
    spread,
)
from tiny_models import CONFIGS, SHAPE, VOCABULARY_SIZE, tiny_model
from transformers import AutoModelForCausalLM, NemotronConfig, Qwen3Config

from stand.forward.cache import tree_cache
from stand.forward.cache.tree_cache import CacheMemoryError, TreeCache
from stand.forward.model import run_plan
from stand.forward.packed_plan import CALL_COST, StepPlan, _padded_width, running, running_plan
from stand.forward.tree_attention import ATTENTION_NAME, attend, tree_attention
from stand.trees import DraftBatch

TOLERANCE = 2e-5  # share of the logits' spread; float32 rounding is about 1e-6


@pytest.mark.parametrize("family", CONFIGS)
@torch.inference_mode()
def test_tree_logits_equal_plain_forwards(family):
    model = tiny_model(family)
    prompts, drafts = ragged_case(1)
    batch = DraftBatch.concatenate(drafts)
    with tree_attention(model):
        cache = prefilled(model, prompts)
        lengths = np.array([len(prompt) for prompt in prompts])
        logits = run_plan(model, cache, StepPlan.for_drafts(batch, lengths))
    assert_equals_plain_forwards(model, prompts, drafts, logits, tolerance=TOLERANCE)


@torch.inference_mode()
def test_layers_need_not_hand_the_plan_on():
    """Nemotron's give their attention nothing of what the model was called with."""
    torch.manual_seed(1)
    model = AutoModelForCausalLM.from_config(NemotronConfig(**SHAPE, head_dim=8)).eval()
    prompts, drafts = ragged_case(1)
    lengths = np.array([len(prompt) for prompt in prompts])
    with tree_attention(model):
        cache = prefilled(model, prompts)
        logits = run_plan(model, cache, StepPlan.for_drafts(DraftBatch.concatenate(drafts), lengths))
        with pytest.raises(RuntimeError, match="needs the plan of a step"):
            model(input_ids=torch.tensor([[3, 4]]), use_cache=False)
    assert_equals_plain_forwards(model, prompts, drafts, logits, tolerance=TOLERANCE)


@torch.inference_mode()
def test_a_plain_forward_in_the_midst_of_a_step_is_refused():
    """Its keys are fewer than those of the running plan: compiled attention would read past them."""
    torch.manual_seed(1)
    model = AutoModelForCausalLM.from_config(Qwen3Config(**{**SHAPE, "num_key_value_heads": 1}, head_dim=16)).eval()
    prompt = np.arange(3, 9, dtype=np.int32)
    with tree_attention(model):
        cache = TreeCache(1, 16)
        run_plan(model, cache, StepPlan.for_prompt(prompt, 0, row=0))
        norm = model.model.norm
        hook = norm.register_forward_hook(lambda *args: model(input_ids=torch.tensor([[7]]), use_cache=False))
        with pytest.raises(RuntimeError, match="needs the plan of a step, got a plain forward"):
            run_plan(model, cache, StepPlan.for_prompt(prompt[:1], len(prompt), row=0))
        hook.remove()


def test_the_plan_of_a_forward_goes_with_it():
    """To queries and keys of its own tokens and rows."""
    outer, inner = (StepPlan.for_prompt(np.arange(count, dtype=np.int32), 0, row=0) for count in (2, 3))
    of_outer, of_inner = ((torch.zeros(1, 1, count, 8), torch.zeros(1, 1, count, 8)) for count in (2, 3))
    with running(outer):
        with pytest.raises(KeyError), running(inner):
            assert running_plan(*of_inner) is inner and running_plan(*of_outer) is None
            raise KeyError
        assert running_plan(*of_outer) is outer and running_plan(*of_inner) is None
    assert running_plan(*of_outer) is None


@pytest.mark.parametrize("family", CONFIGS)
@torch.inference_mode()
def test_cache_after_commit_equals_a_fresh_prefill(family):
    """Commit the deepest path of each row, then score a second tree on the compacted cache and on a fresh one."""
    model = tiny_model(family)
    prompts, drafts = ragged_case(2)
    _, second = ragged_case(3)
    batch, second = DraftBatch.concatenate(drafts), DraftBatch.concatenate(second)
    deepest = [path_to(draft, int(np.argmax(batch[row].parents))) for row, draft in enumerate(drafts)]
    with tree_attention(model):
        cache = prefilled(model, prompts)
        lengths = np.array([len(prompt) for prompt in prompts])
        run_plan(model, cache, StepPlan.for_drafts(batch, lengths))
        keep(cache, prompts, deepest)
        extended = [
            np.concatenate([prompt, draft.token_ids[path]])
            for prompt, draft, path in zip(prompts, drafts, deepest, strict=True)
        ]
        grown = np.array([len(tokens) for tokens in extended])
        kept = run_plan(model, cache, StepPlan.for_drafts(second, grown))
        fresh = run_plan(model, prefilled(model, extended), StepPlan.for_drafts(second, grown))
    assert max(map(len, deepest)) > 2
    assert float((kept - fresh).abs().max()) < TOLERANCE * spread(fresh)


@torch.inference_mode()
def test_long_rows_beside_short_ones_equal_plain_forwards():
    """One row of 30 nodes among nine of 2: the remainder of the long row gets attention calls of its own."""
    model = tiny_model("gemma3")
    generator = np.random.default_rng(7)
    prompts = [generator.integers(3, VOCABULARY_SIZE, 9 + row).astype(np.int32) for row in range(10)]
    drafts = [random_draft(generator, 30 if row == 4 else 2) for row in range(10)]
    batch = DraftBatch.concatenate(drafts)
    lengths = np.array([len(prompt) for prompt in prompts])
    with tree_attention(model):
        plan = StepPlan.for_drafts(batch, lengths)
        assert plan.width == 2 and [row for row, _, _ in plan.overflow] == [4]
        logits = run_plan(model, prefilled(model, prompts), plan)
    for row in (3, 4, 5):
        for node in range(drafts[row].num_nodes):
            expected = plain_logits(model, [*prompts[row], *drafts[row].token_ids[path_to(drafts[row], node)]])
            assert float((logits[batch.offsets[row] + node] - expected).abs().max()) < TOLERANCE * spread(expected)


@torch.inference_mode()
def test_chunked_prefill_and_fan_out_equal_one_pass():
    model = tiny_model("qwen2")
    prompts, drafts = ragged_case(4)
    batch = DraftBatch.concatenate([drafts[0]] * 4)
    sources = [2, 0, 2, 1]
    lengths = np.array([len(prompts[source]) for source in sources])
    with tree_attention(model):
        whole, chunked = prefilled(model, prompts), prefilled(model, prompts, chunk=4)
        results = []
        for cache in (whole, chunked):
            cache.fan_out(sources)
            results.append(run_plan(model, cache, StepPlan.for_drafts(batch, lengths)))
    torch.testing.assert_close(results[0], results[1], rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(results[0][:12], results[0][24:36])


@pytest.mark.parametrize("length", [254, 256])
@torch.inference_mode()
def test_a_cache_that_grows_keeps_every_slot(length):
    """Its first room holds 256 tokens; the step after them makes it grow, with rows of other lengths in it."""
    model = tiny_model("qwen2")
    generator = np.random.default_rng(11)
    prompts = [generator.integers(3, VOCABULARY_SIZE, size).astype(np.int32) for size in (length, 100)]
    batch = DraftBatch.concatenate([random_draft(generator, 7), random_draft(generator, 3)])
    with tree_attention(model):
        cache = prefilled(model, prompts)
        before = [storage.clone() for storage in (*cache.keys, *cache.values)]
        assert cache.room == 256
        logits = run_plan(model, cache, StepPlan.for_drafts(batch, np.array([length, 100])))
    assert cache.room >= 512
    for old, new in zip(before, (*cache.keys, *cache.values), strict=True):
        assert torch.equal(new[0, :, :length], old[0, :, :length]) and torch.equal(new[1, :, :100], old[1, :, :100])
    for row, prompt in enumerate(prompts):
        expected = plain_logits(model, [*prompt, *batch[row].token_ids[path_to(batch[row], 1)]])
        assert float((logits[batch.offsets[row] + 1] - expected).abs().max()) < TOLERANCE * spread(expected)


@torch.inference_mode()
def test_a_wrong_mask_is_seen():
    """Negative control: siblings that see each other move the logits far beyond the tolerance."""
    model = tiny_model("qwen2")
    prompts, drafts = ragged_case(1)
    batch = DraftBatch.concatenate(drafts[:1])
    with tree_attention(model):
        cache = prefilled(model, prompts[:1])
        plan = StepPlan.for_drafts(batch, np.array([len(prompts[0])]))
        right = run_plan(model, cache, plan)
        plan = StepPlan.for_drafts(batch, np.array([len(prompts[0])]))
        plan.ancestors = np.tri(batch.num_nodes, dtype=bool)
        wrong = run_plan(model, cache, plan)
    assert float((right - wrong).abs().max()) > 100 * TOLERANCE * spread(right)


@torch.inference_mode()
def test_bfloat16_runs_and_stays_close():
    model = tiny_model("llama")
    prompts, drafts = ragged_case(1)
    batch = DraftBatch.concatenate(drafts)
    lengths = np.array([len(prompt) for prompt in prompts])
    with tree_attention(model):
        exact = run_plan(model, prefilled(model, prompts), StepPlan.for_drafts(batch, lengths))
    half = type(model)(model.config).eval()
    half.load_state_dict(model.state_dict())
    half = half.to(torch.bfloat16)
    with tree_attention(half):
        rounded = run_plan(half, prefilled(half, prompts), StepPlan.for_drafts(batch, lengths))
    assert rounded.dtype == torch.bfloat16
    assert float((rounded.float() - exact).abs().max()) < 0.1 * spread(exact)


def test_the_model_gets_its_attention_back():
    model = tiny_model("qwen2")
    before = model.config._attn_implementation
    with pytest.raises(KeyError), tree_attention(model):
        assert model.config._attn_implementation == ATTENTION_NAME
        raise KeyError
    assert model.config._attn_implementation == before


@pytest.mark.parametrize("cut", [np.s_[:, :, :-1], np.s_[:0], np.s_[[0, 0]]])
def test_other_keys_than_those_of_the_step_are_refused(cut):
    """Compiled attention would read behind them."""
    plan = StepPlan.for_prompt(np.full(5, 3, dtype=np.int32), 0, row=0)
    query, keys, values = (torch.randn(1, heads, 5, 16) for heads in (4, 2, 2))
    attend(torch.nn.Module(), query, keys, values, None, stand_plan=plan)
    with pytest.raises(ValueError, match="all 1 rows of a step, 5 slots of each, got .* from Module; this model"):
        attend(torch.nn.Module(), query, keys[cut], values[cut], None, stand_plan=plan)


@pytest.mark.parametrize("num_tokens", [3, 150])
def test_what_attention_gives_is_contiguous(num_tokens):
    """As transformers' own functions do; AFMoE takes a view of it. Rows that are all padded to one width would come
    transposed."""
    plan = StepPlan.for_prompt(np.full(num_tokens, 3, dtype=np.int32), 0, row=0)
    cache = TreeCache(num_rows=1, room=num_tokens)
    states = [torch.randn(1, heads, num_tokens, 16) for heads in (4, 2, 2)]
    cache.begin(plan)
    keys, values = cache.update(*states[1:], 0)
    mixed, _ = attend(torch.nn.Module(), states[0], keys, values, None, stand_plan=plan)
    assert mixed.shape == (1, num_tokens, 4, 16) and mixed.is_contiguous()


def test_an_impossible_cache_is_one_clear_error():
    cache = TreeCache(num_rows=2**20, room=2**24)
    cache._plan = StepPlan.for_prompt(np.array([3], dtype=np.int32), 0, row=0)
    with pytest.raises(CacheMemoryError, match="must fit into memory.*lower num_return_sequences"):
        cache.update(torch.zeros(1, 2, 1, 64), torch.zeros(1, 2, 1, 64), 0)


def test_the_memory_asked_for_is_the_memory_taken(monkeypatch):
    asked = []
    monkeypatch.setattr(tree_cache, "check_fits", lambda nbytes, device: asked.append(nbytes))
    for dtype in (torch.float32, torch.bfloat16):
        storage = TreeCache(3, 256)._allocate(torch.zeros(1, 2, 1, 4, dtype=dtype))
        assert asked.pop() == storage.nbytes == 3 * 2 * 256 * 4 * storage.element_size()


def test_rows_are_padded_to_the_cheapest_width():
    """Against all widths that a row has: padded places of all rows, and a call for each row that is longer."""
    generator = np.random.default_rng(13)
    for _ in range(200):
        counts = generator.integers(1, generator.choice([3, 10, 60]), generator.integers(1, 9))

        def cost(width, counts=counts):
            return len(counts) * width + sum(CALL_COST + count - width for count in counts if count > width)

        assert cost(_padded_width(counts)) == min(map(cost, counts))
