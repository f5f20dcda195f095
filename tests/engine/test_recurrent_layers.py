"""Models with recurrent states: trees equal plain forwards, states follow kept paths, tokens are `generate`'s."""

import copy
import pickle

import numpy as np
import pytest
import torch
from plain_forwards import (
    assert_equals_plain_forwards,
    keep,
    lengths_of,
    path_to,
    prefilled,
    ragged_case,
    random_draft,
    spread,
)
from recurrent_models import CONVOLUTION, DELTA_RULE, RECURRENT, STATE_SPACE, new_recurrent_model, recurrent_model
from tiny_models import VOCABULARY_SIZE, tiny_model
from transformers import Qwen3_5TextConfig

import stand
import stand.forward.recurrent.tree_scan as tree_scan
from stand.forward.cache.key_shape import key_shape
from stand.forward.cache.tree_cache import TreeCache
from stand.forward.model import run_plan
from stand.forward.packed_plan import StepPlan
from stand.forward.recurrent.layers import recurrent_layers
from stand.forward.self_check import UnsupportedModelError, check_model, kept_difference, own_steps_difference
from stand.forward.tree_attention import tree_attention
from stand.scheduling.memory import WithinMemory
from stand.trees import DraftBatch

TOLERANCE = 1e-4  # share of the logits' spread; float32 rounding is about 1e-6, in these models up to 7e-5
ONE_EACH = [family for family in ("qwen3_5", "nemotron_h", "falcon_h1", "lfm2") if family in RECURRENT]  # of every kind


@pytest.mark.parametrize("family", RECURRENT)
@pytest.mark.parametrize("chunk", [512, 5])
@torch.inference_mode()
def test_tree_logits_equal_plain_forwards(family, chunk):
    model = recurrent_model(family)
    prompts, drafts = ragged_case(1)
    batch = DraftBatch.concatenate(drafts)
    with tree_attention(model):
        cache = prefilled(model, prompts, chunk=chunk)
        logits = run_plan(model, cache, StepPlan.for_drafts(batch, lengths_of(prompts)))
    assert_equals_plain_forwards(model, prompts, drafts, logits, tolerance=TOLERANCE)


@pytest.mark.parametrize("family", ["qwen3_5", "lfm2"])
@torch.inference_mode()
def test_the_default_dtype_does_not_round_a_convolution(family):
    model = recurrent_model(family)
    prompts, drafts = ragged_case(1)
    plan = StepPlan.for_drafts(DraftBatch.concatenate(drafts), lengths_of(prompts))
    with tree_attention(model):
        cache = prefilled(model, prompts)
        expected = run_plan(model, cache, plan)
        torch.set_default_dtype(torch.bfloat16)
        try:
            logits = run_plan(model, cache, plan)
        finally:
            torch.set_default_dtype(torch.float32)
    assert torch.equal(logits, expected)


@pytest.mark.parametrize("family", ["qwen3_5", "bamba"])
@torch.inference_mode()
def test_autocast_does_not_round_what_a_rule_computes(family, monkeypatch):
    name = "gated_delta_rule" if family in DELTA_RULE else "state_space"
    rule, are_equal = getattr(tree_scan, name), []

    def compared(*operands, **trees):
        output, changes = rule(*operands, **trees)
        with torch.autocast("cpu", enabled=False):
            are_equal.append(torch.equal(output, rule(*operands, **trees)[0]))
        return output, changes

    monkeypatch.setattr(tree_scan, name, compared)
    prompts, drafts = ragged_case(1)
    model = recurrent_model(family)
    with torch.autocast("cpu", torch.bfloat16), tree_attention(model):
        cache = prefilled(model, prompts)
        run_plan(model, cache, StepPlan.for_drafts(DraftBatch.concatenate(drafts), lengths_of(prompts)))
    assert are_equal and all(are_equal)


