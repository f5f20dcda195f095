"""What a token keeps, as layers have stored it: heads of several sizes, keys and values that differ."""

import copy

import pytest
import torch
from tiny_models import CONFIGS, tiny_model
from transformers import AutoModelForCausalLM, DeepseekV3Config

import stand
from stand.drafters.blended import BlendedDrafter
from stand.forward.attention_shape import AttentionShape, HeadSizes
from stand.forward.cache.cache_argument import cache_argument
from stand.forward.cache.key_shape import KeyShape, LayerKeys, key_shape, new_states, remember_layers
from stand.scheduling.free_memory import bytes_per_token

BASE = {"vocab_size": 97, "hidden_size": 32, "intermediate_size": 48, "initializer_range": 0.3}
ENDS = {"pad_token_id": 0, "eos_token_id": 2, "bos_token_id": 1, "max_position_embeddings": 512}


def latent_attention():
    """Keys of 192 and values of 128 numbers a head, which the configuration says nowhere."""
    return DeepseekV3Config(
        moe_intermediate_size=16, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=4,
        qk_rope_head_dim=64, qk_nope_head_dim=128, v_head_dim=128, q_lora_rank=16, kv_lora_rank=16, n_routed_experts=4,
        num_experts_per_tok=2, n_group=1, topk_group=1, first_k_dense_replace=1, n_shared_experts=1, **BASE, **ENDS,
    )  # fmt: skip


def layers_of_two_sizes():
    gemma4 = pytest.importorskip("transformers.models.gemma4", reason="transformers has no Gemma 4")
    return gemma4.Gemma4TextConfig(
        num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2, head_dim=16, global_head_dim=32,
        sliding_window=16, vocab_size_per_layer_input=97, **BASE, **ENDS,
    )  # fmt: skip


def new_model(config):
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config).eval()


@pytest.mark.parametrize("make", [latent_attention, layers_of_two_sizes])
def test_what_is_counted_is_what_is_stored(make):
    model = new_model(make())
    engine = stand.wrap(model, drafter=BlendedDrafter(budget=6))
    with torch.inference_mode():
        stored = model(torch.tensor([[5, 6, 7]]), use_cache=True)[cache_argument(model)].layers
    kept = sum(layer.keys.nbytes + layer.values.nbytes for layer in stored)
    assert bytes_per_token(model) == kept // 3
    prompts = [[5, 6, 7, 8, 5, 6], [9, 10, 11] * 30]
    settings = {"max_new_tokens": 20, "stop_token_ids": []}
    tokens = engine.generate(prompts, temperature=0, max_cache_bytes=600 * bytes_per_token(model), **settings).token_ids
    for prompt, got in zip(prompts, tokens, strict=True):
        expected = model.generate(torch.tensor([prompt]), do_sample=False, max_new_tokens=20, eos_token_id=None)
        assert got == expected[0, len(prompt) :].tolist()


@pytest.mark.parametrize("family", sorted(CONFIGS))
def test_the_configuration_says_the_same_of_common_models(family):
    """It is asked where nothing was stored yet."""
    model = new_model(CONFIGS[family])
    configured = key_shape(model)
    stand.wrap(model)
    assert key_shape(model) == configured == key_shape(tiny_model(family)) and isinstance(configured, KeyShape)


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_what_is_stored_follows_the_models_type(family):
    model = new_model(CONFIGS[family])
    stand.wrap(model)
    wide = key_shape(model)
    narrow = key_shape(model.bfloat16())
    assert (narrow.token_bytes, narrow.head_bytes) == (wide.token_bytes // 2, wide.head_bytes // 2)
    assert (narrow.layers, narrow.num_heads) == (wide.layers, wide.num_heads)
    assert key_shape(model.double()).token_bytes == 2 * wide.token_bytes


def test_a_model_that_was_not_seen_has_no_states():
    assert not new_states(new_model(CONFIGS["llama"]), 3).layers


def test_layers_of_another_library_are_counted_in_the_models_dtype():
    model = new_model(CONFIGS["llama"]).half()
    remember_layers(model, [LayerKeys(2, 12, 12), LayerKeys(3, 12, 8)], row_bytes=5)
    shape = key_shape(model)
    assert (shape.head_bytes, shape.token_bytes, shape.row_bytes) == (4 * 2, (2 * 24 + 3 * 20) * 2, 5)
    assert shape.layers == ((0, LayerKeys(2, 12, 12)), (1, LayerKeys(3, 12, 8)))


def test_layers_of_a_configuration_of_each_are_asked_by_their_number():
    model = new_model(copy.deepcopy(CONFIGS["llama"]))  # others have the same
    if getattr(model.config, "per_layer_config", None) is None:
        pytest.skip("transformers has no configurations of single layers")
    size = model.config.head_dim
    model.config.per_layer_config = {1: {"head_dim": 3 * size}}
    assert [keys.key_size for _, keys in key_shape(model).layers] == [size, 3 * size]


def test_keys_that_are_computed_from_what_is_kept_are_expanded():
    kept, computed = LayerKeys(2, 16, 16), LayerKeys(1, 24, 16)
    kinds = AttentionShape(4, 2, HeadSizes.alike(16), None), AttentionShape(4, 4, HeadSizes.alike(24), None)
    assert not KeyShape(((0, kept),), 64, 256, kinds[:1]).are_expanded
    assert KeyShape(((0, kept), (1, computed)), 32, 512, kinds).are_expanded
