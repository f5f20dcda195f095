"""Steps of latent attention compute no keys; where a layer is not what it seems, they do, as transformers does."""

import copy
import gc
import weakref

import pytest
import torch
from torch.nn.modules.module import register_module_forward_hook
from unequal_models import unequal_model

import stand
from stand.drafters.blended import BlendedDrafter
from stand.forward.latent_keys import NAME, LatentKeys, unexpanded_keys
from stand.forward.packed_plan import StepPlan, running
from stand.forward.tree_attention import tree_attention

FAMILIES = ("deepseek_v3", "minicpm3")
PROMPTS = [[3, 4, 5, 6, 7, 3, 4], [8], [9, 10, 9]]


def layers_of(model):
    return [layer.self_attn for layer in model.model.layers]


@pytest.fixture(params=FAMILIES)
def model(request):
    found = unequal_model(request.param)
    if not hasattr(layers_of(found)[0], NAME):
        pytest.skip("this version of transformers keeps the keys themselves")
    return found


@pytest.fixture
def expanded(model, monkeypatch):
    """Slots whose keys were computed, call by call."""
    kind, slots = type(layers_of(model)[0]), []
    own = kind.expand_kv

    def counted(self, latents, turned):
        slots.append(latents.shape[2])
        return own(self, latents, turned)

    monkeypatch.setattr(kind, NAME, counted)
    return slots


def generated(model, prompt, count=24):
    sequence = model.generate(
        torch.tensor([prompt]), do_sample=False, max_new_tokens=count, eos_token_id=None, pad_token_id=0
    )
    return sequence[0, len(prompt) :].tolist()


def greedy_tokens(model, **options):
    """Of two calls, so that drafts are accepted in the second one."""
    engine = stand.wrap(model, drafter=BlendedDrafter(budget=16), **options)
    for _ in range(2):
        output = engine.generate(PROMPTS, max_new_tokens=24, temperature=0, stop_token_ids=[])
    assert output.stats.mean_acceptance_length > 1.1
    return output.token_ids


@pytest.mark.parametrize("fuse", [False, True])
def test_tokens_are_generates_own(model, fuse):
    assert greedy_tokens(model, fuse=fuse) == [generated(model, prompt) for prompt in PROMPTS]


def test_steps_expand_nothing(model, expanded):
    """Prompts do: one chunk each, in every layer, but for the prompt of one token."""
    engine = stand.wrap(model, drafter=BlendedDrafter(budget=16))
    with unexpanded_keys(model):  # which compares both ways where the method is new
        pass
    del expanded[:]
    engine.generate(PROMPTS, max_new_tokens=24, temperature=0, stop_token_ids=[])
    assert sorted(expanded) == sorted([2, 6] * len(layers_of(model)))


def test_keys_are_expanded_where_nothing_is_known_of_the_projection(model, expanded):
    """A hook may change what it computes."""
    model = copy.deepcopy(model)
    hooks = [layer.kv_b_proj.register_forward_hook(lambda *given: 3 * given[2]) for layer in layers_of(model)]
    expected = [generated(model, prompt) for prompt in PROMPTS]
    engine = stand.wrap(model, drafter=BlendedDrafter(budget=16))
    del expanded[:]
    assert engine.generate(PROMPTS, max_new_tokens=24, temperature=0, stop_token_ids=[]).token_ids == expected
    assert len(expanded) > 3 * len(layers_of(model))
    for hook in hooks:
        hook.remove()
    del expanded[:]
    assert engine.generate(PROMPTS, max_new_tokens=24, temperature=0, stop_token_ids=[]).token_ids != expected
    probes, chunks = [3] * len(layers_of(model)), [2, 6] * len(layers_of(model))
    assert sorted(expanded) == sorted(probes + chunks)


