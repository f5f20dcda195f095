"""The threshold search gives the law of transformers' warpers, and one rule says which of equal probabilities stay."""

from itertools import product
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("triton")

from stand.gpu.kernels.verification import filter as filter_kernel
from stand.gpu.kernels.verification.filter import filter_rows, first_doubtful_way
from stand.gpu.step_body import StepBody
from stand.laws.sampling import SamplingParams, TargetLaw

VOCABULARY_SIZE = 400  # a chunk and a half, once chunks are small
TEMPERATURE = 0.6
FILTERS = [filters for filters in product((0, 40), (1.0, 0.9), (0.0, 0.02)) if filters != (0, 1.0, 0.0)]


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch):
    """So small that intervals of these laws come in all kinds: few keys, some, more than there is room for."""
    for name, value in (("CHUNK", 256), ("CAPACITY", 64), ("FEW", 16), ("PAIRS", 8)):
        monkeypatch.setattr(filter_kernel, name, value)


def random_logits() -> torch.Tensor:
    """A peaked row, one whose filters meet in its tail, a nearly flat one, and one rounded to a few values."""
    generator = torch.Generator().manual_seed(3)
    logits = torch.randn(4, VOCABULARY_SIZE, generator=generator) * torch.tensor([[4.0], [1.3], [0.3], [1.0]])
    logits[3] = (2 * logits[3]).round() / 2
    return logits


def filtered(laws: torch.Tensor, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0) -> torch.Tensor:
    laws = laws.clone()
    filter_rows(laws, top_k, top_p, min_p)
    return laws


def by_sorting(laws: torch.Tensor, top_k: int, top_p: float, min_p: float, *, is_stable: bool = True) -> torch.Tensor:
    """The filters of one row after the other in float64, ties cut by id: the lowest go first (else the highest)."""
    return torch.stack([_sorted_row(law.double(), top_k, top_p, min_p, is_stable) for law in laws]).float()


def _sorted_row(law, top_k, top_p, min_p, is_stable):
    if top_k:
        law = torch.where(law < law.topk(min(top_k, len(law))).values[-1], 0, law)
    if top_p < 1:
        order = law.argsort(stable=True) if is_stable else law.flip(0).argsort(stable=True).sub(len(law) - 1).neg()
        cumulative = law[order].cumsum(0) / law.sum()
        assert is_stable is False or _is_clear(cumulative, 1 - top_p)
        cumulative[-1] = 2.0
        law = law.index_fill(0, order[cumulative <= 1 - top_p], 0)
    law = torch.where(law < min_p * law.max(), 0, law)
    return law / law.sum()


def _is_clear(cumulative, bound) -> bool:
    """Whether rounding cannot move a token over the bound: none is close, but for those that meet it exactly."""
    distance = (cumulative - bound).abs()
    return bool(((distance > 1e-6) | (distance == 0)).all())


def by_warpers(logits: torch.Tensor, temperature: float, *filters) -> torch.Tensor:
    names = ("top_k", "top_p", "min_p")
    law = TargetLaw(SamplingParams(temperature=temperature, **dict(zip(names, filters, strict=True))))
    return torch.softmax(law.warp(logits.float()), dim=1)


def assert_same_law(laws, expected) -> None:
    assert (laws > 0).equal(expected > 0)
    torch.testing.assert_close(laws, expected, rtol=1e-5, atol=0)


@pytest.mark.parametrize("filters", FILTERS)
def test_equals_the_warpers(filters):
    """Token by token where probabilities differ; of equal ones the warpers keep as many, whichever their sort likes."""
    logits = random_logits()
    laws = torch.softmax(logits / TEMPERATURE, dim=1)
    expected, found = by_warpers(logits, TEMPERATURE, *filters), filtered(laws, *filters)
    assert_same_law(found[:3], expected[:3])
    assert_same_law(found[3].sort().values, expected[3].sort().values)
    assert_same_law(found, by_sorting(laws, *filters))
    assert (found == 0).any()


def test_the_rows_tell_the_filters_apart():
    """Control: every filter takes a token that the others leave, in a row of the test above."""
    laws = torch.softmax(random_logits() / TEMPERATURE, dim=1)
    kept = {filters: by_sorting(laws, *filters) > 0 for filters in FILTERS}
    assert len({tuple(mask.flatten().tolist()) for mask in kept.values()}) == len(FILTERS)


