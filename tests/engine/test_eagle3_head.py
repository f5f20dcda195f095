"""Checkpoints of EAGLE-3 heads: the published layouts, what is saved and read again, and what is refused."""

import copy
import json
from contextlib import nullcontext

import numpy as np
import pytest
import torch
from estimated_rows import EstimatedRows
from plain_eagle import random_head
from plain_eagle3 import LAYER, deep_target, plain_logits3, random_eagle3
from safetensors.torch import load_file, save_file
from tiny_models import SHAPE, tiny_model
from two_tokens import assert_greedy_equals_transformers
from workloads.tiny_classes import tiny_model as tiny_class

import stand
from stand.drafters.eagle.attached import attached
from stand.drafters.eagle.eagle3_head import Eagle3Head
from stand.drafters.eagle.eagle3_settings import Eagle3Settings, usual_layers
from stand.drafters.eagle.head import EagleHead

SIZE, INNER, COUNT = SHAPE["hidden_size"], LAYER["intermediate_size"], SHAPE["vocab_size"]
KNOWN = [0, 3, 5, 8, 13, 21, 34, 60]
FIRST_LAYER = {  # four heads of 8 numbers, keys for two of them
    "self_attn.q_proj": (32, 2 * SIZE), "self_attn.k_proj": (16, 2 * SIZE), "self_attn.v_proj": (16, 2 * SIZE),
    "self_attn.o_proj": (SIZE, 32), "mlp.gate_proj": (INNER, SIZE), "mlp.up_proj": (INNER, SIZE),
    "mlp.down_proj": (SIZE, INNER), "hidden_norm": (SIZE,), "input_layernorm": (SIZE,),
    "post_attention_layernorm": (SIZE,),
}  # fmt: skip
LAYERS_CONFIG = {
    "model_type": "llama", "hidden_size": SIZE, "intermediate_size": INNER, "num_hidden_layers": 1,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "vocab_size": COUNT, "rms_norm_eps": 0.01,
    "rope_theta": 50.0, "rope_scaling": None,
}  # fmt: skip
OUTPUTS, INPUTS = {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 2, 5]}}, (1, 3, 6)
CONFIG = {"architectures": ["LlamaForCausalLMEagle3"], "draft_vocab_size": len(KNOWN), **LAYERS_CONFIG, **OUTPUTS}
NESTED = {
    "architectures": ["Eagle3DraftModel"], "speculators_model_type": "eagle3", "norm_before_residual": True,
    "eagle_aux_hidden_state_layer_ids": list(INPUTS), "target_hidden_size": None,
    "transformer_layer_config": LAYERS_CONFIG,
}  # fmt: skip


def published(first: str = "midlayer", **changes: tuple[int, ...] | None) -> dict[str, torch.Tensor]:
    """Made-up weights with the names of published heads; changes: other shapes by name, None leaves a name out."""
    generator = torch.Generator().manual_seed(0)
    shapes = {"fc.weight": (SIZE, 3 * SIZE), "norm.weight": (SIZE,), "lm_head.weight": (len(KNOWN), SIZE)}
    shapes |= {f"{first}.{name}.weight": shape for name, shape in FIRST_LAYER.items()} | changes
    tensors = {name: torch.randn(shape, generator=generator) for name, shape in shapes.items() if shape is not None}
    is_known = torch.zeros(COUNT, dtype=torch.bool)
    is_known[KNOWN] = True
    return tensors | {"d2t": torch.tensor(KNOWN) - torch.arange(len(KNOWN)), "t2d": is_known}


def written(folder, tensors, config, name: str = "model.safetensors"):
    (torch.save if name.endswith(".bin") else save_file)(tensors, folder / name)
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return folder


@torch.inference_mode()
def guesses(head, target) -> torch.Tensor:
    """Logits after a prompt, and after a drafted token."""
    rows = EstimatedRows(target, head)
    estimate = rows.catch_up([np.array([5, 9, 11, 4], dtype=np.int32)])[1]
    return head.logits(torch.cat([estimate, rows.extend([0], [7], [None], estimate)]))


def assert_formulas(head, target) -> None:
    expected = [plain_logits3(head, target, [5, 9, 11, 4], drafted) for drafted in ([], [7])]
    own = slice(None) if head.vocabulary is None else head.vocabulary.numpy()
    np.testing.assert_allclose(guesses(head, target).numpy(), np.stack(expected)[:, own], atol=1e-3)


