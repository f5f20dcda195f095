"""Products of a few tokens: right to their dtype's rounding, and the same bits for a token in any company."""

import subprocess
import sys

import numpy as np
import pytest
import torch

from stand.forward.few_tokens.dot_products import HAS_PAIRS, HAS_TILES, multiply
from stand.forward.few_tokens.product import (
    NUMBERS,
    WIDEST,
    FewTokenProduct,
    few_token_product,
    few_token_products,
)
from stand.laws.filters import VECTORS
from stand.simd.threads import parallel_region

WITH_FMA = [place for place, name in enumerate(VECTORS) if name != "portable"]
LEVELS, REGION = range(len(VECTORS)), parallel_region()
DEPTHS = (1, 7, 16, 63, 576, 2100)  # the last one is multiplied in blocks of terms
COMPANIES = (*range(2, 34), 67, 140)  # tokens, in one chunk to eight
FLOATS, NARROW, PAIRS, TILES = range(4)  # what `multiply` calls the numbers
# Ways to multiply bfloat16: by the instruction set, number by number or in pairs, and by a matrix unit.
NARROW_WAYS = [(NARROW, level) for level in WITH_FMA] + ([(PAIRS, WIDEST)] if HAS_PAIRS else [])
NARROW_WAYS += [(TILES, WIDEST)] if HAS_TILES else []
needs_narrow = pytest.mark.skipif(not NARROW_WAYS, reason="needs AVX2")


def factors(num_tokens: int, num_rows: int, depth: int, *, has_bias: bool = True):
    generator = torch.Generator().manual_seed(num_tokens * num_rows + depth)
    sizes = [(num_tokens, depth), (num_rows, depth), *([(num_rows,)] if has_bias else [])]
    drawn = [torch.randn(size, generator=generator) for size in sizes]
    return drawn if has_bias else [*drawn, None]


def narrow(*parts):
    """The same in bfloat16."""
    return [None if part is None else part.bfloat16() for part in parts]


def compiled(x, weight, bias=None, *, numbers=FLOATS, level=WIDEST, threads=1, region=REGION) -> torch.Tensor:
    """The compiled product by one instruction set and number of threads; places that it leaves out stay NaN."""
    results = torch.full((len(x), len(weight) + 1), float("nan"), dtype=x.dtype).flatten()
    operands = weight.data_ptr(), 0 if bias is None else bias.data_ptr(), len(weight)
    sizes = len(x), weight.shape[1], numbers
    multiply(x.data_ptr(), (operands,), (results.data_ptr(),), *sizes, level, threads, region)
    assert results[len(x) * len(weight) :].isnan().all(), "written beyond the end"
    return results[: len(x) * len(weight)].view(len(x), len(weight))


def assert_close(found, x, weight, bias, numbers=FLOATS) -> None:
    """Each product within the rounding of 16 sums of K / 16 terms, their sum and the bias, and of its dtype. A matrix
    unit has K / 32 sums, each of two of 16 terms."""
    terms = x.double().abs() @ weight.double().abs().T
    exact = x.double() @ weight.double().T
    if bias is not None:
        exact, terms = exact + bias.double(), terms + bias.double().abs()
    depth = weight.shape[1]
    roundings = depth / 32 + 1 + 17 if numbers == TILES else 2 * (depth / 16 + 1) + 5
    last = 2**-8 * exact.abs() if found.dtype is torch.bfloat16 else 0.0
    assert ((found.double() - exact).abs() <= 1.01 * roundings * 2**-24 * terms + 1.01 * last).all()


@pytest.mark.parametrize("level", LEVELS, ids=VECTORS)
@pytest.mark.parametrize("num_rows", (1, 3, 4, 192))
@pytest.mark.parametrize("depth", DEPTHS)
def test_equals_the_exact_product(depth, num_rows, level):
    for num_tokens in range(1, 34):
        x, weight, bias = factors(num_tokens, num_rows, depth, has_bias=num_tokens % 2 == 0)
        assert_close(compiled(x, weight, bias, level=level), x, weight, bias)