@pytest.mark.parametrize("use_cache", [True, False])
@torch.inference_mode()
def test_a_plain_forward_within_a_step_is_refused_and_leaves_the_step_alone(use_cache, monkeypatch):
    """As of another thread: before the rule of a layer goes on, the model is called without a plan."""
    model, rule = recurrent_model("qwen3_5"), tree_scan.gated_delta_rule

    def interrupted(*operands, **trees):
        with pytest.raises(RuntimeError, match="must not call the model that decodes"):
            model(torch.tensor([[5, 6, 7]]), use_cache=use_cache)
        return rule(*operands, **trees)

    prompts, drafts = ragged_case(1)
    plan = StepPlan.for_drafts(DraftBatch.concatenate(drafts), lengths_of(prompts))
    with tree_attention(model):
        cache = prefilled(model, prompts)
        expected = run_plan(model, cache, plan)
        monkeypatch.setattr(tree_scan, "gated_delta_rule", interrupted)
        assert torch.equal(run_plan(model, cache, plan), expected)


@pytest.mark.parametrize("family", RECURRENT)
@torch.inference_mode()
def test_states_after_kept_paths_equal_a_fresh_prefill(family):
    model = recurrent_model(family)
    prompts, drafts = ragged_case(2)
    _, second = ragged_case(3)
    batch, second = DraftBatch.concatenate(drafts), DraftBatch.concatenate(second)
    deepest = [path_to(draft, int(np.argmax(draft.parents))) for draft in drafts]
    others = [path_to(draft, 0) for draft in drafts]
    extended = [np.append(p, d.token_ids[path]) for p, d, path in zip(prompts, drafts, deepest, strict=True)]
    next_plan = StepPlan.for_drafts(second, lengths_of(extended))
    with tree_attention(model):
        fresh = run_plan(model, prefilled(model, extended), next_plan)
        logits = []
        for paths in (deepest, others):
            cache = prefilled(model, prompts)
            run_plan(model, cache, StepPlan.for_drafts(batch, lengths_of(prompts)))
            keep(cache, prompts, paths)
            logits.append(run_plan(model, cache, next_plan))
    assert max(map(len, deepest)) > 2
    assert float((logits[0] - fresh).abs().max()) < TOLERANCE * spread(fresh)
    assert float((logits[1] - fresh).abs().max()) > 1e-2 * spread(fresh)  # control: the states of other paths


@pytest.mark.parametrize("family", ONE_EACH)
@torch.inference_mode()
def test_a_long_prompt_in_chunks_of_the_rule_equals_a_plain_forward(family):
    """Longer than a chunk of the rule, and no multiple of it."""
    model = recurrent_model(family)
    prompt = np.random.default_rng(0).integers(3, VOCABULARY_SIZE, 200).astype(np.int32)
    draft = random_draft(np.random.default_rng(1), 4)
    with tree_attention(model):
        cache = prefilled(model, [prompt], chunk=150)
        plan = StepPlan.for_drafts(DraftBatch.concatenate([draft]), np.array([200]))
        logits = run_plan(model, cache, plan)
    assert_equals_plain_forwards(model, [prompt], [draft], logits, tolerance=TOLERANCE)


@pytest.mark.parametrize("family", ONE_EACH)
@torch.inference_mode()
def test_rows_that_enter_move_and_fan_out_take_their_states_along(family):
    model = recurrent_model(family)
    prompts, drafts = ragged_case(4)
    batch = DraftBatch.concatenate(drafts)
    plan = StepPlan.for_drafts(batch, lengths_of(prompts))
    with tree_attention(model):
        expected = run_plan(model, prefilled(model, prompts), plan)
        ones = [prefilled(model, [prompt]) for prompt in prompts]
        entered = TreeCache(num_rows=4, room=1)
        for row, source in enumerate((2, 1, 0, 2)):  # row 0 begins with another prompt first
            entered.enter(row, ones[source], len(prompts[source]))
        entered.enter(0, ones[0], len(prompts[0]))
        entered.move(3, 2, len(prompts[2]))
        fanned = prefilled(model, prompts[::-1])
        fanned.fan_out([2, 1, 0])
        for cache in (entered, fanned):
            assert float((run_plan(model, cache, plan) - expected).abs().max()) < TOLERANCE * spread(expected)
        entered.enter(1, TreeCache(num_rows=1, room=1), 0)  # a prompt of one token: nothing is computed for it
        alone = StepPlan.for_drafts(DraftBatch.concatenate([drafts[0]]), np.array([0]))
        plain = run_plan(model, TreeCache(num_rows=1, room=1), alone)
        begun = StepPlan.for_drafts(DraftBatch.concatenate([drafts[1], drafts[0]]), np.array([len(prompts[0]), 0]))
        after_another = run_plan(model, entered, begun)[drafts[1].num_nodes :]
        assert float((after_another - plain).abs().max()) < TOLERANCE * spread(plain)


