"""How a DFlash head is built, as its checkpoint's config.json says it."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import PreTrainedModel, Qwen3Config
from transformers.models.qwen3.modeling_qwen3 import Qwen3DecoderLayer, Qwen3RotaryEmbedding

from stand.drafters.heads.trained_part import reason_of
from stand.forward.features import FeatureLayers
from stand.forward.model import MOVING_ROPES, text_config

CONFIG_FILE = "config.json"
KIND = "qwen3"  # of the layers
USUAL_BLOCK = 16  # where a checkpoint names none
NUMBERS = {"input_embedding_scale": 1.0, "output_multiplier": 1.0, "final_logit_softcapping": 0.0}  # and what is plain
COUNTS = ("conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k", "markov_rank")
PLAIN_THETA = 10_000.0  # of rotary angles where the target names none
SHALLOW = 8  # layers of a target that is read to its borders
MARKOV_KINDS = ("vanilla", "gated")
FOREIGN = "take a head that was trained for this model"


@dataclass(frozen=True, slots=True)
class DFlashSettings:
    """Of one head.

    feature_layers: the target's decoder layers whose inputs it reads.
    block_size: places of a block; the first holds the pending token, all others mask_token_id.
    has_anchor_law: the first place guesses, too: place k the token k + 1 places on. Else place k the one k places on.
    is_causal: per layer, whether a place sees the places behind it.
    input_embedding_scale, output_multiplier, final_logit_softcapping (0: none): of what goes in and what comes out.
    conv_kernel_size, conv_group_size: of convolutions around each sublayer; 0: none (DFlash 2).
    selector_rank, selector_top_k: of a selector of pairs; 0: none (DFlash 2).
    markov_rank, markov_head_type: of a Markov head; 0: none (DSpark).
    draft_vocab_size: tokens that the head guesses, as a checkpoint says.
    """

    config: Qwen3Config  # of its layers
    feature_layers: FeatureLayers
    block_size: int
    mask_token_id: int
    is_causal: tuple[bool, ...]
    has_anchor_law: bool = False
    input_embedding_scale: float = 1.0
    output_multiplier: float = 1.0
    final_logit_softcapping: float = 0.0
    conv_kernel_size: int = 0
    conv_group_size: int = 0
    selector_rank: int = 0
    selector_top_k: int = 0
    markov_rank: int = 0
    markov_head_type: str = "vanilla"
    draft_vocab_size: int | None = None

    @property
    def num_guesses(self) -> int:
        """Places that guess."""
        return self.block_size if self.has_anchor_law else self.block_size - 1

    @classmethod
    def for_target(
        cls,
        target: PreTrainedModel,
        *,
        num_layers: int = 2,
        most_read: int = 5,
        block_size: int = 8,
        mask_token_id: int | None = None,
        **extras: object,
    ) -> DFlashSettings:
        """Layers of the target's sizes, with plain rotations and without windows, to be trained.

        most_read: of the target's layers. mask_token_id: None for the last token. extras: further settings, by name.
        """
        config = text_config(target)
        names = ("hidden_size", "num_attention_heads", "num_key_value_heads", "head_dim", "rms_norm_eps")
        names += ("intermediate_size", "max_position_embeddings")
        known = {name: getattr(config, name) for name in names if getattr(config, name, None) is not None}
        known["vocab_size"] = target.get_input_embeddings().weight.shape[0]
        known.setdefault("num_key_value_heads", known["num_attention_heads"])
        known.setdefault("intermediate_size", 4 * known["hidden_size"])
        known.setdefault("head_dim", known["hidden_size"] // known["num_attention_heads"])
        theta = (getattr(config, "rope_parameters", None) or {}).get("rope_theta", PLAIN_THETA)
        rope = {"rope_type": "default", "rope_theta": theta}
        mask = known["vocab_size"] - 1 if mask_token_id is None else mask_token_id
        own = Qwen3Config(num_hidden_layers=num_layers, rope_parameters=rope, **known)
        layers = usual_layers(target, count=most_read)
        found = cls(own, layers, block_size, mask, (False,) * num_layers, **extras)
        _check(found.as_json() | found.as_json()["dflash_config"], own, target, remedy="choose other settings")
        return found

    @classmethod
    def read(cls, folder: Path, target: PreTrainedModel) -> DFlashSettings:
        """Of a checkpoint as z-lab, DeepSpec or vLLM's speculators publish it.

        Raises ValueError where there is none, or one that this target or these layers do not fit.
        """
        given, layers, nested = _parts(folder)
        known = {**given, **nested}  # what older checkpoints of z-lab tell at the top newer ones tell within
        config = _config(layers)
        _check(known, config, target)
        numbers = {name: float(known.get(name) or plain) for name, plain in NUMBERS.items()}
        counts = {name: known.get(name) or 0 for name in COUNTS}
        return cls(
            config, _layers_read(given, nested, target), known.get("block_size") or USUAL_BLOCK,
            known["mask_token_id"], _causal(given, known, config),
            has_anchor_law=_has_anchor_law(given, known), draft_vocab_size=given.get("draft_vocab_size"),
            markov_head_type=known.get("markov_head_type") or "vanilla", **numbers, **counts,
        )  # fmt: skip

    def as_json(self) -> dict[str, object]:
        """What `read` reads, in z-lab's layout."""
        theta = self.config.rope_parameters["rope_theta"]  # which transformers 4 looks for by itself
        name = "DFlash2DraftModel" if self.selector_rank else "DFlashDraftModel"
        name = "Qwen3DSparkModel" if self.markov_rank else name
        own = self.config.to_diff_dict() | {"architectures": [name], "rope_theta": theta, "block_size": self.block_size}
        told = {name: getattr(self, name) for name in NUMBERS if getattr(self, name) != NUMBERS[name]}
        told |= {name: getattr(self, name) for name in COUNTS if getattr(self, name)}
        told |= {"markov_head_type": self.markov_head_type} if self.markov_rank else {}
        told |= {"sample_from_anchor": self.has_anchor_law} if self.has_anchor_law or self.markov_rank else {}
        facts = {
            "mask_token_id": self.mask_token_id,
            "target_layer_ids": [layer - 1 for layer in self.feature_layers],
        }
        if len(set(self.is_causal)) == 1:  # else those with a window are
            facts["causal"] = self.is_causal[0]
        return own | {"dflash_config": facts | told}


