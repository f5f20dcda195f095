"""Which experts a token takes, and their shares, from the logits of a router: softmax and top k in one launch."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from stand.gpu.expert_tiles import MOST_CHOSEN
from stand.gpu.kernels.launch import launch_device
from stand.gpu.kernels.top_tokens import NOTHING, sort_keys, token_of, value_of

MOST_EXPERTS = 4096  # a token's logits lie in the registers of one warp up to 1,024, of four beyond
DTYPES = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}


@triton.jit
def _softmax_route(
    logits, shares, experts, num_experts, row_stride,
    CHOSEN: tl.constexpr, RENORMALISES: tl.constexpr, BLOCK: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Program (token): one repeated maximum for each expert that it takes."""
    token = tl.program_id(0).to(tl.int64)
    ids, places = tl.arange(0, BLOCK), tl.arange(0, BLOCK_K)
    inside = ids < num_experts
    values = tl.load(logits + token * row_stride + ids, mask=inside, other=float("-inf")).to(tl.float32)
    values = tl.where(values != values, float("nan"), values)  # one without a sign: the largest key
    keys = tl.where(inside, sort_keys(values, ids), NOTHING)
    best = tl.full([BLOCK_K], NOTHING, tl.int64)
    for place in range(0, CHOSEN):
        key = tl.max(keys, axis=0)
        best = tl.where(places == place, key, best)
        keys = tl.where(keys == key, NOTHING, keys)
    is_chosen = places < CHOSEN
    chosen = tl.where(is_chosen, value_of(best), float("-inf"))
    largest = tl.max(chosen, axis=0)
    powers = tl.exp(chosen - largest)
    if RENORMALISES:
        total = tl.sum(powers, axis=0)
    else:
        total = tl.sum(tl.exp(values - largest), axis=0)
    cells = token * CHOSEN + places
    tl.store(shares + cells, (powers / total).to(shares.dtype.element_ty), mask=is_chosen)
    tl.store(experts + cells, token_of(best).to(tl.int64), mask=is_chosen)


@torch.library.custom_op("stand::softmax_route", mutates_args=())
def softmax_route(logits: torch.Tensor, chosen: int, renormalises: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """(shares [M, k] in the logits' dtype, experts [M, k] int64), the largest first, for logits [M, E].

    The k = `chosen` largest logits; of equal ones the lowest ids come first. A share is the expert's part of a softmax
    over all E, or, where `renormalises`, over the chosen ones: that is what is left of the former when it is divided by
    the sum of the chosen (Qwen3, Mixtral), and what gpt-oss takes at once. Computed in float32, rounded once. The
    experts are in 0 ... E - 1 and distinct whatever the logits are; with NaN among them shares are NaN. Raises
    ValueError for other tensors.
    """
    _check(logits, chosen)
    (num_tokens, num_experts), (shares, experts) = logits.shape, _outputs(logits, chosen)
    block = triton.next_power_of_2(num_experts)
    with launch_device(_softmax_route, logits):
        _softmax_route[(num_tokens,)](
            logits, shares, experts, num_experts, logits.stride(0),
            CHOSEN=chosen, RENORMALISES=renormalises, BLOCK=block, BLOCK_K=triton.next_power_of_2(chosen),
            num_warps=num_warps(block),
        )  # fmt: skip
    return shares, experts


@softmax_route.register_fake
def _(logits: torch.Tensor, chosen: int, renormalises: bool) -> tuple[torch.Tensor, torch.Tensor]:
    _check(logits, chosen)
    return _outputs(logits, chosen)


def num_warps(block: int) -> int:
    """One, so that maxima need no barriers, as long as its threads can hold the logits."""
    return 1 if block <= 1024 else 4


def _outputs(logits: torch.Tensor, chosen: int) -> tuple[torch.Tensor, torch.Tensor]:
    shape = len(logits), chosen
    return logits.new_empty(shape), logits.new_empty(shape, dtype=torch.int64)


def _check(logits: torch.Tensor, chosen: int) -> None:
    is_known = logits.dim() == 2 and logits.dtype in DTYPES and logits.stride(1) == 1
    if not is_known or not 1 <= logits.shape[1] <= MOST_EXPERTS:
        raise ValueError(
            f"logits must be [M, 1 to {MOST_EXPERTS}] in float32, bfloat16 or float16 with contiguous rows, got "
            f"{list(logits.shape)} in {logits.dtype}; use the module's own forward"
        )
    if not 1 <= chosen <= min(MOST_CHOSEN, logits.shape[1]):
        raise ValueError(
            f"experts of a token must be in [1, {min(MOST_CHOSEN, logits.shape[1])}] for {logits.shape[1]} experts, "
            f"got {chosen}; use the module's own forward"
        )
