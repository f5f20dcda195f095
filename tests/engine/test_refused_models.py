"""Models that cannot hold a tree are refused at wrap with the reason; the self-check sees what the list does not."""

import copy
import re
import threading
from types import SimpleNamespace
from unittest.mock import patch

import pytest
import torch
from recurrent_models import recurrent_model
from tiny_models import CONFIGS, SHAPE, tiny_model
from transformers import (
    AutoModelForCausalLM,
    BertConfig,
    BertForMaskedLM,
    BloomConfig,
    DogeConfig,
    FalconConfig,
    JambaConfig,
    MambaConfig,
    MptConfig,
    PhimoeConfig,
)
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

import stand
from stand.forward import self_check
from stand.forward.self_check import LOGIT_TOLERANCES, check_model, relative_difference, tree_difference
from stand.forward.window_check import window_disagreement

REFUSED = {
    "mamba": (MambaConfig(vocab_size=61, hidden_size=32, num_hidden_layers=2), "recurrent|linear_attention"),
    "jamba": (
        JambaConfig(**SHAPE, num_experts=2, mamba_d_state=8, mamba_dt_rank=4, attn_layer_period=2, attn_layer_offset=1),
        "linear_attention.*siblings would mix",
    ),
    "bloom": (BloomConfig(vocab_size=61, hidden_size=32, n_layer=2, n_head=4), "AttentionInterface"),
    "mpt": (MptConfig(vocab_size=61, d_model=32, n_heads=4, n_layers=2), "AttentionInterface"),
    "falcon_alibi": (
        FalconConfig(vocab_size=61, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, alibi=True),
        "ALiBi",
    ),
}


@pytest.mark.parametrize("family", CONFIGS)
def test_served_families_pass_the_self_check(family):
    assert tree_difference(tiny_model(family)) < 1e-5
    check_model(tiny_model(family))


def test_a_default_attention_without_soft_capping_is_no_reference(monkeypatch):
    """Gemma 2 in transformers 5.17: its default sdpa leaves the cap out, and so did the check's reference."""
    model = copy.deepcopy(tiny_model("gemma2"))
    model.config.attn_logit_softcapping = 1.0  # scores far into the cap
    for layer in model.model.layers:
        layer.self_attn.attn_logit_softcapping = 1.0
    monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS._global_mapping, "sdpa", _without_cap)
    monkeypatch.setattr(type(model), "_supports_sdpa", True)
    model.set_attn_implementation("sdpa")
    assert tree_difference(model) < 1e-5
    assert model.config._attn_implementation == "sdpa"
    model.config.attn_logit_softcapping = None  # control: against the default, which is what was done before
    assert tree_difference(model) > 1e-2


def _without_cap(module, query, key, value, attention_mask, softcap=None, **settings):
    return sdpa_attention_forward(module, query, key, value, attention_mask, **settings)


@pytest.mark.parametrize("family", CONFIGS)
def test_whatever_attention_a_version_of_transformers_loads_by_default(family):
    model = AutoModelForCausalLM.from_config(copy.deepcopy(CONFIGS[family])).eval()
    before = model.config._attn_implementation
    check_model(model)
    assert model.config._attn_implementation == before


@pytest.mark.parametrize("family", REFUSED)
def test_unservable_families_are_refused_with_the_reason(family):
    config, reason = REFUSED[family]
    model = AutoModelForCausalLM.from_config(config).eval()
    with pytest.raises(stand.UnsupportedModelError, match=reason):
        stand.wrap(model)


def test_something_that_is_no_model_is_refused():
    with pytest.raises(stand.UnsupportedModelError, match="causal language model, got Linear"):
        stand.wrap(torch.nn.Linear(2, 2))


