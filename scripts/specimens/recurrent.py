"""Kernels of layers with a recurrent state, in the shapes of Qwen3.5-9B (32 heads of 128 by 128, 16 key heads) and of
Nemotron-H-8B (128 heads of 128 by 64, 8 groups): convolutions of four tokens, rows of up to 256 nodes."""

from __future__ import annotations

from specimens.specimen import Specimen
from stand.gpu.kernels.recurrent import convolve, delta_updates, linear_attention, path_decays

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
        "num_tokens": "i32",
    }
    kept = {**data, **ROWS, "path": "*i64", **channels, "stride_path": "i32:16", "max_depth": "i32:16"}
    blocks = {"BLOCK_C": convolve.BLOCK_CHANNELS}
    return [
        Specimen(
            "convolve",
            convolve._convolve,
            {**forward, **channels},
            {"SIZE": 4, "HAS_BIAS": True, "IS_SILU": True, "BLOCK_T": convolve.BLOCK_TOKENS, **blocks},
        ),
        Specimen("keep_tails", convolve._keep_tails, kept, {"SIZE": 3, "BLOCK_PATH": 256, **blocks}, num_warps=2),
    ]


def of_path_decays() -> list[Specimen]:
    pointers = dict.fromkeys(("query", "key", "decay", "rate", "factor", "bias"), "*bf16")
    pointers |= {"ancestors": "*i64", "offsets": "*i32"}
    results = dict.fromkeys(("queries", "keys", "sums", "rates"), "*fp32")
    numbers = dict.fromkeys(("scale", "epsilon", "rate_scale", "least", "most"), "fp32")
    strides = ("query", "query_head", "key", "key_head", "decay", "rate")
    sizes = dict.fromkeys(("size", *(f"stride_{name}" for name in strides)), "i32:16")
    signature = {**pointers, **results, **numbers, **sizes, "stride_words": "i32"}
    blocks = {"BLOCK_T": path_decays.BLOCK_TOKENS, "BLOCK_K": 128}
    formulas = {"given": path_decays.GIVEN, "gated": path_decays.GATED, "steps": path_decays.STEPS}
    return [
        Specimen(
            f"prepare {name}",
            path_decays._prepare,
            signature | ({"decay": "*fp32", "factor": "*fp32"} if name != "gated" else {}),
            {
                **_heads("mamba" if name == "steps" else "delta"),
                "FORMULA": formula.value,
                "HAS_BIAS": True,
                "IS_SOFTPLUS": name == "steps",
                **blocks,
            },
        )
        for name, formula in formulas.items()
    ]


def of_delta_updates() -> list[Specimen]:
    rows = {"offsets": "*i32", "system": "*fp32", "updates": "*fp32", "width": "i32", "value_size": "i32:16"}
    set_up = {**dict.fromkeys(("keys", "sums", "states"), "*fp32"), "value": "*bf16", "beta": "*fp32", **rows}
    set_up |= {"ancestors": "*i64", "cache_rows": "*i64", "size": "i32:16", "stride_words": "i32", "num_blocks": "i32"}
    set_up |= {"stride_value": "i32:16", "stride_value_head": "i32:16"}
    heads, columns = _heads("delta"), {"BLOCK_V": delta_updates.BLOCK_VALUES}
    columns |= {"BLOCK_E": delta_updates.BLOCK_EARLIER}
    return [
        Specimen("set up", delta_updates._set_up, set_up, {**heads, "BLOCK_K": delta_updates.BLOCK_KEYS, **columns}),
        Specimen("solve", delta_updates._solve, rows, {"HEADS": heads["HEADS"], **columns}),
    ]


def of_linear_attention() -> list[Specimen]:
    attend = {**STATE, "queries": "*fp32", "updates": "*fp32", "rates": "*fp32", "skip": "*bf16", "ancestors": "*i64"}
    attend |= {**ROWS, "output": "*bf16", "num_tokens": "i32", **SIZES, "stride_words": "i32", **UPDATE_STRIDES}
    kept = {**STATE, "updates": "*fp32", "rates": "*fp32", **ROWS, "path": "*i64", **SIZES, **UPDATE_STRIDES}
    kept |= {"stride_path": "i32:16", "max_depth": "i32:16"}
    columns = {"BLOCK_V": linear_attention.BLOCK_VALUES}
    blocks = {"BLOCK_T": linear_attention.BLOCK_TOKENS, "BLOCK_K": linear_attention.BLOCK_KEYS, **columns}
    blocks |= {"BLOCK_E": linear_attention.BLOCK_EARLIER}
    wide, specimens = {"BLOCK_V": linear_attention.WIDE_VALUES}, []
    for name in SHAPES:
        heads, is_mamba = _heads(name), name == "mamba"
        written = {"updates": "*bf16"} if is_mamba else {}
        data = {**written, "output": "*fp32"} if is_mamba else {}
        asked = {**heads, "HAS_RATES": is_mamba, "HAS_SKIP": is_mamba, **blocks}
        path = {**heads, "HAS_RATES": is_mamba, "BLOCK_PATH": 256, "BLOCK_K": SHAPES[name][2], **columns}
        specimens += [
            Specimen(f"attend {name}", linear_attention._attend, attend | data, asked),
            Specimen(f"attend {name}, wide", linear_attention._attend, attend | data, {**asked, **wide}),
            Specimen(f"keep_states {name}", linear_attention._keep_states, kept | written, path),
        ]
    return specimens


def _heads(name: str) -> dict[str, int]:
    heads, shared, _ = SHAPES[name]
    return {"HEADS": heads, "SHARED": shared}