@pytest.mark.parametrize("name", ["model.safetensors", "pytorch_model.bin"])
def test_published_heads_are_read(name, tmp_path):
    """Whose config.json counts layers by their outputs; a file or its folder, the target's embeddings."""
    tensors = published()
    written(tmp_path, tensors, CONFIG, name)
    for path in (tmp_path, tmp_path / name):
        head = Eagle3Head.load(deep_target(), path)
        own = head.state_dict()
        assert len(own) == len(tensors) - 2
        assert all(torch.equal(value, tensors[key.replace("layers.0.", "midlayer.")]) for key, value in own.items())
        assert head.vocabulary.tolist() == KNOWN and head.feature_layers == INPUTS and head.embed_tokens is None
        assert head.config.rope_parameters["rope_theta"] == 50.0 and not head.training
        assert_formulas(head, deep_target())


@pytest.mark.parametrize("has_own", [False, True])
def test_heads_of_speculators_are_read(has_own, tmp_path):
    """Whose config.json counts layers by their inputs; embeddings that are the target's are not kept twice."""
    embedding = deep_target().get_input_embeddings().weight.detach().clone()
    embedding[7] += float(has_own)
    beside = {"verifier_norm.weight": torch.ones(SIZE), "verifier_lm_head.weight": torch.ones(COUNT, SIZE)}
    tensors = published("model.layers.0" if has_own else "layers.0") | {"embed_tokens.weight": embedding} | beside
    head = Eagle3Head.load(deep_target(), written(tmp_path, tensors, NESTED))
    assert {name.removeprefix("model.") for name in tensors} - set(head.state_dict()) == {
        "d2t", "t2d", *beside, *([] if has_own else ["embed_tokens.weight"])
    }  # fmt: skip
    assert head.feature_layers == INPUTS and head.settings.norm_before_residual
    assert all(not name.startswith("embed") for name, _ in head.named_parameters())  # nothing trains them
    assert_formulas(head, deep_target())


@pytest.mark.parametrize(
    ("given", "layers"),
    [
        ({}, (2, 3, 4)),
        (OUTPUTS, INPUTS),
        ({"eagle_aux_hidden_state_layer_ids": [0, 2, 5]}, (0, 2, 5)),
        ({"eagle_aux_hidden_state_layer_ids": [0, 2, 5], "eagle_config": {}}, (0, 2, 5)),
        ({"eagle_config": {"use_aux_hidden_state": True}}, (2, 3, 4)),
    ],
)
def test_layers_are_counted_as_their_publishers_do(given, layers, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(LAYERS_CONFIG | given), encoding="utf-8")
    assert Eagle3Settings.read(tmp_path, deep_target()).feature_layers == layers


NORMS = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")
SAVED = {
    "as the paper has it": {},
    "qwen3, two layers": {"kind": "qwen3", "num_layers": 2},
    "some tokens": {"vocabulary": KNOWN},
    "embeddings of its own": {"size": 24},
    **{norm: {norm: True} for norm in NORMS},
}


