"""The trained part of EAGLE-3 (arXiv 2503.01840): from hidden states of three of the target's layers to the next token.

A token's *feature* is what one linear layer makes of them. With tokens t and features f the head maps (f[i], t[i + 1])
and all pairs before it to an estimate of f[i + 1]; its own LM head reads from that the law of t[i + 2].
Unlike EAGLE-1's, estimates are not trained to resemble features, but to be gone on from.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from os import PathLike
from pathlib import Path
from typing import Self

import torch
from safetensors.torch import save_file
from torch import nn
from transformers import PreTrainedModel
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from stand.drafters.eagle.eagle3_settings import CONFIG_FILE, LAYERS, Eagle3Settings
from stand.drafters.eagle.feature_head import FeatureHead
from stand.drafters.eagle.head import EMBEDDING, WEIGHT_FILES, FrozenEmbedding
from stand.drafters.heads.draft_vocabulary import KNOWN, OFFSETS, check_known, offsets_of, tokens_of
from stand.drafters.heads.trained_part import WEIGHT_FILE, check_shapes, named, read_tensors, rows_of
from stand.forward.cache.cache_argument import cache_argument
from stand.forward.features import FeatureLayers, feature_width
from stand.forward.few_tokens.linear_layers import few_token_layers
from stand.forward.model import text_config
from stand.forward.tree_attention import ATTENTION_NAME

OF_THE_TARGET = ("verifier_norm.weight", "verifier_lm_head.weight")  # that some checkpoints hold beside the head's own


class Eagle3Head(FeatureHead):
    """One linear layer over the target's hidden states, decoder layers of its own, an LM head of its own.

    Token embeddings are the target's, frozen, where a checkpoint brings no others. Names of parameters are `fc.*`,
    `layers.*`, `norm.*`, `lm_head.*`; files call the first layer `midlayer`.
    """

    def __init__(
        self, target: PreTrainedModel, settings: Eagle3Settings, *, vocabulary: torch.Tensor | None = None
    ) -> None:
        """vocabulary [W] int64: the tokens that it guesses; None: all of the target's."""
        super().__init__(target)
        self.settings = settings
        self.config = settings.config
        self.config._attn_implementation = ATTENTION_NAME
        size, width = self.config.hidden_size, feature_width(target, self.feature_layers)
        kind = LAYERS[self.config.model_type]
        own = [kind(self.config, index) for index in range(self.config.num_hidden_layers)]
        self.fc = nn.Linear(width, size, bias=False)
        self.layers = nn.ModuleList([PairLayer(own[0], is_normed=settings.norm_before_residual), *own[1:]])
        self.norm = _norm_like(own[0], size)
        if settings.norm_before_fc:
            self.input_norm = _norm_like(own[0], width)
        if settings.fc_norm:
            one = text_config(target).hidden_size
            self.fc_norm = nn.ModuleList(_norm_like(own[0], one) for _ in self.feature_layers)
        embedding = target.get_input_embeddings()
        count = embedding.weight.shape[0] if vocabulary is None else len(vocabulary)
        self.lm_head = nn.Linear(size, count, bias=False)
        self._lm_head = (self.lm_head,)
        self.vocabulary = None if vocabulary is None else vocabulary.to(target.device)
        self.embed_tokens: FrozenEmbedding | None = None  # a checkpoint's own
        self._embedding = (embedding,)  # in tuples: the target's, and angles that stay in float32
        self._rotary = (LlamaRotaryEmbedding(self.config),)
        self.to(target.device, target.dtype)

    @property
    def feature_layers(self) -> FeatureLayers:
        """See `Drafter.feature_layers`."""
        return self.settings.feature_layers

    @classmethod
    def load(cls, target: PreTrainedModel, path: str | PathLike) -> Eagle3Head:
        """Read a checkpoint: a folder with config.json and model.safetensors or pytorch_model.bin, as published.

        Raises ValueError where names, shapes or settings do not belong to an EAGLE-3 head of this target.
        """
        folder = Path(path) if Path(path).is_dir() else Path(path).parent
        settings = Eagle3Settings.read(folder, target)
        found = read_tensors(Path(path), WEIGHT_FILES)
        tensors = {name.removeprefix("model.").replace("midlayer.", "layers.0."): found[name] for name in found}
        offsets, known = tensors.pop(OFFSETS, None), tensors.pop(KNOWN, None)
        size = target.get_input_embeddings().weight.shape[0]
        vocabulary = None if offsets is None else tokens_of(offsets, size)
        check_known(vocabulary, known, settings.draft_vocab_size, size)
        head = cls(target, settings, vocabulary=vocabulary)
        head._take({name: value for name, value in tensors.items() if name not in OF_THE_TARGET})
        return head.eval()

    def combined(self, hidden: torch.Tensor) -> torch.Tensor:
        """Features [..., D] of tokens, from the inputs [..., W] of the target's layers."""
        hidden = hidden.to(self.fc.weight.dtype)
        if self.settings.norm_before_fc:
            hidden = self.input_norm(hidden)
        if self.settings.fc_norm:
            parts = hidden.chunk(len(self.fc_norm), dim=-1)
            hidden = torch.cat([norm(part) for norm, part in zip(self.fc_norm, parts, strict=True)], dim=-1)
        with few_token_layers(self.fc):
            return self.fc(hidden)

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
        embedded = embedding(token_ids).to(features.dtype)
        asked = {"position_embeddings": self._rotary[0](features, position_ids=position_ids), **kwargs}
        first, *others = self.layers
        hidden = first(embedded, features, **{cache_argument(first.self_attn): cache}, **asked)
        for layer in others:
            hidden = layer(hidden, position_ids=position_ids, **{cache_argument(layer): cache}, **asked)
        return self.norm(hidden) if self.settings.norm_output else hidden

    def logits(self, features: torch.Tensor) -> torch.Tensor:
        """[..., W]: of the tokens that are guessed."""
        return self.lm_head(self._read(features))

    def best_tokens(
        self, features: torch.Tensor, *, temperature: float, count: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return super().best_tokens(self._read(features), temperature=temperature, count=count)

    def restrict(self, token_ids: Sequence[int] | torch.Tensor) -> None:
        """Guess those of these tokens alone that the head knows. Raises ValueError as `TrainedPart.restrict`, and where
        it knows none of them."""
        places = self.narrowed(token_ids)
        self.lm_head = rows_of(self.lm_head, places)
        self._lm_head = (self.lm_head,)

    def layers_of_a_run(self) -> Sequence[nn.Module]:
        return self.layers

    def save(self, folder: str | PathLike) -> None:
        """Write model.safetensors in bfloat16 and config.json, as vLLM and SGLang read them."""
        Path(folder).mkdir(parents=True, exist_ok=True)
        own = {name: value.to(torch.bfloat16).contiguous() for name, value in self.state_dict().items()}
        tensors = {name.replace("layers.0.", "midlayer."): value for name, value in own.items()}
        if self.vocabulary is not None:
            tensors |= offsets_of(self.vocabulary, self._embedding[0].weight.shape[0])
        save_file(tensors, Path(folder) / WEIGHT_FILE, metadata={"format": "pt"})
        facts = self.settings.as_json(self._model[0], self.num_guessed)
        (Path(folder) / CONFIG_FILE).write_text(json.dumps(facts, indent=2) + "\n", encoding="utf-8")

    def _read(self, features: torch.Tensor) -> torch.Tensor:
        """What the LM head reads: estimates behind the final norm."""
        return features if self.settings.norm_output else self.norm(features)

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Self:
        super()._apply(fn, recurse)
        self._rotary[0].to(self.fc.weight.device)
        return self

    def _take(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Load `tensors`; embeddings that are the target's own are not kept twice."""
        own, shared = self.state_dict(), self._embedding[0].weight
        shapes = {name: tuple(value.shape) for name, value in own.items()}
        shapes[EMBEDDING] = shared.shape[0], self.config.hidden_size
        needed = set(own) if self.config.hidden_size == shared.shape[1] else set(shapes)
        unknown, missing = sorted(set(tensors) - set(shapes)), sorted(needed - set(tensors))
        if unknown or missing:
            raise ValueError(
                f"an EAGLE-3 checkpoint must hold what {CONFIG_FILE} says, got {named(unknown)} beyond it and lacks "
                f"{named(missing)}; take a head that was trained for this model"
            )
        check_shapes(tensors, shapes)
        embedding = tensors.get(EMBEDDING)
        self.load_state_dict({name: value for name, value in tensors.items() if name != EMBEDDING})
        if embedding is not None and not torch.equal(embedding.to(shared), shared):
            self.embed_tokens = FrozenEmbedding(embedding.to(shared))


class PairLayer(nn.Module):
    """A decoder layer whose attention reads an embedding and a feature side by side, and which goes on from the
    feature: `is_normed`, from the normed one."""

    def __init__(self, layer: nn.Module, *, is_normed: bool) -> None:
        """layer: whose parts it takes."""
        super().__init__()
        self.self_attn, self.mlp = layer.self_attn, layer.mlp
        self.input_layernorm, self.post_attention_layernorm = layer.input_layernorm, layer.post_attention_layernorm
        for name in ("q_proj", "k_proj", "v_proj"):
            old = getattr(self.self_attn, name)
            pair = nn.Linear(2 * old.in_features, old.out_features, bias=old.bias is not None)
            setattr(self.self_attn, name, pair)
        self.hidden_norm = _norm_like(layer, old.in_features)
        self._is_normed = is_normed

    def forward(self, embedded: torch.Tensor, features: torch.Tensor, **kwargs: object) -> torch.Tensor:
        """[B, M, D]; kwargs go to the attention."""
        normed = self.hidden_norm(features)
        attended, _ = self.self_attn(torch.cat([self.input_layernorm(embedded), normed], dim=-1), **kwargs)
        hidden = (normed if self._is_normed else features) + attended
        return hidden + self.mlp(self.post_attention_layernorm(hidden))


def _norm_like(layer: nn.Module, size: int) -> nn.Module:
    """A norm of `size` numbers, of the class and with the constant of the layer's."""
    given = layer.post_attention_layernorm
    return type(given)(size, eps=given.variance_epsilon)
