"""Fused modules in eager steps on a CPU: equal tokens and logits, proven once, and no swap where a module changed."""

import copy
import gc
import sys
import weakref
from contextlib import contextmanager, nullcontext
from functools import lru_cache

import numpy as np
import pytest
import torch
from tiny_models import CONFIGS, SHAPE, tiny_model
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from transformers import (
    AutoModelForCausalLM,
    DeepseekV3Config,
    LlamaConfig,
    NemotronConfig,
    OlmoConfig,
    SmolLM3Config,
)

import stand
from stand.drafters.eagle.head import EagleHead
from stand.forward.cache.tree_cache import TreeCache
from stand.forward.few_tokens.product import DTYPES
from stand.forward.model import cast_dtype, fused, prefill, run_plan
from stand.forward.packed_plan import StepPlan
from stand.forward.self_check import check_case, tree_logits
from stand.forward.tree_attention import tree_attention
from stand.fusion import on_cpu
from stand.fusion.forwards.layer import FusedLayer
from stand.fusion.kernels import cpu_kernels
from stand.fusion.on_cpu import fuse_on_cpu, fused_twin
from stand.fusion.probe import Outcome
from stand.fusion.probe import difference as outcome_difference

own_model = lru_cache(
    tiny_model.__wrapped__
)  # not shared: transformers leaves hooks where hidden states were asked for
PROMPTS = [[5, 9, 11, 4, 7, 8], [3, 5, 6, 7]]
NORM, MLP, ATTENTION = "RMSNorm", "gated feed-forward", "attention with rotary cache write"
ADDED, EXPERTS = "additions joined with norms", "mixture of experts"
PLAIN = {NORM: 5, MLP: 2, ATTENTION: 2, ADDED: 2}
GEMMA = {MLP: 2, ATTENTION: 2}  # a norm before each addition too
EXPECTED = {
    "llama": PLAIN,
    "qwen2": PLAIN,
    "mistral": PLAIN,
    "phi3": PLAIN,
    "qwen3": {**PLAIN, NORM: 9},
    "gemma2": {**GEMMA, NORM: 9},
    "gemma3": {**GEMMA, NORM: 13},
    "qwen3_moe": {NORM: 9, EXPERTS: 2, ATTENTION: 2, ADDED: 2},
    "gpt_oss": {NORM: 5, ATTENTION: 2, ADDED: 2},
}


def fresh(family: str = "llama", num_layers: int = SHAPE["num_hidden_layers"]):
    """A model of its own, for tests that change it."""
    config = copy.deepcopy(CONFIGS[family])
    config.num_hidden_layers = num_layers
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config).eval()


def kept(fusion) -> dict[str, int]:
    return {swap.kind: swap.count for swap in fusion.report if swap.is_kept}


def swapped_names(model, fusion) -> set[str]:
    """Modules whose forward is another one while the fusion is active."""
    with fusion.active():
        return {name for name, module in model.named_modules() if "forward" in vars(module)}


@torch.inference_mode()
def difference(model, fusion) -> float:
    """Largest difference of the logits of a prompt and a small tree, with the fusion and without."""
    case = check_case(model)
    return float((tree_logits(model, *case, fusion=fusion) - tree_logits(model, *case)).abs().max())


def answers(model, **settings) -> list[list[int]]:
    engine = stand.wrap(model, drafter=stand.BlendedDrafter(budget=8), **settings)
    engine.generate(input_ids=PROMPTS, max_new_tokens=40, temperature=0.0)
    return engine.generate(input_ids=PROMPTS, max_new_tokens=40, temperature=0.0).token_ids


@pytest.mark.parametrize("family", CONFIGS)
def test_tokens_and_logits_equal_those_of_unfused_modules(family):
    model = own_model(family)
    engine = stand.wrap(model)
    assert kept(engine.backend.fusion) == EXPECTED[family]
    assert all(swap.max_error <= 1e-6 for swap in engine.backend.fusion.report if swap.is_kept)
    assert difference(model, engine.backend.fusion) <= 1e-4
    assert answers(model) == answers(model, fuse=False)
    assert not any("forward" in vars(module) for module in model.modules())


