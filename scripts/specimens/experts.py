"""Kernels of layers that mix experts, in the shapes of Qwen3-30B-A3B, gpt-oss-20b, Nemotron-3-Nano and others."""

from __future__ import annotations

from dataclasses import dataclass

import triton

from specimens.specimen import Specimen
from stand.fusion.formulas import CLAMPED, RELU_SQUARED, SILU
from stand.gpu.kernels import experts, pairs, route
from stand.gpu.kernels.proxy_fence import MUST_ADD_FENCES
from stand.gpu.tuning.expert_tiles import ExpertTile, expert_tile


@dataclass(frozen=True, slots=True)
class Layer:
    """As `mixed_experts` takes it; all sizes are multiples of 16."""

    name: str
    num_experts: int
    chosen: int
    activation: int
    is_transposed: bool  # and interleaved, with biases


QWEN = Layer("Qwen3-30B-A3B", 128, 8, SILU, False)
GPT_OSS = Layer("gpt-oss-20b", 32, 4, CLAMPED, True)
NEMOTRON = Layer("Nemotron-3-Nano", 128, 6, RELU_SQUARED, False)
CASES = [
    *((layer, num_tokens, "bf16") for layer in (QWEN, GPT_OSS) for num_tokens in (1, 16, 512)),
    (QWEN, 256, "bf16"),
    (QWEN, 1, "fp32"),
    (QWEN, 512, "fp32"),
    (GPT_OSS, 16, "fp16"),
    (NEMOTRON, 16, "bf16"),
]


def of_experts() -> list[Specimen]:
    specimens = [make(*case) for case in CASES for make in (_up, _down)]
    types = {"parts": "*bf16", "experts": "*i64", "output": "*bf16", "size": "i32:16", "num_experts": "i32:16"}
    total = {"CHOSEN": 8, "BLOCK": experts.BLOCK}
    return [*specimens, Specimen("sum_shares", experts._sum_shares, types, total)]


def of_pairs() -> list[Specimen]:
    types = {"experts": "*i64", "order": "*i32", "starts": "*i32", "num_pairs": "i32"}
    return [Specimen("sort_pairs", pairs._sort_pairs, types, {"BLOCK": pairs.BLOCK}, pairs.NUM_WARPS)]


def of_route() -> list[Specimen]:
    """Of each layer, and of as many experts as one warp serves."""
    cases = [(128, 8, "bf16", True), (32, 4, "bf16", True), (64, 6, "fp32", False), (1024, 32, "fp32", True)]
    types = {"experts": "*i64", "num_experts": "i32:16", "row_stride": "i32:16"}
    softmax = [
        Specimen(
            f"softmax_route {chosen} of {num_experts} {dtype}",
            route._softmax_route,
            types | {"logits": f"*{dtype}", "shares": f"*{dtype}"},
            {
                **{"CHOSEN": chosen, "RENORMALISES": renormalises, "BLOCK": num_experts},
                "BLOCK_K": triton.next_power_of_2(chosen),
            },
            route.num_warps(num_experts),
        )
        for num_experts, chosen, dtype, renormalises in cases
    ]
    return softmax + _of_sigmoid_route()


def _of_sigmoid_route() -> list[Specimen]:
    """Of DeepSeek-V3, GLM-4.7-Flash and Nemotron-3-Nano, and of as many experts in groups as one warp serves."""
    cases = [(8, 32, 4, 8), (1, 64, 1, 4), (1, 128, 1, 6), (16, 64, 8, 16)]
    types = dict.fromkeys(("logits", "bias", "shares"), "*fp32") | {"experts": "*i64", "scale": "fp32"}
    types |= {"group_size": "i32:16", "row_stride": "i32:16"}
    return [
        Specimen(
            f"sigmoid_route {chosen} of {groups} x {size}",
            route._sigmoid_route,
            types | ({} if groups == 1 else {"num_groups": "i32"}),
            {
                **({"num_groups": 1} if groups == 1 else {}),
                **{"CHOSEN": chosen, "CHOSEN_GROUPS": chosen_groups, "RENORMALISES": True},
                **{"GROUPS": groups, "SIZE": size, "BLOCK_K": triton.next_power_of_2(chosen)},
            },
            route.num_warps(groups * size),
        )
        for groups, size, chosen_groups, chosen in cases
    ]


def _up(layer: Layer, num_tokens: int, dtype: str) -> Specimen:
    pointers = {**dict.fromkeys(("states", "weight", "bias", "active"), f"*{dtype}"), "experts": "*i64"}
    pointers |= dict.fromkeys(("order", "starts", "arrivals"), "*i32")
    numbers = {"num_experts": "i32:16", "chosen": "i32", "size": "i32:16", "depth": "i32:16"}
    numbers |= {"num_arrivals": "i32", "alpha": "fp32", "limit": "fp32"}
    kind = {"ACTIVATION": layer.activation, "IS_INTERLEAVED": layer.is_transposed, "HAS_BIAS": layer.is_transposed}
    return _specimen("up", experts._up, pointers | numbers, kind, layer, num_tokens, dtype)


def _down(layer: Layer, num_tokens: int, dtype: str) -> Specimen:
    names = ("active", "shares", "weight", "bias", "parts", "output")
    pointers = {**dict.fromkeys(names, f"*{dtype}"), "experts": "*i64"}
    pointers |= dict.fromkeys(("order", "starts", "arrivals"), "*i32")
    numbers = {"num_experts": "i32:16", "size": "i32:16", "depth": "i32:16"}
    kind = {"CHOSEN": layer.chosen, "HAS_BIAS": layer.is_transposed}
    return _specimen("down", experts._down, pointers | numbers, kind, layer, num_tokens, dtype)


def _specimen(
    name: str, kernel: object, types: dict[str, str], kind: dict[str, object], layer: Layer, num_tokens: int, dtype: str
) -> Specimen:
    tile = expert_tile(
        num_tokens, layer.chosen, layer.num_experts, is_transposed=layer.is_transposed, is_float32=dtype == "fp32"
    )
    along, across = ("row_stride", "depth_stride") if layer.is_transposed else ("depth_stride", "row_stride")
    constants = kind | {along: 1} | _sizes(tile, layer, is_single=num_tokens == 1)
    full_name = f"{name} {layer.name} {num_tokens} tokens {dtype}"
    return Specimen(full_name, kernel, types | {across: "i32:16"}, constants, tile.num_warps, tile.num_stages)


def _sizes(tile: ExpertTile, layer: Layer, *, is_single: bool) -> dict[str, object]:
    sizes = {"TOKENS": tile.tokens, "ROWS": tile.rows, "DEPTH": tile.depth, "IS_SINGLE": is_single}
    return sizes | {"BLOCK_E": triton.next_power_of_2(layer.num_experts), "ADDS_FENCES": MUST_ADD_FENCES}
