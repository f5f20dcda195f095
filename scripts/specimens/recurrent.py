"""Kernels of layers with a recurrent state, in the shapes of Qwen3.5-9B (32 heads of 128 by 128, 16 key heads) and of
Nemotron-H-8B (128 heads of 128 by 64, 8 groups): convolutions of four tokens, rows of up to 256 nodes."""

from __future__ import annotations

from specimens.specimen import Specimen
from stand.gpu.kernels import convolve, delta_updates, linear_attention, path_decays

ROWS = {"offsets": "*i32", "cache_rows": "*i64"}
SHAPES = {"delta": (32, 2, 128), "mamba": (128, 16, 128)}  # heads, heads that share a key, size of a key
STATE = {"keys": "*fp32", "sums": "*fp32", "states": "*fp32"}
SIZES = {"size": "i32:16", "value_size": "i32:16"}
UPDATE_STRIDES = {"stride_update": "i32:16", "stride_update_head": "i32:16"}


def of_convolve() -> list[Specimen]:
    channels = {"num_channels": "i32:16", "stride_token": "i32:16", "stride_channel": "i32"}
    data = {"inputs": "*bf16", "tails": "*bf16"}
    forward = {
        **data,
        "weight": "*bf16",
        "bias": "*bf16",
        "parents": "*i64",
        "depths": "*i64",
        **ROWS,
        "mixed": "*bf16",
    }
    kept = {**data, **ROWS, "path": "*i64", **channels, "stride_path": "i32:16", "max_depth": "i32:16"}
    blocks = {"BLOCK_C": convolve.BLOCK_CHANNELS}
    return [
        Specimen(
            "convolve",
            convolve._convolve,
            {**forward, **channels},
            {"SIZE": 4, "HAS_BIAS": True, "BLOCK_T": convolve.BLOCK_TOKENS, **blocks},
        ),
        Specimen("keep_tails", convolve._keep_tails, kept, {"SIZE": 3, "BLOCK_PATH": 256, **blocks}, num_warps=2),
    ]


def of_path_decays() -> list[Specimen]:
    operands = {"query": "*bf16", "key": "*bf16", "log_decay": "*fp32", "ancestors": "*i64", "offsets": "*i32"}
    results = {"queries": "*fp32", "keys": "*fp32", "sums": "*fp32", "scale": "fp32", "epsilon": "fp32"}
    names = ("size", "stride_query", "stride_query_head", "stride_key", "stride_key_head")
    signature = {**operands, **results, **dict.fromkeys(names, "i32:16"), "stride_words": "i32"}
    return [
        Specimen(
            f"prepare {name}",
            path_decays._prepare,
            signature,
            {**_heads(name), "IS_UNIT": name == "delta", "BLOCK_T": path_decays.BLOCK_TOKENS, "BLOCK_K": 128},
        )
        for name in SHAPES
    ]


def of_delta_updates() -> list[Specimen]:
    shared = {"keys": "*fp32", "sums": "*fp32", "beta": "*bf16", "offsets": "*i32", "system": "*fp32"}
    sizes = {"size": "i32:16", "width": "i32:16"}
    relate = {**shared, "ancestors": "*i64", **sizes, "stride_words": "i32"}
    solve = {**shared, "value": "*bf16", "states": "*fp32", "cache_rows": "*i64", "updates": "*fp32", **sizes}
    solve |= {name: "i32:16" for name in ("value_size", "stride_value", "stride_value_head")}
    blocks = {**_heads("delta"), "BLOCK_K": delta_updates.BLOCK_KEYS}
    columns = {"BLOCK_V": delta_updates.BLOCK_VALUES}
    return [
        Specimen("relate", delta_updates._relate, relate, {**blocks, "BLOCK_T": delta_updates.BLOCK_PAIRS}),
        *(
            Specimen(f"solve {width} nodes", delta_updates._solve, solve, {**blocks, **columns, "BLOCK_T": width})
            for width in (16, 32, 64, 128, 256)
        ),
    ]


def of_linear_attention() -> list[Specimen]:
    attend = {**STATE, "queries": "*fp32", "updates": "*fp32", "ancestors": "*i64", **ROWS, "output": "*fp32", **SIZES}
    attend |= {"stride_words": "i32", **UPDATE_STRIDES}
    kept = {**STATE, "updates": "*fp32", **ROWS, "path": "*i64", **SIZES, **UPDATE_STRIDES}
    kept |= {"stride_path": "i32:16", "max_depth": "i32:16"}
    columns = {"BLOCK_V": linear_attention.BLOCK_VALUES}
    blocks = {"BLOCK_T": linear_attention.BLOCK_TOKENS, "BLOCK_K": linear_attention.BLOCK_KEYS, **columns}
    return [
        specimen
        for name in SHAPES
        for specimen in (
            Specimen(f"attend {name}", linear_attention._attend, attend, {**_heads(name), **blocks}),
            Specimen(
                f"keep_states {name}",
                linear_attention._keep_states,
                kept,
                {**_heads(name), "BLOCK_PATH": 256, "BLOCK_K": SHAPES[name][2], **columns},
            ),
        )
    ]


def _heads(name: str) -> dict[str, int]:
    heads, shared, _ = SHAPES[name]
    return {"HEADS": heads, "SHARED": shared}
