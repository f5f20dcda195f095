"""Which experts a token takes, and their shares, from the logits of a router: scores and top k in one launch.

Scores are a softmax, or sigmoids with a bias that only the choice sees (DeepSeek-V3, arXiv 2412.19437, section 2.1.2).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from stand.gpu.kernels.launch import FLOATS, launch_device
from stand.gpu.kernels.swiglu import sigmoid
from stand.gpu.kernels.verification.top_tokens import NOTHING, sort_keys, token_of, value_of
from stand.gpu.tuning.expert_tiles import MOST_CHOSEN

MOST_EXPERTS = 4096  # a token's logits lie in the registers of one warp up to 1,024, of four beyond


@triton.jit
def _keys(values, ids, inside):
    """A NaN, whatever its sign, has the largest key."""
    return tl.where(inside, sort_keys(tl.where(values != values, float("nan"), values), ids), NOTHING)


@triton.jit
def _largest(keys, COUNT: tl.constexpr, BLOCK_K: tl.constexpr):
    """[BLOCK_K]: the COUNT largest of keys [BLOCK], which are distinct, in descending order."""
    places = tl.arange(0, BLOCK_K)
    best = tl.full([BLOCK_K], NOTHING, tl.int64)
    for place in range(0, COUNT):
        key = tl.max(keys, axis=0)
        best = tl.where(places == place, key, best)
        keys = tl.where(keys == key, NOTHING, keys)
    return best


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
    best = _largest(_keys(values, ids, inside), CHOSEN, BLOCK_K)
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


@triton.jit
def _best_groups(keys, groups, num_groups, CHOSEN_GROUPS: tl.constexpr):
    """[GROUPS]: which are chosen, for keys [GROUPS, SIZE]. A group ranks by the sum of its two largest values."""
    first = tl.max(keys, axis=1)
    second = tl.max(tl.where(keys == first[:, None], NOTHING, keys), axis=1)
    ranks = _keys(value_of(first) + value_of(second), groups, groups < num_groups)
    least = tl.max(ranks, axis=0)
    for _ in range(1, CHOSEN_GROUPS):
        least = tl.max(tl.where(ranks < least, ranks, NOTHING), axis=0)
    return ranks >= least


@triton.jit
def _sigmoid_route(
    logits, bias, shares, experts, num_groups, group_size, row_stride, scale,
    CHOSEN: tl.constexpr, CHOSEN_GROUPS: tl.constexpr, RENORMALISES: tl.constexpr,
    GROUPS: tl.constexpr, SIZE: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Program (token): a block [GROUPS, SIZE] of scores, a group a row; GROUPS is 1 where all groups may be chosen."""
    row = logits + tl.program_id(0).to(tl.int64) * row_stride
    groups, members, places = tl.arange(0, GROUPS), tl.arange(0, SIZE), tl.arange(0, BLOCK_K)
    ids = groups[:, None] * group_size + members[None, :]
    inside = (groups < num_groups)[:, None] & (members < group_size)[None, :]
    scores = sigmoid(tl.load(row + ids, mask=inside, other=0.0).to(tl.float32))
    keys = _keys(scores + tl.load(bias + ids, mask=inside, other=0.0).to(tl.float32), ids, inside)
    if GROUPS > 1:
        keys = tl.where(_best_groups(keys, groups, num_groups, CHOSEN_GROUPS)[:, None], keys, NOTHING)
    chosen = token_of(_largest(tl.reshape(keys, [GROUPS * SIZE]), CHOSEN, BLOCK_K))
    is_chosen = places < CHOSEN
    parts = sigmoid(tl.load(row + chosen, mask=is_chosen, other=0.0).to(tl.float32))  # without the bias
    if RENORMALISES:
        parts = parts / (tl.sum(tl.where(is_chosen, parts, 0.0), axis=0) + 1e-20)
    cells = tl.program_id(0).to(tl.int64) * CHOSEN + places
    tl.store(shares + cells, (parts * scale).to(shares.dtype.element_ty), mask=is_chosen)
    tl.store(experts + cells, chosen.to(tl.int64), mask=is_chosen)


