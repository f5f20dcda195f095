"""Kernels of attention: its tiles, the merge of splits, and the compaction of a kept path's keys."""

from __future__ import annotations

import triton

from specimens.specimen import Specimen
from stand.gpu.kernels import attention, compact, merge
from stand.gpu.kernels.proxy_fence import MUST_ADD_FENCES
from stand.gpu.tuning.attention_tiles import (
    BLOCKS_16_BIT,
    BLOCKS_FLOAT32,
    LATENT_16_BIT,
    LATENT_FLOAT32,
    NARROW_VALUES_16_BIT,
    PAGE_SIZE,
    Blocks,
)

LATENT = {"KEY_HEADS": 1, "IS_LATENT": True}


def of_attention() -> list[Specimen]:
    """The specialisations of common models; strides as a contiguous cache has them."""
    (small,), (large, narrow) = BLOCKS_16_BIT[128]
    return [
        _attention_specimen("7B large tiles", "bf16", 128, 7, large),
        _attention_specimen("7B large tiles sm_80", "bf16", 128, 7, narrow),
        _attention_specimen("7B small tiles", "bf16", 128, 7, small),
        _attention_specimen("7B rooms", "bf16", 128, 7, large, IS_PAGED=False),
        _attention_specimen("windowed large tiles", "bf16", 128, 4, large, HAS_WINDOW=True),
        _attention_specimen("fp16 small tiles", "fp16", 128, 4, small),
        _attention_specimen("gpt-oss", "bf16", 64, 8, BLOCKS_16_BIT[64][1][0], HAS_WINDOW=True, HAS_SINKS=True),
        _attention_specimen("Phi-3", "bf16", 96, 1, BLOCKS_16_BIT[96][1][0], HAS_WINDOW=True),
        _attention_specimen("Phi-3 sm_89", "bf16", 96, 1, BLOCKS_16_BIT[96][1][1], HAS_WINDOW=True),
        _attention_specimen("Gemma 2", "bf16", 256, 2, BLOCKS_16_BIT[256][0][0], HAS_WINDOW=True, HAS_SOFTCAP=True),
        _attention_specimen(
            "Gemma 2 sm_89", "bf16", 256, 2, BLOCKS_16_BIT[256][0][1], HAS_WINDOW=True, HAS_SOFTCAP=True
        ),
        _attention_specimen("Gemma 4", "bf16", 512, 8, BLOCKS_16_BIT[512][0][0]),
        _attention_specimen("Gemma 4 sm_89", "bf16", 512, 8, BLOCKS_16_BIT[512][0][1]),
        _attention_specimen("MLA small tiles", "bf16", 192, 1, NARROW_VALUES_16_BIT[0][0], value_size=128),
        _attention_specimen("MLA large tiles", "bf16", 192, 1, NARROW_VALUES_16_BIT[1][0], value_size=128),
        _attention_specimen("MLA large tiles sm_89", "bf16", 192, 1, NARROW_VALUES_16_BIT[1][1], value_size=128),
        _attention_specimen("MLA latents", "bf16", 512, 16, LATENT_16_BIT[512][0][0], value_size=64, **LATENT),
        _attention_specimen("MLA latents sm_89", "bf16", 512, 16, LATENT_16_BIT[512][0][1], value_size=64, **LATENT),
        _attention_specimen("latents of 256", "bf16", 256, 40, LATENT_16_BIT[256][0][0], value_size=64, **LATENT),
        _attention_specimen("7B float32", "fp32", 128, 7, BLOCKS_FLOAT32[128][0][0]),
        _attention_specimen("small model float32", "fp32", 64, 1, BLOCKS_FLOAT32[64][0][0]),
        _attention_specimen("MLA latents float32", "fp32", 512, 16, LATENT_FLOAT32[512][0][0], value_size=64, **LATENT),
        _attention_specimen(
            "MLA latents float32 sm_89", "fp32", 512, 16, LATENT_FLOAT32[512][0][1], value_size=64, **LATENT
        ),
        _attention_specimen("Gemma 4 float32", "fp32", 512, 8, BLOCKS_FLOAT32[512][0][0]),
        _attention_specimen("Gemma 4 float32 sm_89", "fp32", 512, 8, BLOCKS_FLOAT32[512][0][1]),
    ]