def test_keys_are_expanded_where_the_projections_matrix_lies_otherwise(model, expanded):
    """Its rows are taken apart as views."""
    model = copy.deepcopy(model)
    for layer in layers_of(model):
        layer.kv_b_proj.weight = torch.nn.Parameter(layer.kv_b_proj.weight.detach().T.contiguous().T)
    expected = [generated(model, prompt) for prompt in PROMPTS]
    engine = stand.wrap(model, drafter=BlendedDrafter(budget=16))
    del expanded[:]
    assert engine.generate(PROMPTS, max_new_tokens=24, temperature=0, stop_token_ids=[]).token_ids == expected
    assert len(expanded) > 3 * len(layers_of(model))


def test_a_layer_that_computes_keys_otherwise_goes_on_as_it_does(model, monkeypatch):
    """The check compares both ways before the first step."""
    kind = type(layers_of(model)[0])
    own = kind.expand_kv

    def louder(self, latents, turned):
        keys, values = own(self, latents, turned)
        return keys, 1.5 * values

    monkeypatch.setattr(kind, NAME, louder)
    model = copy.deepcopy(model)
    assert not LatentKeys(layers_of(model)[0]).are_right()
    assert greedy_tokens(model) == [generated(model, prompt) for prompt in PROMPTS]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_only_rounding_passes(model, monkeypatch, dtype):
    """One part in a hundred is none, in types of many digits."""
    kind = type(layers_of(model)[0])
    own = kind.expand_kv
    model = copy.deepcopy(model).to(dtype)
    assert LatentKeys(layers_of(model)[0]).are_right()
    monkeypatch.setattr(kind, NAME, lambda *given: tuple(1.01 * part for part in own(*given)))
    assert not LatentKeys(layers_of(model)[0]).are_right()


def test_weights_that_change_count_from_the_next_step_on(model):
    model = copy.deepcopy(model)
    engine = stand.wrap(model, drafter=BlendedDrafter(budget=16))
    settings = {"max_new_tokens": 24, "temperature": 0, "stop_token_ids": []}
    before = engine.generate(PROMPTS, **settings).token_ids
    with torch.no_grad():
        for layer in layers_of(model):
            layer.kv_b_proj.weight.mul_(1.3)
    expected = [generated(model, prompt) for prompt in PROMPTS]
    assert engine.generate(PROMPTS, **settings).token_ids == expected != before


def test_layers_are_given_back(model):
    with pytest.raises(KeyError), tree_attention(model):
        assert all(isinstance(vars(layer)[NAME], LatentKeys) for layer in layers_of(model))
        with unexpanded_keys(model):
            pass
        assert all(NAME in vars(layer) for layer in layers_of(model))  # nested blocks leave them to the outer one
        raise KeyError
    assert not any(NAME in vars(layer) for layer in layers_of(model))


def test_only_a_step_hands_latents_on(model):
    layer = layers_of(model)[0]
    latents, turned = torch.randn(1, 1, 5, 48), torch.randn(1, 1, 5, 16)
    keys = LatentKeys(layer)
    expected = layer.expand_kv(latents, turned)
    prompt = StepPlan.for_prompt(torch.arange(5, dtype=torch.int32).numpy(), 0, row=0)
    assert all(map(torch.equal, keys(latents, turned), expected))
    with running(prompt):
        assert all(map(torch.equal, keys(latents, turned), expected))
    prompt.is_prompt = False
    with running(prompt):
        assert keys(latents, turned) == (latents, turned)


def test_sampled_tokens_are_those_without_drafts(model):
    settings = {"max_new_tokens": 40, "temperature": 0.8, "top_p": 0.95, "seed": 3, "num_return_sequences": 3}
    with_drafts = stand.wrap(model, verifier="match", drafter=BlendedDrafter(budget=16))
    without = stand.wrap(model, verifier="match", drafter=BlendedDrafter(budget=0))
    with_drafts.generate(PROMPTS, **settings)
    assert with_drafts.generate(PROMPTS, **settings).token_ids == without.generate(PROMPTS, **settings).token_ids