def usual_layers(target: PreTrainedModel, *, count: int = 5) -> FeatureLayers:
    """Evenly from the second to the third last layer, by their outputs, as published heads have them."""
    num_layers = _num_layers(target)
    border = 1 if num_layers < SHALLOW else 2
    first, end = min(border, num_layers - 1), max(num_layers - border, 0)
    count = max(min(count, end - first + 1), 1)
    steps = [first + (end - first) * place / max(count - 1, 1) for place in range(count)]
    return tuple(round(step) for step in steps)


def _parts(folder: Path) -> tuple[dict, dict, dict]:
    """What config.json says of the head, of its layers, and in `dflash_config`."""
    try:
        given = json.loads((folder / CONFIG_FILE).read_text(encoding="utf-8"))
        parts = given, given.get("transformer_layer_config") or given, given.get("dflash_config") or {}
        if not all(isinstance(part, dict) for part in parts):
            raise TypeError("no object of JSON")
    except (OSError, ValueError, TypeError, AttributeError) as error:
        raise ValueError(
            f"a DFlash checkpoint must be a folder with {CONFIG_FILE}, got {folder} ({type(error).__name__}); fetch "
            "all files of it"
        ) from error
    return parts


def _config(layers: dict) -> Qwen3Config:
    kind = layers.get("model_type", KIND)
    if kind != KIND:
        raise ValueError(f"a DFlash head must have layers of the kind {KIND}, got {kind!r}; take another head")
    try:
        config = Qwen3Config.from_dict(layers)
        with torch.device("meta"):  # nothing is computed
            Qwen3RotaryEmbedding(config)
            Qwen3DecoderLayer(config, range(config.num_hidden_layers)[0])
    except Exception as error:  # transformers' own checks have many
        raise ValueError(
            f"{CONFIG_FILE} of a DFlash head must describe its layers, got {type(error).__name__}: "
            f"{reason_of(error)}; fetch it again"
        ) from error
    return config


