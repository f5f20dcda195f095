"""The multi-token-prediction layer of a target's own checkpoint: how it is read, what it estimates, and its drafts."""

from __future__ import annotations

import copy
import json
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from estimated_rows import EstimatedRows
from mtp_checkpoints import (
    FILE,
    INDEX,
    KINDS,
    OF_LIBRARY,
    QWEN,
    published,
    read_target,
    together,
    write_checkpoint,
)
from plain_eagle import random_head
from plain_mtp import CheckedRows, LibraryLayer, PlainLayer
from safetensors.torch import load_file, save_file
from tiny_models import tiny_model
from transformers import PreTrainedConfig
from transformers.modeling_layers import MtpModel
from turns import PROMPTS, restless_calls
from two_tokens import plain_greedy
from workloads import tiny_classes

import stand
from stand.drafters.eagle import drafter as eagle_drafter
from stand.drafters.eagle import laws as eagle_laws
from stand.drafters.eagle.attached import attached
from stand.drafters.eagle.head import EagleHead
from stand.drafters.eagle.mtp_head import MtpHead
from stand.trees import TreeShape

COUNT = 12
NOT_READ = "transformers must read the target's multi-token-prediction layer, got .*Error: .*; draft by the lookup,"
GREEDY = {"max_new_tokens": COUNT, "temperature": 0.0, "stop_token_ids": [2]}
DRAFTERS = {
    "eagle": lambda: stand.EagleDrafter("mtp", shape=TreeShape.parse("branching:3,2,1"), num_candidates=8),
    "blended": lambda: stand.BlendedDrafter(source=stand.EagleLaws("mtp", runs=3), budget=16),
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """By kind: the folder of a checkpoint, and the parts of its layer."""

    @cache
    def written(kind: str) -> tuple[Path, dict[str, torch.Tensor]]:
        folder = tmp_path_factory.mktemp(kind)
        return folder, write_checkpoint(kind, folder)

    return written


@pytest.fixture(scope="module")
def targets(folders):
    return cache(lambda kind: read_target(kind, folders(kind)[0]))


def own_part(head: MtpHead, name: str) -> torch.Tensor:
    """Of a head of Qwen, by its plain name."""
    part, _, rest = name.partition(".")
    return head.layer.state_dict()[f"mtp_block.{rest}" if part == "block" else name]


def write_index(folder: Path, files: dict[str, list[str]]) -> None:
    weight_map = {name: file for file, names in files.items() for name in names}
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


@pytest.mark.parametrize("layout", ["apart", "together"])  # weights of experts
@pytest.mark.parametrize("kind", QWEN)
def test_weights_are_read_as_they_lie_in_a_checkpoint(kind, layout, folders, targets, tmp_path):
    """In one file, among tensors of other parts."""
    _, parts = folders(kind)
    beside = {"model.norm.weight": torch.ones(3), "model.visual.mtp.fc.weight": torch.ones(2)}
    tensors = published(kind, parts, 4)
    save_file((together(tensors) if layout == "together" else tensors) | beside, tmp_path / FILE)
    head = MtpHead.load(targets(kind), tmp_path)
    expected = together(parts)
    assert all(torch.equal(own_part(head, name), value) for name, value in expected.items())
    assert len(head.layer.state_dict()) == len(expected) and not head.training


@pytest.mark.parametrize("kind", QWEN)
def test_of_shards_those_of_the_layer_alone_are_opened(kind, folders, targets, tmp_path):
    parts = folders(kind)[1]
    tensors = published(kind, parts, 4)
    (tmp_path / "a.safetensors").write_bytes(b"no tensors")
    names = sorted(tensors)
    shards = {"b.safetensors": names[::2], "c.safetensors": names[1::2]}
    for file, own in shards.items():
        save_file({name: tensors[name] for name in own} | {"lm_head.weight": torch.ones(2)}, tmp_path / file)
    write_index(tmp_path, {**shards, "a.safetensors": ["lm_head.weight", "model.visual.mtp.weight"]})
    head = MtpHead.load(targets(kind), tmp_path)
    expected = together(parts)
    assert all(torch.equal(own_part(head, name), value) for name, value in expected.items())
    write_index(tmp_path, {**shards, "a.safetensors": ["mtp.norm.weight"]})
    with pytest.raises(ValueError, match="must be a folder or a hub id with safetensors, .*SafetensorError"):
        MtpHead.load(targets(kind), tmp_path)


@pytest.mark.parametrize(
    ("kind", "plain"),
    [*((kind, PlainLayer) for kind in KINDS), *((kind, LibraryLayer) for kind in OF_LIBRARY)],
)
@pytest.mark.parametrize("drafter", DRAFTERS)
def test_every_estimate_is_the_layers_own(kind, plain, drafter, folders, targets, monkeypatch):
    """Of prompts and of drafted nodes, siblings among them, in sampled calls whose rows end and move."""
    made: list[CheckedRows] = []
    slow = plain(kind, *folders(kind))

    def checked_rows(*args: object, **settings: object) -> CheckedRows:
        made.append(CheckedRows(*args, plain=slow, **settings))
        return made[-1]

    for module in (eagle_drafter, eagle_laws):
        monkeypatch.setattr(module, "FollowedRows", checked_rows)
    engine = stand.wrap(targets(kind), drafter=DRAFTERS[drafter](), verifier="traversal")
    restless_calls(engine, seed=3)
    (rows,) = made
    assert rows.num_roots > 10 and rows.num_nodes > 60 and rows.num_siblings > 40 and rows.num_kept > 0


@pytest.mark.parametrize("kind", OF_LIBRARY)
def test_laws_are_read_as_by_the_library(kind, folders, targets):
    head = MtpHead.load(targets(kind), folders(kind)[0])
    features = torch.randn(3, 32, generator=torch.Generator().manual_seed(0))
    expected = MtpModel.from_pretrained(targets(kind))._project_to_logits(features)
    torch.testing.assert_close(head.logits(features), expected)
    ids, probs = head.best_tokens(features, temperature=0.7, count=5)
    laws = (expected / 0.7).softmax(dim=-1)
    assert torch.equal(ids, laws.topk(5).indices.int())
    torch.testing.assert_close(probs, laws.topk(5).values)


@pytest.mark.parametrize("drafter", DRAFTERS)
@pytest.mark.parametrize("kind", KINDS)
def test_greedy_tokens_are_the_targets_own(kind, drafter, targets):
    model = targets(kind)
    output = stand.wrap(model, drafter=DRAFTERS[drafter]()).generate(input_ids=PROMPTS, **GREEDY)
    assert output.token_ids == [plain_greedy(model, tuple(prompt), COUNT) for prompt in PROMPTS]
    assert output.stats.num_draft_tokens > 40
    if kind in OF_LIBRARY and drafter == "eagle":
        assert output.token_ids == [plain_greedy(model, tuple(prompt), COUNT, use_mtp=True) for prompt in PROMPTS]


def test_of_several_layers_the_first_drafts(targets, tmp_path):
    parts = write_checkpoint("glm4_moe", tmp_path, more_layers=1)
    head = attached(read_target("glm4_moe", tmp_path), "mtp")
    assert torch.equal(head.layer.eh_proj.weight, parts["eh_proj.weight"])
    assert torch.equal(head.layer.mtp_block.self_attn.q_proj.weight, parts["block.self_attn.q_proj.weight"])


def test_a_norm_that_layers_share_is_applied(targets, monkeypatch):
    head = attached(targets("glm4_moe"), "mtp")
    library = MtpModel.from_pretrained(targets("glm4_moe"))
    library.shared_post_norm = torch.nn.Hardtanh()
    monkeypatch.setattr(MtpModel, "from_pretrained", lambda *args, **settings: library)
    clipped = attached(targets("glm4_moe"), "mtp")
    given = torch.ones(1, 4, 32), torch.tensor([[3, 4, 5, 6]]), torch.arange(4)[None]
    with torch.inference_mode():
        head.config._attn_implementation = clipped.config._attn_implementation = "sdpa"
        estimates = head(*given, attention_mask=None)
        assert estimates.abs().max() > 1 and torch.equal(clipped(*given, attention_mask=None), estimates.clamp(-1, 1))


def state_of(model) -> tuple:
    text = model.config.get_text_config()
    attentions = [config._attn_implementation for config in (model.config, text)]
    modules = {name: (id(module), type(module)) for name, module in model.named_modules()}
    weights = {name: (id(weight), weight.clone()) for name, weight in model.named_parameters()}
    buffers = {name: weight.clone() for name, weight in model.named_buffers()}
    return copy.deepcopy((vars(model.config), vars(text))), attentions, modules, weights, buffers


def is_equal(first: object, second: object) -> bool:
    if isinstance(first, torch.Tensor):
        return torch.equal(first, second)
    if isinstance(first, dict):
        return first.keys() == second.keys() and all(is_equal(value, second[key]) for key, value in first.items())
    if isinstance(first, (tuple, list)):
        return len(first) == len(second) and all(map(is_equal, first, second))
    return isinstance(first, PreTrainedConfig) or first == second


@pytest.mark.parametrize("kind", KINDS)
def test_the_target_is_left_as_it_was(kind, folders):
    """Its weights, too, which a checkpoint's layer may bring once more."""
    model = read_target(kind, folders(kind)[0])
    before = state_of(model)
    head = attached(model, "mtp")
    stand.wrap(model, drafter=stand.EagleDrafter(head, budget=6)).generate(input_ids=PROMPTS[:1], max_new_tokens=3)
    assert is_equal(before, state_of(model))
    own = {id(weight) for weight in model.parameters()}
    assert not own & {id(weight) for weight in head.parameters()}
    assert not any(head.config is part.config for part in model.modules() if hasattr(part, "config"))


def types(module: torch.nn.Module) -> dict[str, torch.dtype]:
    return {name: weight.dtype for name, weight in module.state_dict().items()}


@pytest.mark.parametrize("way", ["read", "cast"])
@pytest.mark.parametrize("kind", ["qwen3_next", "deepseek_v3"])
def test_a_layer_has_its_targets_types(kind, way, folders):
    """Of a target that was read in bfloat16 some numbers of routers stay in float32."""
    folder = folders(kind)[0]
    model = read_target(kind, folder).bfloat16() if way == "cast" else read_target(kind, folder, dtype=torch.bfloat16)
    head = attached(model, "mtp")
    is_mixed = kind in OF_LIBRARY and way == "read"
    library = types(MtpModel.from_pretrained(model).layers[0]) if is_mixed else {}
    assert types(head.layer) == dict.fromkeys(types(head.layer), torch.bfloat16) | library
    with torch.inference_mode():
        estimates = EstimatedRows(model, head).catch_up([np.array(PROMPTS[0], dtype=np.int32)])[1]
    assert estimates.dtype == torch.bfloat16 and estimates.isfinite().all()
    again = attached(model.double(), head)
    assert again is not head and {weight.dtype for weight in again.parameters()} == {torch.float64}


def test_a_drafter_for_another_model_drafts_by_that_ones_layer(folders, targets, tmp_path):
    drafter = stand.EagleDrafter("mtp", budget=8)
    stand.wrap(targets("qwen3_5_text"), drafter=drafter)
    parts = write_checkpoint("qwen3_5_text", tmp_path, seed=1)
    stand.wrap(read_target("qwen3_5_text", tmp_path), drafter=drafter)
    assert torch.equal(drafter.head.layer.eh_proj.weight, parts["eh_proj.weight"])


def test_heads_are_told_apart(targets, tmp_path):
    """Objects, paths of trained heads, and the word for the target's own layer."""
    llama = tiny_model("llama")
    trained = random_head(llama)
    trained.save(tmp_path / "head")
    assert attached(llama, trained) is trained
    assert type(attached(llama, tmp_path / "head")) is type(attached(llama, str(tmp_path / "head"))) is EagleHead
    head = attached(targets("qwen3_next"), "mtp")
    assert type(head) is MtpHead and attached(targets("qwen3_next"), head) is head
    with pytest.raises(ValueError, match="must be a file or a folder with model.safetensors .* got mtp"):
        attached(targets("qwen3_next"), Path("mtp"))
    with pytest.raises(ValueError, match="must be one, a file or a folder, got int"):
        attached(targets("qwen3_next"), 3)


@pytest.mark.parametrize("kind", ["qwen3_next", "glm4_moe"])
def test_a_head_of_another_model_is_refused(kind, folders, targets):
    head = MtpHead.load(read_target(kind, folders(kind)[0]), folders(kind)[0])
    with pytest.raises(ValueError, match="must be the wrapped model's own, got one that was made for another model;"):
        attached(targets(kind), head)


def test_a_head_is_saved_nowhere_else(targets, tmp_path):
    with pytest.raises(ValueError, match="must be kept where the target's checkpoint holds it, got .*; draft with"):
        attached(targets("qwen3_next"), "mtp").save(tmp_path / "own")
    assert not (tmp_path / "own").exists()


def refused(model, message: str) -> None:
    for drafter in (stand.EagleDrafter("mtp"), stand.BlendedDrafter(source=stand.EagleLaws("mtp"))):
        with pytest.raises(ValueError, match=message):
            stand.wrap(model, drafter=drafter)


@pytest.mark.parametrize("kind", ["llama", "qwen3_5_text"])
def test_checkpoints_without_a_layer_are_refused(kind, tmp_path):
    model = tiny_model("llama") if kind == "llama" else tiny_classes.tiny_model(kind)
    model.save_pretrained(tmp_path)
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    refused(model, r"must hold a multi-token-prediction layer \(mtp\.\*\), got .* without; draft by the lookup, or")


def test_models_without_a_checkpoint_are_refused():
    """Whose name is empty."""
    rule = "must be a folder or a hub id with safetensors, got ''.*; load the model from its checkpoint"
    refused(tiny_classes.tiny_model("qwen3_5_text"), rule)
    refused(tiny_classes.tiny_model("deepseek_v3"), NOT_READ)


def test_a_layer_that_transformers_cannot_read_is_refused(folders, tmp_path):
    write_checkpoint("glm4_moe", tmp_path)
    tensors = load_file(tmp_path / FILE)
    tensors.pop("model.layers.4.eh_proj.weight")
    save_file(tensors, tmp_path / FILE, metadata={"format": "pt"})
    refused(read_target("glm4_moe", tmp_path), NOT_READ + " or with an EAGLE head")


@pytest.mark.parametrize(
    ("kind", "name", "shape", "named"),
    [
        ("qwen3_5_text", "mtp.fc.weight", (32, 32), "eh_proj.weight"),
        ("qwen3_5_text", "mtp.layers.0.mlp.up_proj.weight", None, "mtp_block.mlp.up_proj.weight"),
        ("qwen3_5_text", "mtp.layers.1.mlp.up_proj.weight", (48, 32), "layers.1.mlp.up_proj.weight"),
        ("qwen3_next", "mtp.layers.0.mlp.experts.3.up_proj.weight", None, "mtp_block.mlp.experts."),
        ("qwen3_next", "mtp.layers.0.mlp.experts.1.up_proj.weight", None, "mtp_block.mlp.experts."),
        ("qwen3_next", "mtp.layers.0.mlp.experts.1.up_proj.weight", (16, 16), "mtp_block.mlp.experts."),
        ("qwen3_next", "mtp.layers.0.mlp.experts.0.gate_proj.weight", (8, 32), "mtp_block.mlp.experts."),
    ],
)
def test_parts_of_another_model_are_refused(kind, name, shape, named, folders, targets, tmp_path):
    tensors = published(kind, folders(kind)[1], 4)
    tensors.pop(name, None)
    save_file(tensors | ({} if shape is None else {name: torch.ones(shape)}), tmp_path / FILE)
    with pytest.raises(ValueError, match=rf"must have the parts of the target's own layers, got .*{named}.*; draft by"):
        MtpHead.load(targets(kind), tmp_path)


@pytest.mark.parametrize("is_there", [True, False])
def test_experts_whose_parts_do_not_belong_together_are_refused(is_there, folders, targets, tmp_path):
    """All have a gate of another width than what it gates, or one expert has a projection down alone."""
    tensors = published("qwen3_next", folders("qwen3_next")[1], 4)
    if is_there:
        gates = [name for name in tensors if ".experts." in name and name.endswith("gate_proj.weight")]
        tensors |= {name: torch.ones(16, 16) for name in gates}
    else:
        for kind in ("gate", "up"):
            del tensors[f"mtp.layers.0.mlp.experts.1.{kind}_proj.weight"]
    save_file(tensors, tmp_path / FILE)
    with pytest.raises(ValueError, match=r"must have the parts of the target's own layers, got .*experts"):
        MtpHead.load(targets("qwen3_next"), tmp_path)


def test_kinds_of_layers_that_rotate_apart_are_refused(folders):
    """As Mellum's do, where transformers does not read its layer by itself."""
    model = read_target("mellum", folders("mellum")[0])
    model.config.num_mtp_layers = None
    refused(model, "must rotate as all layers of its target, got one whose kinds of layers differ in it; take a newer")
