"""The multi-token-prediction layer that a target's own checkpoint holds (DeepSeek-V3, arXiv 2412.19437, section 2.2).

A *feature* is the target's last hidden state after its final norm, as EAGLE-1's. With tokens t and features f the layer
maps (f[i], t[i + 1]) and all pairs before it to what the target's own LM head reads the law of t[i + 2] from. Drafts go
on from that as from a feature, also where the layer was trained for one token.
"""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Sequence
from os import PathLike
from pathlib import Path

import torch
import transformers.modeling_layers
from safetensors import SafetensorError, safe_open
from torch import nn
from transformers import PreTrainedModel
from transformers.utils import cached_file

from stand.drafters.eagle.feature_head import FeatureHead
from stand.drafters.heads.trained_part import WEIGHT_FILE, named, reason_of
from stand.forward.cache.cache_argument import cache_argument
from stand.forward.model import is_mixture, text_config
from stand.forward.tree_attention import ATTENTION_NAME

INDEX_FILE = "model.safetensors.index.json"
PREFIX = "mtp."  # of the layer's tensors in checkpoints of Qwen
# Their names there, and in transformers' layer.
NAMES = {
    "pre_fc_norm_embedding.": "enorm.",
    "pre_fc_norm_hidden.": "hnorm.",
    "fc.": "eh_proj.",
    "layers.0.": "mtp_block.",
    "norm.": "post_norm.",
}


class MtpHead(FeatureHead):
    """The first such layer, as transformers builds it; embeddings, rotary positions and the LM head are the target's.

    Read for Qwen3.5 (`mtp.*`), and for families whose layer transformers reads by itself (`num_mtp_layers` in their
    configuration: DeepSeek-V3, GLM-4.5 and others).
    """

    def __init__(
        self, target: PreTrainedModel, layer: nn.Module, *, norm: nn.Module | None = None, rope: str | None = None
    ) -> None:
        """layer: transformers' `MtpLayer`; norm: what its output goes through behind it; rope: the kind of layer that
        it rotates as, where the target's kinds differ."""
        super().__init__(target)
        self.config = layer.config
        self.config._attn_implementation = ATTENTION_NAME
        self.layer, self.norm = layer, nn.Identity() if norm is None else norm
        # The target's, in a tuple.
        self._shared = (target.get_input_embeddings(), getattr(target.get_decoder(), "rotary_emb", None))
        self._rope = {} if rope is None else {"layer_type": rope}
        self.to(target.device)  # transformers keeps some numbers of routers in float32

    @classmethod
    def of(cls, target: PreTrainedModel, part: MtpHead | str | PathLike) -> MtpHead:
        """As any part's; one that was read so for another model is that one's, and this target's own is read."""
        is_others = isinstance(part, cls) and part._path is not None and not part.is_of(target)
        return super().of(target, target.config.name_or_path if is_others else part)

    @classmethod
    def load(cls, target: PreTrainedModel, path: str | PathLike) -> MtpHead:
        """Read it out of the target's own checkpoint, a folder or a hub id.

        Raises ValueError where there is none, and where transformers or this class cannot read it.
        """
        if getattr(text_config(target), "num_mtp_layers", None):
            return cls._of_library(target)
        tensors = _own_tensors(path)
        if not tensors:
            raise ValueError(
                f"a checkpoint must hold a multi-token-prediction layer ({PREFIX}*), got {path} without; draft by the "
                "lookup, or with an EAGLE head"
            )
        ropes = getattr(text_config(target), "rope_parameters", None) or {}
        if any(isinstance(part, dict) for part in ropes.values()):
            raise ValueError(
                "a multi-token-prediction layer must rotate as all layers of its target, got one whose kinds of layers "
                "differ in it; take a newer transformers, which may read the layer itself, or draft by the lookup"
            )
        head = cls(target, _qwen_layer(target).to(target.dtype))
        shapes = {name: tuple(value.shape) for name, value in head.layer.state_dict().items()}
        found = {name: tuple(value.shape) for name, value in tensors.items()}
        if shapes != found:
            wrong = sorted(name for name in shapes | found if shapes.get(name) != found.get(name))
            raise ValueError(
                f"a multi-token-prediction layer must have the parts of the target's own layers, got others in "
                f"{named(wrong)}; draft by the lookup, or with an EAGLE head"
            )
        head.layer.load_state_dict(tensors)
        return head.eval()

    @classmethod
    def _of_library(cls, target: PreTrainedModel) -> MtpHead:
        """As `generate(use_mtp=True)` reads it."""
        try:
            library = transformers.modeling_layers.MtpModel.from_pretrained(target, device_map={"": target.device})
        except Exception as error:  # transformers has many
            raise ValueError(
                f"transformers must read the target's multi-token-prediction layer, got {type(error).__name__}: "
                f"{reason_of(error)}; draft by the lookup, or with an EAGLE head"
            ) from error
        has_kinds = getattr(library, "has_per_layer_rope", False)  # from transformers 5.20 on
        rope = library.config.layer_types[0] if has_kinds else None
        head = cls(target, library.layers[0], norm=getattr(library, "shared_post_norm", None), rope=rope).eval()
        return head if head._is_where(target) else head.to(target.dtype)  # as a whole, as the target was cast

    def forward(
        self,
        features: torch.Tensor,
        token_ids: torch.Tensor,
        position_ids: torch.Tensor,
        *,
        cache: object = None,
        **kwargs: object,
    ) -> torch.Tensor:
        """See `FeatureHead.forward`."""
        embedding, rotary = self._shared
        embedded = embedding(token_ids)
        angles = None if rotary is None else rotary(embedded, position_ids=position_ids, **self._rope)
        kwargs[cache_argument(self.layer)] = cache
        hidden = self.layer(
            embedded, features, position_embeddings=angles, position_ids=position_ids, **kwargs
        )  # fmt: skip
        return self.norm(hidden)

    @property
    def is_recordable(self) -> bool:
        """Layers with experts ask the device which ones are wanted."""
        return not is_mixture(self._model[0])

    def layers_of_a_run(self) -> Sequence[nn.Module]:
        return [self.layer]

    def save(self, folder: str | PathLike) -> None:
        """Raises ValueError: nothing of it is new."""
        raise ValueError(
            f"a layer must be kept where the target's checkpoint holds it, got {str(folder)!r} for another file of it; "
            'draft with the head "mtp"'
        )


