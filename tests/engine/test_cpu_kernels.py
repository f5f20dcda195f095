"""Compiled norms, gates and rotary positions: right to float32's rounding, and the same bits in any company."""

import os
import subprocess
import sys

import pytest
import torch
from torch.nn.functional import gelu, silu

from stand.forward.few_tokens.product import DTYPES
from stand.fusion.cpu import kernels as cpu_kernels
from stand.fusion.cpu.kernels import add_rms_norm, gated_product, rms_norm, rope_and_store
from stand.fusion.formulas import GELU_ERF, GELU_TANH, NO_NORM, ONE_PLUS, ROUND_FIRST, RULES, SCALE_FIRST, SILU
from stand.laws.filters import VECTORS
from stand.simd.threads import parallel_region

LEVELS = range(len(VECTORS))
SIZES = (1, 3, 16, 17, 63, 576, 1001)
ACTIVATIONS = {SILU: silu, GELU_TANH: lambda x: gelu(x, approximate="tanh"), GELU_ERF: gelu}
EPSILON = 1e-5
ROOM = 6  # cache slots per row
needs_narrow = pytest.mark.skipif(torch.bfloat16 not in DTYPES, reason="needs AVX2")
SLOTS = torch.tensor([7, 0, -1, 17, 3])  # the third token is not written


@pytest.fixture(params=LEVELS, ids=VECTORS)
def level(request, monkeypatch) -> int:
    """The kernels by one instruction set, in one thread."""
    monkeypatch.setattr(cpu_kernels, "_ways", lambda: (request.param, 1, 0))
    return request.param


@pytest.fixture(params=LEVELS[1:], ids=VECTORS[1:])
def narrow_level(request, monkeypatch) -> int:
    """As `level`, of those that take bfloat16."""
    monkeypatch.setattr(cpu_kernels, "_ways", lambda: (request.param, 1, 0))
    return request.param


def drawn(*size: int) -> torch.Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(sum(size)))


def assert_near(got: torch.Tensor, exact: torch.Tensor, share: float = 1e-6) -> None:
    """Within a share of the largest value of the row."""
    assert got.shape == exact.shape and got.dtype == torch.float32 and got.is_contiguous()
    largest = exact.abs().amax(dim=-1, keepdim=True)
    assert ((got.double() - exact).abs() <= share * largest + 1e-30).all()


def exact_norm(states: torch.Tensor, weight: torch.Tensor, rule: int) -> torch.Tensor:
    states, weight = states.double(), weight.double()
    normal = states * torch.rsqrt(states.square().mean(-1, keepdim=True) + EPSILON)
    return normal * (1 + weight) if rule == ONE_PLUS else normal * weight


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("size", SIZES)
def test_norms_equal_the_exact_ones(size, rule, level):
    weight = drawn(size)
    for scale in (1.0, 1e-3, 1e3):
        states, change = scale * drawn(2, 3, size), scale * drawn(3, 2, size).view(2, 3, size)
        assert_near(rms_norm(states, weight, EPSILON, rule), exact_norm(states, weight, rule))
        total, normed = add_rms_norm(states, change, weight, EPSILON, rule)
        assert torch.equal(total, states + change)
        assert torch.equal(normed, rms_norm(total, weight, EPSILON, rule))


def test_a_number_that_is_left_out_is_seen(level):
    states, weight = drawn(2, 17), drawn(17)
    changed = states.clone()
    changed[:, -1] = 0
    with pytest.raises(AssertionError):
        assert_near(rms_norm(changed, weight, EPSILON, 0), exact_norm(states, weight, 0))


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("size", SIZES)
def test_gates_equal_the_exact_ones(size, activation, level):
    gate, up = 4 * drawn(5, size), drawn(size, 5).view(5, size)
    exact = ACTIVATIONS[activation](gate.double()) * up.double()
    errors = (gated_product(gate, up, activation).double() - exact).abs()
    assert (errors <= 4 * 2**-24 * (gate * up).abs()).all()