def _check(known: dict, config: Qwen3Config, target: PreTrainedModel, *, remedy: str = FOREIGN) -> None:
    own, count = text_config(target).hidden_size, target.get_input_embeddings().weight.shape[0]
    size, mask, kind = known.get("block_size", USUAL_BLOCK), known.get("mask_token_id"), known.get("markov_head_type")
    rope = config.rope_parameters.get("rope_type")
    odd = [name for name in COUNTS if known.get(name) is not None and not _is_whole(known[name], 0)]
    odd += [name for name in NUMBERS if not _is_number(known.get(name) or 0.0)]
    kernel, group = known.get("conv_kernel_size") or 0, known.get("conv_group_size") or 0
    obstacles = {
        f"hidden states of {own} numbers, as this target, got {config.hidden_size}": config.hidden_size != own,
        f"blocks of 2 places or more, got {size!r}": not _is_whole(size, 2),
        f"a mask token from 0 to {count - 1}, got {mask!r}": not _is_whole(mask, 0) or mask >= count,
        f"rotary frequencies that stay the same, got {rope!r}": rope in MOVING_ROPES,
        f"numbers for {', '.join([*COUNTS, *NUMBERS])}, got others for {', '.join(odd)}": bool(odd),
        f"a Markov head of the kinds {', '.join(MARKOV_KINDS)}, got {kind!r}": bool(known.get("markov_rank"))
        and kind not in (None, *MARKOV_KINDS),
    }
    obstacles = {rule: is_met for rule, is_met in obstacles.items() if is_met} or {
        f"convolutions in groups that {own} channels fall into, got kernels of {kernel} for groups of {group}": bool(
            kernel
        )
        and (not group or own % group != 0),
        f"convolutions no longer than its blocks of {size} places, got kernels of {kernel}": kernel > size,
        "one of a selector and a Markov head, got both": bool(known.get("selector_rank") and known.get("markov_rank")),
        f"pairs of this target's {count} tokens, got those of {config.vocab_size}": bool(
            known.get("selector_rank") or known.get("markov_rank")
        )
        and config.vocab_size < count,
        f"a selector of 1 candidate or more, got {known.get('selector_top_k')!r}": bool(known.get("selector_rank"))
        and not known.get("selector_top_k"),
    }
    for rule, is_met in obstacles.items():
        if is_met:
            raise ValueError(f"a DFlash head must have {rule}; {remedy}")


def _is_whole(value: object, least: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def _causal(given: dict, known: dict, config: Qwen3Config) -> tuple[bool, ...]:
    """z-lab and vLLM tell it of all layers; else those with a window are, in speculators unless a flag says no."""
    told = known.get("causal", known.get("is_causal"))
    is_free = given.get("speculators_model_type") is not None and bool(given.get("sliding_window_non_causal"))
    kinds = getattr(config, "layer_types", None) or ["full_attention"] * config.num_hidden_layers
    return tuple(bool(told) if told is not None else kind != "full_attention" and not is_free for kind in kinds)


def _has_anchor_law(given: dict, known: dict) -> bool:
    """Where it is not told, heads of DeepSpec's code have one, with a Markov head or without, and no others."""
    told = known.get("sample_from_anchor")
    names = f"{given.get('speculators_model_type')} {given.get('architectures')}"
    return "dspark" in names.lower() if told is None else bool(told)


def _layers_read(given: dict, nested: dict, target: PreTrainedModel) -> FeatureLayers:
    """speculators counts a layer by its input; z-lab, in `dflash_config` or at the top, by its output."""
    count, name = _num_layers(target), "aux_hidden_state_layer_ids"
    read = given.get(name) or nested.get(name)
    later = 0
    if not read:
        read, later = nested.get("target_layer_ids") or given.get("target_layer_ids"), 1
    layers = read if isinstance(read, list) else [read]
    layers = tuple(layer + later if _is_whole(layer, -1) else layer for layer in layers)
    if not all(_is_whole(layer, 0) and layer < count for layer in layers):
        raise ValueError(
            f"a DFlash head must read inputs of the target's {count} decoder layers, got those of {list(layers)}; take "
            "the head that was trained for this model"
        )
    return layers


def _num_layers(target: PreTrainedModel) -> int:
    layers = getattr(target.get_decoder(), "layers", None)
    if layers is None:
        raise ValueError(
            f"a DFlash head must have a target with `layers` in its decoder, got {type(target).__name__}; draft for it "
            "with stand.BlendedDrafter"
        )
    return len(layers)
