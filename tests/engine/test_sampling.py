"""The end of every law, temperature and filters, is what transformers' own warpers give."""

import math

import pytest
import torch
from node_cases import node_case
from transformers import LogitsProcessorList, TopKLogitsWarper, TopPLogitsWarper
from transformers.generation.logits_process import (
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TypicalLogitsWarper,
)

from stand.laws.filters import filter_laws
from stand.laws.processors import ProcessorChain
from stand.laws.sampling import SamplingParams, TargetLaw

WARPERS = {
    "temperature": TemperatureLogitsWarper,
    "top_k": TopKLogitsWarper,
    "top_p": TopPLogitsWarper,
    "min_p": MinPLogitsWarper,
}


@pytest.mark.parametrize(
    "settings",
    [
        {"temperature": 0.6, "top_k": 20, "top_p": 0.95},
        {"temperature": 1.0},
        {"temperature": 1.7, "min_p": 0.1},
        {"temperature": 0.8, "top_k": 3},
        {"temperature": 2.0, "top_k": 8, "top_p": 0.7, "min_p": 0.15},
    ],
)
def test_laws_equal_the_warpers_of_transformers(settings):
    batch, rows, _, logits = node_case()
    law = TargetLaw(SamplingParams(**settings))
    got = law.laws(law.process(logits, batch, rows)).probabilities
    reference = LogitsProcessorList([WARPERS[name](value) for name, value in settings.items()])
    torch.testing.assert_close(got, torch.softmax(reference(None, logits.clone()), dim=-1))


@pytest.mark.parametrize("settings", [{"top_k": 3, "top_p": 0.72}, {"top_p": 0.72, "min_p": 0.6}])
def test_the_order_of_the_filters_is_transformers_own(settings):
    """Laws on which the other order gives another law; top_k and min_p commute."""
    logits = torch.tensor([[0.3, 0.25, 0.2, 0.15, 0.1]]).log()
    warpers = LogitsProcessorList([WARPERS[name](value) for name, value in settings.items()])
    expected = torch.softmax(warpers(None, logits.clone()), dim=-1)
    other = torch.softmax(LogitsProcessorList(reversed(warpers))(None, logits.clone()), dim=-1)
    assert float((expected - other).abs().sum()) > 0.2
    law = TargetLaw(SamplingParams(**settings))
    torch.testing.assert_close(law.laws(logits).probabilities, expected)
    torch.testing.assert_close(torch.softmax(law.warp(logits), dim=-1), expected)  # as on other devices


@pytest.mark.parametrize("count", [2, 4, 9])
@pytest.mark.parametrize(
    "settings", [{"temperature": 0.5}, {"top_k": 1}, {"top_k": 3, "top_p": 0.7}, {"temperature": 0.5, "min_p": 0.3}]
)
def test_laws_in_float64_are_those_of_the_warpers(settings, count):
    """The array code, which other devices take: laws, best tokens, and no more of them than there are tokens."""
    logits = torch.tensor([[0.3, 0.25, 0.2, 0.15, 0.1], [0.1, 0.5, 0.05, 0.15, 0.2]], dtype=torch.float64).log()
    reference = LogitsProcessorList([WARPERS[name](value) for name, value in settings.items()])
    expected = torch.softmax(reference(None, logits.clone()), dim=-1)
    laws = TargetLaw(SamplingParams(**settings)).laws(logits, count)
    torch.testing.assert_close(laws.probabilities, expected)
    best = expected.sort(dim=-1, descending=True).values[:, : min(count, 5)]
    torch.testing.assert_close(laws.top_probs, best)
    torch.testing.assert_close(expected.gather(1, laws.top_ids.long()), best)


@pytest.mark.parametrize(
    ("processors", "params", "count"),
    [
        ([TemperatureLogitsWarper(0.5), TopKLogitsWarper(9), TopPLogitsWarper(0.9), MinPLogitsWarper(0.1)],
         SamplingParams(0.5, 9, 0.9, 0.1), 4),
        ([TypicalLogitsWarper(0.9), TopPLogitsWarper(0.9)], SamplingParams(top_p=0.9), 1),
        ([TopKLogitsWarper(9), TemperatureLogitsWarper(0.5)], SamplingParams(0.5), 1),
        ([TopPLogitsWarper(0.9), TopKLogitsWarper(9)], SamplingParams(top_k=9), 1),
        ([TopKLogitsWarper(9), TopKLogitsWarper(5)], SamplingParams(top_k=5), 1),
        ([TopKLogitsWarper(9), TypicalLogitsWarper(0.9)], SamplingParams(), 0),
        ([TopPLogitsWarper(0.9, min_tokens_to_keep=2)], SamplingParams(), 0),
        ([TopKLogitsWarper(9, filter_value=-5.0)], SamplingParams(), 0),
        ([], SamplingParams(), 0),
    ],
)  # fmt: skip
def test_only_transformers_own_filters_in_their_order_count_as_the_end(processors, params, count):
    assert SamplingParams.at_the_end_of(processors) == (params, count)


