"""EAGLE-3's head from its formulas (arXiv 2503.01840): no layer of transformers, no cache, no batch, no tree."""

from functools import lru_cache

import numpy as np
import torch
from tiny_models import SHAPE
from torch.nn.functional import silu
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedModel

from stand.drafters.eagle.eagle3_head import Eagle3Head
from stand.drafters.eagle.eagle3_settings import CONFIGS, Eagle3Settings
from stand.drafters.eagle.head import FrozenEmbedding
from stand.forward.tree_attention import tree_attention

LAYER = {
    "intermediate_size": 40, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "rms_norm_eps": 0.01,
    "rope_parameters": {"rope_type": "default", "rope_theta": 50.0},
}  # fmt: skip


@lru_cache
def deep_target() -> PreTrainedModel:
    """Seven layers, so that those which a head reads can differ."""
    torch.manual_seed(1)
    return AutoModelForCausalLM.from_config(LlamaConfig(**{**SHAPE, "num_hidden_layers": 7})).eval()


def random_eagle3(
    target: PreTrainedModel,
    *,
    kind: str = "llama",
    num_layers: int = 1,
    size: int | None = None,
    feature_layers: tuple[int, ...] = (1, 0, 1),
    vocabulary: list[int] | None = None,
    seed: int = 0,
    scale: float = 1.0,
    head_size: int | None = None,
    **norms: bool,
) -> Eagle3Head:
    """An untrained head; size: other hidden states than the target's, and so embeddings of its own; scale: of torch's
    own initial matrices."""
    layer = LAYER if head_size is None else LAYER | {"head_dim": head_size}
    width, count = target.config.hidden_size, target.config.vocab_size
    config = CONFIGS[kind](vocab_size=count, hidden_size=size or width, num_hidden_layers=num_layers, **layer)
    torch.manual_seed(seed)
    known = None if vocabulary is None else torch.tensor(vocabulary)
    head = Eagle3Head(target, Eagle3Settings(config, feature_layers, **norms), vocabulary=known)
    with torch.no_grad():
        for parameter in head.parameters():
            if parameter.dim() == 1:
                parameter.copy_(1 + 0.3 * torch.randn_like(parameter))
            else:
                parameter.mul_(scale)
    if size is not None:
        head.embed_tokens = FrozenEmbedding(torch.randn(count, size))
    return head.eval()


@torch.inference_mode()
def layer_inputs(target: PreTrainedModel, token_ids: list[int], layers: tuple[int, ...]) -> torch.Tensor:
    """[L, W]: what these decoder layers take, side by side."""
    with tree_attention(target, "eager"):  # plain attention, also in the middle of a call
        states = target(torch.tensor([token_ids]), use_cache=False, output_hidden_states=True).hidden_states
    return torch.cat([states[layer][0] for layer in layers], dim=-1)


@torch.inference_mode()
def plain_logits3(head: Eagle3Head, target: PreTrainedModel, history: list[int], drafted: list[int]) -> np.ndarray:
    """[V]: the head's logits after `history` and the drafted tokens, of which only the first have true features; of
    tokens that it never guesses, minus infinity."""
    formulas, tokens = Formulas(head, target), [*history, *drafted]
    features = formulas.combined(layer_inputs(target, history, head.feature_layers)[:-1])
    for end in range(len(history), len(tokens) + 1):
        features = torch.cat([features, formulas.estimates(features, tokens[1:end])[-1:]])
    found = formulas.read(features[-1])
    logits = torch.full((target.config.vocab_size,), -torch.inf)
    logits[slice(None) if head.vocabulary is None else head.vocabulary] = found
    return logits.numpy()


