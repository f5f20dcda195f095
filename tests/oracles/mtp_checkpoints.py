"""Checkpoints of tiny targets that hold a made-up multi-token-prediction layer by the names of published ones."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from image_cases import image_model
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, PreTrainedModel
from workloads.tiny_classes import CLASSES, VOCABULARY_SIZE, tiny_model

QWEN = ("qwen3_5_text", "qwen3_5_moe_text", "qwen3_next", "qwen3_5")  # the last one takes images, too
OF_LIBRARY = ("glm4_moe", "deepseek_v3", "sarvam_moe", "mellum")  # whose layer transformers reads
KINDS = (*QWEN, *OF_LIBRARY)
OWN_PREFIX = ("mellum", *QWEN)  # which name it `mtp.`, not as one layer more
# Published names: of parts beside the block's under such a prefix, and of those of one layer more.
UNDER_PREFIX = {
    "enorm": "pre_fc_norm_embedding", "hnorm": "pre_fc_norm_hidden", "eh_proj": "fc", "post_norm": "norm",
}  # fmt: skip
AS_A_LAYER = {"enorm": "enorm", "hnorm": "hnorm", "eh_proj": "eh_proj", "post_norm": "shared_head.norm"}
FILE, INDEX = "model.safetensors", "model.safetensors.index.json"
TWIN = "twin"  # folder of a target whose last layer is the made-up block


def made_target(kind: str) -> PreTrainedModel:
    """Skips the test where this version of transformers has no such class, or does not read its layer."""
    if kind == "qwen3_5":
        return image_model(kind)
    model = tiny_model(kind) if kind in CLASSES else None
    if model is None or kind in OF_LIBRARY and not hasattr(model.config, "num_mtp_layers"):
        pytest.skip(f"this version of transformers has no such layer of {kind}")
    if kind != "mellum":
        return model
    model.config.layer_types = ["full_attention", "sliding_attention"] * 2  # its layer slides
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(model.config).eval()


def write_checkpoint(kind: str, folder: Path, *, seed: int = 0, more_layers: int = 0) -> dict[str, torch.Tensor]:
    """A target in `folder` with its layer, other ones behind it, and its twin; the layer's parts by plain names."""
    model = made_target(kind)
    for place in (folder, folder / TWIN):
        model.save_pretrained(place)
    tensors = load_file(folder / FILE)
    count = model.config.get_text_config().num_hidden_layers
    last = next(name for name in tensors if f"layers.{count - 1}." in name).partition(f"layers.{count - 1}.")[0]
    last += f"layers.{count - 1}."
    shapes = {name.removeprefix(last): value.shape for name, value in tensors.items() if name.startswith(last)}
    parts = made_up(shapes, seed)
    blocks = {last + name.removeprefix("block."): value for name, value in parts.items() if name.startswith("block.")}
    save_file(tensors | blocks, folder / TWIN / FILE, metadata={"format": "pt"})
    tensors |= published(kind, parts, count) | beside(kind, count)
    for number in range(1, 1 + more_layers):
        tensors |= published(kind, made_up(shapes, seed + number), count + number)
    save_file(tensors, folder / FILE, metadata={"format": "pt"})
    if kind in OF_LIBRARY:
        config = json.loads((folder / "config.json").read_text())
        config["num_nextn_predict_layers"] = 1 + more_layers
        (folder / "config.json").write_text(json.dumps(config))
    return parts


def made_up(shapes: dict[str, torch.Size], seed: int) -> dict[str, torch.Tensor]:
    """A layer around a block with these tensors: vectors around 0.5, so that no norm is another's."""
    generator = torch.Generator().manual_seed(seed)
    size = shapes["input_layernorm.weight"][0]
    sizes = {f"block.{name}": shape for name, shape in shapes.items()}
    sizes |= {f"{name}.weight": (size,) for name in ("enorm", "hnorm", "post_norm")}
    sizes["eh_proj.weight"] = (size, 2 * size)
    return {
        name: 0.3 * torch.randn(sizes[name], generator=generator) + 0.5 * (len(sizes[name]) == 1)
        for name in sorted(sizes)
    }


def published(kind: str, parts: dict[str, torch.Tensor], num_layers: int) -> dict[str, torch.Tensor]:
    """The parts by their names in a checkpoint whose target has `num_layers`."""
    prefix, names = ("mtp.", UNDER_PREFIX) if kind in OWN_PREFIX else (f"model.layers.{num_layers}.", AS_A_LAYER)
    block = "layers.0." if kind in OWN_PREFIX else ""
    renamed = {}
    for name, value in parts.items():
        part, _, rest = name.partition(".")
        renamed[prefix + (block if part == "block" else f"{names[part]}.") + rest] = value
    return renamed


def beside(kind: str, num_layers: int) -> dict[str, torch.Tensor]:
    """What published files hold beyond it: a tower for images, or a layer's own embeddings and LM head."""
    if kind in OWN_PREFIX:
        names = [] if kind in ("mellum", "qwen3_5") else ["model.visual.patch_embed.proj.weight"]
    else:
        names = [f"model.layers.{num_layers}.{name}.weight" for name in ("embed_tokens", "shared_head.head")]
    return {name: torch.ones(VOCABULARY_SIZE, 32) for name in names}


def together(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The weights of all experts as one tensor, as some checkpoints have them."""
    apart = {name for name in tensors if ".mlp.experts." in name}
    if not apart:
        return tensors
    before = min(apart).partition("experts.")[0] + "experts."
    count = len(apart) // 3

    def of_all(kind: str) -> torch.Tensor:
        return torch.stack([tensors[f"{before}{number}.{kind}_proj.weight"] for number in range(count)])

    rest = {name: value for name, value in tensors.items() if name not in apart}
    rest[f"{before}gate_up_proj"] = torch.cat([of_all("gate"), of_all("up")], dim=1)
    return rest | {f"{before}down_proj": of_all("down")}


def read_target(kind: str, folder: Path, **settings: object) -> PreTrainedModel:
    """transformers tells such a layer by the numbers of published models' layers: here by that of this one."""
    reader = AutoModelForImageTextToText if kind == "qwen3_5" else AutoModelForCausalLM
    model = reader.from_pretrained(folder, **settings).eval()
    if kind in OF_LIBRARY and kind not in OWN_PREFIX:
        own = model.config.num_hidden_layers
        model._keys_to_ignore_on_load_unexpected = [rf"model\.layers\.{own + number}\..*" for number in range(2)]
    return model
