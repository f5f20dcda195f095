"""Captured steps of models whose layers keep keys of several sizes, or values narrower than keys: the tokens of eager
steps, whatever rows do."""

import copy
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("triton")

from failures import failing_after
from plain_kernels import use_plain_kernels
from step_pair import OTHER_STEPS, PROMPTS, StepPair, growing_pools, put_back_after
from tiny_models import kernel_model
from unequal_models import unequal_model

import stand
from stand.drafters.blended import BlendedDrafter
from stand.forward.attention_shape import AttentionShape, HeadSizes
from stand.forward.cache.key_shape import KeyShape, LayerKeys, key_shape
from stand.forward.cache.tree_cache import TreeCache
from stand.fusion.trial import Trial
from stand.gpu import kernel_attention, step_body
from stand.gpu.captured_step import CapturedStep
from stand.gpu.device_cache import DeviceCache, has_one_type
from stand.gpu.kernel_attention import KernelPlan
from stand.gpu.kernels.rotate import rotate_pair
from stand.gpu.packets import page_table

FAMILIES = (
    "gemma4",
    "gemma4_e2b",
    "mimo_v2",
    "deepseek_v3",
    "minicpm3",
)  # the latter two keep latents, or values narrower than keys
# With seed 4 DeepSeek meets two experts whose scores differ by 8e-7, which rounding decides.
PAIR = StepPair(unequal_model, num_return_sequences=2, max_new_tokens=40, temperature=0.6, seed=5, learn=False)


@pytest.fixture
def plain_kernels(monkeypatch):
    use_plain_kernels(monkeypatch)


@pytest.mark.parametrize("verifier", ["match", "coupled", "traversal"])
@pytest.mark.parametrize("settings", [{"temperature": 0.0}, {"temperature": 1.0, "top_p": 0.9}, {}])
@pytest.mark.parametrize("family", FAMILIES)
def test_tokens_equal_the_eager_step(plain_kernels, family, settings, verifier):
    eager, captured = PAIR.both(family, verifier=verifier, **settings)
    assert captured.token_ids == eager.token_ids and captured.stats.num_steps == eager.stats.num_steps
    assert captured.stats.mean_acceptance_length > 1.1  # drafts are accepted, so keys were moved


@pytest.mark.parametrize("family", FAMILIES)
def test_rows_that_are_put_back_and_take_places_of_others(plain_kernels, family, monkeypatch):
    put_back_after(monkeypatch, 6)
    page = page_table.PAGE_SIZE * key_shape(unequal_model(family)).token_bytes
    eager, captured = PAIR.both(family, verifier="match", captured={"max_cache_bytes": 20 * page})
    assert captured.token_ids == eager.token_ids and captured.stats.num_put_back > 0


@pytest.mark.long
@pytest.mark.parametrize("family", FAMILIES)
def test_pools_that_grow_keep_their_keys(plain_kernels, family, monkeypatch):
    settings = {**PAIR.settings, "num_return_sequences": 1, "max_new_tokens": 150, "stop_token_ids": []}
    expected = PAIR.engine_of(family).generate(PROMPTS, **settings).token_ids
    pools = growing_pools(monkeypatch)
    assert PAIR.engine_of(family).generate(PROMPTS, **settings).token_ids == expected and pools


@pytest.mark.parametrize("family", FAMILIES)
def test_eager_steps_over_the_pool(plain_kernels, family, monkeypatch):
    """With filters of a hot law, and after a failure; and steps in two parts, with a penalty."""
    for asked in OTHER_STEPS:
        eager, other = PAIR.both(family, **asked, verifier="match", captured={"max_rows": 3})
        assert other.token_ids == eager.token_ids
    expected = PAIR.engine_of(family, verifier="match").generate(PROMPTS, **PAIR.settings).token_ids
    monkeypatch.setattr(CapturedStep, "launch", failing_after(4, CapturedStep.launch, RuntimeError("gone")))
    with pytest.warns(UserWarning, match="decoding goes on with eager steps"):
        assert PAIR.engine_of(family, verifier="match").generate(PROMPTS, **PAIR.settings).token_ids == expected


@pytest.mark.long
@pytest.mark.parametrize("family", ["deepseek_v3", "minicpm3", "gemma4_e2b"])
def test_fused_modules(family):
    """Kernels are interpreted."""
    few = {**PAIR.settings, "num_return_sequences": 1, "max_new_tokens": 4}
    expected = PAIR.engine_of(family, backend="sdpa").generate(PROMPTS[:1], **few).token_ids
    engine = PAIR.engine_of(family, fuse=True)
    kept = {swap.kind for swap in engine.backend.fusion.report if swap.is_kept}
    latent = "rotation of latent attention"
    assert (latent if family != "gemma4_e2b" else "attention with rotary cache write") in kept
    assert engine.generate(PROMPTS[:1], **few).token_ids == expected and str(engine.backend) == "triton"


