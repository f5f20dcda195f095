"""Checkpoints of block heads that are refused, each with what to do."""

import json
from contextlib import nullcontext

import pytest
import torch
from plain_eagle3 import deep_target
from random_dflash import CONVOLUTIONS, LAYER, MARKOV, SELECTOR, random_dflash
from safetensors.torch import load_file, save_file
from workloads.tiny_classes import tiny_model as tiny_class

from stand.drafters.dflash.head import DFlashHead
from stand.drafters.dflash.settings import DFlashSettings

KNOWN = [0, 3, 5, 8, 13, 21, 34, 60]
INPUTS = (1, 3, 6)


def made(folder, **settings) -> tuple[dict[str, torch.Tensor], dict]:
    """What a head of these settings saves."""
    random_dflash(deep_target(), feature_layers=INPUTS, **settings).save(folder)
    return load_file(folder / "model.safetensors"), json.loads((folder / "config.json").read_text(encoding="utf-8"))


def write(folder, tensors, config):
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")


def read(folder, changed: dict, told: dict, **settings) -> DFlashSettings:
    """changed: at the top of the file; told: within `dflash_config`."""
    _, config = made(folder, **settings)
    config |= changed
    config["dflash_config"] |= told
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return DFlashSettings.read(folder, deep_target())


@pytest.mark.parametrize(
    ("changed", "told", "message"),
    [
        ({"model_type": "llama"}, {}, "layers of the kind qwen3, got 'llama'"),
        ({"model_type": ["qwen3"]}, {}, r"layers of the kind qwen3, got \['qwen3'\]"),
        ({"hidden_size": 64}, {}, "hidden states of 32 numbers, as this target, got 64"),
        ({"block_size": 1}, {}, "blocks of 2 places or more, got 1"),
        ({}, {"block_size": "8"}, "blocks of 2 places or more, got '8'"),
        ({}, {"block_size": True}, "blocks of 2 places or more, got True"),
        ({}, {"mask_token_id": 61}, "a mask token from 0 to 60, got 61"),
        ({}, {"mask_token_id": -1}, "a mask token from 0 to 60, got -1"),
        ({}, {"mask_token_id": None}, "a mask token from 0 to 60, got None"),
        ({"rope_parameters": {"rope_type": "dynamic", "factor": 2.0}}, {}, "that stay the same, got 'dynamic'"),
        ({}, {"conv_kernel_size": 2.0}, "numbers for conv_kernel_size, .*, got others for conv_kernel_size"),
        ({}, {"selector_rank": -1}, "numbers for .*, got others for selector_rank"),
        ({}, {"output_multiplier": "2"}, "numbers for .*, got others for output_multiplier"),
        ({}, {"final_logit_softcapping": float("nan")}, "numbers for .*, got others for final_logit_softcapping"),
        ({}, {"input_embedding_scale": True}, "numbers for .*, got others for input_embedding_scale"),
        ({}, {"markov_rank": 6, "markov_head_type": "rnn"}, "a Markov head of the kinds vanilla, gated, got 'rnn'"),
        ({}, {"markov_rank": 6, "selector_rank": 6, "selector_top_k": 2}, "a selector and a Markov head, got both"),
        ({}, {"conv_kernel_size": 2, "conv_group_size": 5}, "32 channels fall into, got kernels of 2 for groups of 5"),
        ({}, {"conv_kernel_size": 2}, "32 channels fall into, got kernels of 2 for groups of 0"),
        ({}, {"conv_kernel_size": 6, "conv_group_size": 4}, "no longer than its blocks of 5 places, got kernels of 6"),
        ({}, {"selector_rank": 6}, "a selector of 1 candidate or more, got None"),
        ({"vocab_size": 60}, {"selector_rank": 6, "selector_top_k": 2}, "this target's 61 tokens, got .* of 60"),
        ({"vocab_size": 60}, {"markov_rank": 6}, "pairs of this target's 61 tokens, got those of 60"),
        ({}, {"target_layer_ids": [0, 2, 6]}, r"inputs of the target's 7 decoder layers, got those of \[1, 3, 7\]"),
        ({}, {"target_layer_ids": [-2, 2]}, r"7 decoder layers, got those of \[-2, 3\]"),
        ({}, {"target_layer_ids": ["1"]}, r"7 decoder layers, got those of \['1'\]"),
        ({}, {"target_layer_ids": [True]}, r"7 decoder layers, got those of \[True\]"),
        ({}, {"target_layer_ids": None}, r"7 decoder layers, got those of \[None\]"),
        ({}, {"target_layer_ids": []}, r"7 decoder layers, got those of \[None\]"),
        ({"aux_hidden_state_layer_ids": [7]}, {}, r"7 decoder layers, got those of \[7\]"),
    ],
)  # fmt: skip
def test_settings_that_do_not_fit_are_refused(changed, told, message, tmp_path):
    with pytest.raises(ValueError, match=f"a DFlash head must .*{message}; take"):
        read(tmp_path, changed, told)