def generated(model, prompt, num_tokens) -> list[int]:
    options = {"do_sample": False, "max_new_tokens": num_tokens, "pad_token_id": 0}
    return model.generate(torch.tensor([prompt]), **options)[0, len(prompt) :].tolist()


@pytest.mark.parametrize("family", RECURRENT)
def test_greedy_tokens_are_those_of_generate(family):
    model = recurrent_model(family)
    engine = stand.wrap(model, None, drafter=stand.BlendedDrafter(budget=24))
    generator = np.random.default_rng(0)
    prompts = [generator.integers(3, VOCABULARY_SIZE, length).tolist() for length in (1, 9, 40)]
    expected = [generated(model, prompt, 16) for prompt in prompts]
    output = engine.generate(prompts, max_new_tokens=16, temperature=0.0)
    assert output.token_ids == expected
    assert output.stats.mean_acceptance_length > 1.05  # or nothing was put to the test
    requests = [stand.Request(prompt, id=number) for number, prompt in enumerate(prompts)]
    run = engine.run(requests, max_rows=2, max_new_tokens=16, temperature=0.0)
    assert {each.id: each.token_ids for each in run} == dict(enumerate(expected))


@pytest.mark.parametrize("family", ONE_EACH)
def test_drafts_do_not_change_sampled_tokens(family):
    """Under `match`, whose tokens are a function of the seed; states that took one wrong token would show."""
    engine = stand.wrap(recurrent_model(family), None, verifier="match", drafter=stand.BlendedDrafter(budget=24))
    settings = {"num_return_sequences": 3, "max_new_tokens": 30, "temperature": 0.7, "seed": 5}
    prompt = [[5, 9, 12, 7, 5, 9, 12, 7, 5]]
    plain = engine.generate(prompt, **settings, draft=False)
    for _ in range(2):
        drafted = engine.generate(prompt, **settings)
        assert drafted.token_ids == plain.token_ids
    assert drafted.stats.mean_acceptance_length > 1.2


@pytest.mark.parametrize("rule", ["traversal", "rrs"])
def test_other_rules_and_streams_run(rule):
    engine = stand.wrap(recurrent_model("qwen3_5"), None, verifier=rule)
    settings = {"num_return_sequences": 2, "max_new_tokens": 12, "temperature": 1.0, "seed": 1}
    output = engine.generate([[5, 6, 7]], **settings)
    assert [len(tokens) for tokens in output.token_ids] == [12, 12] or "eos" in output.finish_reasons


def test_bfloat16_models_are_served():
    model = copy.deepcopy(recurrent_model("qwen3_5")).to(torch.bfloat16)
    output = stand.wrap(model, None).generate([[5, 6, 7]], max_new_tokens=10, temperature=0.0)
    assert len(output.token_ids[0]) == 10 or output.finish_reasons == ["eos"]


def test_the_model_is_given_back():
    model = new_recurrent_model(DELTA_RULE["qwen3_5"])
    before = [dict(vars(module)) for module in model.modules()]
    engine = stand.wrap(model, None, fuse=False)
    engine.generate([[5, 6, 7]], max_new_tokens=3)
    with pytest.raises(RuntimeError, match="stop here"), tree_attention(model):
        assert all("forward" in vars(layer) for layer in recurrent_layers(model))
        raise RuntimeError("stop here")
    assert [set(vars(module)) for module in model.modules()] == [set(attributes) for attributes in before]
    with tree_attention(model):
        twins = copy.deepcopy(model), pickle.loads(pickle.dumps(model))
    for twin in twins:
        twin.set_attn_implementation("sdpa")  # which a copy keeps as it was
        output = stand.wrap(twin, None).generate([[5, 6, 7]], max_new_tokens=9, temperature=0.0)
        assert output.token_ids == [generated(twin, [5, 6, 7], 9)] == [generated(model, [5, 6, 7], 9)]