def test_layers_end_with_their_model(model):
    """What is known of a layer does not hold it."""
    model = copy.deepcopy(model)
    engine = stand.wrap(model, drafter=BlendedDrafter(budget=16))
    engine.generate(PROMPTS, max_new_tokens=4, temperature=0)
    layers = [weakref.ref(layer) for layer in layers_of(model)]
    del model, engine
    gc.collect()
    assert not any(layer() for layer in layers)


def test_keys_are_expanded_where_hooks_are_registered_for_all_modules(model):
    model = copy.deepcopy(model)
    projections = [layer.kv_b_proj for layer in layers_of(model)]
    engine = stand.wrap(model, drafter=BlendedDrafter(budget=16))
    settings = {"max_new_tokens": 24, "temperature": 0, "stop_token_ids": []}
    before = engine.generate(PROMPTS, **settings).token_ids
    hook = register_module_forward_hook(
        lambda module, args, output: 3 * output if any(module is one for one in projections) else None
    )
    try:
        expected = [generated(model, prompt) for prompt in PROMPTS]
        assert engine.generate(PROMPTS, **settings).token_ids == expected != before
    finally:
        hook.remove()


def test_a_method_that_is_replaced_after_the_check_counts(model, monkeypatch):
    model = copy.deepcopy(model)
    engine = stand.wrap(model, drafter=BlendedDrafter(budget=16))
    settings = {"max_new_tokens": 24, "temperature": 0, "stop_token_ids": []}
    before = engine.generate(PROMPTS, **settings).token_ids
    kind = type(layers_of(model)[0])
    own = kind.expand_kv

    def louder(self, latents, turned):
        keys, values = own(self, latents, turned)
        return keys, -1.5 * values

    monkeypatch.setattr(kind, NAME, louder)
    expected = [generated(model, prompt) for prompt in PROMPTS]
    assert engine.generate(PROMPTS, **settings).token_ids == expected != before


def test_a_copy_that_is_made_within_a_step_has_its_classs_method(model):
    """It is a layer like any other: its keys are left unexpanded in steps of its own, and where it is no longer plain,
    expanded."""
    layer = layers_of(model)[0]
    with tree_attention(model):
        twin = copy.deepcopy(layer)
        assert isinstance(vars(layer)[NAME], LatentKeys)
    latents, turned = torch.randn(1, 1, 5, 48), torch.randn(1, 1, 5, 16)
    assert not isinstance(twin.expand_kv, LatentKeys) and twin.expand_kv.__self__ is twin
    assert all(map(torch.equal, twin.expand_kv(latents, turned), layer.expand_kv(latents, turned)))
    with unexpanded_keys(twin):
        assert isinstance(vars(twin)[NAME], LatentKeys)
    twin.kv_b_proj.register_forward_hook(lambda *given: 3 * given[2])
    with unexpanded_keys(twin):
        assert not isinstance(twin.expand_kv, LatentKeys)


def test_another_default_device_changes_nothing(model):
    """Many scripts set it to "cuda" once."""
    twin = copy.deepcopy(model)
    with torch.device("meta"), unexpanded_keys(twin):
        assert all(isinstance(vars(layer)[NAME], LatentKeys) for layer in layers_of(twin))


def test_a_method_that_takes_something_else_is_left_alone(model, monkeypatch):
    """Such a class is served as transformers computes it."""
    kind = type(layers_of(model)[0])
    own = kind.expand_kv
    forward = kind.forward

    def strict(self, latents, turned, *, is_own=False):
        if not is_own:
            raise TypeError("is_own must be given")
        return own(self, latents, turned)

    def forward_of_strict(self, *given, **named):
        vars(self)[NAME] = lambda latents, turned: strict(self, latents, turned, is_own=True)
        try:
            return forward(self, *given, **named)
        finally:
            del vars(self)[NAME]

    monkeypatch.setattr(kind, NAME, strict)
    monkeypatch.setattr(kind, "forward", forward_of_strict)
    model = copy.deepcopy(model)
    assert greedy_tokens(model, fuse=False) == [generated(model, prompt) for prompt in PROMPTS]
