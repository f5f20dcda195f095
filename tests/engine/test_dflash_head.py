"""Checkpoints of block heads: published layouts, what is saved and read again; and the head that transformers has."""

import copy
import json

import numpy as np
import pytest
import torch
from estimated_rows import EstimatedBlocks
from plain_dflash import plain_block
from plain_eagle3 import deep_target, layer_inputs
from random_dflash import CONVOLUTIONS, LAYER, MARKOV, SELECTOR, random_dflash
from safetensors.torch import load_file, save_file
from tiny_models import SHAPE
from transformers import GenerationConfig
from two_tokens import assert_greedy_equals_transformers

import stand
from stand.drafters.dflash.head import DFlashHead
from stand.drafters.dflash.settings import DFlashSettings, usual_layers

SIZE, INNER, COUNT, RANK = SHAPE["hidden_size"], LAYER["intermediate_size"], SHAPE["vocab_size"], 6
KNOWN = [0, 3, 5, 8, 13, 21, 34, 60]
SUBLAYERS = {  # four heads of 8 numbers, keys for two of them
    "self_attn.q_proj.weight": (32, SIZE), "self_attn.k_proj.weight": (16, SIZE),
    "self_attn.v_proj.weight": (16, SIZE), "self_attn.o_proj.weight": (SIZE, 32), "self_attn.q_norm.weight": (8,),
    "self_attn.k_norm.weight": (8,), "mlp.gate_proj.weight": (INNER, SIZE), "mlp.up_proj.weight": (INNER, SIZE),
    "mlp.down_proj.weight": (SIZE, INNER), "input_layernorm.weight": (SIZE,),
    "post_attention_layernorm.weight": (SIZE,),
}  # fmt: skip
OF_CONVOLUTIONS = {
    f"{name}.{part}": shape
    for name in ("attention_conv", "mlp_conv")
    for part, shape in {"base_kernel": (2, 2, SIZE), "kernel_projection.weight": (4 * SIZE // 4, SIZE)}.items()
}
OF_SELECTOR = {
    "candidate_selector.predecessor_codebook": (COUNT, RANK), "candidate_selector.successor_codebook": (COUNT, RANK),
    "candidate_selector.hidden_projection.weight": (RANK, SIZE),
}  # fmt: skip
OF_MARKOV = {"markov_head.markov_w1.weight": (COUNT, RANK), "markov_head.markov_w2.weight": (len(KNOWN), RANK)}
OF_GATE = {"markov_head.gate_proj.weight": (RANK, SIZE + RANK), "markov_head.gate_proj.bias": (RANK,)}
LAYERS_CONFIG = {
    "model_type": "qwen3", "hidden_size": SIZE, "intermediate_size": INNER, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "vocab_size": COUNT, "rms_norm_eps": 0.01,
    "rope_theta": 50.0, "rope_scaling": None, "max_position_embeddings": 512,
}  # fmt: skip
OUTPUTS, INPUTS = [0, 2, 5], (1, 3, 6)
NESTED = {"mask_token_id": 4, "target_layer_ids": OUTPUTS}
CONFIG = {"architectures": ["DFlashDraftModel"], "block_size": 5, "dflash_config": NESTED, **LAYERS_CONFIG}
SECOND = {**NESTED, "block_size": 5, **SELECTOR, **CONVOLUTIONS}  # newer ones tell all of it there
CONFIG_2 = {"architectures": ["DFlash2DraftModel"], "dflash_config": SECOND, **LAYERS_CONFIG}
OF_SPECULATORS = {
    "architectures": ["DSparkSpeculator"], "speculators_model_type": "dspark", "block_size": 5, "mask_token_id": 4,
    "aux_hidden_state_layer_ids": list(INPUTS), "transformer_layer_config": LAYERS_CONFIG, "sample_from_anchor": True,
    "sliding_window_non_causal": False, "target_hidden_size": None, "draft_vocab_size": len(KNOWN),
    "markov_rank": RANK, "markov_head_type": "gated", "enable_confidence_head": True,
}  # fmt: skip


def published(*parts: dict, layer: dict = SUBLAYERS, **changes: tuple[int, ...] | None) -> dict[str, torch.Tensor]:
    """Made-up weights with the names of published heads; changes: other shapes by name, None leaves a name out."""
    generator = torch.Generator().manual_seed(0)
    shapes = {"fc.weight": (SIZE, 3 * SIZE), "hidden_norm.weight": (SIZE,), "norm.weight": (SIZE,)}
    for index in range(2):
        shapes |= {f"layers.{index}.{name}": shape for name, shape in layer.items()}
    for part in parts:
        shapes |= part
    shapes |= changes
    return {name: torch.randn(shape, generator=generator) for name, shape in shapes.items() if shape is not None}


def of_tokens() -> dict[str, torch.Tensor]:
    is_known = torch.zeros(COUNT, dtype=torch.bool)
    is_known[KNOWN] = True
    return {"d2t": torch.tensor(KNOWN) - torch.arange(len(KNOWN)), "t2d": is_known}


def written(folder, tensors, config, name: str = "model.safetensors"):
    (torch.save if name.endswith(".bin") else save_file)(tensors, folder / name)
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return folder


def settings_of(folder, config) -> DFlashSettings:
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return DFlashSettings.read(folder, deep_target())


HISTORY = [5, 9, 11, 4]


@torch.inference_mode()
def estimates_of(head) -> torch.Tensor:
    return EstimatedBlocks(deep_target(), head).run([np.array(HISTORY, dtype=np.int32)])[0]


def assert_formulas(head) -> None:
    torch.testing.assert_close(estimates_of(head), plain_block(head, deep_target(), HISTORY), atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize("name", ["model.safetensors", "pytorch_model.bin"])
def test_published_heads_are_read(name, tmp_path):
    """z-lab's: layers counted by their outputs, a block's size at the top; a file or its folder."""
    tensors = published()
    written(tmp_path, tensors, CONFIG, name)
    for path in (tmp_path, tmp_path / name):
        head = DFlashHead.load(deep_target(), path)
        own = head.state_dict()
        assert set(own) == set(tensors) and all(torch.equal(value, tensors[key]) for key, value in own.items())
        assert head.feature_layers == INPUTS and head.settings.is_causal == (False, False) and not head.training
        assert head.settings.block_size == 5 and head.settings.mask_token_id == 4 and head.pairs is None
        assert head.config.rope_parameters["rope_theta"] == 50.0 and head.num_guessed == COUNT
        assert_formulas(head)


def test_heads_of_the_second_kind_are_read(tmp_path):
    """All that is new stands within `dflash_config`."""
    tensors = published(OF_SELECTOR, layer=SUBLAYERS | OF_CONVOLUTIONS)
    head = DFlashHead.load(deep_target(), written(tmp_path, tensors, CONFIG_2))
    assert head.settings.block_size == 5 and head.pairs.num_candidates == 16 and head.settings.conv_group_size == 4
    assert set(head.state_dict()) == set(tensors)
    assert_formulas(head)


def test_heads_of_speculators_are_read(tmp_path):
    """Layers counted by their inputs, some tokens alone; what is the target's own is left aside."""
    embedding = deep_target().get_input_embeddings().weight.detach().clone()
    beside = {
        "verifier_norm.weight": torch.ones(SIZE), "verifier_lm_head.weight": torch.ones(len(KNOWN), SIZE),
        "confidence_head.proj.weight": torch.ones(1, SIZE + RANK), "confidence_head.proj.bias": torch.ones(1),
        "embed_tokens.weight": embedding, **of_tokens(),
    }  # fmt: skip
    tensors = published(OF_MARKOV, OF_GATE, {"lm_head.weight": (len(KNOWN), SIZE)})
    head = DFlashHead.load(deep_target(), written(tmp_path, tensors | beside, OF_SPECULATORS))
    assert set(head.state_dict()) == set(tensors) and head.feature_layers == INPUTS
    assert head.settings.has_anchor_law and head.vocabulary.tolist() == KNOWN and head.num_guessed == len(KNOWN)
    assert estimates_of(head).shape == (5, SIZE)
    assert_formulas(head)


@pytest.mark.parametrize("offset", [0.0, 0.5])
def test_an_lm_head_that_is_the_targets_is_not_kept_twice(offset, tmp_path):
    own = deep_target().get_output_embeddings().weight.detach().clone() + offset
    tensors = published() | {"lm_head.weight": own}
    head = DFlashHead.load(deep_target(), written(tmp_path, tensors, CONFIG))
    assert ("lm_head.weight" in head.state_dict()) == (offset > 0)
    estimates = torch.randn(3, SIZE, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(head.logits(estimates), estimates @ own.T)


WINDOWED = {"layer_types": ["sliding_attention", "full_attention"], "use_sliding_window": True, "sliding_window": 4}
SPECULATORS = {"speculators_model_type": "dflash", "transformer_layer_config": LAYERS_CONFIG | WINDOWED}


@pytest.mark.parametrize(
    ("given", "is_causal"),
    [
        ({}, (False, False)),
        (WINDOWED, (True, False)),
        ({**WINDOWED, "is_causal": False}, (False, False)),
        ({**WINDOWED, "dflash_config": NESTED | {"causal": False}}, (False, False)),
        ({**WINDOWED, "dflash_config": NESTED | {"causal": True}}, (True, True)),
        ({"is_causal": True}, (True, True)),
        (SPECULATORS, (True, False)),
        ({**SPECULATORS, "sliding_window_non_causal": True}, (False, False)),
    ],
)
def test_who_sees_whom_in_a_block(given, is_causal, tmp_path):
    assert settings_of(tmp_path, CONFIG | given).is_causal == is_causal


@pytest.mark.parametrize(
    ("given", "layers"),
    [
        ({}, INPUTS),
        ({"dflash_config": {"mask_token_id": 4}, "target_layer_ids": OUTPUTS}, INPUTS),
        ({"dflash_config": {"mask_token_id": 4}, "aux_hidden_state_layer_ids": OUTPUTS}, (0, 2, 5)),
        ({"dflash_config": {"mask_token_id": 4, "aux_hidden_state_layer_ids": OUTPUTS}}, (0, 2, 5)),
        ({"dflash_config": {"mask_token_id": 4, "target_layer_ids": [-1, 5]}}, (0, 6)),
    ],
)
def test_layers_are_counted_as_their_publishers_do(given, layers, tmp_path):
    assert settings_of(tmp_path, CONFIG | given).feature_layers == layers


@pytest.mark.parametrize(
    ("given", "has_anchor_law"),
    [
        ({}, False),
        ({"architectures": None}, False),
        ({"architectures": ["Qwen3DSparkModel"]}, True),
        ({"architectures": "Qwen3DSparkModel"}, True),
        ({"architectures": 3, "speculators_model_type": "dspark"}, True),
        ({"architectures": ["Qwen3DSparkModel"], "sample_from_anchor": False}, False),
        ({"sample_from_anchor": True}, True),
        ({"speculators_model_type": "dflash"}, False),
    ],
)
def test_which_heads_guess_at_the_pending_token(given, has_anchor_law, tmp_path):
    """Where it is not told: those of DSpark's code."""
    found = settings_of(tmp_path, CONFIG | given)
    assert found.has_anchor_law == has_anchor_law and found.num_guesses == 4 + has_anchor_law


def test_numbers_are_read_from_either_place(tmp_path):
    plain = settings_of(tmp_path, {**CONFIG, "final_logit_softcapping": None, "conv_kernel_size": None})
    assert (plain.input_embedding_scale, plain.output_multiplier, plain.final_logit_softcapping) == (1.0, 1.0, 0.0)
    assert plain.num_guesses == 4 and plain.conv_kernel_size == 0 and plain.markov_head_type == "vanilla"
    nested = NESTED | {"input_embedding_scale": 3, "final_logit_softcapping": 30.0}
    given = {**CONFIG, "dflash_config": nested, "output_multiplier": 0.5, "final_logit_softcapping": 7.0}
    found = settings_of(tmp_path, given)
    assert (found.input_embedding_scale, found.output_multiplier, found.final_logit_softcapping) == (3.0, 0.5, 30.0)


SAVED = {
    "plain": {},
    "windows": {"windows": (True, False)},
    "windows, causal there": {"windows": (True, False), "is_causal": (True, False)},
    "causal": {"is_causal": (True, True)},
    "the first place guesses": {"has_anchor_law": True, "block_size": 7},
    "DFlash 2": {**CONVOLUTIONS, **SELECTOR},
    "Markov": MARKOV,
    "gated, some tokens": {**MARKOV, "markov_head_type": "gated", "vocabulary": KNOWN},
    "scales": {"input_embedding_scale": 3.0, "output_multiplier": 0.5, "final_logit_softcapping": 2.0},
}


@pytest.mark.parametrize("settings", SAVED.values(), ids=SAVED)
@torch.inference_mode()
def test_a_saved_head_is_read_again(settings, tmp_path):
    """To the bit, also a second time."""
    head = random_dflash(deep_target(), feature_layers=INPUTS, **settings).to(torch.bfloat16).to(torch.float32)
    head.save(tmp_path / "first")
    again = DFlashHead.load(deep_target(), tmp_path / "first")
    again.save(tmp_path / "second")
    first, second = (tmp_path / "first", tmp_path / "second")
    assert (first / "model.safetensors").read_bytes() == (second / "model.safetensors").read_bytes()
    first, second = (json.loads((one / "config.json").read_text(encoding="utf-8")) for one in (first, second))
    assert first == second
    assert torch.equal(estimates_of(again), estimates_of(head))
    asked = {"temperature": 0.7, "count": 6, "width": 3}
    laws = [one.laws(estimates_of(head)[None], torch.tensor([4]), **asked) for one in (head, again)]
    for name in laws[0].__slots__:
        one, other = (getattr(law, name) for law in laws)
        assert one is other is None or torch.equal(one, other)
    for name in ("block_size", "mask_token_id", "feature_layers", "is_causal", "has_anchor_law"):
        assert getattr(again.settings, name) == getattr(head.settings, name)
    names = set(head.state_dict()) | ({"d2t", "t2d"} if "vocabulary" in settings else set())
    assert set(load_file(tmp_path / "first" / "model.safetensors")) == names


def test_fewer_tokens_are_saved_as_some_tokens(tmp_path):
    target = copy.deepcopy(deep_target()).to(torch.bfloat16).to(torch.float32)  # whose LM head is saved
    head = random_dflash(target, feature_layers=INPUTS, **MARKOV).to(torch.bfloat16).to(torch.float32)
    head.restrict([60, 59, 21, 5])
    head.save(tmp_path)
    again = DFlashHead.load(target, tmp_path)
    assert again.vocabulary.tolist() == [5, 21, 59, 60] and again.num_guessed == 4
    estimates = torch.randn(1, 4, SIZE, generator=torch.Generator().manual_seed(0))
    asked = {"temperature": 0.7, "count": 6, "width": 3}
    laws = [one.laws(estimates, torch.tensor([4]), **asked) for one in (head, again)]
    assert torch.equal(laws[0].pair_probs, laws[1].pair_probs) and laws[0].ids.shape == (1, 4, 4)
    head.to(torch.bfloat16)
    assert head._lm_head[0].weight.dtype == torch.bfloat16 and head.vocabulary.dtype == torch.int64
    with pytest.raises(ValueError, match="a vocabulary must have tokens that the head knows, got 2 others; add some"):
        head.restrict([7, 8])


@pytest.mark.parametrize(
    ("num_layers", "count", "layers"),
    [(1, 3, (0,)), (2, 3, (1,)), (7, 3, (1, 4, 6)), (7, 99, (1, 2, 3, 4, 5, 6)), (36, 5, (2, 10, 18, 26, 34))],
)
def test_usual_layers_are_those_of_published_heads(num_layers, count, layers, monkeypatch):
    """Of Qwen3-8B's: outputs 1, 9, 17, 25 and 33."""
    monkeypatch.setattr("stand.drafters.dflash.settings._num_layers", lambda target: num_layers)
    assert usual_layers(deep_target(), count=count) == layers


def test_drafters_take_the_path_of_a_head(tmp_path):
    written(tmp_path, published(OF_SELECTOR, layer=SUBLAYERS | OF_CONVOLUTIONS), CONFIG_2)
    drafter = stand.BlendedDrafter(budget=8, source=stand.DFlashLaws(tmp_path))
    engine = stand.wrap(deep_target(), drafter=drafter)
    assert drafter.asked_features == INPUTS
    assert_greedy_equals_transformers(engine, deep_target(), [HISTORY, [7]])


# The same head as transformers has it.


def as_transformers(head, *, window: int | None):
    """Its own block drafter with the head's weights. Windows count the place that is `window` away, too."""
    module = pytest.importorskip("transformers.models.muse_glimmer_assistant", reason="transformers has no DFlash")
    kinds = ["full_attention" if window is None else "sliding_attention", "full_attention"]
    config = module.MuseGlimmerAssistantConfig(
        hidden_size=SIZE, num_hidden_layers=2, layer_types=kinds, sliding_window=window or 99, block_size=5,
        mask_token_id=3, target_layer_ids=[layer - 1 for layer in INPUTS], **LAYER,
    )  # fmt: skip
    model = module.MuseGlimmerAssistantModel(config).eval()
    names = {"fc.weight": "encoder.fc.weight", "hidden_norm.weight": "encoder.output_norm_enc.weight"}
    model.load_state_dict({names.get(name, name): value for name, value in head.state_dict().items()})
    return model


@pytest.mark.parametrize("window", [None, 4])
@torch.inference_mode()
def test_estimates_are_those_of_transformers(window):
    """Windows of a head count a place itself: 4 there are 5 here."""
    head = random_dflash(deep_target(), feature_layers=INPUTS, windows=(window is not None, False))
    model = as_transformers(head, window=window)
    if window is not None:
        head.layers[0].self_attn.sliding_window = 5
    for history in ([5, 9, 11, 4, 5, 9, 30, 31, 32], [7, 8]):
        hidden = layer_inputs(deep_target(), history, INPUTS)[None, :-1]
        block = deep_target().get_input_embeddings()(torch.tensor([[history[-1], 3, 3, 3, 3]]))
        places = torch.arange(len(history) + 4)[None]
        cache = pytest.importorskip("transformers.cache_utils").DFlashCache(config=model.config)
        cache.set_previous_accepted_tokens(len(history) - 1)
        expected = model(block, hidden, position_ids=places, cache=cache).last_hidden_state[0, 1:]
        found = EstimatedBlocks(deep_target(), head).run([np.array(history, dtype=np.int32)])[0]
        torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)


@torch.inference_mode()
def test_transformers_drafts_from_the_same_hidden_states():
    """Its generator takes outputs of layers, which are inputs of the next ones, of all tokens but the pending one."""
    head = random_dflash(deep_target(), feature_layers=INPUTS)
    model, target = as_transformers(head, window=None), deep_target()
    candidates = pytest.importorskip("transformers.generation.candidate_generator")
    generator = candidates.DFlashTokenCandidateGenerator(
        model, target.get_input_embeddings(), target.get_output_embeddings(), GenerationConfig(max_length=100)
    )
    history = torch.tensor([[5, 9, 11, 4, 5, 9, 30, 31]])
    outputs = target(history[:, :-1], output_hidden_states=True)
    kept = {"position_ids": torch.arange(history.shape[1])[None], "attention_mask": None}
    found = generator.get_candidates(history, kept, outputs, is_first_iteration=False, n_last_matches=0)[1]
    estimates = EstimatedBlocks(target, head).run([history[0].numpy().astype(np.int32)])
    torch.testing.assert_close(head.logits(estimates), found, atol=1e-3, rtol=1e-3)
