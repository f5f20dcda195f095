"""Shapes of the models that figures are given for, written out: nothing is downloaded to time them.

Sizes are those of the published configurations (Qwen2.5-1.5B, 7B and 14B, Qwen3-8B, Qwen3-30B-A3B, Llama-3.1-8B);
those of Qwen3.5-9B are the defaults of its class in transformers. Weights are random, which is as good as trained ones
for time, but for the routes of a mixture of experts, and says nothing about acceptance.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch
    from transformers import PretrainedConfig, PreTrainedModel

INITIAL_SPREAD = 0.02  # standard deviation of random weights; zeros would make matrix products faster


@dataclass(frozen=True, slots=True)
class Product:
    """One matrix product of a layer: [M, inputs] x [inputs, outputs], `count` times per step."""

    name: str
    inputs: int
    outputs: int
    count: int


@dataclass(frozen=True, slots=True)
class ModelShape:
    """A dense decoder; embeddings of input and output are separate."""

    name: str
    family: str  # transformers' model_type
    layers: int
    hidden: int
    heads: int
    key_heads: int
    head_size: int
    intermediate: int
    vocabulary: int
    rope_theta: float

    @property
    def groups(self) -> int:
        """Query heads per key head."""
        return self.heads // self.key_heads

    @property
    def attention_layers(self) -> int:
        """That keep keys."""
        return self.layers

    def products(self) -> Iterator[Product]:
        """The matrix products of one step with merged QKV and gate/up, in order."""
        queries, keys = self.heads * self.head_size, self.key_heads * self.head_size
        yield Product("qkv", self.hidden, queries + 2 * keys, self.attention_layers)
        yield Product("o", queries, self.hidden, self.attention_layers)
        yield Product("gate_up", self.hidden, 2 * self.intermediate, self.layers)
        yield Product("down", self.intermediate, self.hidden, self.layers)
        yield Product("lm_head", self.hidden, self.vocabulary, 1)

    def weight_count(self, num_tokens: int = 1) -> float:
        """Weights that a step of so many tokens reads: all but the input embedding, biases and norms."""
        return sum(product.inputs * product.outputs * product.count for product in self.products())

    def cache_elements(self) -> int:
        """Key and value elements per cached token, all layers."""
        return 2 * self.attention_layers * self.key_heads * self.head_size

    def state_bytes(self) -> int:
        """Of a row's recurrent states in float32, which a step reads."""
        return 0

    def attention_flops(self) -> int:
        """Floating-point operations per (query token, key) pair, all layers."""
        return 4 * self.attention_layers * self.heads * self.head_size

    def config(self, *, max_positions: int) -> PretrainedConfig:
        """A configuration to build a model with random weights from."""
        from transformers import AutoConfig  # slow, and not needed to time kernels

        return AutoConfig.for_model(
            self.family,
            vocab_size=self.vocabulary,
            hidden_size=self.hidden,
            intermediate_size=self.intermediate,
            num_hidden_layers=self.layers,
            num_attention_heads=self.heads,
            num_key_value_heads=self.key_heads,
            head_dim=self.head_size,
            max_position_embeddings=max_positions,
            rope_theta=self.rope_theta,
            initializer_range=INITIAL_SPREAD,
            tie_word_embeddings=False,
            **self.more_settings(),
        )

    def more_settings(self) -> dict[str, int]:
        """Of the configuration."""
        return {}

    def random_model(self, *, device: torch.device, dtype: torch.dtype, max_positions: int) -> PreTrainedModel:
        """With random weights, made where it runs."""
        import torch
        from transformers import AutoModelForCausalLM

        torch.manual_seed(0)
        with torch.device(device):
            model = AutoModelForCausalLM.from_config(self.config(max_positions=max_positions), dtype=dtype)
        return model.eval()


@dataclass(frozen=True, slots=True)
class DeltaShape(ModelShape):
    """Three of four layers keep a state by the gated delta rule; attention has a gate as wide as its queries."""

    state_heads: int
    state_key_heads: int
    state_size: int  # of a key, and of a value

    @property
    def attention_layers(self) -> int:
        return self.layers // 4

    def products(self) -> Iterator[Product]:
        inner, queries = self.state_heads * self.state_size, self.heads * self.head_size
        mixed = 2 * self.state_key_heads * self.state_size + 2 * inner + 2 * self.state_heads
        yield from ModelShape.products(self)
        yield Product("attention gate", self.hidden, queries, self.attention_layers)
        yield Product("q, k, v, gate, decay and rate", self.hidden, mixed, self.layers - self.attention_layers)
        yield Product("out", inner, self.hidden, self.layers - self.attention_layers)

    def state_bytes(self) -> int:
        return 4 * (self.layers - self.attention_layers) * self.state_heads * self.state_size**2

    def more_settings(self) -> dict[str, int]:
        return {
            "linear_num_value_heads": self.state_heads,
            "linear_num_key_heads": self.state_key_heads,
            "linear_key_head_dim": self.state_size,
            "linear_value_head_dim": self.state_size,
        }


@dataclass(frozen=True, slots=True)
class MixtureShape(ModelShape):
    """Feed-forward blocks are mixtures of experts."""

    experts: int
    chosen: int  # of a token
    expert_size: int

    def products(self) -> Iterator[Product]:
        """But those of experts."""
        yield from (product for product in ModelShape.products(self) if product.name not in {"gate_up", "down"})
        yield Product("router", self.hidden, self.experts, self.layers)

    def weight_count(self, num_tokens: int = 1) -> float:
        """With routes that are drawn at random, as random weights make them."""
        asked = self.experts * (1 - (1 - self.chosen / self.experts) ** num_tokens)
        return ModelShape.weight_count(self) + asked * self.layers * 3 * self.hidden * self.expert_size

    def more_settings(self) -> dict[str, int]:
        sizes = {"num_experts_per_tok": self.chosen, "moe_intermediate_size": self.expert_size}
        return {"num_experts": self.experts, "norm_topk_prob": True, **sizes}


SHAPES = {
    shape.name: shape
    for shape in (
        ModelShape("qwen2.5-1.5b", "qwen2", 28, 1536, 12, 2, 128, 8960, 151936, 1e6),
        ModelShape("qwen2.5-7b", "qwen2", 28, 3584, 28, 4, 128, 18944, 152064, 1e6),
        ModelShape("qwen2.5-14b", "qwen2", 48, 5120, 40, 8, 128, 13824, 152064, 1e6),
        ModelShape("qwen3-8b", "qwen3", 36, 4096, 32, 8, 128, 12288, 151936, 1e6),
        ModelShape("llama-3.1-8b", "llama", 32, 4096, 32, 8, 128, 14336, 128256, 5e5),
    )
}
HYBRIDS = {
    "qwen3.5-9b": DeltaShape("qwen3.5-9b", "qwen3_5_text", 32, 4096, 16, 4, 256, 12288, 248320, 1e7, 32, 16, 128)
}
MIXTURES = {
    "qwen3-30b-a3b": MixtureShape(
        "qwen3-30b-a3b", "qwen3_moe", 48, 2048, 32, 4, 128, 6144, 151936, 1e6, experts=128, chosen=8, expert_size=768
    )
}
ALL_SHAPES = SHAPES | HYBRIDS | MIXTURES
SMOKE_SHAPE = ModelShape("smoke", "qwen2", 1, 64, 4, 2, 64, 96, 300, 1e4)