@needs_narrow
@pytest.mark.parametrize(("numbers", "level"), NARROW_WAYS)
@pytest.mark.parametrize("num_rows", (1, 3, 4, 192))
@pytest.mark.parametrize("depth", DEPTHS)
def test_equals_the_exact_product_in_bfloat16(depth, num_rows, numbers, level):
    for num_tokens in range(1, 34):
        x, weight, bias = narrow(*factors(num_tokens, num_rows, depth, has_bias=num_tokens % 2 == 0))
        assert_close(compiled(x, weight, bias, numbers=numbers, level=level), x, weight, bias, numbers)


@pytest.mark.parametrize("numbers", (FLOATS, *{numbers for numbers, _ in NARROW_WAYS}))
@pytest.mark.parametrize("depth", DEPTHS)
def test_a_term_that_is_left_out_is_seen(depth, numbers):
    x, weight, bias = factors(3, 5, depth)
    x[1, -1] = 30.0  # so that bfloat16 shows it
    if numbers != FLOATS:
        x, weight, bias = narrow(x, weight, bias)
    fewer = x.clone()
    fewer[1, -1] = 0.0
    with pytest.raises(AssertionError):
        assert_close(compiled(fewer, weight, bias, numbers=numbers), x, weight, bias, numbers)


@pytest.mark.parametrize("level", LEVELS, ids=VECTORS)
@pytest.mark.parametrize("depth", DEPTHS)
def test_a_token_has_the_same_bits_in_any_company(depth, level):
    x, weight, bias = factors(max(COMPANIES), 195, depth)
    alone = torch.cat([compiled(token[None], weight, bias, level=level) for token in x])
    for num_tokens in COMPANIES:
        together = compiled(x[:num_tokens], weight, bias, level=level)
        assert torch.equal(together, alone[:num_tokens]), num_tokens
    moved = compiled(x.flip(0).contiguous(), weight, bias, level=level)
    assert torch.equal(moved.flip(0), alone)


@needs_narrow
@pytest.mark.parametrize(("numbers", "level"), NARROW_WAYS)
@pytest.mark.parametrize("depth", DEPTHS)
def test_a_token_has_the_same_bits_in_any_company_in_bfloat16(depth, numbers, level):
    x, weight, bias = narrow(*factors(max(COMPANIES), 195, depth))
    way = {"numbers": numbers, "level": level}
    alone = torch.cat([compiled(token[None], weight, bias, **way) for token in x])
    for num_tokens in COMPANIES:
        assert torch.equal(compiled(x[:num_tokens], weight, bias, **way), alone[:num_tokens]), num_tokens
    if REGION:
        assert torch.equal(compiled(x, weight, bias, threads=2, **way), alone)


def sums_of_a_matrix_unit(x, weight, bias) -> torch.Tensor:
    """Its order of terms, in numpy's float32. A product of two bfloat16 is exact there."""
    rest = -weight.shape[1] % 32
    x, weight = (np.pad(part.float().numpy(), ((0, 0), (0, rest))) for part in (x, weight))
    terms = (x[:, None] * weight[None]).reshape(len(x), len(weight), -1, 16, 2)
    totals = np.zeros(terms.shape[:2], np.float32)
    for step in range(terms.shape[2]):
        halves = np.zeros((*totals.shape, 2), np.float32)
        for pair in range(16):
            halves += terms[:, :, step, pair]
        totals += halves[..., 0] + halves[..., 1]
    return torch.from_numpy(totals + bias.float().numpy()).bfloat16()


def with_what_cancels(x, weight):
    """A step of terms more, which takes away from x's one token the first 16 bits of its products: what is left is what
    rounding has done, and bfloat16 holds it."""
    exact = (x.double() @ weight.double().T)[0]
    first = exact.bfloat16()
    more = torch.zeros(len(weight), 32, dtype=torch.bfloat16)
    more[:, 0], more[:, 1] = -first, -(exact - first.double()).bfloat16()
    return torch.cat([x, torch.ones_like(more[:1])], dim=1), torch.cat([weight, more], dim=1)


@pytest.mark.skipif(not HAS_TILES, reason="needs AMX")
@pytest.mark.parametrize("depth", (32, 576, 2112))
def test_a_matrix_unit_adds_terms_in_the_order_that_its_page_says(depth):
    x, weight, _ = narrow(*factors(1, 500, depth))
    zeros = torch.zeros(500).bfloat16()
    expected = sums_of_a_matrix_unit(*with_what_cancels(x, weight), zeros)
    assert torch.equal(compiled(*with_what_cancels(x, weight), numbers=TILES), expected)
    turned = [part.flip(1).contiguous() for part in (x, weight)]
    assert not torch.equal(compiled(*with_what_cancels(*turned), numbers=TILES), expected)


