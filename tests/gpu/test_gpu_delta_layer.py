"""Fused layers by the gated delta rule: raw gates go to the rule, and what is not proven or has changed stays alone."""

import copy
import inspect
import textwrap
from functools import lru_cache
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("triton")

from nearest_bfloat16 import nearest_bfloat16
from plain_forwards import lengths_of, prefilled, ragged_case, spread
from recurrent_models import DELTA_RULE, STATE_SPACE, new_recurrent_model
from torch import nn

from stand.forward.model import run_plan
from stand.forward.packed_plan import StepPlan
from stand.forward.recurrent.layers import RecurrentForward, recurrent_layers
from stand.forward.tree_attention import tree_attention
from stand.fusion.forwards import delta_layer
from stand.fusion.forwards.delta_layer import (
    BY_KEY_HEAD,
    SEPARATE,
    SINGLE,
    FusedDeltaLayer,
    delta_parts,
    is_delta_layer,
)
from stand.fusion.fusion import Fusion, fuse
from stand.gpu import kernel_scan
from stand.trees import DraftBatch

KIND = "gated delta rule"
PARTS = {"qwen3_5": SEPARATE, "qwen3_5_moe": SEPARATE, "qwen3_next": BY_KEY_HEAD, "olmo_hybrid": SINGLE}
SCALES = {family: 2.0 if family == "olmo_hybrid" else 1.0 for family in PARTS}


@pytest.fixture(autouse=True)
def rounding():
    with nearest_bfloat16():
        yield


def fresh(family: str, dtype: torch.dtype = torch.float32):
    """Gates depend on the token: their layers have larger weights."""
    model = new_recurrent_model(DELTA_RULE[family])
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.rsplit(".", 2)[-2] in {"in_proj_a", "in_proj_b", "in_proj_ba", "a_proj", "b_proj"}:
                parameter.normal_(std=0.3)
            if name.endswith("dt_bias"):
                parameter.normal_()
    return model.to(dtype)


@lru_cache
def fused(family: str) -> Fusion:
    return fuse(fresh(family))


def verdicts(fusion: Fusion) -> list:
    return [swap for swap in fusion.report if swap.kind == KIND]


def stands_in(model) -> list[type]:
    return [type(vars(layer).get("forward")) for layer in recurrent_layers(model)]


@pytest.mark.parametrize("family", PARTS)
def test_every_layer_is_proven_and_its_scale_found(family):
    fusion = fused(family)
    (swap,) = verdicts(fusion)
    assert swap.is_kept and swap.count == 3 and swap.max_error < 2e-6
    assert set(fusion.recipe.delta_layers.values()) == {SCALES[family]}
    assert delta_parts(recurrent_layers(fusion.model)[0]) is PARTS[family]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("family", ["qwen3_5", "olmo_hybrid"])
@pytest.mark.filterwarnings("ignore:overflow encountered in cast")
def test_sixteen_bits_are_rounded_where_the_model_rounds(family, dtype):
    (swap,) = verdicts(fuse(fresh(family, dtype)))
    assert swap.is_kept and swap.max_error <= 2 * torch.finfo(dtype).eps


@pytest.mark.long
@pytest.mark.parametrize("family", PARTS)
@torch.inference_mode()
def test_steps_equal_those_of_the_models_own_layers(family):
    """Over trees, by the `TreeScan` of eager steps; plain forwards inside run the model's own."""
    fusion = fused(family)
    model, (prompts, drafts) = fusion.model, ragged_case(1)
    plan, tokens = StepPlan.for_drafts(DraftBatch.concatenate(drafts), lengths_of(prompts)), torch.tensor([[5, 6, 7]])
    with tree_attention(model):
        expected = run_plan(model, prefilled(model, prompts), plan)
        with fusion.active():
            assert stands_in(model) == [FusedDeltaLayer] * 3
            logits = run_plan(model, prefilled(model, prompts), plan)
        assert stands_in(model) == [RecurrentForward] * 3
    assert stands_in(model) == [type(None)] * 3
    assert float((logits - expected).abs().max()) < 1e-4 * spread(expected)
    own = model(tokens).logits
    with fusion.active():
        assert float((model(tokens).logits - own).abs().max()) < 1e-4 * spread(own)


def test_an_active_fusion_stays_when_a_step_begins():
    fusion = fused("qwen3_5")
    with fusion.active(), tree_attention(fusion.model):
        assert stands_in(fusion.model) == [FusedDeltaLayer] * 3


@pytest.mark.parametrize("broken", ["decay", "rate", "log_scale", "bias"])
def test_wrong_gates_are_noticed(broken, monkeypatch):
    """Control: each of what the kernel gets is that of another head, in turn."""
    own, place = kernel_scan.prepared_gated, ["decay", "rate", "log_scale", "bias"].index(broken)

    def wrong(query, key, *gates):
        gates = [gate.roll(1, -1) if at == place else gate for at, gate in enumerate(gates)]
        return own(query, key, *gates)

    monkeypatch.setattr(kernel_scan, "prepared_gated", wrong)
    (swap,) = verdicts(fuse(fresh("qwen3_5")))
    assert not swap.is_kept and swap.max_error > 1e-3 and "rounding" in swap.reason