def test_temperature_zero_is_all_mass_on_the_best_token():
    batch, rows, _, logits = node_case()
    logits[0] = 0.0  # a tie: the lowest id wins
    law = TargetLaw(SamplingParams(temperature=0.0))
    probabilities = law.laws(law.process(logits, batch, rows)).probabilities
    assert probabilities.sum(dim=-1).tolist() == [1.0] * 7
    assert probabilities.argmax(dim=-1).tolist() == [0, *logits[1:].argmax(dim=-1).tolist()]


@pytest.mark.parametrize(
    ("bad", "rule"),
    [
        ({"top_p": 0.0}, r"top_p must be in \(0, 1\], got 0.0; use 1"),
        ({"top_p": 1.7}, r"top_p must be in \(0, 1\], got 1.7"),
        ({"temperature": -1.0}, "temperature must be >= 0, got -1.0; use 0"),
        ({"temperature": float("nan")}, "temperature must be >= 0, got nan"),
        ({"temperature": float("inf")}, "temperature must be >= 0, got inf"),
        ({"temperature": True}, "temperature must be >= 0, got True"),
        ({"top_k": -2}, r"top_k must be an integer in \[0, 2\*\*31\)"),
        ({"top_k": True}, "top_k must be an integer in .*, got True; use 0"),
        ({"min_p": 2.0}, r"min_p must be in \[0, 1\]"),
    ],
)
def test_bad_settings_name_rule_value_and_remedy(bad, rule):
    with pytest.raises(ValueError, match=rule):
        SamplingParams(**bad)


@pytest.mark.parametrize(
    ("fill", "kind"), [(float("nan"), "NaN"), (float("-inf"), "only -inf"), (float("inf"), r"\+inf")]
)
def test_broken_logits_are_refused(fill, kind):
    batch, rows, _, logits = node_case()
    logits[3] = fill
    with pytest.raises(ValueError, match=f"finite best logit, got {kind}"):
        law = TargetLaw(SamplingParams())
        law.laws(law.process(logits, batch, rows))


def test_only_filters_that_may_take_tokens_out_count():
    for settings in ({"top_k": 1}, {"top_p": 0.9}, {"min_p": 0.1}):
        assert TargetLaw(SamplingParams(**settings)).has_filters
        assert not TargetLaw(SamplingParams(**settings, temperature=0.0)).has_filters
    assert not TargetLaw(SamplingParams(temperature=0.6)).has_filters


def test_filters_of_hot_laws_need_scores():
    """Float32 probabilities of a hot law are equal where scores are not: filters of captured steps see the former."""
    scores = torch.linspace(0, 5, 1000)[None]
    for temperature, needs in ((1e3, False), (1e4, False), (2e4, True), (1e8, True)):
        law = TargetLaw(SamplingParams(temperature=temperature, top_k=50))
        assert law.needs_scores == needs and not TargetLaw(SamplingParams(temperature=temperature)).needs_scores
        probabilities = torch.softmax(scores / temperature, dim=1)[0]
        num_kept = int((probabilities >= probabilities.sort(descending=True).values[49]).sum())
        assert num_kept == 50 or needs
        assert int((law.laws(scores).probabilities > 0).sum()) == 50


def test_a_law_tells_whether_it_has_processors():
    chain = ProcessorChain([[TopKLogitsWarper(3)]])
    assert TargetLaw(SamplingParams(), processors=chain).has_processors
    assert not TargetLaw(SamplingParams()).has_processors


@pytest.mark.parametrize("temperature", [1e31, 1e39, math.inf, 1e-31, -1.0, math.nan])
def test_temperatures_that_float32_cannot_divide_by_are_refused(temperature):
    """Infinity divided by infinity is no number, and compiled code would look for tokens that are not there."""
    with pytest.raises(ValueError, match="temperature must be"):
        SamplingParams(temperature=temperature)
    with pytest.raises(ValueError, match=r"temperature must be in \[1e-30, 1e30\]"):
        filter_laws(torch.zeros(1, 8).numpy(), temperature=temperature, count=3)


@pytest.mark.parametrize("temperature", [1e30, 1e-30])
def test_the_hottest_and_the_coldest_law(temperature):
    scores = torch.tensor([[2.0, -math.inf, 1.0, 2.0]])
    laws = TargetLaw(SamplingParams(temperature=temperature, top_k=2)).laws(scores, 3).probabilities
    assert laws.sum().item() == pytest.approx(1.0) and laws[0, 1] == 0.0