def test_gates_far_from_zero(level):
    gate = torch.tensor([-1e30, -200.0, -88.0, -87.5, -86.5, -20.0, -1e-30, 0.0, 1e-30, 20.0, 88.0, 200.0, 1e30])
    for activation, reference in ACTIVATIONS.items():
        found, expected = gated_product(gate, torch.ones_like(gate), activation), reference(gate.double())
        assert found.isfinite().all()
        assert ((found.double() - expected).abs() <= 4 * 2**-24 * gate.abs().double().clamp(max=1e30)).all()
        edges = torch.tensor([float("nan"), float("inf")])
        found = gated_product(edges, torch.ones(2), activation)
        assert found[0].isnan() and found[1] == float("inf")


def test_the_exponential_has_few_units_in_the_last_place(level):
    """silu(x) / x = e^x / (1 + e^x), whose relative error for x < 0 is that of e^x, a sum and a quotient."""
    gate = -torch.linspace(0.01, 86.9, 40001)
    share = gated_product(gate, torch.ones_like(gate), SILU).double() / gate.double()
    errors = (share / torch.sigmoid(gate.double()) - 1).abs()
    assert errors.max() <= 4 * 2**-23


def exact_turn(heads: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, rotary: int) -> torch.Tensor:
    heads, (cos, sin) = heads.double(), (table.double()[:, None] for table in (cos, sin))
    if rotary == 0:
        return heads
    half = rotary // 2
    first, second, rest = heads[..., :half], heads[..., half:rotary], heads[..., rotary:]
    twice = cos.shape[-1] == rotary
    cos_second, sin_second = (cos[..., half:], sin[..., half:]) if twice else (cos, sin)
    turned = [first * cos[..., :half] - second * sin[..., :half], second * cos_second + first * sin_second]
    return torch.cat([*turned, rest], dim=-1)


def heads_case(size: int, rotary: int, *, width: int, is_sliced: bool = False):
    """query, key, value, cos, sin, keys, values of 5 tokens, 3 heads and 2 key heads; a cache of 3 rows."""
    if is_sliced:
        query, key, value = drawn(5, 7 * size).split([3 * size, 2 * size, 2 * size], dim=1)
    else:
        query, key, value = drawn(5, 3 * size), drawn(6, 2 * size)[:5], drawn(7, 2 * size)[:5]
    parts = [part.unflatten(1, (-1, size)) for part in (query, key, value)]
    cache = torch.full((2, 3, 2, ROOM, size), 7.0)
    return *parts, drawn(5, width), drawn(6, width)[:5], *cache