def test_what_does_not_generate_is_refused_at_wrap(monkeypatch):
    sizes = {"vocab_size": 61, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    model = BertForMaskedLM(BertConfig(**sizes, intermediate_size=16)).eval()
    with pytest.raises(stand.UnsupportedModelError, match="got BertForMaskedLM without a generate of its own; load"):
        stand.wrap(model)
    model = tiny_model("llama")
    monkeypatch.setattr(model, "generation_config", None)
    with pytest.raises(stand.UnsupportedModelError, match="got LlamaForCausalLM without its generation_config; load"):
        stand.wrap(model)


class Adapted(torch.nn.Module):
    """As adapters wrap a model."""

    def get_base_model(self):
        return tiny_model("llama")


@pytest.mark.parametrize(
    ("wrapper", "remedy"),
    [
        (Adapted(), "model.get_base_model()"),
        (torch.nn.DataParallel(torch.nn.Linear(2, 2)), "model.module"),
        (SimpleNamespace(_orig_mod=None), "model._orig_mod"),
    ],
)
def test_what_wraps_a_model_is_told_how_to_pass_it(wrapper, remedy):
    with pytest.raises(stand.UnsupportedModelError, match=re.escape(f"pass {remedy}")):
        stand.wrap(wrapper)


def test_a_learned_prompt_which_the_model_inside_does_without_is_refused():
    prompted = Adapted()
    prompted.active_peft_config = SimpleNamespace(is_prompt_learning=True)
    with pytest.raises(stand.UnsupportedModelError, match="got Adapted with a learned one; call its own generate"):
        stand.wrap(prompted)


def test_training_mode_with_dropout_is_refused():
    model = copy.deepcopy(tiny_model("llama"))
    model.train()
    stand.wrap(model)  # nothing is dropped
    model.config.attention_dropout = 0.1
    with pytest.raises(stand.UnsupportedModelError, match=r"call model.eval\(\)"):
        stand.wrap(model)
    engine = stand.wrap(model.eval())
    model.train()  # after wrap
    for call in (lambda: engine.generate([3, 4]), lambda: engine.run([[3, 4]])):
        with pytest.raises(stand.UnsupportedModelError, match=r"call model.eval\(\)"):
            call()


def test_gradient_checkpointing_in_training_mode_is_refused():
    """transformers drops keys and values then."""
    model = copy.deepcopy(tiny_model("llama"))
    engine = stand.wrap(model)
    model.gradient_checkpointing_enable()
    expected = engine.generate([3, 4], max_new_tokens=4).token_ids
    model.train()
    for call in (lambda: engine.generate([3, 4]), lambda: stand.wrap(model)):
        with pytest.raises(stand.UnsupportedModelError, match=r"with gradient checkpointing.*call model.eval\(\)"):
            call()
    model.eval()
    assert engine.generate([3, 4], max_new_tokens=4).token_ids == expected


CHECKS = [
    "window_disagreement", "tree_difference", "own_steps_difference", "kept_difference", "far_position_difference",
]  # fmt: skip


@pytest.mark.parametrize("failing", CHECKS)
def test_what_a_models_own_code_raises_is_a_refusal(monkeypatch, failing):
    model = recurrent_model("lfm2")

    def fail(model):
        raise error

    monkeypatch.setattr(self_check, failing, fail)
    error = KeyError("conv_states")
    with pytest.raises(stand.UnsupportedModelError, match="must run .*, got KeyError: 'conv_states'"):
        check_model(model)
    error = torch.OutOfMemoryError("CUDA out of memory")
    with pytest.raises(torch.OutOfMemoryError):
        check_model(model)


def test_the_self_check_sees_positions_taken_from_slots():
    """Negative control: a model that ignores position_ids and counts its input instead."""
    model = AutoModelForCausalLM.from_config(CONFIGS["llama"]).eval()
    rotary = model.model.rotary_emb
    original = rotary.forward

    def by_slot(hidden_states, position_ids):
        return original(hidden_states, torch.arange(position_ids.shape[1])[None])

    rotary.forward = by_slot
    assert tree_difference(model) > LOGIT_TOLERANCES[torch.float32]
    with pytest.raises(stand.UnsupportedModelError, match="must equal plain forwards"):
        check_model(model)


MASKS = {"finfo": torch.finfo(torch.float32).min, "float16": -65504.0, "thousands": -1e4, "infinity": -torch.inf}


def mask_logits(model, value: float, places=slice(0, 1)) -> None:
    def masked(module, args, logits):
        logits = logits.clone()
        logits[..., places] = value
        return logits

    model.lm_head.register_forward_hook(masked)


@pytest.mark.parametrize("value", MASKS.values(), ids=MASKS)
def test_masked_logits_hide_nothing_and_refuse_nobody(value):
    """A spread that counts masks would be so large that no difference shows."""
    model = AutoModelForCausalLM.from_config(CONFIGS["llama"]).eval()
    mask_logits(model, value, slice(0, 20))
    assert tree_difference(model) < 1e-5
    check_model(model)
    original = model.model.rotary_emb.forward
    model.model.rotary_emb.forward = lambda x, position_ids: original(x, torch.arange(position_ids.shape[1])[None])
    with pytest.raises(stand.UnsupportedModelError, match="must equal plain forwards"):
        check_model(model)


def test_most_tokens_may_be_masked():
    model = AutoModelForCausalLM.from_config(CONFIGS["llama"]).eval()
    mask_logits(model, torch.finfo(torch.float32).min, slice(8, None))
    assert 0 < tree_difference(model) < 1e-5


def test_the_differences_of_a_mask_count():
    expected = torch.tensor([[1.0, 0.0, -1.0, -torch.inf, -1e9]])
    assert relative_difference(expected, expected) == 0.0
    assert relative_difference(expected + 0.1, expected) == pytest.approx(0.05)
    for place, value in ((3, 2.0), (3, torch.inf), (1, -torch.inf), (4, 0.0)):
        logits = expected.clone()
        logits[0, place] = value
        assert relative_difference(logits, expected) > 1e6


def test_weights_that_are_no_numbers_are_named():
    model = AutoModelForCausalLM.from_config(CONFIGS["llama"]).eval()
    with torch.no_grad():
        model.model.layers[0].mlp.up_proj.weight[0, 0] = torch.nan
    with pytest.raises(stand.UnsupportedModelError, match="got NaN.*check the model's weights and dtype"):
        check_model(model)


def test_bfloat16_passes_the_self_check():
    config = copy.deepcopy(CONFIGS["qwen2"])  # from_config notes the dtype in it
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()
    assert tree_difference(model) < LOGIT_TOLERANCES[torch.bfloat16]


def test_inside_autocast_the_models_own_type_is_checked():
    with torch.autocast("cpu", torch.bfloat16):
        check_model(tiny_model("llama"))


def test_an_unfit_dtype_is_refused(monkeypatch):
    monkeypatch.delitem(LOGIT_TOLERANCES, torch.float32)
    with pytest.raises(stand.UnsupportedModelError, match="dtype must be float32.*got torch.float32"):
        check_model(tiny_model("qwen2"))


def windowed(config_class, window):
    """Classes that put a sliding window into their mask alone. It is longer than what the self-check looks at."""
    shape = {"vocab_size": 61, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256}
    config = config_class(**shape, **heads, sliding_window=window, num_local_experts=4, pad_token_id=0)
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config).eval()