class Formulas:
    """Those of one head, on the weights of its state_dict."""

    def __init__(self, head: Eagle3Head, target: PreTrainedModel):
        self._config, self._settings = head.config, head.settings
        frozen = {
            "embed_tokens.weight": target.get_input_embeddings().weight,
            "lm_head.weight": target.get_output_embeddings().weight,
        }
        self._weights = {**frozen, **head.state_dict()}

    def combined(self, hidden: torch.Tensor) -> torch.Tensor:
        """Features [L, D] of the target's hidden states [L, W]."""
        if self._settings.norm_before_fc:
            hidden = self._normed("input_norm", hidden)
        if self._settings.fc_norm:
            parts = hidden.chunk(len(self._settings.feature_layers), dim=-1)
            hidden = torch.cat([self._normed(f"fc_norm.{place}", part) for place, part in enumerate(parts)], dim=-1)
        return self._times("fc", hidden)

    def estimates(self, features: torch.Tensor, token_ids: list[int]) -> torch.Tensor:
        """[L, D], from features [L, D] and the tokens after them."""
        normed = self._normed("layers.0.hidden_norm", features)
        embedded = self._normed("layers.0.input_layernorm", self._weights["embed_tokens.weight"][token_ids])
        hidden = normed if self._settings.norm_before_residual else features
        hidden = hidden + self._attended("layers.0", torch.cat([embedded, normed], dim=-1))
        hidden = hidden + self._fed_forward("layers.0", hidden)
        for layer in range(1, self._config.num_hidden_layers):
            name = f"layers.{layer}"
            hidden = hidden + self._attended(name, self._normed(f"{name}.input_layernorm", hidden))
            hidden = hidden + self._fed_forward(name, hidden)
        return self._normed("norm", hidden) if self._settings.norm_output else hidden

    def read(self, estimate: torch.Tensor) -> torch.Tensor:
        """Logits of the tokens that are guessed."""
        return self._times("lm_head", estimate if self._settings.norm_output else self._normed("norm", estimate))

    def _attended(self, layer: str, inputs: torch.Tensor, unseen: torch.Tensor | None = None) -> torch.Tensor:
        """unseen: bool [L, L], keys that a query does not see; None: those behind it."""
        size = self._config.head_dim
        query, key, value = (
            self._times(f"{layer}.self_attn.{name}_proj", inputs).unflatten(-1, (-1, size)).transpose(0, 1)
            for name in "qkv"
        )
        if self._config.model_type == "qwen3":
            query = self._normed(f"{layer}.self_attn.q_norm", query)
            key = self._normed(f"{layer}.self_attn.k_norm", key)
        query, key = self._rotated(query), self._rotated(key)
        key, value = (each.repeat_interleave(len(query) // len(each), dim=0) for each in (key, value))
        scores = query @ key.transpose(1, 2) / size**0.5
        unseen = torch.ones(scores.shape[1:], dtype=torch.bool).triu(1) if unseen is None else unseen
        mixed = scores.masked_fill(unseen, -torch.inf).softmax(dim=-1) @ value
        return self._times(f"{layer}.self_attn.o_proj", mixed.transpose(0, 1).flatten(1))

    def _rotated(self, states: torch.Tensor) -> torch.Tensor:
        """Place p of [H, L, d]: halves turned against each other by p / theta ** (2 i / d)."""
        half = states.shape[-1] // 2
        speeds = self._config.rope_parameters["rope_theta"] ** (-torch.arange(half) / half)
        angles = torch.outer(torch.arange(states.shape[1]), speeds)
        one, other = states[..., :half], states[..., half:]
        turned = one * angles.cos() - other * angles.sin(), other * angles.cos() + one * angles.sin()
        return torch.cat(turned, dim=-1)

    def _fed_forward(self, layer: str, hidden: torch.Tensor) -> torch.Tensor:
        return self._gated(layer, self._normed(f"{layer}.post_attention_layernorm", hidden))

    def _gated(self, layer: str, normed: torch.Tensor) -> torch.Tensor:
        gate = silu(self._times(f"{layer}.mlp.gate_proj", normed))
        return self._times(f"{layer}.mlp.down_proj", gate * self._times(f"{layer}.mlp.up_proj", normed))

    def _normed(self, name: str, states: torch.Tensor) -> torch.Tensor:
        mean = states.square().mean(dim=-1, keepdim=True)
        return states / (mean + self._config.rms_norm_eps).sqrt() * self._weights[f"{name}.weight"]

    def _times(self, name: str, states: torch.Tensor) -> torch.Tensor:
        return states @ self._weights[f"{name}.weight"].T