def of_another_formula(layer: nn.Module, old: str, new: str) -> type:
    """Its class, with this in its forward instead of that."""
    own = inspect.unwrap(type(layer).forward)
    source = textwrap.dedent(inspect.getsource(own))
    source, names = source[source.index("def forward") :], dict(own.__globals__)
    assert source.count(old) == 1
    exec("from __future__ import annotations\n" + source.replace(old, new), names)
    return type("Other", (type(layer),), {"forward": names["forward"]})


@pytest.mark.parametrize(
    ("old", "new"), [("F.softplus(", "F.relu("), ("b.sigmoid()", "b.sigmoid() ** 2"), ("self.norm(", "2 * self.norm(")]
)
def test_a_layer_that_computes_otherwise_is_left_alone(old, new):
    """The others are fused."""
    model = fresh("qwen3_5")
    layers = recurrent_layers(model)
    layers[1].__class__ = of_another_formula(layers[1], old, new)
    fusion = fuse(model)
    assert [(swap.count, swap.is_kept) for swap in verdicts(fusion)] == [(2, True), (1, False)]
    with fusion.active():
        assert stands_in(model) == [FusedDeltaLayer, type(None), FusedDeltaLayer]


def test_a_layer_whose_own_forward_fails_over_a_chain_is_left_alone(monkeypatch):
    monkeypatch.setattr(kernel_scan, "convolve", None)
    (swap,) = verdicts(fuse(fresh("qwen3_5")))
    assert not swap.is_kept and "cannot be tried over a chain (TypeError" in swap.reason


def a_hook(layer):
    return layer.register_forward_hook(lambda *given: None)


def another_norm(layer):
    layer.norm = copy.deepcopy(layer.norm)


def another_setting(layer):
    layer.activation = "gelu"


def a_hook_on_the_norm(layer):
    layer.norm.register_forward_hook(lambda *given: None)


@pytest.mark.parametrize("change", [a_hook, another_norm, another_setting, a_hook_on_the_norm])
def test_a_layer_that_has_changed_runs_its_own_forward(change):
    fusion = fuse(fresh("qwen3_5"))
    change(recurrent_layers(fusion.model)[1])
    with fusion.active():
        assert stands_in(fusion.model) == [FusedDeltaLayer, type(None), FusedDeltaLayer]


def test_a_hook_on_an_input_that_is_passed_is_seen():
    """Qwen3-Next's two products are one, past its linear layers."""
    fusion = fuse(fresh("qwen3_next"))
    recurrent_layers(fusion.model)[0].in_proj_ba.register_forward_hook(lambda *given: None)
    with fusion.active():
        assert stands_in(fusion.model) == [type(None), FusedDeltaLayer, FusedDeltaLayer]


@pytest.mark.parametrize("family", PARTS)
@torch.inference_mode()
def test_layers_whose_inputs_and_norms_are_not_fused(family):
    """Every child is called then: adapters and quantised layers stay at work."""
    model = fresh(family)
    layer = recurrent_layers(model)[0]
    for name, child in list(layer.named_children()):
        if isinstance(child, nn.Linear):
            setattr(layer, name, type("Adapted", (nn.Linear,), {})(child.in_features, child.out_features, bias=False))
            getattr(layer, name).weight = child.weight
    a_hook(getattr(layer, PARTS[family].norm))
    fusion = fuse(model)
    name = next(name for name, module in model.named_modules() if module is layer)
    assert fusion.recipe.delta_layers[name] == SCALES[family] and name not in fusion.recipe.merged
    assert not any(norm.startswith(f"{name}.") for norm in fusion.recipe.gated_norms)


def test_names_alone_make_no_layer():
    layer = recurrent_layers(fresh("qwen3_next"))[0]
    del layer.in_proj_ba
    assert delta_parts(layer) is None
    layer = recurrent_layers(fresh("qwen3_5"))[0]
    del layer.A_log
    assert delta_parts(layer) is None and delta_parts(nn.Linear(2, 2)) is None


def test_a_trial_begins_without_a_past():
    layer = recurrent_layers(fresh("qwen3_5"))[0]
    asked = []
    kernels = SimpleNamespace(chain_scan=lambda *given: asked.append(given))
    delta_layer._chain(layer, kernels, torch.zeros(1, 5, 32))
    ((index, num_tokens, tails, states),) = asked
    assert (index, num_tokens) == (layer.layer_idx, 5)
    assert tails.shape == (1, layer.conv1d.weight.shape[-1] - 1, len(layer.conv1d.weight)) and not tails.any()
    assert states.shape == (1, layer.num_v_heads, layer.head_k_dim, layer.head_v_dim) and not states.any()


def test_only_layers_by_the_delta_rule_are_taken_for_such():
    model = new_recurrent_model(STATE_SPACE["bamba"])
    assert recurrent_layers(model) and not any(map(is_delta_layer, model.modules()))
    assert all(map(is_delta_layer, recurrent_layers(fresh("qwen3_5"))))
