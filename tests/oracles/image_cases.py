"""Tiny random models that take images, real transformers classes, float32; prompts with images; a processor."""

from __future__ import annotations

from functools import lru_cache

import numpy as np
import pytest
import torch
import transformers
from letter_tokenizer import LETTERS, letter_tokenizer
from transformers import AutoModelForImageTextToText, PreTrainedModel, ProcessorMixin

IMAGE, VIDEO, START, END = 55, 56, 57, 58  # placeholders, and what stands around images
VOCABULARY_SIZE = 61
TEXT = {
    "vocab_size": VOCABULARY_SIZE, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4,
    "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16, "max_position_embeddings": 512,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "initializer_range": 0.4,
    "tie_word_embeddings": False,
}  # fmt: skip
TOWER = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 4}
QWEN_TOWER = {
    "depth": 2, "hidden_size": 32, "intermediate_size": 48, "num_heads": 4, "in_channels": 3, "patch_size": 4,
    "spatial_merge_size": 2, "temporal_patch_size": 2, "out_hidden_size": 32, "initializer_range": 0.4,
}  # fmt: skip
QWEN_IDS = {
    "image_token_id": IMAGE, "video_token_id": VIDEO, "vision_start_token_id": START, "vision_end_token_id": END,
}  # fmt: skip
SECTIONS = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 3, 3]}
QWEN_TEXT = {**TEXT, "rope_parameters": SECTIONS}
SQUARE = {**TOWER, "image_size": 16, "patch_size": 4}