@pytest.mark.parametrize("settings", SAVED.values(), ids=SAVED)
def test_a_saved_head_is_read_again(settings, tmp_path):
    target = deep_target()
    head = random_eagle3(target, feature_layers=INPUTS, **settings).to(torch.bfloat16).to(torch.float32)
    head.save(tmp_path)
    again = Eagle3Head.load(target, tmp_path)
    assert torch.equal(guesses(again, target), guesses(head, target))
    hidden = torch.randn(2, 3, len(INPUTS) * target.config.hidden_size, generator=torch.Generator().manual_seed(0))
    assert torch.allclose(again.combined(hidden[0]), again.combined(hidden)[0], atol=1e-6)
    assert again.feature_layers == INPUTS and again.num_guessed == head.num_guessed
    names = {name.replace("layers.0.", "midlayer.") for name in head.state_dict()}
    names |= {"d2t", "t2d"} if "vocabulary" in settings else set()
    assert set(load_file(tmp_path / "model.safetensors")) == names
    config = json.loads((tmp_path / "config.json").read_text(encoding="utf-8"))
    assert config["draft_vocab_size"] == head.num_guessed and config["rope_theta"] == 50.0
    assert [name for name in NORMS if config.get(name)] == [name for name in NORMS if name in settings]
    del config["eagle_aux_hidden_state_layer_ids"]  # SGLang's own are to say the same
    (tmp_path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    assert Eagle3Settings.read(tmp_path, target).feature_layers == INPUTS


@pytest.mark.parametrize("target", ["gemma3_text", "phi3", "opt", "gpt_oss", "qwen3_5_text"])
def test_a_head_is_made_for_any_target_whose_decoder_has_layers(target):
    """Whatever its rotary positions and its norms are called."""
    settings = Eagle3Settings.for_target(tiny_class(target))
    assert settings.config.rope_parameters["rope_type"] == "default" and settings.config.hidden_size == 32
    assert len(settings.feature_layers) == 3 and settings.config.intermediate_size < 200


@pytest.mark.parametrize(("count", "layers"), [(1, (0, 0, 0)), (2, (1, 1, 0)), (3, (2, 1, 0)), (36, (2, 18, 33))])
def test_usual_layers_are_those_of_published_code_as_far_as_there_are_so_many(count, layers, monkeypatch):
    monkeypatch.setattr("stand.drafters.eagle.eagle3_settings._num_layers", lambda target: count)
    assert usual_layers(deep_target()) == layers


@pytest.mark.parametrize(
    "config",
    [
        {"num_attention_heads": "many"},
        {"num_key_value_heads": 0},
        {"num_hidden_layers": 0},
        {"intermediate_size": -1},
        {"hidden_act": "none"},
        {"rope_scaling": {"rope_type": "none", "factor": 2.0}},
        {"rope_theta": None},
    ],
)
def test_layers_that_transformers_refuses_are_told(config, tmp_path):
    """When it reads their configuration, or builds them."""
    (tmp_path / "config.json").write_text(json.dumps(LAYERS_CONFIG | config), encoding="utf-8")
    with pytest.raises(ValueError, match="config.json of an EAGLE-3 head must describe its layers, got .*; fetch it"):
        Eagle3Settings.read(tmp_path, deep_target())


def test_a_head_is_made_for_a_target_as_the_paper_has_it():
    torch.manual_seed(0)
    head = Eagle3Head(deep_target(), Eagle3Settings.for_target(deep_target())).eval()
    assert head.feature_layers == (2, 3, 4) and head.num_guessed == COUNT and len(head.layers) == 1
    assert_formulas(head, deep_target())


def test_the_tokens_that_a_head_guesses_can_be_fewer(tmp_path):
    """Those alone that it knows, with the probabilities among them; saved so, read again and cast."""
    target = copy.deepcopy(deep_target())
    head = random_eagle3(target, feature_layers=INPUTS, vocabulary=KNOWN)
    law = guesses(head, target)[:, [2, 5, 7]].softmax(dim=-1)
    head.restrict([60, 59, 21, 5])
    head.save(tmp_path)
    for one in (head, Eagle3Head.load(target, tmp_path)):
        assert one.vocabulary.tolist() == [5, 21, 60] and one.num_guessed == 3
    estimates = torch.randn(2, SIZE, generator=torch.Generator().manual_seed(0))
    for count, width in ((2, 2), (10, 3)):
        ids, probs = head.best_tokens(estimates, temperature=0.7, count=count)
        best = (head.logits(estimates) / 0.7).softmax(dim=-1).topk(width)
        assert torch.equal(ids.long(), torch.tensor([5, 21, 60])[best.indices]) and ids.dtype == torch.int32
        torch.testing.assert_close(probs, best.values)
    torch.testing.assert_close(guesses(head, target).softmax(dim=-1), law)
    head.to(torch.bfloat16), target.to(torch.bfloat16)
    torch.testing.assert_close(guesses(head, target).float().softmax(dim=-1), law, atol=0.05, rtol=0.0)
    assert head._rotary[0].inv_freq.dtype == torch.float32
    head.restrict([5])
    assert head.vocabulary.tolist() == [5]


def test_heads_of_both_kinds_are_told_apart_by_their_tensors(tmp_path):
    target = tiny_model("llama")
    for make, kind in ((random_head, EagleHead), (random_eagle3, Eagle3Head)):
        folder = tmp_path / kind.__name__
        make(target).save(folder)
        for path in (folder, str(folder), folder / "model.safetensors", make(target)):
            assert type(attached(target, path)) is kind
        torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")
        (folder / "model.safetensors").unlink()
        assert type(attached(target, folder)) is kind
    with pytest.raises(ValueError, match="Eagle3Head must be the wrapped model's own, got one .*; make it with"):
        attached(deep_target(), random_eagle3(target))
    with pytest.raises(ValueError, match="must be a file or a folder with .*, got .*; check it"):
        attached(target, tmp_path)


@pytest.mark.parametrize("make", [
    stand.EagleDrafter, lambda path: stand.BlendedDrafter(budget=8, source=stand.EagleLaws(path))
])  # fmt: skip
def test_drafters_take_the_path_of_a_head(make, tmp_path):
    drafter = make(written(tmp_path, published(), CONFIG))
    engine = stand.wrap(deep_target(), drafter=drafter)
    assert type(getattr(drafter, "source", drafter).head) is Eagle3Head and drafter.asked_features == INPUTS
    assert_greedy_equals_transformers(engine, deep_target(), [[5, 9, 11, 4], [7]])


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"model_type": "gpt_oss"}, "layers of the kinds llama, qwen3, got 'gpt_oss'"),
        ({"model_type": ["llama"]}, r"layers of the kinds llama, qwen3, got \['llama'\]"),
        ({"norm_output": "false"}, r"norms that are true or false, got another \['norm_output'\]"),
        ({"eagle_config": {"use_aux_hidden_state": "false"}}, "hidden states of several layers, got use_aux_hidden"),
        ({"eagle_config": {"use_aux_hidden_state": False}}, "hidden states of several layers, got use_aux_hidden"),
        ({"hidden_size": 64}, "features of 32 numbers, as this target's, got 64"),
        ({"target_hidden_size": 48}, "features of 32 numbers, as this target's, got 48"),
        ({"layer_types": ["sliding_attention"]}, "layers without sliding windows, got some with"),
        ({"model_type": "qwen3", "use_sliding_window": True, "max_window_layers": 0}, "layers without sliding windows"),
        ({"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, "frequencies that stay the same, got 'dynamic'"),
        ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 3, 6]}}, r"7 decoder layers, got .* \[2, 4, 7\]"),
        ({"eagle_aux_hidden_state_layer_ids": [-1, 3, 6]}, r"7 decoder layers, got those of \[-1, 3, 6\]"),
        ({"eagle_aux_hidden_state_layer_ids": ["1", 3, 6]}, r"7 decoder layers, got those of \['1', 3, 6\]"),
        ({"eagle_aux_hidden_state_layer_ids": 9}, r"7 decoder layers, got those of \[9\]"),
    ],
)
def test_settings_that_do_not_fit_are_refused(config, message, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(LAYERS_CONFIG | config), encoding="utf-8")
    with pytest.raises(ValueError, match=f"an EAGLE-3 head must .*{message}.*; take"):
        Eagle3Settings.read(tmp_path, deep_target())