def test_values_may_be_shorter_or_longer_than_keys():
    """DeepSeek's attention: the trial stands in for it, and its answer has to have the size of values."""
    sizes = {"kv_lora_rank": 16, "q_lora_rank": 16, "n_routed_experts": 4, "moe_intermediate_size": 16}
    for qk_nope_head_dim, v_head_dim in ((16, 8), (8, 24)):
        config = DeepseekV3Config(
            **{**SHAPE, "num_key_value_heads": 4}, **sizes, num_experts_per_tok=2, n_group=1, topk_group=1,
            first_k_dense_replace=1, qk_rope_head_dim=8, qk_nope_head_dim=qk_nope_head_dim, v_head_dim=v_head_dim,
        )  # fmt: skip
        torch.manual_seed(1)
        model = AutoModelForCausalLM.from_config(config).eval()
        engine = stand.wrap(model)
        assert "not fused" not in engine.backend.reason and engine.backend.fusion.recipe.norms
        ids = torch.tensor([[3, 4, 5, 6, 3, 4]])
        output = engine.generate(input_ids=ids, max_new_tokens=12, temperature=0, stop_token_ids=[])
        expected = model.generate(ids, do_sample=False, max_new_tokens=12, eos_token_id=None)[0, 6:]
        assert output.token_ids[0] == expected.tolist()


def test_layers_that_hand_nothing_on_are_named():
    torch.manual_seed(1)
    model = AutoModelForCausalLM.from_config(NemotronConfig(**SHAPE, head_dim=8)).eval()
    reason = stand.wrap(model).backend.reason
    assert "not fused, because of ValueError: layers that are fused must hand on" in reason


def test_rotary_tables_may_come_transposed(monkeypatch):
    """As the product of frequencies and positions leaves those of GPT-OSS under transformers 5.17."""
    model = fresh("gpt_oss")
    rotary = type(model.model.rotary_emb)
    own = rotary.forward

    def transposed(self, x, position_ids):
        return tuple(table.mT.contiguous().mT for table in own(self, x, position_ids))

    monkeypatch.setattr(rotary, "forward", transposed)
    fusion = fuse_on_cpu(model)
    assert kept(fusion) == EXPECTED["gpt_oss"]
    assert difference(model, fusion) <= 1e-4


@pytest.mark.parametrize("family", ["llama", "gemma3", "phi3"])
def test_steps_run_through_the_fused_modules(family, monkeypatch):
    """Kernels that fail after the proof stop the engine; with fuse=False nobody asks for them."""
    model = own_model(family)
    answers(model)

    def fail(*_):
        raise ZeroDivisionError

    monkeypatch.setattr(on_cpu, "cpu_kernels", lambda: cpu_kernels()._replace(rope_and_store=fail))
    answers(model, fuse=False)
    with pytest.raises(ZeroDivisionError):
        answers(model)


def test_long_prompts_in_chunks_and_growing_rooms():
    model = fresh()
    tokens = (np.arange(460) * 7 % 61).astype(np.int32)
    caches = [TreeCache(1, 1, fusion=fusion) for fusion in (None, fuse_on_cpu(model))]
    with tree_attention(model), torch.inference_mode():
        for cache in caches:
            prefill(model, cache, tokens[:300], row=0)
            for first in range(300, 460, 80):
                plan = StepPlan.for_prompt(tokens[first : first + 80], first, row=0)
                logits = run_plan(model, cache, plan)
            cache.logits = logits
    own, fused = caches
    assert own.room == fused.room > 256
    assert (own.logits - fused.logits).abs().max() <= 1e-4
    for mine, theirs in zip((*own.keys, *own.values), (*fused.keys, *fused.values), strict=True):
        assert (mine - theirs)[:, :, :460].abs().max() <= 1e-4


def test_a_proof_is_made_once_and_lets_go_of_its_model(monkeypatch):
    model, trials = fresh(), []
    own = on_cpu.Trial
    monkeypatch.setattr(on_cpu, "Trial", lambda *args: trials.append(1) or own(*args))
    first, second = fuse_on_cpu(model), fuse_on_cpu(model)
    assert first.report is second.report and len(trials) == 1
    with torch.no_grad():
        model.model.layers[0].mlp.down_proj.weight *= 2  # weights are not part of the proof
    fuse_on_cpu(model)
    assert len(trials) == 1
    model.model.layers[0].mlp.register_forward_hook(lambda *_: None)
    fuse_on_cpu(model)
    model.model.layers[1].mlp = copy.deepcopy(model.model.layers[1].mlp)
    fuse_on_cpu(model)
    assert len(trials) == 3
    gone = weakref.ref(model)
    del model, first, second
    gc.collect()
    assert gone() is None


