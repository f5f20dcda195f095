"""Kernels of recurrent layers equal recurrences with a state for every token, and the eager forward's closed form."""

from dataclasses import replace

import plain_scan
import pytest
import torch
from scan_cases import ScanCase

pytest.importorskip("triton")

from nearest_bfloat16 import nearest_bfloat16

from stand.forward.recurrent.gates import DeltaGates, StepSizes
from stand.forward.recurrent.linear_attention import gated_delta_rule, state_space
from stand.fusion.formulas import GATE_FIRST
from stand.gpu.kernels.recurrent.convolve import convolve, keep_tails
from stand.gpu.kernels.recurrent.delta_updates import delta_updates
from stand.gpu.kernels.recurrent.gated_norm import gated_rms_norm
from stand.gpu.kernels.recurrent.linear_attention import keep_states, linear_attention
from stand.gpu.kernels.recurrent.path_decays import prepared, prepared_gated, prepared_steps

CASES = {
    "rows of many lengths": ScanCase((19, 0, 1, 5), 32),
    "chains without drafts": ScanCase((1, 1, 1), 4, heads=2, key_heads=1, taps=3),
    "more values than a program has": ScanCase((6, 3), 16, heads=2, key_heads=2, key_size=40, value_size=35),
    "a second word of ancestors": ScanCase((70,), 96, heads=1, key_heads=1, key_size=5, value_size=3, channels=3),
    "more padding than a row may have": ScanCase((2, 0), 300, heads=1, key_heads=1, key_size=5, value_size=3),
    "16 bits": ScanCase((9, 4), 16, dtype=torch.bfloat16),
}
TOLERANCE = 2e-5  # of float32 sums in another order


@pytest.fixture(autouse=True)
def rounding():
    with nearest_bfloat16():
        yield