def _attention_specimen(
    name: str, dtype: str, head_size: int, groups: int, sizes: Blocks, *, value_size: int | None = None, **variant: bool
) -> Specimen:
    """value_size: default as keys."""
    value_size = value_size or head_size
    constants = {
        "PAGE_STRIDE": 4 * PAGE_SIZE * head_size,
        "HEAD_STRIDE": PAGE_SIZE * head_size,
        "SLOT_STRIDE": head_size,
        "VALUE_PAGE_STRIDE": 4 * PAGE_SIZE * value_size,
        "VALUE_HEAD_STRIDE": PAGE_SIZE * value_size,
        "VALUE_SLOT_STRIDE": value_size,
        "PAGE_SIZE": PAGE_SIZE,
        "IS_PAGED": True,
        "KEY_HEADS": 4,
        "GROUPS": groups,
        "HEAD_SIZE": head_size,
        "BLOCK_D": triton.next_power_of_2(head_size),
        "VALUE_SIZE": value_size,
        "BLOCK_E": triton.next_power_of_2(value_size),
        "WORDS": 2,
        "BLOCK_M": sizes.rows,
        "BLOCK_N": sizes.keys,
        "HAS_WINDOW": False,
        "HAS_SOFTCAP": False,
        "HAS_SINKS": False,
        "IS_LATENT": False,
        "ADDS_FENCES": MUST_ADD_FENCES,
    } | variant
    types = dict.fromkeys(("query", "keys", "values"), f"*{dtype}")
    types |= {"pages": "*i32", "ancestors": "*i64", "positions": "*i64", "items": "*i32", "partial_starts": "*i32"}
    types |= {"partials": "*fp32", "log_sums": "*fp32", "sinks": f"*{dtype}", "mixed": f"*{dtype}"}
    types |= dict.fromkeys(("num_tokens", "num_items", "window"), "i32") | {"scale": "fp32", "softcap": "fp32"}
    types |= {f"{stride}_stride": "i32:16" for stride in ("query_token", "query_head")} | {"table_stride": "i32"}
    return Specimen(name, attention._tree_attention_kernel, types, constants, sizes.num_warps, sizes.num_stages)


def of_merge() -> list[Specimen]:
    """Of Qwen2.5-7B, gpt-oss, Gemma 4 and a small model."""
    shapes = (("bf16", 28, 128), ("bf16", 64, 64), ("bf16", 32, 512), ("fp32", 9, 64))
    return [_merge_specimen(*shape) for shape in shapes]


def _merge_specimen(dtype: str, num_heads: int, head_size: int) -> Specimen:
    types = {"partials": "*fp32", "log_sums": "*fp32", "partial_starts": "*i32", "mixed": f"*{dtype}"}
    constants = {
        "NUM_HEADS": num_heads,
        "HEAD_SIZE": head_size,
        "BLOCK_D": triton.next_power_of_2(head_size),
        "SPLITS": merge.merged_splits(head_size),
    }
    return Specimen(
        f"merge {num_heads} x {head_size} {dtype}", merge._merge_splits, types, constants, merge.MERGE_WARPS
    )


def of_compact() -> list[Specimen]:
    """As launched for the usual head sizes, and for paths of up to 64 nodes."""
    small = ("num_heads", "head_size", "max_depth", "stride_head", "stride_slot", "stride_table", "stride_path")
    integers = {**dict.fromkeys(small, "i32"), "stride_layer": "i64", "stride_page": "i64"}
    indices = {"pages": "*i32", "cache_rows": "*i64", "lengths": "*i64", "path": "*i64"}
    return [
        Specimen(
            f"compact_{dtype}_{size}",
            compact._compact,
            {"storage": f"*{dtype}", **indices, **integers},
            {"PAGE_SIZE": PAGE_SIZE, "BLOCK_PATH": 64, "BLOCK_DEPTHS": compact.BLOCK_DEPTHS, "BLOCK_SIZE": size},
            num_warps=2,
        )
        for dtype, size in (("bf16", 64), ("bf16", 128), ("fp16", 128), ("fp32", 128), ("bf16", 256), ("bf16", 512))
    ]
