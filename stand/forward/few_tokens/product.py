"""Linear layers on a CPU for the few tokens of a speculative step.

Weights are most of what such a step reads, and memory hands them over at full speed only to who asks in time. Here each
row of weights is asked for while the rows before it are multiplied with all tokens.
"""

from __future__ import annotations

import platform

import torch

from stand.forward.few_tokens.dot_products import HAS_PAIRS, HAS_TILES, IS_INTEL, multiply
from stand.laws.filters import VECTORS
from stand.simd.threads import parallel_region

WIDEST = len(VECTORS) - 1
NUMBERS = {torch.float32: 0}  # as `dot_products.multiply` takes them
if WIDEST > 0:  # Intel's multiply pairs at half the rate of others, so that widened numbers take less time
    NUMBERS[torch.bfloat16] = 3 if HAS_TILES else 2 if HAS_PAIRS and not IS_INTEL else 1
INSTRUCTION_SET = "amx" if HAS_TILES else VECTORS[-1]  # the widest in use
DTYPES = tuple(NUMBERS)
DTYPE_NAMES = " or ".join(str(dtype).removeprefix("torch.") for dtype in DTYPES)
ORDINARY = (torch.Tensor, torch.nn.Parameter)  # a tensor of another class, quantised or sharded, has other bytes
IS_FASTER = WIDEST > 0 and platform.machine() in ("x86_64", "AMD64")  # AVX2 at least; on ARM nothing was measured


def few_token_product(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """x [..., K] @ weight [N, K]^T + bias [N] -> [..., N], as `torch.nn.functional.linear`; made for few tokens.

    All are contiguous tensors on a CPU, of one of DTYPES (bfloat16 needs AVX2), K >= 1; gradients are not kept. The
    result of a token has the same bits whatever other tokens `x` holds and with any number of threads: a product is 16
    sums in float32, each of every 16th term in order, rounded once per term (twice on x86-64 without FMA), then the
    sums of its halves, and last the bias; in bfloat16 the result is rounded once more, at the end. A matrix unit (AMX)
    adds up bfloat16 as dots/matrix_unit.h says.

    Uses torch's threads where torch has GNU's OpenMP, else the calling one. Raises ValueError for other tensors.
    """
    fits = x.dtype is weight.dtype and 1 <= x.dim() and weight.shape[1:] == x.shape[-1:]
    if not (are_weights(weight, bias) and is_plain(x) and fits):
        raise ValueError(_refusal(x, weight, bias))
    return FewTokenProduct(weight, bias)(x)


class FewTokenProduct:
    """`few_token_product` with one weight and bias, which `are_weights`: they are looked at once.

    Weight and bias are held as tensors, not as addresses: if a parameter gets other data, that is read, as long as
    `reads` holds.
    """

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None):
        self.weight, self.bias = weight, bias
        self.num_rows, self.depth = weight.shape

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """[..., K], which `is_plain` and of the weight's dtype -> [..., N]."""
        return few_token_products((self,), x)[0]

    def reads(self, weight: torch.Tensor, bias: torch.Tensor | None) -> bool:
        """Whether these are its operands, and still as they were."""
        is_same = weight is self.weight and bias is self.bias
        return is_same and weight.shape == (self.num_rows, self.depth) and are_weights(weight, bias)

    def operands(self) -> tuple[int, int, int]:
        """As `dot_products.multiply` takes them."""
        return self.weight.data_ptr(), 0 if self.bias is None else self.bias.data_ptr(), self.num_rows


def few_token_products(products: tuple[FewTokenProduct, ...], x: torch.Tensor) -> list[torch.Tensor]:
    """x [..., K], which `is_plain`, with up to four products of that depth and dtype -> [..., N] each.

    The same bits as one by one, in less time: threads start and wait once.
    """
    depth = products[0].depth
    results = [x.new_empty((*x.shape[:-1], product.num_rows)) for product in products]
    multiply(
        x.data_ptr(),
        tuple([product.operands() for product in products]),
        tuple([result.data_ptr() for result in results]),
        x.numel() // depth,
        depth,
        NUMBERS[x.dtype],
        WIDEST,
        torch.get_num_threads(),
        parallel_region(),
    )
    return results


def is_plain(tensor: torch.Tensor) -> bool:
    """Whether compiled code can read it, and no gradient is asked of it."""
    is_readable = tensor.dtype in DTYPES and tensor.is_contiguous() and tensor.is_cpu and type(tensor) in ORDINARY
    return is_readable and not (tensor.requires_grad and torch.is_grad_enabled())


def are_weights(weight: torch.Tensor, bias: torch.Tensor | None = None) -> bool:
    """Whether `few_token_product` takes them."""
    if weight.dim() != 2 or weight.shape[1] < 1 or not is_plain(weight):
        return False
    return bias is None or (is_plain(bias) and bias.shape == weight.shape[:1] and bias.dtype is weight.dtype)


def described(tensor: torch.Tensor) -> str:
    """What a refusal says of a tensor."""
    return (
        f"{tensor.dtype} {list(tensor.shape)} on {tensor.device}"
        + ("" if type(tensor) in ORDINARY else f" of class {type(tensor).__name__}")
        + (" with gradients" if torch.is_grad_enabled() and tensor.requires_grad else "")
    )


def _refusal(*tensors: torch.Tensor | None) -> str:
    got = ", ".join(
        f"{name} {described(tensor)}" + ("" if tensor.is_contiguous() else " not contiguous")
        for name, tensor in zip(("x", "weight", "bias"), tensors, strict=True)
        if tensor is not None
    )
    return (
        f"x [..., K], weight [N, K] and bias [N] must be contiguous tensors, all of {DTYPE_NAMES}, on a CPU, "
        f"without gradients, K >= 1, got {got}; call torch.nn.functional.linear"
    )
