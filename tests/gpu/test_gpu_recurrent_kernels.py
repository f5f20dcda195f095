"""Kernels of recurrent layers equal recurrences with a state for every token, and the eager forward's closed form."""

import plain_scan
import pytest
import torch
from scan_cases import ScanCase

pytest.importorskip("triton")

from stand.forward.linear_attention import gated_delta_rule, state_space  # noqa: E402
from stand.gpu.kernels.convolve import convolve, keep_tails  # noqa: E402
from stand.gpu.kernels.delta_updates import delta_updates  # noqa: E402
from stand.gpu.kernels.linear_attention import keep_states, linear_attention  # noqa: E402
from stand.gpu.kernels.path_decays import prepared  # noqa: E402

CASES = {
    "rows of many lengths": ScanCase((19, 0, 1, 5), 32),
    "chains without drafts": ScanCase((1, 1, 1), 4, heads=2, key_heads=1, taps=3),
    "more values than a program has": ScanCase((6, 3), 16, heads=2, key_heads=2, key_size=40, value_size=35),
    "a second word of ancestors": ScanCase((70,), 96, heads=1, key_heads=1, key_size=5, value_size=3, channels=3),
    "16 bits": ScanCase((9, 4), 16, dtype=torch.bfloat16),
}
TOLERANCE = 2e-5  # of float32 sums in another order


@pytest.fixture(params=CASES.values(), ids=CASES.keys())
def case(request) -> ScanCase:
    return request.param


def assert_close(found: torch.Tensor, expected: torch.Tensor, case: ScanCase) -> None:
    """At tokens; padding may be anything."""
    found, expected = found[case.is_token].float(), expected[case.is_token].float()
    assert (found - expected).abs().max() <= TOLERANCE * expected.abs().max()


def scanned(case: ScanCase, *, is_delta: bool, kernels=None) -> tuple[torch.Tensor, ...]:
    """(queries, keys, sums, updates, output) of `kernels`, a module; default: the real ones."""
    prepare, solve, attend = (
        (prepared, delta_updates, linear_attention)
        if kernels is None
        else (kernels.prepared, kernels.delta_updates, kernels.linear_attention)
    )
    queries, keys, sums = prepare(case.query, case.key, case.log_decay, case.ancestors, case.offsets, is_delta)
    places = (case.states, case.ancestors, *case.rows)
    updates = solve(keys, case.value, sums, case.beta, *places) if is_delta else case.value.float()
    return queries, keys, sums, updates, attend(queries, keys, updates, sums, *places)


@pytest.mark.parametrize("is_delta", [True, False], ids=["delta rule", "state space"])
def test_all_that_a_rule_computes_equals_the_recurrence(case, is_delta):
    found, expected = scanned(case, is_delta=is_delta), scanned(case, is_delta=is_delta, kernels=plain_scan)
    for own, other in zip(found, expected, strict=True):
        assert_close(own, other, case)


@pytest.mark.parametrize("is_delta", [True, False], ids=["delta rule", "state space"])
def test_the_recurrence_equals_the_closed_form_of_eager_steps(case, is_delta):
    output = scanned(case, is_delta=is_delta, kernels=plain_scan)[4]
    shared = case.heads // case.key_heads
    for row, (first, end, place) in enumerate(plain_scan.rows(*case.rows)):
        if first < end:
            wide = [one[first:end].repeat_interleave(shared, 1) for one in (case.query, case.key)]
            operands = [*wide, case.value[first:end], case.log_decay[first:end]]
            operands += [case.beta[first:end]] if is_delta else []
            trees = [one.float()[None].transpose(1, 2) for one in operands]
            rule, seen = gated_delta_rule if is_delta else state_space, case.seen(row)[None, None]
            expected, _ = rule(*trees, states=case.states[place : place + 1], seen=seen)
            difference = (output[first:end] - expected[0].transpose(0, 1)).abs().max()
            assert difference <= TOLERANCE * expected.abs().max()


@pytest.mark.parametrize("is_delta", [True, False], ids=["delta rule", "state space"])
def test_states_follow_the_kept_paths(case, is_delta):
    _, keys, sums, updates, _ = scanned(case, is_delta=is_delta, kernels=plain_scan)
    found, expected = case.states.clone(), case.states.clone()
    keep_states(keys, updates, sums, found, *case.rows, case.path)
    plain_scan.keep_states(keys, updates, sums, expected, *case.rows, case.path)
    assert (found - expected).abs().max() <= TOLERANCE * expected.abs().max()
    for count, place in zip(case.counts, case.cache_rows.tolist(), strict=True):
        assert torch.equal(found[place], case.states[place]) == (count == 0)


def test_convolutions_look_back_along_paths(case):
    rest = case.parents, case.depths, *case.rows
    for bias in (case.bias, None):
        found = convolve(case.inputs, case.tails, case.weight, bias, *rest)
        assert found.dtype == case.dtype and not found[~case.is_token].any()
        expected = plain_scan.convolve(case.inputs, case.tails, case.weight, bias, *rest)
        rounding = 2**-7 if case.dtype is torch.bfloat16 else TOLERANCE
        assert (found - expected).abs().max() <= rounding * expected.abs().max()


def test_inputs_may_lie_channel_by_channel():
    """As models give them: a transposed view."""
    case = CASES["rows of many lengths"]
    rest = case.tails, case.weight, case.bias, case.parents, case.depths, *case.rows
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
    found = prepared(*parts, case.log_decay, case.ancestors, case.offsets, True)
    expected = prepared(case.query, case.key, case.log_decay, case.ancestors, case.offsets, True)
    places = (found[2], case.beta, case.states, case.ancestors, *case.rows)
    for own, other in zip(found, expected, strict=True):
        assert torch.equal(own[case.is_token], other[case.is_token])
    whole = delta_updates(expected[1], case.value, *places)
    assert torch.equal(delta_updates(found[1], value.view_as(case.value), *places)[case.is_token], whole[case.is_token])


@pytest.mark.parametrize("broken", ["ancestors", "log_decay", "beta", "cache_rows", "states"])
def test_a_wrong_operand_is_noticed(broken):
    """Control: each has a part in the result."""
    case, other = (ScanCase((9, 4, 6), 32) for _ in range(2))
    if broken == "ancestors":  # every token hangs on its root
        firsts = torch.tensor([0] * 9 + [9] * 4 + [13] * 19)
        other.ancestors[:, 0] = 1 | 1 << (torch.arange(32) - firsts)
    else:
        numbers = getattr(other, broken)
        setattr(other, broken, numbers.flip(0) if broken == "cache_rows" else numbers.roll(1, 0))
    found, expected = (scanned(one, is_delta=True, kernels=plain_scan)[4] for one in (other, case))
    assert (found - expected)[case.is_token].abs().max() > 1e-2 * expected.abs().max()