def test_a_wrong_rotation_is_not_kept(monkeypatch):
    from stand.fusion import fusion as fusion_module
    from stand.fusion.kernels import triton_kernels

    def backwards(query, key, cos, sin, is_interleaved):
        return rotate_pair(query, key, cos, -sin, is_interleaved)

    kernels = triton_kernels()._replace(rotate_pair=backwards)
    model = copy.deepcopy(unequal_model("deepseek_v3"))
    stand.wrap(model, backend="sdpa", fuse=False)
    for known, is_kept in ((triton_kernels(), True), (kernels, False)):
        trial = Trial(model, known)
        trial.try_latent_rotations()
        assert bool(trial.recipe.latent_rotations) is is_kept
        assert [swap.is_kept for swap in trial.report()] == [is_kept]
    monkeypatch.setattr(fusion_module, "triton_kernels", lambda: kernels)
    fusion = fusion_module.fuse(model)
    assert not fusion.recipe.latent_rotations
    fusion.undo()


def test_blocks_hold_what_has_one_shape():
    model = unequal_model("gemma4")
    PAIR.engine_of("gemma4", backend="sdpa")
    cache = DeviceCache(
        layers=key_shape(model).layers, num_pages=2, page_size=64, dtype=torch.float32, device=torch.device("cpu")
    )
    assert [tuple(block.shape) for block in cache.blocks] == [(4, 3, 2, 64, 16), (4, 3, 1, 64, 32)]
    for block in cache.blocks:
        block.copy_(torch.arange(len(block)).view(-1, 1, 1, 1, 1).expand(block.shape))
    assert [[int(one.max()) for one in cache.layer(layer)] for layer in range(4)] == [[0, 1], [0, 1], [2, 3], [2, 3]]
    assert cache.num_pages == 2 and cache.spare_slot == 3 * 64 - 1
    assert cache.nbytes == 2 * 64 * key_shape(model).token_bytes


def test_keys_of_two_types_are_told():
    cache = TreeCache(1, 8)
    cache.keys, cache.values = [torch.zeros(1, 2, 8, 4)] * 2, [torch.zeros(1, 1, 8, 2)] * 2
    assert has_one_type(cache)
    cache.values = [torch.zeros(1, 1, 8, 2), torch.zeros(1, 1, 8, 2, dtype=torch.bfloat16)]
    assert not has_one_type(cache)


def test_layers_with_a_window_have_a_work_list_of_their_own():
    """With tiles by their own heads, and without items before the window."""
    model = unequal_model("gemma4")
    PAIR.engine_of("gemma4", backend="sdpa")
    windowed, whole = step_body.StepOutput(model, num_rows=1).tilings(80)
    assert (windowed.splitting.window, whole.splitting.window) == (8, 0)
    assert (windowed.tile_tokens, whole.tile_tokens) == (32, 16)  # of 64 query rows: two groups, four groups
    assert windowed.splitting.most_splits(10**6) == 2 < whole.splitting.most_splits(10**6)


class OwnLinear(torch.nn.Linear):
    """Might compute anything."""


def test_layers_that_expand_what_they_keep_take_eager_steps():
    """Every step would compute the keys of the whole pool. Older versions of transformers keep the keys themselves."""
    model = copy.deepcopy(unequal_model("deepseek_v3"))
    for layer in model.model.layers:
        layer.self_attn.kv_b_proj.__class__ = OwnLinear
    stand.wrap(model, backend="sdpa")
    if not key_shape(model).are_expanded:
        pytest.skip("this version of transformers keeps the keys themselves")
    with pytest.raises(ValueError, match="would compute those of the whole pool"):
        stand.wrap(model, backend="triton")
    drafter = BlendedDrafter(PAIR.taught_lookup("deepseek_v3"), budget=16)
    engine = stand.wrap(model, backend="auto", drafter=drafter, verifier="match")
    expected = PAIR.engine_of("deepseek_v3", backend="sdpa", verifier="match").generate(PROMPTS, **PAIR.settings)
    assert engine.generate(PROMPTS, **PAIR.settings).token_ids == expected.token_ids


class Adapted(torch.nn.Module):
    """A linear layer plus a low-rank product, as PEFT has them."""

    def __init__(self, base_layer):
        super().__init__()
        self.base_layer = base_layer
        self.down = torch.nn.Linear(base_layer.in_features, 4, bias=False)
        self.up = torch.nn.Linear(4, base_layer.out_features, bias=False)

    @property
    def weight(self):
        return self.base_layer.weight

    def forward(self, states):
        return self.base_layer(states) + self.up(self.down(states))


def wrapped_latents() -> stand.Engine:
    """Over a model of its own."""
    model = copy.deepcopy(unequal_model("deepseek_v3"))
    engine = stand.wrap(model, backend="triton", fuse=False, drafter=BlendedDrafter(budget=8))
    if not any(shape.sizes.is_latent for shape in key_shape(model).attentions):
        pytest.skip("this version of transformers keeps the keys themselves")
    return engine