@pytest.mark.parametrize("is_sliced", [False, True])
@pytest.mark.parametrize("rule", (NO_NORM, *RULES))
@pytest.mark.parametrize("size, rotary", [(2, 2), (8, 8), (16, 16), (64, 64), (96, 72), (80, 20), (128, 0), (257, 256)])
def test_heads_turn_and_go_to_their_slots(size, rotary, rule, is_sliced, level):
    for width in {rotary, rotary // 2} if rotary else {8}:
        query, key, value, cos, sin, keys, values = heads_case(size, rotary, width=width, is_sliced=is_sliced)
        weights = (None, None) if rule == NO_NORM else (drawn(size), 2 * drawn(size))
        found = rope_and_store(query, key, value, cos, sin, keys, values, SLOTS, rotary, *weights, EPSILON, rule)
        expected = [query, key]
        if rule != NO_NORM:
            expected = [exact_norm(part, weight, rule) for part, weight in zip(expected, weights, strict=True)]
        query, key = (exact_turn(part, cos, sin, rotary) for part in expected)
        assert_near(found, query)
        for token, slot in enumerate(SLOTS.tolist()):
            if slot >= 0:
                assert_near(keys[slot // ROOM, :, slot % ROOM].contiguous(), key[token])
                assert torch.equal(values[slot // ROOM, :, slot % ROOM], value[token])
        for storage in (keys, values):
            places = storage.transpose(1, 2).flatten(0, 1)
            others = [slot for slot in range(3 * ROOM) if slot not in SLOTS]
            assert (places[others] == 7.0).all()


@pytest.mark.parametrize("rule", RULES)
def test_values_may_be_normed_too(rule):
    """They do not turn, and are slices of one product here."""
    query, key, value, cos, sin, keys, values = heads_case(16, 8, width=8, is_sliced=True)
    plain, weights = (keys.clone(), values.clone()), (drawn(16), 2 * drawn(16))
    given = (query, key, value, cos, sin)
    found = rope_and_store(*given, keys, values, SLOTS, 8, *weights, EPSILON, rule, 3 * drawn(16))
    assert torch.equal(found, rope_and_store(*given, *plain, SLOTS, 8, *weights, EPSILON, rule))
    assert torch.equal(keys, plain[0])
    expected = exact_norm(value, 3 * drawn(16), rule)
    for token, slot in enumerate(SLOTS.tolist()):
        if slot >= 0:
            assert_near(values[slot // ROOM, :, slot % ROOM].contiguous(), expected[token])


def test_a_cache_with_gaps_keeps_what_is_between():
    query, key, value, cos, sin, _, _ = heads_case(16, 16, width=16)
    whole = torch.full((2, 3, 2, ROOM, 20), 7.0)
    keys, values = whole[..., :16]
    rope_and_store(query, key, value, cos, sin, keys, values, SLOTS, 16, None, None, 0.0, NO_NORM)
    assert (whole[..., 16:] == 7.0).all() and torch.equal(values[1, :, 1], value[0])


def rounded_norm(states: torch.Tensor, weight: torch.Tensor, rule: int) -> torch.Tensor:
    """As the classes of transformers compute it, which round in different places."""
    wide, scales = states.float(), weight.float()
    normal = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + EPSILON)
    if rule == ROUND_FIRST:
        return weight * normal.to(states.dtype)
    return ((1 + scales) * normal if rule == ONE_PLUS else scales * normal).to(states.dtype)


def assert_alike(found: torch.Tensor, expected: torch.Tensor) -> None:
    """One in a hundred may be a neighbour, or the next one: sums in float32 have another order. The tails of gates,
    next to nothing, may be anything as small."""
    assert found.dtype is expected.dtype is torch.bfloat16 and found.shape == expected.shape
    apart = (found.contiguous().view(torch.int16).int() - expected.contiguous().view(torch.int16).int()).abs()
    apart[(found.abs() < 1e-5) & (expected.abs() < 1e-5)] = 0
    assert apart.max() <= 2 and (apart > 0).double().mean() <= 0.01


@needs_narrow
@pytest.mark.parametrize("size", SIZES)
def test_in_bfloat16_numbers_are_rounded_where_modules_round(size, narrow_level):
    states, change, weight = (drawn(*shape).bfloat16() for shape in ((40, size), (41, size), (size,)))
    for rule in RULES:
        assert_alike(rms_norm(states, weight, EPSILON, rule), rounded_norm(states, weight, rule))
        total, normed = add_rms_norm(states, change[:40], weight, EPSILON, rule)
        assert torch.equal(total, states + change[:40])
        assert torch.equal(normed, rms_norm(total, weight, EPSILON, rule))
    for activation, reference in ACTIVATIONS.items():
        active = reference((4 * states).double()).bfloat16()
        assert_alike(gated_product(4 * states, change[:40], activation), active * change[:40])


@needs_narrow
def test_another_place_to_round_is_seen():
    states, weight = drawn(40, 577).bfloat16(), drawn(577).bfloat16()
    with pytest.raises(AssertionError):
        assert_alike(rms_norm(states, weight, EPSILON, SCALE_FIRST), rounded_norm(states, weight, ROUND_FIRST))


@needs_narrow
@pytest.mark.parametrize("size, rotary", [(2, 2), (64, 64), (80, 20), (128, 0)])
def test_heads_turn_in_bfloat16(size, rotary, narrow_level):
    case = [part.bfloat16() for part in heads_case(size, rotary, width=rotary or 8)]
    query, key, value, cos, sin, keys, values = case
    found = rope_and_store(query, key, value, cos, sin, keys, values, SLOTS, rotary, None, None, 0.0, NO_NORM)
    expected = [turned_by_torch(part, cos, sin, rotary) for part in (query, key)]
    assert torch.equal(found, expected[0])
    for token, slot in enumerate(SLOTS.tolist()):
        if slot >= 0:
            assert torch.equal(keys[slot // ROOM, :, slot % ROOM], expected[1][token])
            assert torch.equal(values[slot // ROOM, :, slot % ROOM], value[token])


def turned_by_torch(heads: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, rotary: int) -> torch.Tensor:
    """x cos + rotate_half(x) sin, every operation rounded."""
    if rotary == 0:
        return heads
    turned, rest = heads[..., :rotary], heads[..., rotary:]
    first, second = turned.chunk(2, dim=-1)
    crossed = torch.cat([-second, first], dim=-1)
    return torch.cat([turned * cos[:, None] + crossed * sin[:, None], rest], dim=-1)


def everything(tokens: slice, dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    """What all kernels make of some of 40 tokens."""
    numbers = drawn(40, 576), drawn(41, 576)[:40], drawn(42, 576)[:40], drawn(576)
    states, change, up, weight = (part.to(dtype) for part in numbers)
    results = [*add_rms_norm(states[tokens], change[tokens], weight, EPSILON, ROUND_FIRST)]
    results += [gated_product(states[tokens], up[tokens], activation) for activation in ACTIVATIONS]
    query, key, value = (part[tokens].view(-1, 9, 64) for part in (states, change, up))
    cos, sin, slots = drawn(40, 64)[tokens].to(dtype), drawn(41, 64)[:40][tokens].to(dtype), torch.arange(40)[tokens]
    keys, values = torch.zeros(2, 4, 9, 10, 64, dtype=dtype)
    weights = (weight[:64], weight[64:128])
    query = rope_and_store(query, key, value, cos, sin, keys, values, slots, 64, *weights, EPSILON, SCALE_FIRST)
    written = keys.transpose(1, 2).flatten(0, 1)[slots]
    return [*results, query.flatten(1), written.flatten(1)]


def test_a_token_has_the_same_bits_in_any_company(level):
    for dtype in DTYPES if level > 0 else (torch.float32,):
        together = everything(slice(0, 40), dtype)
        for token in range(0, 40, 7):
            alone = everything(slice(token, token + 1), dtype)
            assert all(torch.equal(a, b[token : token + 1]) for a, b in zip(alone, together, strict=True))


@needs_narrow
def test_instruction_sets_and_threads_have_equal_bits_in_bfloat16(monkeypatch):
    found = []
    for ways in [(place, 1, 0) for place in LEVELS[1:]] + [(LEVELS[-1], 3, parallel_region())]:
        monkeypatch.setattr(cpu_kernels, "_ways", lambda ways=ways: ways)
        found.append(everything(slice(0, 40), torch.bfloat16))
    assert all(torch.equal(a, b) for other in found[1:] for a, b in zip(found[0], other, strict=True))


@pytest.mark.parametrize("other", [(place, 1, 0) for place in LEVELS] + [(len(VECTORS) - 1, 3, parallel_region())])
def test_instruction_sets_and_threads_have_equal_bits(other, monkeypatch):
    states, up, weight = drawn(512, 576), drawn(513, 576)[:512], drawn(576)

    def run(ways):
        monkeypatch.setattr(cpu_kernels, "_ways", lambda: ways)
        return [rms_norm(states, weight, EPSILON, 0), gated_product(states, up, GELU_ERF), *everything(slice(0, 40))]

    assert all(torch.equal(a, b) for a, b in zip(run(other), run((0, 1, 0)), strict=True))


@pytest.fixture(scope="module")
def portable_lines() -> list[str]:
    """What a process of its own prints that must take the portable kernels."""
    code = """
import torch
from stand.forward.few_tokens.product import WIDEST, few_token_product
from stand.fusion.cpu.kernels import rms_norm
x = torch.linspace(-2, 2, 100)
print(WIDEST, rms_norm(x, torch.ones(100), 1e-5, 0).sum().item())
x = torch.ones(2, 8, dtype=torch.bfloat16)
for call in (lambda: rms_norm(x, x[0], 1e-6, 0), lambda: few_token_product(x, x)):
    try:
        call()
    except ValueError as error:
        print(error)
"""
    environment = os.environ | {"STAND_PORTABLE": "1"}
    command = [sys.executable, "-c", code]
    return subprocess.run(command, capture_output=True, text=True, check=True, env=environment).stdout.splitlines()


def test_the_environment_chooses_the_portable_kernels(portable_lines):
    widest, total = portable_lines[0].split()
    here = rms_norm(torch.linspace(-2, 2, 100), torch.ones(100), EPSILON, 0).sum().item()
    assert widest == "0" and total == str(here)


def test_a_refusal_names_what_this_processor_has_kernels_for(portable_lines):
    norm, product = portable_lines[1:]
    assert norm.startswith("states and weight must be float32 on a CPU, got torch.bfloat16")
    assert "all of float32, on a CPU" in product and "x torch.bfloat16" in product


class Sharded(torch.Tensor):
    """A tensor whose bytes compiled code must not take for its numbers."""


def refused():
    x, w = drawn(3, 8), drawn(8)
    query, key, value, cos, sin, keys, values = heads_case(8, 8, width=8)
    good = (query, key, value, cos, sin, keys, values, SLOTS, 8, None, None, 0.0, NO_NORM)

    def rope(**changed):
        names = "query key value cos sin keys values slots rotary query_weight key_weight eps rule".split()
        return lambda: rope_and_store(**(dict(zip(names, good, strict=True)) | changed))

    return {
        "on a CPU, got torch.float64": lambda: rms_norm(x.double(), w, EPSILON, 0),
        "last size": lambda: rms_norm(x, w[:4], EPSILON, 0),
        "rule must be one of": lambda: rms_norm(x, w, EPSILON, 3),
        "as the states": lambda: add_rms_norm(x, x[:2], w, EPSILON, 0),
        "on a CPU and of one shape": lambda: gated_product(x, x[:2], SILU),
        "activation must be": lambda: gated_product(x, x, 5),
        "make the cache in": rope(keys=keys.double()),
        "must agree": rope(slots=SLOTS[:2]),
        "next to each other": rope(query=query.transpose(1, 2).contiguous().transpose(1, 2)),
        "the cache must be": rope(slots=SLOTS.int()),
        "one layout": rope(values=values.transpose(0, 2).contiguous().transpose(0, 2)),
        "must be even": rope(rotary=7),
        r"must be \[5, 8 or 4\]": rope(cos=cos[:, :3], sin=sin[:, :3]),
        "weights need a rule": rope(query_weight=w),
        "needs contiguous weights": rope(rule=0, query_weight=w, key_weight=w[:4]),
        "or one of": rope(rule=7),
    }


@pytest.mark.parametrize("reason", refused())
def test_refuses_by_rule(reason):
    with pytest.raises(ValueError, match=reason):
        refused()[reason]()


def test_tensors_of_other_classes_are_refused():
    x, w = drawn(3, 8), drawn(8)
    parts = [*heads_case(8, 8, width=8), SLOTS]
    odd = [part.as_subclass(Sharded) for part in (x, w, *parts)]
    calls = [lambda: rms_norm(odd[0], w, EPSILON, 0), lambda: rms_norm(x, odd[1], EPSILON, 0)]
    calls += [lambda: add_rms_norm(x, odd[0], w, EPSILON, 0)]
    calls += [lambda: gated_product(odd[0], x, SILU), lambda: gated_product(x, odd[0], SILU)]
    for place, part in enumerate(odd[2:]):
        given = [*parts[:place], part, *parts[place + 1 :]]
        calls.append(lambda given=given: rope_and_store(*given, 8, None, None, 0.0, NO_NORM))
    for call in calls:
        with pytest.raises(ValueError, match="Sharded"):
            call()


def test_a_slot_beyond_the_cache_is_refused_before_anything_is_written():
    query, key, value, cos, sin, _, _ = heads_case(8, 8, width=8)
    keys, values = torch.zeros(2, 3, 2, ROOM, 8)
    slots = torch.tensor([0, 1, 2, 3, 3 * ROOM])
    with pytest.raises(IndexError, match="3 rows with 6 slots, got 18"):
        rope_and_store(query, key, value, cos, sin, keys, values, slots, 8, None, None, 0.0, NO_NORM)
    assert not keys.any() and not values.any()