@needs_narrow
def test_numbers_that_only_just_fit_are_rounded_to_even():
    """Halfway between two of bfloat16, a little beyond, and beyond the largest."""
    x = torch.tensor([[1.0, 2.0**-8, 0.0], [1.0, 3 * 2.0**-8, 0.0], [1.0, 2.0**-8, 2.0**-20], [3e38, 3e38, 0.0]])
    x, weight = narrow(x, torch.ones(1, 3))
    for numbers, level in NARROW_WAYS:
        found = compiled(x, weight, numbers=numbers, level=level)
        assert found[:, 0].tolist() == [1.0, 1.0 + 2.0**-6, 1.0 + 2.0**-7, float("inf")]


@needs_narrow
def test_infinities_and_nan_stay_with_their_rows_in_bfloat16():
    x, weight, bias = narrow(*factors(3, 9, 70))
    weight[4, 69], x[1, 3] = float("inf"), float("nan")
    for numbers, level in NARROW_WAYS:
        found = compiled(x, weight, bias, numbers=numbers, level=level)
        assert found[1].isnan().all() and found[0, 4].isinf() and found[2, [0, 1, 2, 3, 5, 6, 7, 8]].isfinite().all()


def test_a_row_has_the_same_bits_among_any_rows():
    x, weight, _ = factors(6, 195, 577)
    whole = compiled(x, weight)
    assert torch.equal(compiled(x, weight[2:].contiguous()), whole[:, 2:])
    assert torch.equal(compiled(x, weight[:1]), whole[:, :1])


def test_another_order_of_terms_has_other_bits():
    x, weight, _ = factors(4, 192, 576)
    assert not torch.equal(compiled(x.flip(1).contiguous(), weight.flip(1).contiguous()), compiled(x, weight))


@pytest.mark.skipif(len(WITH_FMA) < 2, reason="needs two instruction sets with FMA")
@pytest.mark.parametrize("depth", DEPTHS)
def test_instruction_sets_with_fma_have_equal_bits(depth):
    x, weight, bias = factors(7, 66, depth)
    first, *others = [compiled(x, weight, bias, level=level) for level in WITH_FMA]
    assert all(torch.equal(other, first) for other in others)


@pytest.mark.skipif(REGION == 0, reason="needs GNU's OpenMP")
@pytest.mark.parametrize(("num_rows", "depth"), [(576, 576), (4097, 63), (33, 8000)])
def test_threads_have_equal_bits(num_rows, depth):
    x, weight, bias = factors(5, num_rows, depth)
    alone = compiled(x, weight, bias)
    assert all(torch.equal(compiled(x, weight, bias, threads=threads), alone) for threads in (2, 3, 8))


def test_without_an_openmp_the_calling_thread_does_it_all():
    x, weight, bias = factors(5, 576, 576)
    assert torch.equal(compiled(x, weight, bias, threads=2, region=0), compiled(x, weight, bias))


@pytest.mark.skipif(REGION == 0, reason="needs GNU's OpenMP")
def test_torch_and_the_product_share_one_pool():
    """A pool of its own would be seen as threads beside those that torch has started."""
    code = """
import os, torch
torch.set_num_threads(2)
x, weight = torch.randn(4, 1024), torch.randn(4096, 1024)
torch.nn.functional.linear(x, weight)
before = len(os.listdir("/proc/self/task"))
from stand.forward.few_tokens.product import few_token_product
few_token_product(x, weight)
print(before, len(os.listdir("/proc/self/task")))
"""
    printed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    before, after = printed.split()
    assert int(before) >= 2 and after == before


def test_infinities_and_nan_stay_with_their_rows():
    x, weight, bias = factors(3, 9, 70)
    expected = compiled(x, weight, bias)
    weight[4, 69], x[1, 3] = float("inf"), float("nan")
    found = compiled(x, weight, bias)
    assert found[1].isnan().all() and found[0, 4].isinf() and found[2, 4].isinf()
    kept = [0, 1, 2, 3, 5, 6, 7, 8]
    assert torch.equal(found[0, kept], expected[0, kept])