def test_another_default_device_changes_nothing():
    """Results lie where the operands do: compiled code writes there."""
    model = tiny_model("llama")
    with torch.device("meta"):
        found = answers(model)
    assert found == answers(model)


def test_nothing_of_the_model_moves():
    model = fresh()
    before = {name: (parameter, parameter.data_ptr()) for name, parameter in model.named_parameters()}
    fusion = fuse_on_cpu(model)
    with fusion.active():
        assert all(before[name] == (p, p.data_ptr()) for name, p in model.named_parameters())
    assert "forward" not in vars(model.model.layers[0])


def add_hook(model):
    model.model.layers[1].mlp.gate_proj.register_forward_hook(lambda module, args, output: 2 * output)


def add_norm_hook(model):
    model.model.layers[1].post_attention_layernorm.register_forward_hook(lambda module, args, output: 2 * output)


def add_layer_hook(model):
    """Changes in place what the layer before it has handed on, whose norm was foretold."""
    model.model.layers[1].register_forward_pre_hook(lambda module, args: args[0].mul_(2))


def add_adapter(model):
    class Adapter(torch.nn.Linear):
        def forward(self, states):
            return 1.5 * super().forward(states)

    adapted = Adapter(32, 32, bias=False)
    adapted.weight = model.model.layers[1].self_attn.q_proj.weight
    model.model.layers[1].self_attn.q_proj = adapted


def replace_forward(model):
    layer = model.model.layers[1].mlp
    layer.forward = lambda states: 2 * type(layer).forward(layer, states)


def replace_norm(model):
    model.model.layers[1].post_attention_layernorm = torch.nn.LayerNorm(32)


def replace_activation(model):
    model.model.layers[1].mlp.act_fn = torch.nn.ReLU()


def set_scaling(model):
    for layer in model.model.layers:
        layer.self_attn.scaling *= 0.1


def spread_norm(model, name="post_attention_layernorm"):
    """A slice of a larger matrix."""
    norm = getattr(model.model.layers[1], name)
    norm.weight.data = torch.stack([3 * norm.weight.data, norm.weight.data], dim=1)[:, 0]


def spread_norm_behind_a_layer(model):
    """The layer before it adds and norms at once."""
    spread_norm(model, "input_layernorm")


CHANGES = [
    add_hook, add_norm_hook, add_layer_hook, add_adapter, replace_forward, replace_norm, replace_activation,
    set_scaling, spread_norm, spread_norm_behind_a_layer,
]  # fmt: skip


@pytest.mark.parametrize("change", CHANGES)
def test_a_module_that_changed_before_or_after_the_proof_keeps_its_own_way(change):
    model = fresh(num_layers=3)  # the second one is changed
    before = fuse_on_cpu(model)
    with torch.no_grad():
        own = tree_logits(model, *check_case(model))
        change(model)
        changed = tree_logits(model, *check_case(model))
    assert (changed - own).abs().max() > 1e-2, "the change must show"
    assert difference(model, before) <= 1e-4
    assert difference(model, fuse_on_cpu(model)) <= 1e-4
    assert swapped_names(model, before) >= {"model.layers.0.mlp", "model.layers.2.mlp", "model.norm"}


def test_what_large_states_alone_show_is_not_fused():
    """OLMo cuts queries, keys and values off, gelu_10 its result."""
    torch.manual_seed(0)
    shape = {**SHAPE, "initializer_range": 0.02}
    for clip, is_cut in ((8.0, True), (None, False)):
        model = AutoModelForCausalLM.from_config(OlmoConfig(**shape, clip_qkv=clip)).eval()
        assert (ATTENTION in kept(fuse_on_cpu(model))) is not is_cut
    for activation, is_cut in (("gelu_10", True), ("gelu", False), ("gelu_new", False), ("silu", False)):
        model = AutoModelForCausalLM.from_config(LlamaConfig(**shape, hidden_act=activation)).eval()
        assert (MLP in kept(fuse_on_cpu(model))) is not is_cut, activation


