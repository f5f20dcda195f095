"""What is recorded follows the model: whatever a graph would not see between two calls makes it be recorded anew."""

import copy
import gc
import logging
import weakref

import pytest
import torch

pytest.importorskip("triton")

from letter_tokenizer import letter_tokenizer
from plain_kernels import use_plain_kernels
from tiny_models import kernel_model
from torch.nn.modules import module as all_modules
from torch.nn.modules.module import register_module_forward_hook
from torch.testing._internal.two_tensor import TwoTensor

import stand
from stand.forward.model_state import ModelState
from stand.gpu.captured_step import CapturedStep
from stand.gpu.runner import DirectRunner
from stand.scheduling.free_memory import bytes_per_token

PROMPT = [[3, 4, 5, 6, 7, 3, 4]]
SETTINGS = {"max_new_tokens": 8, "temperature": 0.0, "stop_token_ids": [], "seed": 4}


@pytest.fixture
def recorded(monkeypatch, caplog):
    """Grows by one with every size that is recorded; where a test fails, the log says why one was.

    Hooks for all modules that a test registers end with it. Were they to end with its model, the collector of garbage
    would remove them in the middle of a later test, which then sees a change that it did not make.
    """
    caplog.set_level(logging.INFO, logger="stand")
    monkeypatch.setattr(all_modules, "_global_forward_hooks", all_modules._global_forward_hooks.copy())
    use_plain_kernels(monkeypatch)
    sizes, record = [], DirectRunner.record
    monkeypatch.setattr(DirectRunner, "record", lambda self, *bodies: sizes.append(1) or record(self, *bodies))
    return sizes


def own_model():
    """Of two layers."""
    model = copy.deepcopy(kernel_model("qwen2"))
    del model.model.layers[2:]
    model.config.num_hidden_layers = 2
    return model


def engine_of(model, backend="triton", **settings):
    return stand.wrap(model, drafter=stand.BlendedDrafter(budget=2), backend=backend, **{"fuse": False, **settings})


def move_weights(model):
    for parameter in model.parameters():
        parameter.data = parameter.data.clone()


def move_a_buffer(model):
    rotary = model.model.rotary_emb
    rotary.inv_freq = rotary.inv_freq.clone()


def add_a_hook(model):
    model.model.layers[0].mlp.register_forward_hook(lambda module, args, output: -5 * output)


def add_a_hook_before(model):
    model.model.layers[0].mlp.register_forward_pre_hook(lambda module, args: (-args[0],))


def replace_a_forward(model):
    mlp = model.model.layers[0].mlp
    mlp.forward = lambda states: -mlp.down_proj(mlp.up_proj(states))


def replace_a_module(model):
    layer = model.model.layers[0]
    layer.mlp.down_proj = torch.nn.Linear(*reversed(layer.mlp.down_proj.weight.shape), bias=False)


def name_an_adapter(model):
    """As peft keeps which one is active."""
    model.model.layers[0].mlp._active_adapter = ["second"]


def change_a_setting(model):
    model.model.layers[0].self_attn.scaling *= 0.25


def change_the_configuration(model):
    model.config.rms_norm_eps = 0.5


def merge_projections(model):
    engine_of(model, fuse=True)


def hook_all_modules(model):
    mlp = model.model.layers[0].mlp
    register_module_forward_hook(lambda module, args, output: -5 * output if module is mlp else None)


CHANGES = (
    move_weights, move_a_buffer, replace_a_forward, replace_a_module, name_an_adapter, change_a_setting,
    change_the_configuration, merge_projections,
)  # fmt: skip


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_a_changed_model_is_recorded_anew(recorded, change):
    model = own_model()
    engine = engine_of(model)
    engine.generate(input_ids=PROMPT, **SETTINGS)
    recorded.clear()
    change(model)
    recorded.clear()  # what a further engine has recorded
    output = engine.generate(input_ids=PROMPT, **SETTINGS)
    assert recorded and str(engine.backend) == "triton"
    assert output.token_ids == engine_of(model, "sdpa").generate(input_ids=PROMPT, **SETTINGS).token_ids