# By family: configuration class, its arguments.
CONFIGS: dict[str, tuple[str, dict]] = {
    "qwen2_vl": (
        "Qwen2VLConfig",
        {
            "text_config": QWEN_TEXT, **QWEN_IDS,
            "vision_config": {
                "depth": 1, "embed_dim": 32, "hidden_size": 32, "mlp_ratio": 1, "num_heads": 4, "in_channels": 3,
                "patch_size": 4, "spatial_merge_size": 2, "temporal_patch_size": 2,
            },
        },
    ),
    "qwen2_5_vl": (
        "Qwen2_5_VLConfig",
        {
            "text_config": QWEN_TEXT, **QWEN_IDS,
            "vision_config": {**QWEN_TOWER, "window_size": 16, "fullatt_block_indexes": [1], "tokens_per_second": 2},
        },
    ),
    "qwen3_vl": (
        "Qwen3VLConfig",
        {
            "text_config": QWEN_TEXT, **QWEN_IDS,
            "vision_config": {**QWEN_TOWER, "num_position_embeddings": 16, "deepstack_visual_indexes": [0, 1]},
        },
    ),
    "qwen3_5": (
        "Qwen3_5Config",
        {
            "text_config": {
                **QWEN_TEXT, "layer_types": ["linear_attention", "full_attention"] * 2, "linear_num_key_heads": 2,
                "rope_parameters": {**SECTIONS, "partial_rotary_factor": 1.0}, "linear_num_value_heads": 4,
                "linear_key_head_dim": 16, "linear_value_head_dim": 16,
            },
            "vision_config": {**QWEN_TOWER, "num_position_embeddings": 16, "deepstack_visual_indexes": []}, **QWEN_IDS,
        },
    ),
    "glm4v": (
        "Glm4vConfig",
        {
            "text_config": {**QWEN_TEXT, "rope_parameters": {**SECTIONS, "partial_rotary_factor": 1.0}},
            "vision_config": {**QWEN_TOWER, "image_size": 16}, **QWEN_IDS,
            "image_start_token_id": START, "image_end_token_id": END,
        },
    ),
    "gemma3": (
        "Gemma3Config",
        {
            "text_config": {**TEXT, "sliding_window": 8, "sliding_window_pattern": 2},
            "vision_config": SQUARE, "image_token_id": IMAGE, "mm_tokens_per_image": 4,
        },
    ),
    "llava": (
        "LlavaConfig",
        {
            "text_config": {"model_type": "llama", **TEXT},
            "vision_config": {"model_type": "clip_vision_model", **SQUARE},
            "image_token_id": IMAGE, "image_token_index": IMAGE, "image_seq_length": 16, "vision_feature_layer": -1,
        },
    ),
    "mistral3": (
        "Mistral3Config",
        {
            "text_config": {"model_type": "mistral", **TEXT, "sliding_window": None},
            "vision_config": {"model_type": "pixtral", **SQUARE, "head_dim": 8},
            "image_token_index": IMAGE, "image_token_id": IMAGE, "vision_feature_layer": -1, "spatial_merge_size": 2,
        },
    ),
    "internvl": (
        "InternVLConfig",
        {
            "text_config": {"model_type": "qwen2", **TEXT},
            "vision_config": {**TOWER, "image_size": [16, 16], "patch_size": [4, 4]},
            "image_token_id": IMAGE, "image_seq_length": 4, "vision_feature_layer": -1,
        },
    ),
    "smolvlm": (
        "SmolVLMConfig",
        {
            "text_config": {"model_type": "llama", **TEXT}, "vision_config": SQUARE,
            "image_token_id": IMAGE, "scale_factor": 2,
        },
    ),
    "paligemma": (
        "PaliGemmaConfig",
        {
            "text_config": {"model_type": "gemma", **TEXT, "vocab_size": VOCABULARY_SIZE}, "projection_dim": 32,
            "vision_config": {"model_type": "siglip_vision_model", **SQUARE, "vision_use_head": False},
            "image_token_id": IMAGE, "image_token_index": IMAGE, "vocab_size": VOCABULARY_SIZE,
        },
    ),
    "ernie4_5_vl_moe": (
        "Ernie4_5_VLMoeConfig",
        {
            "text_config": {
                **QWEN_TEXT, "rope_parameters": {**SECTIONS, "mrope_section": [3, 3, 2]}, "moe_k": 2,
                "moe_intermediate_size": [24, 24], "moe_num_experts": 4, "moe_num_shared_experts": 1,
                "mlp_layer_types": ["dense", *["sparse"] * 3],
            },
            "vision_config": {
                "depth": 1, "hidden_size": 32, "intermediate_size": 48, "num_heads": 4, "patch_size": 4,
                "spatial_merge_size": 2, "temporal_merge_size": 2,
            },
            "image_token_id": IMAGE, "video_token_id": VIDEO, "image_start_token_id": START, "image_end_token_id": END,
        },
    ),
    "gemma4": (
        "Gemma4Config",
        {
            "text_config": {
                **TEXT, "num_hidden_layers": 3, "layer_types": ["sliding_attention"] * 2 + ["full_attention"],
                "sliding_window": 8, "global_head_dim": 16, "hidden_size_per_layer_input": 0,
                "num_kv_shared_layers": 0, "use_bidirectional_attention": "vision",
            },
            "vision_config": {
                **TOWER, "head_dim": 8, "num_key_value_heads": 4, "patch_size": 4, "pooling_kernel_size": 2,
                "position_embedding_size": 64,
            },
            "image_token_id": IMAGE, "initializer_range": 0.4,
        },
    ),
}  # fmt: skip

GRID = (1, 4, 6)  # frames, patches up, patches across
SEED = 3
SERVED = [family for family in CONFIGS if family != "paligemma"]
TEMPLATE = (
    "{% for message in messages %}{% if message.content is string %}{{ message.content }}{% else %}"
    "{% for part in message.content %}{% if part.type == 'image' %}" + LETTERS[START] + "{% else %}{{ part.text }}"
    "{% endif %}{% endfor %}{% endif %}{% endfor %}{% if add_generation_prompt %}@{% endif %}"
)