def test_memory_counts_states():
    model = recurrent_model("qwen3_5")
    check_model(model)
    shape = key_shape(model)
    states, tails = 4 * 8 * 12 * 4, 3 * (2 * 2 * 8 + 4 * 12) * 4  # bytes of one layer
    assert shape.row_bytes == 3 * (states + tails)
    assert shape.token_bytes == 2 * 2 * 16 * 4  # one layer of four keeps keys
    assert key_shape(tiny_model("llama")).row_bytes == 0
    assert stand.wrap(model, None).backend.page_size is None

    class Long:
        most_cached = 44

    rows = [Long(), Long()]
    assert WithinMemory(num_bytes=3 * 300 * 10, bytes_per_token=10).allows(rows, Long())
    assert not WithinMemory(num_bytes=3 * 300 * 10, bytes_per_token=10, bytes_per_row=1).allows(rows, Long())


def test_what_cannot_go_through_states_is_refused():
    model = recurrent_model("qwen3_5")
    with pytest.raises(UnsupportedModelError, match="a draft model must keep keys and values alone"):
        stand.ModelDrafter(model)


def test_steps_that_leave_a_limit_out_are_refused():
    """Mamba-2 in transformers: prompts are computed with time_step_min, steps over its cache without."""
    config = copy.deepcopy(STATE_SPACE["zamba2"])
    config.time_step_min = 0.05
    model = new_recurrent_model(config)
    assert own_steps_difference(model) > 1e-3
    with pytest.raises(UnsupportedModelError, match="time_step_min"):
        check_model(model)


def test_states_that_take_another_path_are_seen(monkeypatch):
    model = recurrent_model("qwen3_5")
    assert kept_difference(model) < 1e-4
    keep_states = TreeCache.keep_states
    monkeypatch.setattr(TreeCache, "keep_states", lambda cache, ends: keep_states(cache, [end - 1 for end in ends]))
    assert kept_difference(model) > 1e-2
    with pytest.raises(UnsupportedModelError, match="must follow the kept path"):
        check_model(model)


def test_a_layer_whose_forward_somebody_has_replaced_is_refused():
    model = new_recurrent_model(DELTA_RULE["qwen3_5"])
    layer = recurrent_layers(model)[0]
    own = layer.forward
    layer.forward = lambda *given, **named: own(*given, **named)
    with pytest.raises(UnsupportedModelError):
        check_model(model)


def test_a_layer_that_takes_anothers_place_is_served():
    model = new_recurrent_model(CONVOLUTION["lfm2"])
    engine = stand.wrap(model, None)
    twin = copy.deepcopy(model.model.layers[0].conv)
    torch.nn.init.ones_(twin.conv.weight)
    model.model.layers[0].conv = twin
    expected = [generated(model, [5, 6, 7], 9)]
    assert twin in recurrent_layers(model)
    for current in (engine, stand.wrap(model, None)):
        assert current.generate([[5, 6, 7]], max_new_tokens=9, temperature=0.0).token_ids == expected


def test_a_model_without_any_keys_is_refused():
    config = copy.deepcopy(DELTA_RULE["qwen3_5"])
    config.layer_types = ["linear_attention"] * 4
    with pytest.raises(UnsupportedModelError, match="a layer at least must keep keys and values"):
        check_model(new_recurrent_model(config))


def test_a_hybrid_class_whose_layers_all_keep_keys_is_served():
    """Granite 4 has sizes without a recurrent layer, of the same class."""
    config = copy.deepcopy(STATE_SPACE["granite"])
    config.layer_types = ["full_attention"] * 4
    model = new_recurrent_model(config)
    assert recurrent_layers(model) == []
    output = stand.wrap(model, None).generate([[5, 6, 7]], max_new_tokens=9, temperature=0.0)
    assert output.token_ids == [generated(model, [5, 6, 7], 9)]


def test_ordinary_models_have_no_recurrent_layers():
    assert recurrent_layers(tiny_model("llama")) == [] and recurrent_layers(tiny_model("gpt_oss")) == []
    assert len(recurrent_layers(recurrent_model("lfm2"))) == 3 and set(CONVOLUTION) <= set(RECURRENT)
    assert isinstance(DELTA_RULE["qwen3_5"], Qwen3_5TextConfig)