@pytest.mark.parametrize("config_class", [PhimoeConfig, DogeConfig])
def test_a_window_in_the_mask_alone_is_refused(config_class):
    with pytest.raises(stand.UnsupportedModelError, match="must be told the window that its mask has, got"):
        stand.wrap(windowed(config_class, 24))


def test_without_its_window_such_a_model_is_served():
    model = windowed(PhimoeConfig, None)
    prompt = torch.arange(3, 43)[None]
    expected = model.generate(prompt, max_new_tokens=8, do_sample=False, eos_token_id=None)[0, 40:].tolist()
    assert stand.wrap(model).generate(input_ids=prompt, max_new_tokens=8, temperature=0.0).token_ids == [expected]


def test_a_mask_that_a_model_makes_itself_is_refused():
    """Doge keeps the 2,048 keys that it finds most important: the self-check is shorter."""
    with pytest.raises(stand.UnsupportedModelError, match="no mask but that of the tree|window that its mask has"):
        stand.wrap(windowed(DogeConfig, None))


@pytest.mark.parametrize("told", [None, 7, 9])
def test_the_probe_sees_another_window(told, monkeypatch):
    """One layer says no window, or one that is by one key too short or too long."""
    model = tiny_model("mistral")
    assert window_disagreement(model) is None
    assert model.config.sliding_window == 8
    attention = model.model.layers[1].self_attn
    forward = attention.forward

    def misled(*args, **kwargs):
        config = copy.copy(model.config)
        config.sliding_window = told
        with patch.object(attention, "config", config):
            return forward(*args, **kwargs)

    monkeypatch.setattr(attention, "forward", misled)
    assert f"is told of {told or 512} keys, and its mask shows 8" in window_disagreement(model)