@pytest.mark.parametrize(
    ("changed", "told"),
    [
        ({"vocab_size": 90}, {"selector_rank": 6, "selector_top_k": 200}),
        ({"vocab_size": 60}, {}),
        ({}, {"conv_kernel_size": 5, "conv_group_size": 32}),
        ({}, {"markov_rank": 0, "markov_head_type": "rnn"}),
        ({}, {"output_multiplier": 2, "final_logit_softcapping": 0}),
    ],
)
def test_settings_that_fit_are_not(changed, told, tmp_path):
    assert read(tmp_path, changed, told).feature_layers == INPUTS


@pytest.mark.parametrize(
    "changed",
    [
        {"num_attention_heads": "many"},
        {"num_key_value_heads": 0},
        {"num_hidden_layers": 0},
        {"intermediate_size": -1},
        {"hidden_act": "none"},
        {"rope_parameters": {"rope_type": "none", "factor": 2.0}},
        {"layer_types": ["chunked", "full_attention"]},
    ],
)
def test_layers_that_transformers_refuses_are_told(changed, tmp_path):
    with pytest.raises(ValueError, match="config.json of a DFlash head must describe its layers, got .*; fetch it"):
        read(tmp_path, changed, {})


@pytest.mark.parametrize(
    "text", [None, "{", "\xff", "[1]", '{"dflash_config": "no"}', '{"transformer_layer_config": 3}']
)
def test_a_folder_without_a_configuration_is_refused(text, tmp_path):
    made(tmp_path)
    (tmp_path / "config.json").unlink()
    if text is not None:
        (tmp_path / "config.json").write_text(text, encoding="latin-1")
    with pytest.raises(ValueError, match=r"must be a folder with config.json, got .* \(\w+Error\); fetch all files"):
        DFlashHead.load(deep_target(), tmp_path)


def test_a_target_whose_layers_have_another_name_is_refused(tmp_path):
    made(tmp_path)
    with pytest.raises(ValueError, match="must have a target with `layers` .*, got GPT2LMHeadModel; draft for it with"):
        DFlashSettings.read(tmp_path, tiny_class("gpt2"))


@pytest.mark.parametrize(
    ("settings", "changes", "message"),
    [
        ({}, {"fc.weight": (32, 64)}, r"fc.weight must be \[32, 96\] for this target, got \[32, 64\]; take"),
        ({}, {"norm.weight": None}, "got nothing beyond it and lacks norm.weight; take"),
        ({}, {"layers.1.self_attn.q_norm.weight": (4,)}, r"q_norm.weight must be \[8\] .*, got \[4\]; take"),
        ({}, {"layers.2.mlp.up_proj.weight": (40, 32)}, "got layers.2.mlp.up_proj.weight beyond it .*; take"),
        ({}, {"lm_head.weight": (8, 32)}, r"lm_head.weight must be \[61, 32\] .*, got \[8, 32\]; take"),
        ({}, {"embed_tokens.weight": (61, 32)}, "embed_tokens.weight .* must be the target's, got others; take"),
        ({}, {"embed_tokens.weight": (60, 32)}, "embed_tokens.weight .* must be the target's, got others; take"),
        ({}, {"markov_head.markov_w1.weight": (61, 6)}, "got markov_head.markov_w1.weight beyond it .*; take"),
        (CONVOLUTIONS, {"layers.0.mlp_conv.base_kernel": (2, 3, 32)}, r"must be \[2, 2, 32\] .*, got \[2, 3, 32\]"),
        (SELECTOR, {"candidate_selector.successor_codebook": (61, 7)}, r"must be \[61, 6\] .*, got \[61, 7\]; take"),
        (SELECTOR, {"candidate_selector.hidden_projection.weight": None}, "lacks candidate_selector.hid.*; take"),
        ({**MARKOV, "vocabulary": KNOWN}, {"markov_head.markov_w2.weight": (61, 6)}, r"must be \[8, 6\] .*; take"),
        ({"vocabulary": KNOWN}, {"lm_head.weight": (9, 32)}, r"must be \[8, 32\] .*, got \[9, 32\]; take"),
        ({"vocabulary": KNOWN}, {"lm_head.weight": None}, "lacks lm_head.weight; take"),
    ],
)  # fmt: skip
def test_weights_that_do_not_fit_are_refused(settings, changes, message, tmp_path):
    tensors, config = made(tmp_path, **settings)
    for name, shape in changes.items():
        tensors.pop(name, None)
        if shape is not None:
            tensors[name] = torch.ones(shape)
    write(tmp_path, tensors, config)
    with pytest.raises(ValueError, match=message) as refusal:
        DFlashHead.load(deep_target(), tmp_path)
    assert "must " in str(refusal.value)