@pytest.mark.parametrize("config", [{}, {"eagle_aux_hidden_state_layer_ids": [0, 1, 2]}])
def test_a_target_whose_layers_have_another_name_is_refused(config, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(LAYERS_CONFIG | config), encoding="utf-8")
    with pytest.raises(ValueError, match="must have a target with `layers` .*, got GPT2LMHeadModel; draft for it with"):
        Eagle3Settings.read(tmp_path, tiny_class("gpt2"))


@pytest.mark.parametrize(
    "text", [None, "{", "\xff", "[1]", '{"eagle_config": "no"}', '{"transformer_layer_config": 3}']
)
def test_a_folder_without_a_configuration_is_refused(text, tmp_path):
    save_file(published(), tmp_path / "model.safetensors")
    if text is not None:
        (tmp_path / "config.json").write_text(text, encoding="latin-1")
    with pytest.raises(ValueError, match=r"must be a folder with config.json, got .* \(\w+Error\); fetch all files"):
        Eagle3Head.load(deep_target(), tmp_path)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"fc.weight": (SIZE, 2 * SIZE)}, r"fc.weight must be \[32, 96\] for this target, got \[32, 64\]; take"),
        ({"lm_head.weight": (9, SIZE)}, r"lm_head.weight must be \[8, 32\] .*, got \[9, 32\]; take"),
        ({"embed_tokens.weight": (50, SIZE)}, r"embed_tokens.weight must be \[61, 32\] .*, got \[50, 32\]; take"),
        ({"midlayer.hidden_norm.weight": None}, "lacks layers.0.hidden_norm.weight; take"),
        ({"midlayer.self_attn.q_norm.weight": (8,)}, "got layers.0.self_attn.q_norm.weight beyond it .*; take"),
        ({"layers.1.mlp.up_proj.weight": (INNER, SIZE)}, "got layers.1.mlp.up_proj.weight beyond it .*; take"),
    ],
)
def test_weights_that_do_not_fit_are_refused(changes, message, tmp_path):
    with pytest.raises(ValueError, match=message) as refusal:
        Eagle3Head.load(deep_target(), written(tmp_path, published(**changes), CONFIG))
    assert "must " in str(refusal.value)


