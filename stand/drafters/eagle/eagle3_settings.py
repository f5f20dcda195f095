"""How an EAGLE-3 head is built, as its checkpoint's config.json says it."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import LlamaConfig, PretrainedConfig, PreTrainedModel, Qwen3Config
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRotaryEmbedding
from transformers.models.qwen3.modeling_qwen3 import Qwen3DecoderLayer

from stand.drafters.heads.trained_part import reason_of
from stand.forward.features import FeatureLayers
from stand.forward.model import MOVING_ROPES, text_config

CONFIG_FILE = "config.json"
PLAIN_THETA = 10_000.0  # of rotary angles where the target names none
CONFIGS: dict[str, type[PretrainedConfig]] = {"llama": LlamaConfig, "qwen3": Qwen3Config}  # by kinds of layers
LAYERS = {"llama": LlamaDecoderLayer, "qwen3": Qwen3DecoderLayer}
NORMS = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")


@dataclass(frozen=True, slots=True)
class Eagle3Settings:
    """Of one head.

    feature_layers: the target's decoder layers whose inputs it reads.
    norm_before_residual: the first layer goes on from the normed feature. norm_before_fc: one norm over the features
    side by side; fc_norm: one norm for each. norm_output: the final norm's output is the estimated feature.
    draft_vocab_size: tokens that the head guesses, as a checkpoint says.
    """

    config: PretrainedConfig  # of its layers
    feature_layers: FeatureLayers
    norm_before_residual: bool = False
    norm_before_fc: bool = False
    fc_norm: bool = False
    norm_output: bool = False
    draft_vocab_size: int | None = None

    @classmethod
    def for_target(cls, target: PreTrainedModel) -> Eagle3Settings:
        """One Llama layer of the target's sizes, as the paper trains it (arXiv 2503.01840), with plain rotations."""
        config = text_config(target)
        names = ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim")
        names += ("vocab_size", "max_position_embeddings", "rms_norm_eps")
        known = {name: getattr(config, name) for name in names if getattr(config, name, None) is not None}
        known.setdefault("intermediate_size", 4 * known["hidden_size"])
        theta = (getattr(config, "rope_parameters", None) or {}).get("rope_theta", PLAIN_THETA)
        rope = {"rope_type": "default", "rope_theta": theta}
        return cls(LlamaConfig(num_hidden_layers=1, rope_parameters=rope, **known), usual_layers(target))

    @classmethod
    def read(cls, folder: Path, target: PreTrainedModel) -> Eagle3Settings:
        """Of a checkpoint as SafeAILab, SpecForge or vLLM's speculators publish it.

        Raises ValueError where there is none, or one that this target or these layers do not fit.
        """
        given, layers, nested = _parts(folder)
        kind, size = layers.get("model_type", "llama"), given.get("target_hidden_size") or layers.get("hidden_size")
        own = text_config(target).hidden_size
        odd = [name for name in NORMS if given.get(name) not in (None, False, True)]
        obstacles = {
            f"layers of the kinds {', '.join(CONFIGS)}, got {kind!r}": kind not in [*CONFIGS],
            "hidden states of several layers, got use_aux_hidden_state=false": nested.get("use_aux_hidden_state", True)
            not in (None, True),
            f"features of {own} numbers, as this target's, got {size}": size != own,
            f"norms that are true or false, got another {odd}": odd,
        }
        for rule, is_met in obstacles.items():
            if is_met:
                raise ValueError(f"an EAGLE-3 head must have {rule}; take a head that was trained for this model")
        try:
            config = CONFIGS[kind].from_dict(layers)
            with torch.device("meta"):  # nothing is computed
                LlamaRotaryEmbedding(config)
                LAYERS[kind](config, range(config.num_hidden_layers)[0])
        except Exception as error:  # transformers' own checks have many
            raise ValueError(
                f"{CONFIG_FILE} of an EAGLE-3 head must describe its layers, got {type(error).__name__}: "
                f"{reason_of(error)}; fetch it again"
            ) from error
        if "sliding_attention" in (getattr(config, "layer_types", None) or ()):  # Qwen3 has other names for it, too
            raise ValueError("an EAGLE-3 head must have layers without sliding windows, got some with; take another")
        rope = config.rope_parameters.get("rope_type")
        if rope in MOVING_ROPES:
            raise ValueError(
                f"an EAGLE-3 head must rotate by frequencies that stay the same, got {rope!r}; take another head"
            )
        found = _layers_read(given, nested, target)
        norms = {name: bool(given.get(name)) for name in NORMS}
        return cls(config, found, **norms, draft_vocab_size=given.get("draft_vocab_size"))

    def as_json(self, target: PreTrainedModel, num_guessed: int) -> dict[str, object]:
        """What `read` reads, and what vLLM and SGLang ask for."""
        theta = self.config.rope_parameters["rope_theta"]  # which transformers 4 looks for by itself
        own = self.config.to_diff_dict() | {"architectures": ["LlamaForCausalLMEagle3"], "rope_theta": theta}
        sizes = {"draft_vocab_size": num_guessed, "target_hidden_size": text_config(target).hidden_size}
        layers = {
            "eagle_aux_hidden_state_layer_ids": list(self.feature_layers),
            "eagle_config": {
                "eagle_aux_hidden_state_layer_ids": [layer - 1 for layer in self.feature_layers],
                "use_aux_hidden_state": True,
            },
        }
        return own | sizes | layers | {name: True for name in NORMS if getattr(self, name)}


def _parts(folder: Path) -> tuple[dict, dict, dict]:
    """What config.json says of the head, of its layers, and in `eagle_config`."""
    try:
        given = json.loads((folder / CONFIG_FILE).read_text(encoding="utf-8"))
        parts = given, given.get("transformer_layer_config") or given, given.get("eagle_config") or {}
        if not all(isinstance(part, dict) for part in parts):
            raise TypeError("no object of JSON")
    except (OSError, ValueError, TypeError, AttributeError) as error:
        raise ValueError(
            f"an EAGLE-3 checkpoint must be a folder with {CONFIG_FILE}, got {folder} ({type(error).__name__}); "
            "fetch all files of it"
        ) from error
    return parts


def usual_layers(target: PreTrainedModel) -> FeatureLayers:
    """The third, the middle and the third last layer, as all published code has them."""
    count = _num_layers(target)
    return tuple(min(max(layer, 0), count - 1) for layer in (2, count // 2, count - 3))


def _layers_read(given: dict, nested: dict, target: PreTrainedModel) -> FeatureLayers:
    """vLLM counts a layer by its input; what stands in `eagle_config` is SGLang's, which counts by its output."""
    name, count = "eagle_aux_hidden_state_layer_ids", _num_layers(target)
    read, later = (given, 0) if given.get(name) else (nested, 1)
    if not read.get(name):
        return usual_layers(target)
    layers = read[name] if isinstance(read[name], list) else [read[name]]
    layers = tuple(layer + later if isinstance(layer, int) else layer for layer in layers)
    if not all(isinstance(layer, int) and 0 <= layer < count for layer in layers):
        raise ValueError(
            f"an EAGLE-3 head must read inputs of the target's {count} decoder layers, got those of {list(layers)}; "
            "take the head that was trained for this model"
        )
    return layers


def _num_layers(target: PreTrainedModel) -> int:
    layers = getattr(target.get_decoder(), "layers", None)
    if layers is None:
        raise ValueError(
            f"an EAGLE-3 head must have a target with `layers` in its decoder, got {type(target).__name__}; draft for "
            "it with stand.BlendedDrafter"
        )
    return len(layers)