def test_models_are_probed_in_several_threads(monkeypatch):
    """One thread has finished with its model while another one's forward stands: neither takes the other's windows."""
    model, other = tiny_model("mistral"), tiny_model("llama")
    is_begun, may_go_on, found = threading.Event(), threading.Event(), []
    layer = model.model.layers[1]
    forward = layer.forward

    def paused(*args, **kwargs):
        is_begun.set()
        assert may_go_on.wait(60)
        return forward(*args, **kwargs)

    monkeypatch.setattr(layer, "forward", paused)
    monkeypatch.setattr(layer.self_attn, "config", copy.copy(model.config))
    layer.self_attn.config.sliding_window = 9  # is told one key more than its mask shows
    thread = threading.Thread(target=lambda: found.append(window_disagreement(model)))
    thread.start()
    assert is_begun.wait(60)
    assert window_disagreement(other) is None
    may_go_on.set()
    thread.join()
    assert "is told of 9 keys, and its mask shows 8" in found[0]


@pytest.mark.parametrize("compiled", ["forward", "module", "layer"])
def test_compiled_models_are_refused_by_name(compiled):
    model = copy.deepcopy(tiny_model("llama"))
    engine = stand.wrap(model)
    if compiled == "forward":
        model.forward = torch.compile(model.forward, backend="eager")
    elif compiled == "module":
        model.compile(backend="eager")
    else:
        model.model.layers[0].compile(backend="eager")
    for use in (lambda: stand.wrap(model), lambda: engine.generate(input_ids=[[1, 2]], max_new_tokens=2)):
        with pytest.raises(stand.UnsupportedModelError, match="not compiled, got a compiled forward of"):
            use()


def test_logits_beyond_the_vocabulary_are_refused():
    """As transformers 5.16 gathers those of some tied embeddings twice under tensor parallelism."""
    model = copy.deepcopy(tiny_model("llama"))
    weight = model.lm_head.weight.detach()
    model.lm_head.weight = torch.nn.Parameter(torch.cat([weight, weight]))
    with pytest.raises(stand.UnsupportedModelError, match="must score the 61 tokens of its vocabulary, got 122"):
        stand.wrap(model)


class Centred(torch.nn.Linear):
    """What it makes of a token follows from the others of the forward."""

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        return super().forward(states - states.mean(dim=-2, keepdim=True))


class Renamed(torch.nn.Linear):
    """Another class that computes the same."""


class Wrapped(torch.nn.Parameter):
    """As quantised weights are: of a class of their own, in a layer of torch's."""


def test_weights_of_another_class_are_checked(monkeypatch):
    model = copy.deepcopy(tiny_model("llama"))
    engine = stand.wrap(model)
    checks = []
    monkeypatch.setattr(self_check, "_compare_forwards", checks.append)
    layer = model.model.layers[0].mlp.up_proj
    layer.weight = Wrapped(layer.weight.detach())
    for _ in range(2):
        engine.generate([3, 4], max_new_tokens=2)
    assert checks == [model]


@pytest.mark.parametrize("kind", [Centred, Renamed])
def test_layers_that_were_exchanged_are_checked_once(kind, monkeypatch):
    checks = []
    compare = self_check._compare_forwards
    monkeypatch.setattr(self_check, "_compare_forwards", lambda model: (checks.append(model), compare(model)))
    model = copy.deepcopy(tiny_model("llama"))
    engine = stand.wrap(model)
    engine.generate([3, 4], max_new_tokens=2)
    assert len(checks) == 1
    old = model.model.layers[0].mlp.up_proj
    new = kind(old.in_features, old.out_features, bias=False)
    new.load_state_dict(old.state_dict())
    model.model.layers[0].mlp.up_proj = new
    if kind is Renamed:
        for _ in range(2):
            engine.generate([3, 4], max_new_tokens=2)
        assert len(checks) == 2
    else:
        with pytest.raises(stand.UnsupportedModelError, match="must equal plain forwards"):
            engine.generate([3, 4], max_new_tokens=2)