def test_embeddings_that_are_the_targets_are_not(tmp_path):
    tensors, config = made(tmp_path)
    own = deep_target().get_input_embeddings().weight.detach().clone()
    write(tmp_path, tensors | {"embed_tokens.weight": own}, config)
    assert "embed_tokens.weight" not in DFlashHead.load(deep_target(), tmp_path).state_dict()


@pytest.mark.parametrize(
    ("place", "offset", "size", "message"),
    [
        (0, -1, 8, "d2t must lead to tokens from 0 to 60, got -1 to 60; take the head"),
        (7, 54, 8, "d2t must lead to tokens from 0 to 60, got 0 to 61; take the head"),
        (1, -1, 8, "d2t must lead to distinct tokens, got some twice; fetch"),
        (1, 1, 8, "t2d must be true at the tokens that d2t leads to, got 8 true and 8 tokens .*; fetch"),
        (
            None,
            None,
            9,
            "draft_vocab_size of config.json must be the number .* d2t leads to, 8, got 9; fetch all files",
        ),
        (None, None, 8, None),
    ],
)
def test_tables_that_contradict_each_other_are_refused(place, offset, size, message, tmp_path):
    tensors, config = made(tmp_path, vocabulary=KNOWN)
    if place is not None:
        tensors["d2t"][place] = offset
    write(tmp_path, tensors, config | {"draft_vocab_size": size})
    with nullcontext() if message is None else pytest.raises(ValueError, match=message):
        assert DFlashHead.load(deep_target(), tmp_path).vocabulary.tolist() == KNOWN


def test_a_head_of_another_kind_is_refused(tmp_path):
    """DFlash 2's weights under a plain head's configuration would draft without what it was trained with."""
    tensors, config = made(tmp_path, **CONVOLUTIONS, **SELECTOR)
    for name in (*CONVOLUTIONS, *SELECTOR):
        del config["dflash_config"][name]
    write(tmp_path, tensors, config)
    with pytest.raises(ValueError, match="must hold what config.json says, got candidate_selector.* beyond it"):
        DFlashHead.load(deep_target(), tmp_path)


def test_layers_of_a_head_are_those_of_its_configuration():
    head = random_dflash(deep_target(), windows=(True, False))
    assert head.has_windows and [layer.self_attn.sliding_window for layer in head.layers] == [4, None]
    assert not random_dflash(deep_target()).has_windows and head.config.head_dim == LAYER["head_dim"]
    assert head.fusion() is None and list(head.layers_of_a_run()) == list(head.layers)
    assert 0 < head.share_of_step() < 1


@pytest.mark.parametrize("content", [b"", b"abc", b"\x80" * 300])
def test_damaged_files_are_refused_by_name(content, tmp_path):
    made(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(content)
    with pytest.raises(ValueError, match=r"model.safetensors must hold tensors, got \w+: \w.*; fetch or write"):
        DFlashHead.load(deep_target(), tmp_path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda weights: weights * float("nan"), "norm.weight in .*model.safetensors must be finite"),
        (lambda weights: weights.to(torch.int8), "norm.weight in .* must hold floats of .*got torch.int8; dequantise"),
    ],
)
def test_weights_that_are_no_numbers_are_refused(change, message, tmp_path):
    tensors, config = made(tmp_path)
    tensors["norm.weight"] = change(tensors["norm.weight"])
    write(tmp_path, tensors, config)
    with pytest.raises(ValueError, match=message):
        DFlashHead.load(deep_target(), tmp_path)


def test_a_folder_without_weights_is_refused(tmp_path):
    made(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(ValueError, match="must be a file or a folder with model.safetensors or pytorch_model.bin, got"):
        DFlashHead.load(deep_target(), tmp_path)
    with pytest.raises(ValueError, match="DFlashHead must have a transformers model as its target, got str; load"):
        DFlashHead("a/model", random_dflash(deep_target()).settings)