def test_adapters_that_come_to_latents_after_wrap_make_calls_eager(plain_kernels):
    """And only as long as they are there."""
    engine, settings = wrapped_latents(), {"max_new_tokens": 12, "temperature": 0}
    model = engine.model
    before = engine.generate(PROMPTS, **settings).token_ids
    for layer in model.model.layers:
        layer.self_attn.kv_b_proj = Adapted(layer.self_attn.kv_b_proj)
    expected = stand.wrap(model, backend="sdpa", drafter=BlendedDrafter(budget=0)).generate(PROMPTS, **settings)
    with pytest.warns(UserWarning, match="eager in this call: the projection of latents in model.layers.0"):
        assert engine.generate(PROMPTS, **settings).token_ids == expected.token_ids != before
    for layer in model.model.layers:
        layer.self_attn.kv_b_proj = layer.self_attn.kv_b_proj.base_layer
    stand.wrap(model, backend="sdpa")
    assert engine.generate(PROMPTS, **settings).token_ids == before and str(engine.backend) == "triton"


def test_another_wrap_of_what_computed_keys_meanwhile_makes_calls_eager(plain_kernels):
    """It has seen other kinds of layers than are there now."""
    engine, settings = wrapped_latents(), {"max_new_tokens": 12, "temperature": 0}
    model = engine.model
    expected = engine.generate(PROMPTS, **settings).token_ids
    hooks = [layer.self_attn.kv_b_proj.register_forward_hook(lambda *given: None) for layer in model.model.layers]
    stand.wrap(model, backend="sdpa")
    for hook in hooks:
        hook.remove()
    with pytest.warns(UserWarning, match="eager in this call: the model was wrapped once more"):
        assert engine.generate(PROMPTS * 4, **settings).token_ids == expected * 4
    stand.wrap(model, backend="sdpa")
    assert engine.generate(PROMPTS * 4, **settings).token_ids == expected * 4 and str(engine.backend) == "triton"


def test_a_second_call_replays_what_is_recorded(plain_kernels):
    """What stands for a layer's method within a step is no change of the model."""
    engine = PAIR.engine_of("deepseek_v3")
    first = engine.generate(PROMPTS, **PAIR.settings)
    step = engine.backend._previous.captured
    recorded = dict(step._recorded)
    assert engine.generate(PROMPTS, **PAIR.settings).token_ids == first.token_ids
    assert engine.backend._previous.captured is step and all(
        step._recorded[size] is one for size, one in recorded.items()
    )


def test_what_is_expanded_is_told_from_what_is_kept():
    kept, shape = LayerKeys(2, 16, 8), AttentionShape(4, 2, HeadSizes(16, 8))
    assert not KeyShape(((0, kept),), 16, 1, (shape,)).are_expanded
    assert KeyShape(((0, LayerKeys(1, 16, 8)),), 16, 1, (shape,)).are_expanded


def test_a_kind_of_layers_that_nobody_has_seen_is_refused():
    plan = KernelPlan({}, {AttentionShape(4, 2, HeadSizes.alike(16)): None}, torch.zeros(0), torch.zeros(0))
    with pytest.raises(ValueError, match="one of the shapes that the model had when it was wrapped.*window=8"):
        plan.work(AttentionShape(4, 2, HeadSizes.alike(16), window=8))


def test_a_plan_of_kernels_fits_a_steps_queries_over_a_pool():
    plan = KernelPlan({"positions": torch.zeros(5)}, {}, torch.zeros(0), torch.zeros(0))
    query, pool = torch.zeros(1, 2, 5, 16), torch.zeros(3, 2, 64, 16)
    assert plan.fits(query, pool)
    assert not plan.fits(query[:, :, :4], pool) and not plan.fits(query, pool[:1])  # a plain forward's


def test_models_that_were_not_seen_have_the_kinds_of_their_configuration():
    assert key_shape(kernel_model("mistral")).attentions == (AttentionShape(4, 2, HeadSizes.alike(64), window=8),)


@pytest.mark.parametrize(("given", "scale"), [({}, 0.25), ({"scaling": None}, 0.25), ({"scaling": 2.0}, 2.0)])
def test_scores_are_scaled_as_the_layer_says_or_by_the_size_of_a_head(monkeypatch, given, scale):
    """Of 16 numbers."""
    seen = []

    def recorded(query, *others):
        seen.append(others[9])
        return query

    monkeypatch.setattr(kernel_attention, "tree_attention", recorded)
    work = SimpleNamespace(num_partials=1, items=None, partial_starts=None, tile_tokens=1)
    plan = SimpleNamespace(
        work=lambda shape: work,
        step={"pages": None, "ancestors": None, "positions": None},
        partials=torch.zeros(64),
        log_sums=torch.zeros(4),
    )
    keys = torch.zeros(3, 2, 8, 16)
    kernel_attention.attend(torch.nn.Module(), torch.zeros(1, 4, 5, 16), keys, keys, None, stand_plan=plan, **given)
    assert seen == [scale]