@torch.library.custom_op("stand::softmax_route", mutates_args=())
def softmax_route(
    logits: torch.Tensor, chosen: int, renormalises: bool, has_float32_shares: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """(shares [M, k] in the logits' dtype or in float32, experts [M, k] int64), the largest first, for logits [M, E].

    The k = `chosen` largest logits; of equal ones the lowest ids come first. A share is the expert's part of a softmax
    over all E, or, where `renormalises`, over the chosen ones: that is what is left of the former when it is divided by
    the sum of the chosen (Qwen3, Mixtral), and what gpt-oss takes at once. Computed in float32, rounded once. The
    experts are in 0 ... E - 1 and distinct whatever the logits are; with NaN among them shares are NaN. Raises
    ValueError for other tensors.
    """
    _check(logits, chosen)
    (num_tokens, num_experts), (shares, experts) = logits.shape, _outputs(logits, chosen, has_float32_shares)
    block = triton.next_power_of_2(num_experts)
    with launch_device(_softmax_route, logits):
        _softmax_route[(num_tokens,)](
            logits, shares, experts, num_experts, logits.stride(0),
            CHOSEN=chosen, RENORMALISES=renormalises, BLOCK=block, BLOCK_K=triton.next_power_of_2(chosen),
            num_warps=num_warps(block),
        )  # fmt: skip
    return shares, experts


@softmax_route.register_fake
def _(logits, chosen, renormalises, has_float32_shares=False):
    _check(logits, chosen)
    return _outputs(logits, chosen, has_float32_shares)


@torch.library.custom_op("stand::sigmoid_route", mutates_args=())
def sigmoid_route(
    logits: torch.Tensor, bias: torch.Tensor,
    chosen: int, groups: int, chosen_groups: int, renormalises: bool, scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """(shares [M, k] in the logits' dtype, experts [M, k] int64) for logits [M, E] and bias [E], the best first.

    A score is the sigmoid of a logit; the k = `chosen` largest sums of score and bias are chosen, of equal ones the
    lowest ids. The E experts are `groups` groups of equal size, one behind the other: only experts of the
    `chosen_groups` groups are chosen whose two largest sums add up to the most. A share is the expert's score, where
    `renormalises` divided by (the sum of the chosen + 1e-20), times `scale`. Computed in float32, rounded once. The
    experts are in 0 ... E - 1 and distinct whatever the logits are. Raises ValueError for other tensors and numbers.
    """
    _check(logits, chosen)
    _check_groups(logits, bias, chosen, groups, chosen_groups)
    (num_tokens, num_experts), (shares, experts) = logits.shape, _outputs(logits, chosen)
    if chosen_groups == groups:
        groups = 1
    group_size = num_experts // groups
    num_rows, size = triton.next_power_of_2(groups), triton.next_power_of_2(group_size)
    with launch_device(_sigmoid_route, logits):
        _sigmoid_route[(num_tokens,)](
            logits, bias, shares, experts, groups, group_size, logits.stride(0), scale,
            CHOSEN=chosen, CHOSEN_GROUPS=chosen_groups, RENORMALISES=renormalises,
            GROUPS=num_rows, SIZE=size, BLOCK_K=triton.next_power_of_2(chosen), num_warps=num_warps(num_rows * size),
        )  # fmt: skip
    return shares, experts


@sigmoid_route.register_fake
def _(logits, bias, chosen, groups, chosen_groups, renormalises, scale):
    _check(logits, chosen)
    _check_groups(logits, bias, chosen, groups, chosen_groups)
    return _outputs(logits, chosen)


def num_warps(block: int) -> int:
    """One, so that maxima need no barriers, as long as its threads can hold the logits."""
    return 1 if block <= 1024 else 4


def _outputs(logits: torch.Tensor, chosen: int, has_float32_shares: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
    shape, dtype = (len(logits), chosen), torch.float32 if has_float32_shares else logits.dtype
    return logits.new_empty(shape, dtype=dtype), logits.new_empty(shape, dtype=torch.int64)


def _check(logits: torch.Tensor, chosen: int) -> None:
    is_known = logits.dim() == 2 and logits.dtype in FLOATS and logits.stride(1) == 1
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


def _check_groups(logits: torch.Tensor, bias: torch.Tensor, chosen: int, groups: int, chosen_groups: int) -> None:
    num_experts = logits.shape[1]
    if bias.shape != (num_experts,) or bias.dtype not in FLOATS or not bias.is_contiguous():
        raise ValueError(
            f"bias must be [{num_experts}] in float32, bfloat16 or float16, contiguous, got {list(bias.shape)} in "
            f"{bias.dtype}; use the module's own forward"
        )
    if groups < 1 or num_experts % groups or (groups > 1 and num_experts < 2 * groups):
        raise ValueError(
            f"groups must divide {num_experts} experts into equal ones of two or more, got {groups}; use the module's "
            "own forward"
        )
    if not 1 <= chosen_groups <= groups or chosen > chosen_groups * (num_experts // groups):
        raise ValueError(
            f"chosen groups must be in [1, {groups}] and have {chosen} experts at {num_experts // groups} each, got "
            f"{chosen_groups}; use the module's own forward"
        )
