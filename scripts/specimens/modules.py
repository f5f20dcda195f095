"""Kernels that stand for modules of a model: norms, rotation with the write to the cache, gates, products."""

from __future__ import annotations

import triton

from specimens.specimen import Specimen
from stand.fusion.formulas import (
    GELU_ERF,
    GELU_TANH,
    HALVES,
    NO_NORM,
    ONE_PLUS,
    PAIRS,
    ROUND_FIRST,
    SCALE_FIRST,
    SILU,
)
from stand.gpu.kernels import norm, product, rope, rotate, swiglu
from stand.gpu.kernels.recurrent import gated_norm
from stand.gpu.tuning.product_tiles import MOST_TOKENS, TILES, ProductTile


def of_norm() -> list[Specimen]:
    """Hidden sizes of 1B to 14B models, and one head."""
    sizes = (128, 2048, 3584, 4096, 5120)
    cases = [(size, "bf16", ROUND_FIRST) for size in sizes]
    cases += [(3584, "fp16", ROUND_FIRST), (3584, "fp32", ROUND_FIRST), (3584, "bf16", ONE_PLUS)]
    cases += [(4096, "bf16", SCALE_FIRST)]
    return [_norm_specimen(*case, kernel=kernel) for case in cases for kernel in (norm._rms_norm, norm._add_rms_norm)]


def _norm_specimen(size: int, dtype: str, rule: int, *, kernel: object) -> Specimen:
    block = triton.next_power_of_2(size)
    pointers = {name: f"*{dtype}" for name in ("states", "weight", "output")}
    strides = {"row_stride": "i32:16"}
    if kernel is norm._add_rms_norm:
        pointers |= {name: f"*{dtype}" for name in ("change", "total")}
        strides = {"states_stride": "i32:16", "change_stride": "i32:16"}
    return Specimen(
        name=f"{'add_' if kernel is norm._add_rms_norm else ''}rms_norm size {size} {dtype} rule {rule}",
        kernel=kernel,
        signature={**pointers, **strides, "eps": "fp32"},
        constants={"SIZE": size, "RULE": rule, "BLOCK": block},
        num_warps=norm._num_warps(block),
    )


def of_gated_norm() -> list[Specimen]:
    """A head of Qwen3.5, and a group of Nemotron-H whose states are in float32."""
    cases = [(128, "bf16", False), (1024, "fp32", True)]
    return [
        Specimen(
            name=f"gated_rms_norm group {group} {dtype}",
            kernel=gated_norm._gated_rms_norm,
            signature={
                **{"states": f"*{dtype}", "gate": "*bf16", "weight": "*bf16", "output": f"*{dtype}"},
                **{"states_stride": "i32:16", "gate_stride": "i32:16", "size": "i32:16", "eps": "fp32"},
            },
            constants={
                "GROUP": group,
                "IS_SHARED": not is_first,
                "IS_GATE_FIRST": is_first,
                "BLOCK": triton.next_power_of_2(group),
            },
        )
        for group, dtype, is_first in cases
    ]


def of_rope() -> list[Specimen]:
    """Qwen2.5-7B, Qwen3-8B, Llama-3.1-8B, Phi-3 mini, Gemma 3, gpt-oss, Gemma 4 and GLM-4-9B: heads, key heads, size,
    norm, whether of values too, and which components turn together."""
    return [
        _rope_specimen(28, 4, 128, "bf16", NO_NORM),
        _rope_specimen(28, 4, 128, "fp16", NO_NORM),
        _rope_specimen(28, 4, 128, "fp32", NO_NORM),
        _rope_specimen(32, 8, 128, "bf16", ROUND_FIRST),
        _rope_specimen(32, 8, 128, "bf16", NO_NORM),
        _rope_specimen(32, 32, 96, "bf16", NO_NORM),
        _rope_specimen(8, 4, 256, "bf16", ONE_PLUS),
        _rope_specimen(64, 8, 64, "bf16", NO_NORM),
        _rope_specimen(32, 4, 512, "bf16", SCALE_FIRST, of_values=True),
        _rope_specimen(32, 2, 128, "bf16", NO_NORM, pairing=PAIRS),
    ]