@pytest.fixture(autouse=True)
def new_memory_is_nan():
    """So that a zero has been written."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture(params=CASES.values(), ids=CASES.keys())
def case(request) -> ScanCase:
    return request.param


def assert_close(found: torch.Tensor, expected: torch.Tensor, case: ScanCase) -> None:
    """At tokens; padding may be anything."""
    found, expected = found[case.is_token].float(), expected[case.is_token].float()
    assert (found - expected).abs().max() <= TOLERANCE * expected.abs().max()


RULES = {"delta rule": "delta_rule", "delta rule, raw gates": "gated", "state space": "state_space"}
each_rule = pytest.mark.parametrize("rule", RULES.values(), ids=RULES.keys())


def scanned(case: ScanCase, rule: str, kernels=None) -> dict[str, torch.Tensor | None]:
    """All that a rule computes by `kernels`, a module; default: the real ones."""
    names = ("prepared", "prepared_gated", "prepared_steps", "delta_updates", "linear_attention")
    real = prepared, prepared_gated, prepared_steps, delta_updates, linear_attention
    plain, gated, of_steps, solve, attend = real if kernels is None else [getattr(kernels, name) for name in names]
    places, seen = (case.states, case.ancestors, *case.rows), (case.ancestors, case.offsets)
    operands, updates, skip = (case.query, case.key), case.value, None
    if rule == "state_space":
        steps, skip = case.steps, case.skip
        given = steps.raw, steps.bias, steps.is_softplus, *steps.limits, steps.decay
        queries, keys, sums, rates = of_steps(*operands, *given, *seen)
    else:
        if rule == "gated":
            gates = case.gates
            given = gates.decay, gates.rate, gates.log_scale, gates.bias, gates.rate_scale
            queries, keys, sums, beta = gated(*operands, *given, *seen)
        else:
            (queries, keys, sums), beta = plain(*operands, case.log_decay, *seen), case.beta
        updates, rates = solve(keys, case.value, sums, beta, *places), None
    output = attend(queries, keys, updates, rates, sums, skip, *places, torch.float32)
    beta = beta if rule == "gated" else None  # else it is given
    return {"queries": queries, "keys": keys, "updates": updates, "rates": rates, "sums": sums, "beta": beta} | {
        "output": output
    }


@each_rule
def test_all_that_a_rule_computes_equals_the_recurrence(case, rule):
    found, expected = scanned(case, rule), scanned(case, rule, plain_scan)
    for name, own in found.items():
        if own is not None:
            assert_close(own, expected[name], case)
    assert not found["output"][~case.is_token].any()


@each_rule
def test_the_recurrence_equals_the_closed_form_of_eager_steps(case, rule):
    output = scanned(case, rule, plain_scan)["output"]
    shared = case.heads // case.key_heads
    log_decay, beta, values = case.log_decay, case.beta, case.value.float()
    if rule == "gated":
        log_decay, beta = case.gates.log_decay(), case.gates.beta()
    elif rule == "state_space":
        log_decay, values = case.steps.decay * case.steps.values(), values * case.steps.values()[:, :, None]
    for row, (first, end, place) in enumerate(plain_scan.rows(*case.rows)):
        if first < end:
            wide = [one[first:end].repeat_interleave(shared, 1) for one in (case.query, case.key)]
            operands = [*wide, values[first:end], log_decay[first:end]]
            operands += [] if rule == "state_space" else [beta[first:end]]
            trees = [one.float()[None].transpose(1, 2) for one in operands]
            eager, seen = state_space if rule == "state_space" else gated_delta_rule, case.seen(row)[None, None]
            expected = eager(*trees, states=case.states[place : place + 1], seen=seen)[0][0].transpose(0, 1)
            if rule == "state_space":
                expected = expected + case.skip[:, None] * case.value[first:end].float()
            assert (output[first:end] - expected).abs().max() <= TOLERANCE * expected.abs().max()


@pytest.mark.parametrize("rate", [1.0, 2.0])
def test_updates_are_exact_where_keys_are_alike(rate):
    """A chain of tokens with nearly one key and no decay, where sums of powers of the system would cancel. Against
    float64, with rates of 2 as well, by which states turn round."""
    case = ScanCase((70,), 96, heads=2, key_heads=1, key_size=32, value_size=3)
    chain = torch.tril(torch.ones(70, 70, dtype=torch.bool))
    case.ancestors[:70] = torch.tensor([[words(row)[0], words(row)[1]] for row in chain.tolist()])
    keys = torch.nn.functional.normalize(1.0 + 0.01 * case.key, dim=2)
    sums, beta = torch.zeros(96, 2), torch.full((96, 2), rate)
    found = delta_updates(keys, case.value, sums, beta, case.states, case.ancestors, *case.rows)[:70].double()
    wide = keys[:70, 0].double()
    system = torch.eye(70, dtype=torch.float64) + rate * (wide @ wide.T).tril(-1)
    read = torch.einsum("tk,hkv->htv", wide, case.states[case.cache_rows[0]].double())
    rest = rate * (case.value[:70].double().transpose(0, 1) - read)
    expected = torch.linalg.solve_triangular(system.expand(2, -1, -1), rest, upper=False, unitriangular=True)
    error = (found.transpose(0, 1) - expected).abs().max() / expected.abs().max()
    assert error <= 2 * TOLERANCE  # 2.4e-5 where it was largest, by how a processor sums


def words(bits: list[bool]) -> tuple[int, int]:
    """Two words of 64, as int64 has them."""
    whole = sum(1 << place for place, bit in enumerate(bits) if bit)
    low = whole & (1 << 64) - 1
    return low - (1 << 64) if low >= 1 << 63 else low, whole >> 64


@each_rule
def test_states_follow_the_kept_paths(case, rule):
    found, expected, of = case.states.clone(), case.states.clone(), scanned(case, rule, plain_scan)
    changes = [of[name] for name in ("keys", "updates", "rates", "sums")]
    keep_states(*changes, found, *case.rows, case.path)
    plain_scan.keep_states(*changes, expected, *case.rows, case.path)
    assert (found - expected).abs().max() <= TOLERANCE * expected.abs().max()
    for count, place in zip(case.counts, case.cache_rows.tolist(), strict=True):
        assert torch.equal(found[place], case.states[place]) == (count == 0)


def test_outputs_are_rounded_to_the_type_that_is_asked_for():
    case = CASES["rows of many lengths"]
    of = scanned(case, "delta_rule", plain_scan)
    given = [of[name] for name in ("queries", "keys", "updates", "rates", "sums")]
    asked = (*given, None, case.states, case.ancestors, *case.rows)
    narrow, wide = (linear_attention(*asked, dtype) for dtype in (torch.bfloat16, torch.float32))
    assert narrow.dtype is torch.bfloat16 and torch.equal(narrow, wide.bfloat16())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_gates_of_every_size_are_those_of_torch(dtype):
    """Softplus and sigmoid where they bend, vanish and grow."""
    case = ScanCase((64,), 64, heads=1, key_heads=1, dtype=dtype)
    case.ancestors = torch.bitwise_left_shift(torch.ones(64, 1, dtype=torch.int64), torch.arange(64)[:, None])
    operands, seen = (case.query, case.key), (case.ancestors, case.offsets)
    raw = torch.cat([torch.linspace(-30, 30, 61), torch.tensor([-80.0, 80.0, 0.0])]).to(dtype)[:, None]
    zero, limits = torch.zeros(1, dtype=dtype), (0.0, float("inf"))
    gates, steps = DeltaGates(raw, raw, zero, zero, 1.0), StepSizes(raw, None, True, limits, torch.ones(1))
    _, _, decays, beta = prepared_gated(*operands, raw, raw, zero, zero, 1.0, *seen)
    *_, sizes = prepared_steps(*operands, raw, None, True, *limits, steps.decay, *seen)
    rounding = 1e-5 if dtype is torch.float32 else torch.finfo(dtype).eps  # exp of a GPU errs more in large arguments
    torch.testing.assert_close(decays, gates.log_decay(), rtol=1e-5, atol=1e-37)
    torch.testing.assert_close(beta, gates.beta().float(), rtol=rounding, atol=1e-37)
    torch.testing.assert_close(sizes, steps.values(), rtol=rounding, atol=1e-37)


def test_steps_without_softplus_and_beyond_limits():
    case = ScanCase((4,), 4, heads=1, key_heads=1)
    raw = torch.tensor([[-2.0], [0.3], [9.0], [float("nan")]])
    for bias in (None, torch.tensor([0.5])):
        given = raw, bias, False, 0.1, 5.0
        *_, own = prepared_steps(case.query, case.key, *given, torch.ones(1), case.ancestors, case.offsets)
        expected = StepSizes(raw, bias, False, (0.1, 5.0), torch.ones(1)).values()
        assert torch.equal(own[:3], expected[:3]) and own[3].isnan() and expected[3].isnan()


def test_convolutions_look_back_along_paths(case):
    rest = case.parents, case.depths, *case.rows
    for bias, is_silu in ((case.bias, False), (None, True)):
        found = convolve(case.inputs, case.tails, case.weight, bias, *rest, is_silu)
        assert found.dtype == case.dtype and not found[~case.is_token].any()
        expected = plain_scan.convolve(case.inputs, case.tails, case.weight, bias, *rest, is_silu)
        rounding = 2**-7 if case.dtype is torch.bfloat16 else TOLERANCE
        assert (found - expected).abs().max() <= rounding * expected.abs().max()


def test_inputs_may_lie_channel_by_channel():
    """As models give them: a transposed view."""
    case = CASES["rows of many lengths"]
    rest = case.tails, case.weight, case.bias, case.parents, case.depths, *case.rows, True
    assert torch.equal(convolve(case.inputs.T.contiguous().T, *rest), convolve(case.inputs, *rest))


def test_tails_are_the_newest_inputs_of_the_kept_paths(case):
    found, expected = case.tails.clone(), case.tails.clone()
    keep_tails(case.inputs, found, *case.rows, case.path)
    plain_scan.keep_tails(case.inputs, expected, *case.rows, case.path)
    assert torch.equal(found, expected)


def test_operands_may_be_parts_of_one_tensor():
    """Queries, keys and values are split from what one product gives."""
    case = CASES["rows of many lengths"]
    sizes = [case.key_heads * case.key_size] * 2 + [case.heads * case.value_size]
    flat = torch.cat([one.flatten(1) for one in (case.query, case.key, case.value)], dim=1)
    query, key, value = flat.split(sizes, dim=1)
    parts = query.view_as(case.query), key.view_as(case.key)
    found = prepared(*parts, case.log_decay, case.ancestors, case.offsets)
    expected = prepared(case.query, case.key, case.log_decay, case.ancestors, case.offsets)
    places = (found[2], case.beta, case.states, case.ancestors, *case.rows)
    for own, other in zip(found, expected, strict=True):
        assert torch.equal(own[case.is_token], other[case.is_token])
    whole = delta_updates(expected[1], case.value, *places)
    assert torch.equal(delta_updates(found[1], value.view_as(case.value), *places)[case.is_token], whole[case.is_token])


def test_vectors_of_heads_and_channels_may_be_columns():
    """Parameters that were taken out of a table."""
    case, other = (ScanCase((9, 4), 16) for _ in range(2))
    for name in ("bias", "skip"):
        setattr(other, name, column(getattr(case, name)))
    steps, gates = case.steps, case.gates
    other.steps = replace(steps, bias=column(steps.bias), decay=column(steps.decay))
    other.gates = replace(gates, log_scale=column(gates.log_scale), bias=column(gates.bias))
    for rule in ("gated", "state_space"):
        found, expected = (scanned(one, rule)["output"] for one in (other, case))
        assert torch.equal(found, expected)
    rest = case.parents, case.depths, *case.rows, True
    found, expected = (convolve(case.inputs, case.tails, case.weight, one.bias, *rest) for one in (other, case))
    assert torch.equal(found, expected)
    weight, gate = case.inputs[0], case.inputs.flip(0)
    found, expected = (gated_rms_norm(case.inputs, gate, one, 1e-6, 70, GATE_FIRST) for one in (column(weight), weight))
    assert torch.equal(found, expected)


def column(vector: torch.Tensor) -> torch.Tensor:
    """The same numbers, others between them."""
    return torch.stack([vector, vector + 1], dim=1)[:, 0]


BROKEN = {"delta_rule": ["ancestors", "log_decay", "beta", "cache_rows", "states"], "state_space": ["skip"]}


@pytest.mark.parametrize(("rule", "broken"), [(rule, one) for rule, names in BROKEN.items() for one in names])
def test_a_wrong_operand_is_noticed(rule, broken):
    """Control: each has a part in the result."""
    case, other = (ScanCase((9, 4, 6), 32) for _ in range(2))
    if broken == "ancestors":  # every token hangs on its root
        firsts = torch.tensor([0] * 9 + [9] * 4 + [13] * 19)
        other.ancestors[:, 0] = 1 | 1 << (torch.arange(32) - firsts)
    else:
        numbers = getattr(other, broken)
        setattr(other, broken, numbers.flip(0) if broken == "cache_rows" else numbers.roll(1, 0))
    assert_wrong(other, case, rule)


@pytest.mark.parametrize(
    ("rule", "broken"),
    [("gated", name) for name in ("decay", "rate", "log_scale", "bias", "rate_scale")]
    + [("state_space", name) for name in ("raw", "bias", "limits", "decay")],
)
def test_a_wrong_gate_is_noticed(rule, broken):
    case, other = (ScanCase((9, 4, 6), 32) for _ in range(2))
    name = "gates" if rule == "gated" else "steps"
    numbers = getattr(getattr(other, name), broken)
    wrong = numbers.roll(1, 0) if isinstance(numbers, torch.Tensor) else 1.0 if broken == "rate_scale" else (0.0, 0.1)
    setattr(other, name, replace(getattr(other, name), **{broken: wrong}))
    assert_wrong(other, case, rule)


def assert_wrong(other: ScanCase, case: ScanCase, rule: str) -> None:
    found, expected = (scanned(one, rule, plain_scan)["output"] for one in (other, case))
    assert (found - expected)[case.is_token].abs().max() > 1e-2 * expected.abs().max()