@pytest.mark.parametrize("hook", [add_a_hook, add_a_hook_before, hook_all_modules])
def test_a_hook_makes_a_call_eager(recorded, hook):
    """A recorded step would run its Python once, over padding, and never again."""
    model = own_model()
    engine = engine_of(model)
    first = engine.generate(input_ids=PROMPT, **SETTINGS)
    before = [list(module._forward_hooks) + list(module._forward_pre_hooks) for module in model.modules()]
    hook(model)
    recorded.clear()
    with pytest.warns(UserWarning, match=f"steps are eager in this call: {hook.__name__}.* is a hook"):
        output = engine.generate(input_ids=PROMPT, **SETTINGS)
    assert not recorded and str(engine.backend) == "triton"
    assert output.token_ids == engine_of(model, "sdpa").generate(input_ids=PROMPT, **SETTINGS).token_ids
    all_modules._global_forward_hooks.clear()
    for module, own in zip(model.modules(), before, strict=True):
        for hooks in (module._forward_hooks, module._forward_pre_hooks):
            for name in [name for name in hooks if name not in own]:
                del hooks[name]
    assert engine.generate(input_ids=PROMPT, **SETTINGS).token_ids == first.token_ids and recorded


def test_a_cast_model_is_recorded_anew(recorded):
    model = own_model()
    engine = engine_of(model)
    engine.generate(input_ids=PROMPT, **SETTINGS)
    before = bytes_per_token(model)
    model.to(torch.bfloat16)
    recorded.clear()
    output = engine.generate(input_ids=PROMPT, **SETTINGS)
    assert recorded and str(engine.backend) == "triton" and 2 * bytes_per_token(model) == before
    assert output.token_ids == engine_of(model, "sdpa").generate(input_ids=PROMPT, **SETTINGS).token_ids


def test_a_call_that_is_interrupted_where_it_begins_costs_no_graphs_for_good(recorded, monkeypatch):
    engine = engine_of(own_model())
    expected = engine.generate(input_ids=PROMPT, **SETTINGS).token_ids
    begin = CapturedStep.begin
    monkeypatch.setattr(CapturedStep, "begin", lambda self, *args, **law: interrupt())
    with pytest.raises(KeyboardInterrupt):
        engine.generate(input_ids=PROMPT, **{**SETTINGS, "temperature": 0.7})
    monkeypatch.setattr(CapturedStep, "begin", begin)
    recorded.clear()
    assert engine.generate(input_ids=PROMPT, **SETTINGS).token_ids == expected
    assert recorded and str(engine.backend) == "triton"


def interrupt():
    raise KeyboardInterrupt


def test_code_of_a_class_that_is_replaced(recorded, monkeypatch):
    model = own_model()
    engine = engine_of(model)
    engine.generate(input_ids=PROMPT, **SETTINGS)
    recorded.clear()
    kind = type(model.model.layers[0].mlp)
    forward = kind.forward
    monkeypatch.setattr(kind, "forward", lambda self, states: -5 * forward(self, states))
    output = engine.generate(input_ids=PROMPT, **SETTINGS)
    assert recorded
    assert output.token_ids == engine_of(model, "sdpa").generate(input_ids=PROMPT, **SETTINGS).token_ids


def test_an_unchanged_model_is_not(recorded):
    """Weights that are written where they lie are read by graphs as they are. Without drafts steps have one size."""
    settings = SETTINGS | {"draft": False}
    model = own_model()
    engine = engine_of(model)
    first = engine.generate(input_ids=PROMPT, **settings)
    recorded.clear()
    assert engine.generate(input_ids=PROMPT, **settings).token_ids == first.token_ids
    with torch.no_grad():
        model.lm_head.weight.neg_()
    output = engine.generate(input_ids=PROMPT, **settings)
    assert not recorded and output.token_ids != first.token_ids
    assert output.token_ids == engine_of(model, "sdpa").generate(input_ids=PROMPT, **settings).token_ids


def test_weights_that_move_while_a_stream_waits(recorded):
    model = own_model()
    engine = engine_of(model, tokenizer=letter_tokenizer())
    expected = engine.generate(input_ids=PROMPT, **SETTINGS).texts
    pieces = engine.stream(input_ids=PROMPT, **SETTINGS)
    first = next(pieces)
    recorded.clear()
    move_weights(model)
    assert "".join(text for _, text in [first, *pieces]) == expected[0]
    assert recorded


def test_what_has_changed_is_named(recorded, caplog):
    model = own_model()
    engine = engine_of(model)
    engine.generate(input_ids=PROMPT, **SETTINGS)
    replace_a_forward(model)
    with caplog.at_level("INFO", logger="stand"):
        engine.generate(input_ids=PROMPT, **SETTINGS)
    assert "recorded anew, because the model is not as it was: module 'model.layers.0.mlp' has changed" in caplog.text