def _rope_specimen(
    heads: int, kv_heads: int, size: int, dtype: str, rule: int, *, of_values: bool = False, pairing: int = HALVES
) -> Specimen:
    pointers = "query key value cos sin keys values".split()
    outputs = "query_weight key_weight value_weight output".split()
    strides = "query_stride key_stride value_stride cos_stride sin_stride second".split()
    places = "row_stride head_stride slot_stride room".split()
    return Specimen(
        name=f"rope_and_store {heads}/{kv_heads} heads of {size} {dtype} norm {rule}{' pairs' if pairing else ''}",
        kernel=rope._rope_and_store,
        signature={
            **dict.fromkeys(pointers, f"*{dtype}"),
            "slots": "*i64",
            **dict.fromkeys(outputs, f"*{dtype}"),
            **dict.fromkeys(strides + places, "i32:16"),
            "eps": "fp32",
        },
        constants={
            "HEADS": heads,
            "KV_HEADS": kv_heads,
            "SIZE": size,
            "HALF": size // 2,
            "PAIRING": pairing,
            "RULE": rule,
            "VALUE_RULE": rule if of_values else NO_NORM,
            "BLOCK": triton.next_power_of_2(size),
        },
        num_warps=rope.NUM_WARPS,
    )


def of_rotate() -> list[Specimen]:
    """DeepSeek V2-Lite and MiniCPM 3: heads, turned numbers, whether pairs are side by side."""
    shapes = ((16, 64, "bf16", True), (16, 64, "fp32", True), (40, 32, "bf16", False))
    pointers = "query key cos sin turned_query turned_key".split()
    strides = "query_token query_head key_token key_head cos_token sin_token".split()
    return [
        Specimen(
            name=f"rotate_pair {heads} heads of {size} {dtype}{' side by side' if is_interleaved else ''}",
            kernel=rotate._rotate_pair,
            signature={**dict.fromkeys(pointers, f"*{dtype}"), **dict.fromkeys([*strides, "num_tokens"], "i32")},
            constants={"HEADS": heads, "SIZE": size, "BLOCK": size, "IS_INTERLEAVED": is_interleaved},
            num_warps=rotate.NUM_WARPS,
        )
        for heads, size, dtype, is_interleaved in shapes
    ]


def of_swiglu() -> list[Specimen]:
    cases = [("bf16", SILU), ("fp16", SILU), ("fp32", SILU), ("bf16", GELU_TANH), ("bf16", GELU_ERF)]
    return [
        Specimen(
            name=f"gated_product {dtype} activation {activation}",
            kernel=swiglu._gated_product,
            signature={
                **{name: f"*{dtype}" for name in ("gate", "up", "output")},
                **{name: "i32:16" for name in ("gate_stride", "up_stride", "size")},
            },
            constants={"ACTIVATION": activation, "BLOCK": swiglu.BLOCK},
            num_warps=swiglu.NUM_WARPS,
        )
        for dtype, activation in cases
    ]


def of_product() -> list[Specimen]:
    cases = [(tile, "bf16", False) for tile in TILES] + [(TILES[0], "fp16", True), (TILES[0], "fp32", False)]
    return [_product_specimen(tile, dtype, has_bias) for tile, dtype, has_bias in cases]


def _product_specimen(tile: ProductTile, dtype: str, has_bias: bool) -> Specimen:
    types = dict.fromkeys(("states", "weight", "bias"), f"*{dtype}")
    types |= {"partials": "*fp32", "arrivals": "*i32", "output": f"*{dtype}", "num_tokens": "i32", "num_splits": "i32"}
    types |= dict.fromkeys(("states_stride", "num_rows", "depth"), "i32:16")
    constants = {"TOKENS": MOST_TOKENS, "ROWS": tile.rows, "DEPTH": tile.depth, "HAS_BIAS": has_bias}
    name = f"few_token_product {tile.rows} x {tile.depth} {dtype}"
    return Specimen(name, product._few_token_product, types, constants, tile.num_warps, tile.num_stages)