def _qwen_layer(target: PreTrainedModel) -> nn.Module:
    """Without weights: its block is one of the target's own layers with full attention."""
    config = copy.deepcopy(text_config(target))
    config.layer_types = ["full_attention"]
    last = target.get_decoder().layers[-1]
    return transformers.modeling_layers.MtpLayer(config, type(last), type(last.input_layernorm), 0)


def _own_tensors(path: str | PathLike) -> dict[str, torch.Tensor]:
    """Those of the layer, by transformers' names; files of a checkpoint that hold none of them are not read."""
    try:
        try:
            index = json.loads(Path(cached_file(path, INDEX_FILE)).read_text(encoding="utf-8"))
            files = {file for name, file in index["weight_map"].items() if name.startswith(PREFIX)}
        except OSError:
            files = {WEIGHT_FILE}  # not sharded
        tensors: dict[str, torch.Tensor] = {}
        for file in sorted(files):
            with safe_open(cached_file(path, file), "pt") as opened:
                own = [name for name in opened.keys() if name.startswith(PREFIX)]
                tensors |= {_renamed(name.removeprefix(PREFIX)): opened.get_tensor(name) for name in own}
        return _with_experts_together(tensors)
    except (OSError, ValueError, KeyError, SafetensorError) as error:
        raise ValueError(
            f"the target's checkpoint must be a folder or a hub id with safetensors, got {str(path)!r} "
            f"({type(error).__name__}: {reason_of(error)}); load the model from its checkpoint"
        ) from error


def _with_experts_together(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Weights of each expert by itself become those of all, as transformers holds them; left out where one lacks or
    has a shape of its own."""
    of_one = re.compile(r"(.*\.experts\.)\d+\.(gate|up|down)_proj\.weight")
    places = {match[1] for match in map(of_one.fullmatch, tensors) if match}
    together = {name: value for name, value in tensors.items() if not of_one.fullmatch(name)}
    for place in places:
        count = sum(name.startswith(place) and name.endswith(".up_proj.weight") for name in tensors)
        own = {kind: [tensors.get(f"{place}{index}.{kind}_proj.weight") for index in range(count)]
               for kind in ("gate", "up", "down")}  # fmt: skip
        shapes = [{getattr(part, "shape", None) for part in own[kind]} for kind in own]
        if all(len(found) == 1 and None not in found for found in shapes) and shapes[0] == shapes[1]:
            gate, up, down = (torch.stack(parts) for parts in own.values())
            together |= {f"{place}gate_up_proj": torch.cat([gate, up], dim=1), f"{place}down_proj": down}
    return together


def _renamed(name: str) -> str:
    for old, new in NAMES.items():
        if name.startswith(old):
            return new + name.removeprefix(old)
    return name