@lru_cache
def image_model(family: str) -> PreTrainedModel:
    """Skips the test where this version of transformers has no such class."""
    class_name, arguments = CONFIGS[family]
    if not hasattr(transformers, class_name):
        pytest.skip(f"this version of transformers has no {class_name}")
    torch.manual_seed(1)
    config = getattr(transformers, class_name)(**arguments, tie_word_embeddings=False)
    model = AutoModelForImageTextToText.from_config(config).eval()
    if family == "gemma3":  # it starts with zeros, so that images would change nothing
        torch.nn.init.normal_(model.model.multi_modal_projector.mm_input_projection_weight, std=0.4)
    return model


def image_prompt(
    family: str,
    *,
    before: tuple[int, ...] = (3, 4, 5, 6),
    behind: tuple[int, ...] = (7, 3, 4, 5, 9),
    num_images: int = 1,
    seed: int = SEED,
) -> dict[str, torch.Tensor]:
    """What a processor gives: token ids [1, L] and the images that they show, other ones for another seed."""
    generator = torch.Generator().manual_seed(seed)

    def pixels(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    if family in ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_5", "glm4v", "ernie4_5_vl_moe"):
        frames, height, width = GRID
        numbers = 3 * 4 * 4 * (1 if family == "ernie4_5_vl_moe" else 2)  # of a patch of one frame, or of two
        grids = torch.tensor([GRID] * num_images)
        shown = {"pixel_values": pixels(num_images * frames * height * width, numbers), "image_grid_thw": grids}
        num_tokens = frames * height * width // 4
    elif family == "smolvlm":
        shown = {
            "pixel_values": pixels(1, num_images, 3, 16, 16),
            "pixel_attention_mask": torch.ones(1, num_images, 16, 16, dtype=torch.int64),
        }
        num_tokens = 4
    elif family == "gemma4":
        places = torch.stack(torch.meshgrid(torch.arange(4), torch.arange(4), indexing="xy"), dim=-1).reshape(1, 16, 2)
        shown = {
            "pixel_values": 20 * pixels(num_images, 16, 3 * 4 * 4),
            "image_position_ids": places.expand(num_images, -1, -1).clone(),
        }
        num_tokens = 4
    else:
        shown = {"pixel_values": pixels(num_images, 3, 16, 16)}
        num_tokens = 16 if family in ("llava", "paligemma") else 4
    if family == "mistral3":
        shown["image_sizes"] = torch.tensor([[16, 16]] * num_images)
    one = [START, *[IMAGE] * num_tokens, END]
    token_ids = torch.tensor([[*before, *one * num_images, *behind]])
    types = (token_ids == IMAGE).long()
    if family in ("gemma3", "paligemma"):
        shown["token_type_ids"] = types
    elif family.startswith(("qwen", "glm", "gemma4", "ernie")):
        shown["mm_token_type_ids"] = types
    if family == "ernie4_5_vl_moe":
        shown["moe_mm_token_type_ids"] = torch.isin(token_ids, torch.tensor([IMAGE, START, END])).long()
    return {"input_ids": token_ids, "attention_mask": torch.ones_like(token_ids), **shown}


def image_processor() -> ProcessorMixin:
    """Of Gemma 3, on PIL images, with a token per letter."""
    processing = pytest.importorskip("transformers.models.gemma3.image_processing_pil_gemma3")
    named = {"image_token": IMAGE, "boi_token": START, "eoi_token": END}
    tokenizer = letter_tokenizer(**{name: LETTERS[token] for name, token in named.items()})
    pixels = processing.Gemma3ImageProcessorPil(size={"height": 16, "width": 16})
    beside = {"image_seq_length": 4, "chat_template": TEMPLATE}
    return transformers.Gemma3Processor(image_processor=pixels, tokenizer=tokenizer, **beside)


def picture(seed: int = SEED):
    """A PIL image of noise."""
    from PIL import Image

    return Image.fromarray(np.random.default_rng(seed).integers(0, 256, (16, 16, 3), dtype=np.uint8))


def chat_about(image, text: str = "ABC") -> list[dict]:
    return [{"role": "user", "content": [{"type": "image", "image": image}, {"type": "text", "text": text}]}]
