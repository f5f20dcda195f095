"""The trained part of EAGLE-1 (arXiv 2401.15077): from a feature and the token after it to the next feature.

A *feature* is the target's last hidden state as its LM head takes it, after the final norm. With tokens t and features
f the head maps (f[i], t[i + 1]) and all pairs before it to an estimate of f[i + 1]; the target's own LM head reads from
that the law of t[i + 2].
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from os import PathLike
from pathlib import Path

import torch
from torch import nn
from transformers import PreTrainedModel

from stand.argument_checks import check_flags
from stand.drafters.eagle.feature_head import FeatureHead
from stand.drafters.heads.trained_part import FAMILIES, VOCABULARY, WEIGHT_FILE, check_shapes, named, read_tensors
from stand.forward.cache.cache_argument import cache_argument
from stand.forward.model import text_config
from stand.forward.tree_attention import ATTENTION_NAME
from stand.fusion.fusion import Fusion
from stand.fusion.on_cpu import fused_twin

WEIGHT_FILES = (WEIGHT_FILE, "pytorch_model.bin")
EMBEDDING = "embed_tokens.weight"
INPUT_NORM = "layers.0.input_layernorm.weight"


class EagleHead(FeatureHead):
    """One linear layer over [embedding, feature] and one decoder layer of the target's own class.

    Token embeddings, rotary positions and the LM head are the target's, frozen; a checkpoint may bring embeddings of
    its own. Names of parameters are those of published checkpoints: `fc.*`, `layers.0.*`, `embed_tokens.weight`. As
    there, the decoder layer has no norm before its attention unless `has_input_norm`.

    Raises ValueError for a target of another family than Llama or Qwen2.
    """

    def __init__(self, target: PreTrainedModel, *, has_input_norm: bool = False) -> None:
        super().__init__(target)
        check_flags(has_input_norm=has_input_norm)
        config = text_config(target)
        if config.model_type not in FAMILIES:
            raise ValueError(
                f"an EAGLE-1 head needs a target of the families {', '.join(FAMILIES)}, got {config.model_type!r}; "
                "draft for it with stand.BlendedDrafter"
            )
        decoder = target.get_decoder()
        self.config = copy.deepcopy(config)
        self.config._attn_implementation = ATTENTION_NAME
        size = config.hidden_size
        self.fc = nn.Linear(2 * size, size)
        self.layers = nn.ModuleList([type(decoder.layers[0])(self.config, layer_idx=0)])
        if not has_input_norm:
            self.layers[0].input_layernorm = nn.Identity()
        # In tuples, so that the target's parameters are not the head's.
        self._embedding = (decoder.embed_tokens,)
        self.embed_tokens: FrozenEmbedding | None = None  # a checkpoint's own
        self._rotary = (decoder.rotary_emb,)
        self.to(target.device, target.dtype)

    @classmethod
    def load(cls, target: PreTrainedModel, path: str | PathLike) -> EagleHead:
        """Read a checkpoint: a file, or a folder with model.safetensors or pytorch_model.bin, as published for Llama
        and Qwen2 targets. Biases that it lacks are zero.

        Raises ValueError where names or shapes do not belong to an EAGLE-1 head of this target.
        """
        tensors = read_tensors(Path(path), WEIGHT_FILES)
        head = cls(target, has_input_norm=INPUT_NORM in tensors)
        vocabulary = tensors.pop(VOCABULARY, None)
        head._take(tensors)
        if vocabulary is not None:
            head.restrict(vocabulary)
        return head.eval()

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
        embedding = self._embedding[0] if self.embed_tokens is None else self.embed_tokens
        embedded = embedding(token_ids)
        hidden = self.fc(torch.cat([embedded, features.to(embedded.dtype)], dim=-1))
        angles = self._rotary[0](hidden, position_ids=position_ids)
        kwargs[cache_argument(self.layers[0])] = cache
        return self.layers[0](hidden, position_embeddings=angles, position_ids=position_ids, **kwargs)

    def fusion(self) -> Fusion | None:
        """Of its layer on a CPU: what was proven for the target's first one."""
        target = self._model[0]
        return fused_twin(target, target.get_decoder().layers[0], self, "layers.0")

    def layers_of_a_run(self) -> Sequence[nn.Module]:
        return self.layers

    def _take(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Load `tensors`; what may be missing is zero."""
        own = self.state_dict()
        embedding = self._embedding[0].weight
        shapes = {name: tuple(value.shape) for name, value in own.items()} | {EMBEDDING: tuple(embedding.shape)}
        unknown = sorted(set(tensors) - set(shapes))
        missing = sorted(name for name in own if name not in tensors and not name.endswith(".bias"))
        if unknown or missing:
            raise ValueError(
                "an EAGLE-1 checkpoint must hold fc.*, layers.0.* and may hold embed_tokens.weight, got "
                f"{named(unknown)} beyond them and lacks {named(missing)}; take a head that was trained for this "
                "model"
            )
        check_shapes(tensors, shapes)
        zeros = {name: torch.zeros_like(value) for name, value in own.items()}
        self.load_state_dict(zeros | {name: value for name, value in tensors.items() if name != EMBEDDING})
        if EMBEDDING in tensors:
            self.embed_tokens = FrozenEmbedding(tensors[EMBEDDING].to(embedding))


class FrozenEmbedding(nn.Module):
    """Rows of `weight` [V, D]: a buffer, which is saved, cast and moved, and no weight to train."""

    def __init__(self, weight: torch.Tensor) -> None:
        super().__init__()
        self.register_buffer("weight", weight)

    def forward(self, token_ids: torch.Tensor) -> torch.Tensor:
        return nn.functional.embedding(token_ids, self.weight)