def test_a_head_of_another_size_must_bring_embeddings(tmp_path):
    random_eagle3(deep_target(), feature_layers=INPUTS, size=24).save(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    del tensors["embed_tokens.weight"]
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match="must hold .*, got nothing beyond it and lacks embed_tokens.weight; take"):
        Eagle3Head.load(deep_target(), tmp_path)


@pytest.mark.parametrize(("place", "offset", "got"), [(0, -1, "-1 to 60"), (7, 54, "0 to 61")])
def test_offsets_to_tokens_that_there_are_not_are_refused(place, offset, got, tmp_path):
    tensors = published()
    tensors["d2t"][place] = offset
    with pytest.raises(ValueError, match=f"d2t must lead to tokens from 0 to 60, got {got}; take the head"):
        Eagle3Head.load(deep_target(), written(tmp_path, tensors, CONFIG))


@pytest.mark.parametrize(
    ("offsets", "got"),
    [
        (torch.tensor(3), r"\[\] of torch.int64"),
        (torch.zeros(8, 1, dtype=torch.int64), r"\[8, 1\] of torch.int64"),
        (torch.zeros(0, dtype=torch.int64), r"\[0\] of torch.int64"),
        (torch.full((8,), 2.5), r"\[8\] of torch.float32"),
        (torch.ones(8, dtype=torch.bool), r"\[8\] of torch.bool"),
    ],
)
def test_offsets_that_are_no_list_of_integers_are_refused(offsets, got, tmp_path):
    with pytest.raises(ValueError, match=f"d2t must be integers in a row, got {got}; fetch the checkpoint again"):
        Eagle3Head.load(deep_target(), written(tmp_path, published() | {"d2t": offsets}, CONFIG))


def test_offsets_that_lead_to_a_token_twice_are_refused(tmp_path):
    """A law that names a token twice would end the call that drafts."""
    tensors = published()
    tensors["d2t"][1] = tensors["d2t"][0] - 1
    with pytest.raises(ValueError, match="d2t must lead to distinct tokens, got some twice; fetch"):
        Eagle3Head.load(deep_target(), written(tmp_path, tensors, CONFIG))


@pytest.mark.parametrize(
    ("place", "size", "message"),
    [
        (4, 8, "t2d must be true at the tokens that d2t leads to, got 9 true and 8 tokens .*; fetch"),
        (KNOWN[0], 8, "t2d must be true .*, got 7 true"),
        (None, 9, "draft_vocab_size of config.json must be the number .* d2t leads to, 8, got 9; fetch all files"),
        (None, None, None),
    ],
)
def test_tables_of_a_checkpoint_that_contradict_each_other_are_refused(place, size, message, tmp_path):
    tensors = published()
    if place is not None:
        tensors["t2d"][place] ^= True
    folder = written(tmp_path, tensors, CONFIG | {"draft_vocab_size": size})
    with nullcontext() if message is None else pytest.raises(ValueError, match=message):
        assert Eagle3Head.load(deep_target(), folder).vocabulary.tolist() == KNOWN


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        ([4, 6], "a vocabulary must have tokens that the head knows, got 2 others; add some"),
        ([61], "a vocabulary must be some tokens from 0 to 60, got 61 to 61; give"),
        ([], "a vocabulary must be some tokens .*, got none; give"),
        ([2.5], "a vocabulary must hold token ids, got numbers of torch.float32; give integers"),
    ],
)
def test_tokens_that_cannot_be_guessed_are_refused(ids, message):
    head = random_eagle3(tiny_model("llama"), vocabulary=KNOWN)
    with pytest.raises(ValueError, match=message):
        head.restrict(ids)
    assert head.vocabulary.tolist() == KNOWN and head.num_guessed == len(KNOWN)