def test_a_step_takes_its_laws_from_it():
    logits, filters = random_logits()[:2].bfloat16(), (50, 0.95, 0.004)
    law = TargetLaw(SamplingParams(TEMPERATURE, *filters))
    laws = torch.empty(logits.shape)
    StepBody._fill_laws(SimpleNamespace(_law=law), laws, logits)
    expected = by_warpers(logits, TEMPERATURE, *filters)
    assert_same_law(laws.sort(dim=1).values, expected.sort(dim=1).values)


def law_with_ties() -> torch.Tensor:
    """Half of the mass on one token, the rest on 256 others in all chunks; every sum is exact in float32."""
    law = torch.zeros(1, 600)
    law[0, 40:552:2] = 2.0**-9
    law[0, 301] = 0.5
    return law


@pytest.mark.parametrize(("top_p", "num_kept"), [(0.75, 129), (0.75 + 2.0**-12, 130), (0.5, 1), (0.5 + 2.0**-12, 2)])
def test_of_equal_probabilities_the_lowest_ids_go(top_p, num_kept):
    law = law_with_ties()
    found = filtered(law, top_p=top_p)
    assert int((found > 0).sum()) == num_kept == int((by_warpers(law.log(), 1.0, 0, top_p, 0.0) > 0).sum())
    highest = law[0].eq(2.0**-9).nonzero()[257 - num_kept :, 0]
    assert (found[0] > 0).nonzero()[:, 0].tolist() == sorted([301, *highest.tolist()])
    assert_same_law(found, by_sorting(law, 0, top_p, 0.0))
    is_other = not by_sorting(law, 0, top_p, 0.0, is_stable=False).equal(found)
    assert is_other == (1 < num_kept)  # control: the other order of ties is another law


def test_ties_with_the_last_of_top_k_stay_for_top_p_to_cut():
    law = law_with_ties()
    assert filtered(law, top_k=5).equal(law)
    assert int((filtered(law, top_k=5, top_p=0.75) > 0).sum()) == 129
    assert int((filtered(law, top_k=1, top_p=0.75) > 0).sum()) == 1


@pytest.mark.parametrize(("min_p", "top_p", "num_kept"), [(1.0, 0.1, 1), (1.0, 0.3, 2), (0.5, 0.8, 4)])
def test_a_floor_at_the_cut_brings_no_tie_back_that_top_p_took_out(min_p, top_p, num_kept):
    """Three tokens have a quarter each and two an eighth, so that min_p's floor is the key that top_p cuts at."""
    law = torch.zeros(1, 600)
    law[0, [3, 250, 500]], law[0, [7, 400]] = 0.25, 0.125
    found = filtered(law, top_p=top_p, min_p=min_p)
    assert int((found > 0).sum()) == num_kept
    assert_same_law(found, by_sorting(law, 0, top_p, min_p))


@pytest.mark.parametrize("filters", [(1, 1.0, 0.0), (0, 1e-9, 0.0), (0, 1.0, 1.0), (1, 1e-9, 1.0)])
def test_the_tightest_filters_leave_the_best_token(filters):
    laws = torch.softmax(random_logits()[:2], dim=1)
    expected = torch.zeros_like(laws).scatter_(1, laws.argmax(dim=1, keepdim=True), 1.0)
    assert filtered(laws, *filters).equal(expected)


def test_the_loosest_filters_leave_every_token():
    laws = torch.softmax(random_logits()[:2], dim=1)
    for filters in ((VOCABULARY_SIZE, 1.0, 0.0), (VOCABULARY_SIZE + 7, 1.0, 1e-30), (VOCABULARY_SIZE - 1, 1.0, 0.0)):
        num_kept = min(filters[0], VOCABULARY_SIZE)
        assert (filtered(laws, *filters) > 0).sum(dim=1).tolist() == [num_kept] * 2


def test_flat_laws_and_one_token_laws():
    laws = torch.zeros(3, 512)
    laws[0], laws[1, 511], laws[2, 0] = 2.0**-9, 1.0, 1.0
    found = filtered(laws, 3, 0.25, 0.5)
    assert found[1:].equal(laws[1:])
    assert found[0].nonzero()[:, 0].tolist() == list(range(384, 512))
    assert filtered(laws[:1], top_p=1e-6)[0].nonzero().item() == 511


@pytest.mark.parametrize("filters", [(40, 0.9, 0.02), (0, 1.0, 0.02)])
def test_a_row_with_nan_becomes_nan_and_no_other(filters):
    laws = torch.softmax(random_logits()[:3] / TEMPERATURE, dim=1)
    broken = laws.clone()
    broken[0] = torch.tensor([-(2**22)], dtype=torch.int32).view(torch.float32)  # NaN whose sign bit is set
    broken[2, 300] = float("nan")
    found = filtered(broken, *filters)
    assert torch.isnan(found[[0, 2]]).all()
    assert found[1:2].equal(filtered(laws[1:2], *filters))  # to the bit, whatever the batch mates