@pytest.mark.parametrize("has_positions", [True, False])
def test_weights_that_are_zero_at_the_proof_prove_nothing(has_positions):
    """Heads of zeros turn to zeros, by tables of whatever width (gpt-oss: of half) or by none (SmolLM3)."""
    config = CONFIGS["gpt_oss"] if has_positions else SmolLM3Config(**SHAPE, no_rope_layers=[0, 0])
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).eval()
    loaded_later = {name: value for name, value in model.state_dict().items() if "q_proj" in name or "k_proj" in name}
    weights = {name: value.clone() for name, value in loaded_later.items()}
    for value in loaded_later.values():
        value.zero_()
    fusion = fuse_on_cpu(model)
    model.load_state_dict(weights, strict=False)
    assert ATTENTION not in kept(fusion) and kept(fusion)[NORM] == 5
    assert difference(model, fusion) <= 1e-4


def test_rows_that_overflow_say_nothing():
    """float16 does so where states are large."""
    expected = torch.tensor([[1.0, 2.0], [torch.inf, 1.0]], dtype=torch.float16)
    reference = Outcome(tensors={"output 0": expected})
    found = expected.clone()
    found[1] = torch.nan
    assert outcome_difference(reference, Outcome(tensors={"output 0": found})) == (0.0, None)
    found[0, 1] = torch.nan
    assert outcome_difference(reference, Outcome(tensors={"output 0": found}))[0] == torch.inf
    nothing = Outcome(tensors={"output 0": expected[1:]})
    assert outcome_difference(nothing, nothing) == (torch.inf, "its output 0 is not finite")


def test_a_configuration_that_changed_is_read():
    """Mistral's attention reads its window there; token ids are read by nobody."""
    model = fresh("mistral")
    before, window = fuse_on_cpu(model), model.config.sliding_window
    model.config.pad_token_id = 3
    assert len(swapped_names(model, before)) == 11
    model.config.sliding_window = 2
    assert "model.layers.0.self_attn" not in swapped_names(model, before)
    again = fuse_on_cpu(model)
    assert again.report is not before.report and len(swapped_names(model, again)) == 11
    assert difference(model, before) <= 1e-4 and difference(model, again) <= 1e-4
    model.config.sliding_window = window
    assert len(swapped_names(model, before)) == 11


def test_a_guard_that_is_left_out_is_seen(monkeypatch):
    """Control: without the guards a hook on a norm between two additions would be passed over."""
    model = fresh()
    fusion = fuse_on_cpu(model)
    add_norm_hook(model)
    monkeypatch.setattr("stand.fusion.guard.Guard.holds", lambda guard: True)
    assert difference(model, fusion) > 1e-2


def test_all_swaps_together_are_checked(monkeypatch):
    """Control: layers that add otherwise, but not in the trial."""
    own = FusedLayer.__call__
    monkeypatch.setattr(on_cpu.Trial, "_compare", lambda *_: (0.0, ""))
    monkeypatch.setattr(FusedLayer, "__call__", lambda layer, states, **given: own(layer, 2 * states, **given))
    model = fresh()
    with pytest.raises(ValueError, match="must give the model's own logits"):
        fuse_on_cpu(model)
    engine = stand.wrap(model)
    assert engine.backend.fusion is None and "not fused, because of ValueError" in engine.backend.reason


@pytest.mark.skipif(torch.bfloat16 not in DTYPES, reason="needs AVX2")
@pytest.mark.parametrize("family", EXPECTED)
def test_in_bfloat16_as_much_is_swapped(family):
    """Rounded where the modules round: most swaps have their bits."""
    fusion = fuse_on_cpu(fresh(family).bfloat16())
    assert kept(fusion) == EXPECTED[family]
    errors = [swap.max_error for swap in fusion.report if swap.is_kept]
    assert max(errors) <= 2.0**-8 and errors.count(0.0) > len(errors) // 2