def test_states_are_compared():
    model = own_model()
    state = ModelState(model)
    assert ModelState(model).change_since(state) is None and state.holds_weights()
    move_weights(model)
    assert not state.holds_weights() and ModelState(model).change_since(state) == "its weights have moved"
    state, norm = ModelState(model), model.model.norm
    norm.weight = torch.nn.Parameter(norm.weight.detach().clone())  # the old one lies where it did
    assert not state.holds_weights() and ModelState(model).change_since(state) == "its weights have moved"
    state = ModelState(model)
    change_the_configuration(model)
    assert ModelState(model).change_since(state) == "its configuration has changed"
    del model.model.layers[-1]
    assert ModelState(model).change_since(state) == "it has other modules"


def test_weights_that_consist_of_parts_are_seen_by_their_parts():
    """As quantised ones do: the tensor itself has no address."""
    linear = torch.nn.Linear(4, 4, bias=False)
    linear.weight = torch.nn.Parameter(TwoTensor(torch.randn(4, 4), torch.randn(4, 4)))
    state = ModelState(linear)
    assert linear.weight.data_ptr() == 0
    assert ModelState(linear).change_since(state) is None and state.holds_weights()
    linear.weight.b = linear.weight.b.clone()
    assert not state.holds_weights() and ModelState(linear).change_since(state) == "its weights have moved"
    state = ModelState(linear)
    linear.weight = torch.nn.Parameter(TwoTensor(torch.randn(4, 4), torch.randn(4, 4)))
    assert ModelState(linear).change_since(state) == "its weights have moved"


def test_a_vocabulary_that_has_grown_has_laws_of_its_size(recorded):
    model = own_model()
    engines = [engine_of(model, backend) for backend in ("sdpa", "triton")]
    for size in (model.config.vocab_size, model.config.vocab_size + 9):
        model.resize_token_embeddings(size, mean_resizing=False)
        eager, captured = (engine.generate(input_ids=PROMPT, **SETTINGS).token_ids for engine in engines)
        assert captured == eager and str(engines[1].backend) == "triton"


def test_layers_that_come_back_have_keys_in_the_pool(recorded):
    """A call without the last layer makes a pool without its keys."""
    model = own_model()
    engines, layers = [engine_of(model, backend) for backend in ("sdpa", "triton")], model.model.layers
    for count in (1, 2):
        model.model.layers, model.config.num_hidden_layers = layers[:count], count
        eager, captured = (engine.generate(input_ids=PROMPT, **SETTINGS).token_ids for engine in engines)
        assert captured == eager and str(engines[1].backend) == "triton"


def test_a_prompt_of_one_token_has_a_pool(recorded):
    """Nothing comes before it, so its cache has no layer whose shape the pool could take."""
    model = own_model()
    engine = engine_of(model)
    output = engine.generate(input_ids=[[5]], **SETTINGS)
    assert recorded and str(engine.backend) == "triton"
    assert output.token_ids == engine_of(model, "sdpa").generate(input_ids=[[5]], **SETTINGS).token_ids


def test_a_prompt_of_one_token_with_penalties(recorded):
    model = own_model()
    asked = {**SETTINGS, "repetition_penalty": 1.5}
    output = engine_of(model).generate(input_ids=[[5]], **asked)
    assert output.token_ids == engine_of(model, "sdpa").generate(input_ids=[[5]], **asked).token_ids


def test_memory_goes_with_its_engine(recorded):
    engine = engine_of(own_model())
    engine.generate(input_ids=PROMPT, **SETTINGS)
    captured = weakref.ref(engine.backend._previous.captured)
    assert isinstance(captured(), CapturedStep)
    gc.collect()
    gc.disable()
    try:
        del engine
        assert captured() is None
    finally:
        gc.enable()


def test_steps_are_eager_inside_autocast(recorded):
    model = own_model()
    engine = engine_of(model)
    engine.generate(input_ids=PROMPT, **SETTINGS)
    recorded.clear()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        with pytest.warns(UserWarning, match="steps are eager inside torch.autocast"):
            output = engine.generate(input_ids=PROMPT, **SETTINGS)
        assert output.token_ids == engine_of(model, "sdpa").generate(input_ids=PROMPT, **SETTINGS).token_ids
    assert not recorded and str(engine.backend) == "triton"
    engine.generate(input_ids=PROMPT, **SETTINGS)
    assert not recorded  # what was recorded before serves again


def test_hot_filters_take_eager_steps_over_the_pool(recorded):
    """Kernels filter probabilities, and those of a hot law are equal where scores are not: top_k 1 would draw."""
    model = own_model()
    asked = {**SETTINGS, "temperature": 1e9, "top_k": 1}
    engine = engine_of(model, verifier="match")
    recorded.clear()  # the self-check's
    output = engine.generate(input_ids=PROMPT, **asked)
    assert output.token_ids == engine_of(model, "sdpa").generate(input_ids=PROMPT, **SETTINGS).token_ids
    assert not recorded