def test_takes_what_a_linear_layer_takes():
    x, weight, bias = factors(6, 20, 48)
    expected = torch.nn.functional.linear(x, weight, bias)
    for shape in ((6, 48), (2, 3, 48), (1, 6, 48)):
        found = few_token_product(x.view(shape), weight, bias)
        torch.testing.assert_close(found, expected.view(*shape[:-1], 20))
    assert few_token_product(x[0], weight).shape == (20,)
    assert few_token_product(x[:0], weight).shape == (0, 20)
    assert few_token_product(x, weight[:0]).shape == (6, 0)


@needs_narrow
def test_takes_a_layer_in_bfloat16():
    x, weight, bias = narrow(*factors(6, 20, 48))
    found = few_token_product(x.view(2, 3, 48), weight, bias)
    assert found.dtype is torch.bfloat16 and found.shape == (2, 3, 20)
    assert_close(found.view(6, 20), x, weight, bias, NUMBERS[torch.bfloat16])


class Sharded(torch.Tensor):
    """A tensor whose bytes compiled code must not take for its numbers."""


def test_the_result_lies_where_the_operands_do():
    x, weight, bias = factors(2, 3, 8)
    with torch.device("meta"):
        found = few_token_product(x, weight, bias)
    assert torch.equal(found, few_token_product(x, weight, bias))


def refused():
    x, weight, bias = factors(2, 3, 8)
    return {
        "float64": (x.double(), weight, bias),
        "weight torch.bfloat16": (x, weight.bfloat16(), bias),
        "bias torch.bfloat16": (x, weight, bias.bfloat16()),
        "float16": (x.half(), weight.half(), bias.half()),
        "weight torch.float32 [3, 7]": (x, weight[:, :7].contiguous(), bias),
        "not contiguous": (x, weight.T.contiguous().T, bias),
        "bias torch.float32 [1, 3]": (x, weight, bias[None]),
        "bias torch.float32 [2]": (x, weight, bias[:2]),
        "with gradients": (x, weight.clone().requires_grad_(), bias),
        "on meta": (x.to("meta"), weight, bias),
        "x torch.float32 [2, 8] on cpu of class Sharded": (x.as_subclass(Sharded), weight, bias),
        "weight torch.float32 [3, 8] on cpu of class Sharded": (x, weight.as_subclass(Sharded), bias),
        "bias torch.float32 [3] on cpu of class Sharded": (x, weight, bias.as_subclass(Sharded)),
        "K >= 1": (x[:, :0].contiguous(), weight[:, :0].contiguous(), bias),
    }


@pytest.mark.parametrize("got", refused())
def test_refuses_by_rule_got_and_remedy(got):
    arguments = refused()[got]
    with pytest.raises(ValueError, match="must be contiguous tensors, all of float32") as raised:
        few_token_product(*arguments)
    assert got in str(raised.value) and "torch.nn.functional.linear" in str(raised.value)


@pytest.mark.parametrize("threads", (1, 2, 3))
def test_several_at_once_are_each_alone(threads):
    """Sizes of no whole share, of fewer rows than a share, and of none."""
    x = torch.randn(5, 1040)
    operands = [factors(1, num_rows, 1040, has_bias=num_rows % 2 == 0)[1:] for num_rows in (192, 7, 0, 331)]
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(threads)
        found = few_token_products(tuple(FewTokenProduct(*each) for each in operands), x)
    finally:
        torch.set_num_threads(before)
    for output, (weight, bias) in zip(found, operands, strict=True):
        assert torch.equal(output, compiled(x, weight, bias))


def test_five_at_once_are_refused():
    x, weight, _ = factors(1, 4, 8)
    with pytest.raises(ValueError, match="got 5 and 5"):
        few_token_products((FewTokenProduct(weight, None),) * 5, x)


def test_none_at_once_are_refused():
    with pytest.raises(ValueError, match="one to 4 weights must have a result each, got 0 and 0; .*calls"):
        multiply(0, (), (), 1, 8, FLOATS, WIDEST, 1, REGION)


def test_gradients_are_fine_where_none_are_kept():
    x, weight, bias = factors(2, 3, 8)
    expected = few_token_product(x, weight, bias)
    with torch.no_grad():
        assert torch.equal(few_token_product(x, weight.requires_grad_(), bias), expected)