@pytest.mark.skipif(torch.bfloat16 not in DTYPES, reason="needs AVX2")
def test_what_was_proven_in_one_dtype_does_not_serve_another():
    model = fresh()
    fusion = fuse_on_cpu(model)
    model.bfloat16()
    with torch.inference_mode():
        assert isinstance(fused(model, TreeCache(1, 1, fusion=fusion)), nullcontext)
        again = fuse_on_cpu(model)
        assert again.dtype is torch.bfloat16
        assert not isinstance(fused(model, TreeCache(1, 1, fusion=again)), nullcontext)


@pytest.mark.skipif(torch.bfloat16 not in DTYPES, reason="needs AVX2")
def test_norms_that_are_cast_later_keep_their_own_way():
    """As recipes for adapters do; Gemma's norms give the states' dtype whatever their weights are."""
    model = fresh("gemma3").bfloat16()
    fusion = fuse_on_cpu(model)
    for module in model.modules():
        if type(module).__name__.endswith("RMSNorm"):
            module.float()
    assert difference(model, fusion) <= 0.05
    assert swapped_names(model, fusion) == {"model.layers.0.mlp", "model.layers.1.mlp"}


@pytest.mark.parametrize("dtype", [torch.float16, torch.float64])
def test_other_dtypes_are_not_fused(dtype):
    model = fresh().to(dtype)
    backend = stand.wrap(model).backend
    assert backend.fusion is None and "not fused, because of ValueError: a model that is fused" in backend.reason
    with pytest.raises(ValueError, match="on a CPU must be there in float32"):
        fuse_on_cpu(model)


@contextmanager
def cast(model):
    model.bfloat16()
    yield
    model.float()


WAYS = {
    "autocast": lambda model: torch.autocast("cpu", dtype=torch.bfloat16),
    "gradients": lambda model: torch.enable_grad(),
    "cast": cast,
}


@pytest.mark.parametrize("way", WAYS)
def test_forwards_that_the_kernels_do_not_serve_take_the_models_own(way):
    model = fresh()
    fusion = fuse_on_cpu(model)
    prompt, _ = check_case(model)
    with torch.no_grad(), tree_attention(model), WAYS[way](model):
        plan = StepPlan.for_prompt(prompt, 0, row=0)
        outputs = [run_plan(model, TreeCache(1, 8, fusion=each), plan) for each in (fusion, None)]
        assert torch.equal(*outputs)


def test_a_model_whose_forward_casts_later_runs_its_own_modules():
    """As one that accelerate has prepared for mixed precision."""
    model = fresh()
    engine = stand.wrap(model)
    asked = {"max_new_tokens": 8, "temperature": 0.0, "stop_token_ids": []}
    engine.generate(input_ids=[[1, 2, 3]], **asked)
    model.forward = torch.autocast("cpu", dtype=torch.bfloat16)(model.forward)
    found = engine.generate(input_ids=[[1, 2, 3]], **asked).token_ids
    assert found == stand.wrap(model, fuse=False).generate(input_ids=[[1, 2, 3]], **asked).token_ids


def test_what_a_forward_casts_to_is_seen():
    """It decides what rounding explains: some processors round otherwise with other tokens in a product."""
    model = fresh()
    assert cast_dtype(model) == torch.float32
    model.forward = torch.autocast("cpu", dtype=torch.bfloat16)(model.forward)
    assert model.dtype == torch.float32 and cast_dtype(model) == torch.bfloat16


def test_plain_forwards_inside_have_their_own_attention():
    model = fresh("qwen3")
    tokens = torch.arange(6)[None]
    with torch.inference_mode():
        own = model(tokens).logits
        with fuse_on_cpu(model).active():
            assert (model(tokens).logits - own).abs().max() <= 1e-4
            assert (model(tokens, use_cache=True).logits - own).abs().max() <= 1e-4


@torch.inference_mode()
def test_watched_layers_change_no_bit():
    """A rider's hook makes two layers add by themselves; tokens and logits stay those of other fused steps."""
    model = fresh()
    fusion = fuse_on_cpu(model)
    case = check_case(model)
    free = tree_logits(model, *case, fusion=fusion)
    seen = []
    hook = model.model.layers[1].register_forward_pre_hook(lambda module, args: seen.append(args[0].clone()))
    assert swapped_names(model, fusion).isdisjoint({"model.layers.0", "model.layers.1"})
    assert torch.equal(tree_logits(model, *case, fusion=fusion), free) and len(seen) == 2
    hook.remove()
    assert swapped_names(model, fusion) >= {"model.layers.0", "model.layers.1"}