def test_writes_into_a_part_of_a_larger_buffer():
    buffer, laws = torch.full((5, 500), 7.0), torch.softmax(random_logits()[:2], dim=1)
    part = buffer[1:5:2, 30:430]
    part.copy_(laws)
    filter_rows(part, 0, 0.9, 0.0)
    assert_same_law(part, by_sorting(laws, 0, 0.9, 0.0))
    assert buffer.eq(7.0).sum() == buffer.numel() - part.numel()


def test_every_bit_of_the_key_is_needed(monkeypatch):
    """Control: without the last halving the search ends below a tie, and keeps all of it."""
    law = torch.full((1, 300), 2.0**-9).nextafter(torch.tensor(1.0))
    assert int((filtered(law, top_p=0.5) > 0).sum()) == 150
    monkeypatch.setattr(filter_kernel, "CAPACITY", 512)
    assert int((filtered(law, top_p=0.5) > 0).sum()) == 150
    monkeypatch.setattr(filter_kernel, "HALVINGS", 29)
    assert int((filtered(law, top_p=0.5) > 0).sum()) != 150


def test_room_decides_nothing(monkeypatch):
    """To the bit: with room for all keys, compared in pairs or halved, and with so little that intervals are halved by
    reading the law again."""
    laws, found = torch.softmax(random_logits()[1:3] / TEMPERATURE, dim=1), []
    for rooms in ((512, 512, 512), (512, 512, 4), (512, 4, 4), (32, 4, 4)):
        for name, value in zip(("CAPACITY", "FEW", "PAIRS"), rooms, strict=True):
            monkeypatch.setattr(filter_kernel, name, value)
        found.append(filtered(laws, top_p=0.9))
    assert all(one.equal(found[0]) for one in found)


def test_ways_that_are_left_out_decide_nothing(monkeypatch):
    """To the bit; flat laws have their cut at the first way that is looked at, as low as it can be."""
    flat = torch.full((2, VOCABULARY_SIZE), 1 / VOCABULARY_SIZE)
    flat[1, ::2] *= 0.001
    laws = torch.cat([torch.softmax(random_logits(), dim=1), flat / flat.sum(1, keepdim=True)])
    assert first_doubtful_way(VOCABULARY_SIZE, 0.9) == 11 and first_doubtful_way(151_936, 0.95) == 6
    found = filtered(laws, top_p=0.9)
    monkeypatch.setattr(filter_kernel, "first_doubtful_way", lambda *_: 1)
    assert filtered(laws, top_p=0.9).equal(found)
    monkeypatch.setattr(filter_kernel, "first_doubtful_way", lambda *_: 13)  # control: a threshold above the cut
    assert not filtered(laws, top_p=0.9).equal(found)


@pytest.mark.parametrize("top_p", [0.5, 0.999, 1 - 2.0**-53])
def test_laws_whose_cut_lies_below_every_threshold(top_p):
    """Half of the mass on one token, the rest on many far below 2^-30."""
    law = torch.full((1, 400), 2.0**-40)
    law[0, 77] = 0.5
    found = filtered(law, top_p=top_p)
    assert_same_law(found, by_sorting_shares(law, top_p))


def by_sorting_shares(law: torch.Tensor, top_p: float) -> torch.Tensor:
    """top_p by sums from the most probable token down, which far smaller ones do not lose."""
    order = law[0].double().argsort(stable=True).flip(0)
    sums = law[0].double()[order].cumsum(0)
    kept = order[: int((sums - law[0].double()[order] < top_p * sums[-1]).sum())]
    expected = torch.zeros_like(law, dtype=torch.float64)
    expected[0, kept] = law[0, kept].double()
    return (expected / expected.sum()).float()


def test_refuses_what_it_cannot_filter():
    laws = torch.softmax(random_logits(), dim=1)
    for bad in (laws.double(), laws.t(), laws[0]):
        with pytest.raises(ValueError, match="contiguous rows"):
            filter_rows(bad, 0, 0.9, 0.0)
    for filters in ((-1, 0.9, 0.0), (0, 0.0, 0.0), (0, 1.1, 0.0), (0, 0.9, -0.1), (0, 0.9, 1.1)):
        with pytest.raises(ValueError, match="switch them off"):
            filter_rows(laws, *filters)