@pytest.mark.parametrize("has_input_norm", [False, True])
@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_a_layer_of_the_same_kind_takes_what_was_proven(family, has_input_norm):
    """A head's layer, with weights of its own and a module in another place."""
    model = fresh(family)
    head = EagleHead(model, has_input_norm=has_input_norm).eval()
    layer = model.get_decoder().layers[0]
    assert fused_twin(model, layer, head, "layers.0") is None  # nothing is proven yet
    fuse_on_cpu(model)
    twin = fused_twin(model, layer, head, "layers.0")
    norms = {"layers.0.post_attention_layernorm"} | ({"layers.0.input_layernorm"} if has_input_norm else set())
    assert swapped_names(head, twin) == {"layers.0", "layers.0.self_attn", "layers.0.mlp"} | norms
    head.layers[0].mlp = torch.nn.Identity()
    assert not any("mlp" in name for name in swapped_names(head, fused_twin(model, layer, head, "layers.0")))
    assert fused_twin(model, layer, head.double(), "layers.0") is None


def test_without_its_inner_norm_a_layer_runs_its_own_forward():
    model = fresh()
    fuse_on_cpu(model)
    head = EagleHead(model).eval()
    head.layers[0].post_attention_layernorm = torch.nn.Identity()
    twin = fused_twin(model, model.get_decoder().layers[0], head, "layers.0")
    assert swapped_names(head, twin) == {"layers.0.self_attn", "layers.0.mlp"}


def negated(forward):
    return lambda self, *args, **kwargs: -forward(self, *args, **kwargs)


@pytest.mark.parametrize("is_wrapped_again", [False, True])
@pytest.mark.parametrize("part", ["norm", "mlp", "rotary"])
def test_code_that_is_replaced_later_is_run(part, is_wrapped_again, monkeypatch):
    """As libraries of kernels do it: for a class, or for a function of its file."""
    model = copy.deepcopy(tiny_model("llama"))
    engine = stand.wrap(model)
    engine.generate(input_ids=[[1, 2, 3]], max_new_tokens=2)
    layer = model.model.layers[0]
    if part == "rotary":
        file = sys.modules[type(layer.self_attn).__module__]
        monkeypatch.setattr(file, "apply_rotary_pos_emb", lambda q, k, *args, **kwargs: (-q, k))
    else:
        owner = type(layer.mlp if part == "mlp" else layer.input_layernorm)
        monkeypatch.setattr(owner, "forward", negated(owner.forward))
    engine = stand.wrap(model) if is_wrapped_again else engine
    found = engine.generate(input_ids=[[1, 2, 3]], max_new_tokens=8, temperature=0.0, stop_token_ids=[]).token_ids
    plain = model.generate(torch.tensor([[1, 2, 3]]), max_new_tokens=8, do_sample=False, eos_token_id=None)
    assert found == [plain[0, 3:].tolist()]


@pytest.mark.parametrize("register", [register_module_forward_hook, register_module_forward_pre_hook])
def test_hooks_of_all_modules_are_run(register):
    model = copy.deepcopy(tiny_model("llama"))
    engine = stand.wrap(model)
    asked = {"max_new_tokens": 8, "temperature": 0.0, "stop_token_ids": []}
    without = engine.generate(input_ids=[[1, 2, 3]], **asked).token_ids
    norm = type(model.model.norm)

    def hook(module, args, output=None):
        if type(module) is norm:
            return (-args[0],) if output is None else output.roll(1, -1)
        return None

    handle = register(hook)
    try:
        found = engine.generate(input_ids=[[1, 2, 3]], **asked).token_ids
        plain = model.generate(torch.tensor([[1, 2, 3]]), max_new_tokens=8, do_sample=False, eos_token_id=None)
    finally:
        handle.remove()
    assert found == [plain[0, 3:].tolist()] != without
    assert engine.generate(input_ids=[[1, 2, 3]], **asked).token_ids == without
