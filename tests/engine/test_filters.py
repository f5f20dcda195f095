"""The compiled laws are those of transformers' warpers, and one rule says which of equal scores stay."""

import ctypes
import os
import subprocess
import sys
from itertools import product

import numpy as np
import pytest
import torch

from stand.laws.filters import VECTORS, filter_laws
from stand.laws.sampling import SamplingParams, TargetLaw
from stand.simd.threads import parallel_region

TEMPERATURE = 0.6
BORDER = 1e-6  # of the whole mass: nearer to top_p's border, rounding decides
NOTHING = -np.inf
FILTERS = [
    {"top_k": top_k, "top_p": top_p, "min_p": min_p}
    for top_k, top_p, min_p in product((0, 40, 900), (1.0, 0.95, 0.3), (0.0, 0.02))
]


def random_scores(size: int) -> np.ndarray:
    """A flat row, one whose filters meet in its tail, a peaked one, and one of few values with forbidden tokens."""
    generator = np.random.default_rng(size)
    scores = generator.normal(0, np.array([[0.4], [1.0], [3.0], [1.0]]), (4, size)).astype(np.float32)
    scores[3] = np.round(2 * scores[3]) / 2
    scores[3, generator.random(size) < 0.2] = NOTHING
    scores[3, size // 2] = 1.0
    return scores


def by_warpers(scores: np.ndarray, temperature: float = 1.0, **filters) -> np.ndarray:
    law = TargetLaw(SamplingParams(temperature=temperature, **filters))
    return torch.softmax(law.warp(torch.from_numpy(scores)), dim=1).numpy()


def by_sorting(scores: np.ndarray, temperature: float = 1.0, **filters) -> tuple[np.ndarray, np.ndarray]:
    """(laws float64, distance of each cumulative mass from top_p's border), ties cut by id: the lowest first."""
    rows = [_sorted_row(row / np.float32(temperature), **filters) for row in scores]
    return tuple(map(np.stack, zip(*rows, strict=True)))


def _sorted_row(scores, top_k=0, top_p=1.0, min_p=0.0):
    weights = np.exp((scores - scores.max()).astype(np.float64))
    if top_k:
        weights[scores < np.sort(scores)[-min(top_k, len(scores))]] = 0.0
    order = np.lexsort((np.arange(len(scores)), np.where(weights > 0, scores, NOTHING)))
    distances = np.empty(len(scores))
    distances[order] = weights[order].cumsum() / weights.sum() - (1 - top_p)
    distances[order[-1]] = np.inf  # it always stays
    if top_p < 1:
        weights[distances <= 0] = 0.0
    weights[weights < np.float32(min_p)] = 0.0
    return weights / weights.sum(), np.abs(distances)


def assert_same_kept(found: np.ndarray, expected: np.ndarray, distances: np.ndarray) -> None:
    is_other = (found > 0) != (expected > 0)
    assert (distances[is_other] < BORDER).all()
    assert is_other.sum() <= 3 * len(found)


def laws_of(scores: np.ndarray, temperature: float = 1.0, **settings) -> np.ndarray:
    return filter_laws(scores, temperature=temperature, **settings)[0]


@pytest.mark.parametrize("filters", FILTERS)
@pytest.mark.parametrize("size", [1, 2, 3, 50, 511, 512, 513, 1000])
def test_equals_the_warpers(size, filters):
    """Token by token where scores differ; of equal ones the warpers keep as many, whichever their sort likes."""
    scores = random_scores(size)
    found, expected = laws_of(scores, TEMPERATURE, **filters), by_warpers(scores, TEMPERATURE, **filters)
    sorted_laws, distances = by_sorting(scores, TEMPERATURE, **filters)
    assert_same_kept(found, sorted_laws, distances)
    if filters["top_p"] == 1 or (distances > BORDER).all():
        np.testing.assert_allclose(found, sorted_laws, rtol=2e-6)
        np.testing.assert_allclose(found[:3], expected[:3], rtol=2e-5)
        np.testing.assert_allclose(np.sort(found[3]), np.sort(expected[3]), rtol=2e-5)


@pytest.mark.parametrize("filters", [*FILTERS[1:6], {"top_p": 0.999}, {"top_k": 20000}])
def test_equals_the_warpers_on_a_large_vocabulary(filters):
    scores = random_scores(49152)[:3]
    found, expected = laws_of(scores, TEMPERATURE, **filters), by_warpers(scores, TEMPERATURE, **filters)
    distances = by_sorting(scores, TEMPERATURE, **filters)[1]
    assert_same_kept(found, expected, distances)
    is_kept = (found > 0) & (expected > 0)
    np.testing.assert_allclose(found[is_kept], expected[is_kept], rtol=2e-5)


def test_the_rows_tell_the_filters_apart():
    """Control: every filter, after every other one and with a slightly other value, gives another law."""
    scores = random_scores(1000)
    names = [{}, {"top_k": 40}, {"top_k": 41}, {"top_k": 900}, {"top_p": 0.95}, {"top_p": 0.951}, {"min_p": 0.02}]
    settings = [*names, *({"top_k": 40, "top_p": 0.95} | more for more in ({}, {"top_k": 900}, {"min_p": 0.02}))]
    kept = {(laws_of(scores, TEMPERATURE, **filters) > 0).tobytes() for filters in settings}
    assert len(kept) == len(settings)


def test_the_check_sees_a_wrong_border():
    scores = random_scores(49152)[:3]
    laws, distances = by_sorting(scores, TEMPERATURE, top_p=0.95)
    with pytest.raises(AssertionError):
        assert_same_kept(laws_of(scores, TEMPERATURE, top_p=0.9501), laws, distances)


def test_small_rows_with_many_ties():
    generator = np.random.default_rng(7)
    num_checked = 0
    for _ in range(400):
        size = int(generator.integers(1, 24))
        scores = generator.integers(-4, 3, (1, size)).astype(np.float32)
        scores[0, generator.random(size) < 0.2] = NOTHING
        scores[0, 0] = 1.0
        filters = {
            "top_k": int(generator.integers(0, 30)),
            "top_p": float(generator.choice([1e-9, 0.2, 0.5, 0.9, 0.999, 1.0])),
            "min_p": float(generator.choice([0.0, 0.1, 1.0])),
        }
        expected, distances = by_sorting(scores, **filters)
        if filters["top_p"] < 1 and (distances < BORDER).any():
            continue
        np.testing.assert_allclose(laws_of(scores, **filters), expected, rtol=1e-6)
        np.testing.assert_allclose(np.sort(by_warpers(scores, **filters)), np.sort(expected), rtol=1e-5)
        num_checked += 1
    assert num_checked > 250


def scores_with_ties() -> np.ndarray:
    """All weights are 1: every sum is exact."""
    scores = np.full((1, 1200), NOTHING, dtype=np.float32)
    scores[0, 40:552:2] = 3.0
    return scores


@pytest.mark.parametrize("top_k", [0, 5, 100])
@pytest.mark.parametrize(("top_p", "num_kept"), [(0.5, 128), (0.5 + 2.0**-12, 129), (2.0**-8, 1), (1e-9, 1)])
def test_of_equal_scores_the_lowest_ids_go(top_p, num_kept, top_k):
    """Ties with the last of top_k stay for top_p to cut."""
    scores = scores_with_ties()
    law = laws_of(scores, top_k=top_k, top_p=top_p)[0]
    assert np.flatnonzero(law).tolist() == list(range(552 - 2 * num_kept, 552, 2))
    assert law.max() == law[550] == np.float32(1 / num_kept)
    assert (by_warpers(scores, top_k=top_k, top_p=top_p) > 0).sum() == num_kept


@pytest.mark.parametrize("top_k", [0, 3, 500])
def test_top_p_counts_only_what_top_k_left(top_k):
    """Scores so close that both borders lie in one bucket of the compiled search."""
    scores = np.linspace(0, 2e-3, 1000, dtype=np.float32)[None]
    laws, distances = by_sorting(scores, top_k=top_k, top_p=0.9)
    assert (distances > BORDER).all() and (laws > 0).sum() == {0: 900, 3: 3, 500: 450}[top_k]
    assert np.array_equal(laws_of(scores, top_k=top_k, top_p=0.9) > 0, laws > 0)


def test_ties_are_those_after_the_temperature():
    """Neighbouring scores may be one after a division; then top_k keeps both, as transformers does."""
    high = np.float32(1.0)
    low = np.nextafter(high, np.float32(0))
    for temperature in (0.7, 0.9, 1.1, 1.3):
        scores = np.array([[low, high, 0.0, high]], dtype=np.float32)
        kept = laws_of(scores, temperature, top_k=2) > 0
        assert kept.tolist() == (by_warpers(scores, temperature, top_k=2) > 0).tolist()
        assert kept[0, 0] == (low / np.float32(temperature) == high / np.float32(temperature))


@pytest.mark.parametrize("filters", [{"top_k": 1}, {"top_p": 1e-9}, {"min_p": 1.0}, {"top_p": 1e-9, "min_p": 1.0}])
def test_the_tightest_filters_leave_the_best_token(filters):
    scores = random_scores(1000)[:3]
    expected = np.zeros_like(scores)
    expected[np.arange(3), scores.argmax(axis=1)] = 1.0
    assert np.array_equal(laws_of(scores, TEMPERATURE, **filters), expected)


@pytest.mark.parametrize("filters", [{}, {"top_k": 1000}, {"top_k": 10**9}, {"min_p": 1e-30}, {"top_p": 1 - 1e-16}])
def test_the_loosest_filters_leave_every_token(filters):
    scores = random_scores(1000)[:3]
    laws = laws_of(scores, TEMPERATURE, **filters)
    assert (laws > 0).all()
    np.testing.assert_allclose(laws, by_sorting(scores, TEMPERATURE)[0], rtol=2e-6)


def test_exponentials_over_their_whole_range():
    scores = -np.linspace(0, 95, 5000, dtype=np.float32)[None]
    laws = laws_of(scores)
    expected = np.exp(scores.astype(np.float64))
    is_normal = scores >= -80  # below, the law's own rounding is coarser
    np.testing.assert_allclose(laws[is_normal], (expected / expected.sum())[is_normal], rtol=3e-7)
    assert (laws[(scores >= -87)] > 0).all() and (laws[scores < -87] == 0).all()
    np.testing.assert_allclose(laws.sum(dtype=np.float64), 1.0, rtol=3e-7)


@pytest.mark.parametrize("filters", [{}, *FILTERS])
def test_all_instruction_sets_give_equal_bits(filters):
    scores = random_scores(5000)
    results = [filter_laws(scores, temperature=TEMPERATURE, count=10, vectors=name, **filters) for name in VECTORS]
    for result in results:
        assert [array.tobytes() for array in result] == [array.tobytes() for array in results[0]]


@pytest.mark.skipif(parallel_region() == 0, reason="torch has no GNU OpenMP here")
@pytest.mark.parametrize("filters", [{}, *FILTERS])
@pytest.mark.parametrize("num_rows", [1, 2, 7, 40])
def test_threads_share_the_rows(num_rows, filters):
    """More rows than threads and fewer, enough numbers to be shared: the bits of one thread."""
    scores = np.random.default_rng(3).normal(0, 3, (num_rows, 20_000)).astype(np.float32)
    alone = filter_laws(scores, temperature=TEMPERATURE, count=5, **filters)
    for num_threads in (2, 5):
        shared = filter_laws(
            scores, temperature=TEMPERATURE, count=5, num_threads=num_threads, in_threads=parallel_region(), **filters
        )
        assert [array.tobytes() for array in shared] == [array.tobytes() for array in alone]


IN_THREADS = ctypes.CFUNCTYPE(None, ctypes.CFUNCTYPE(None, ctypes.c_void_p), ctypes.c_void_p, *[ctypes.c_uint] * 2)


@pytest.mark.parametrize(
    ("num_rows", "size", "num_threads", "started"),
    [(2, 16_384, 2, [2]), (2, 16_384, 3, [3]), (2, 16_383, 2, []), (2, 16_384, 1, []), (1, 40_000, 2, [])],
)
def test_threads_are_started_where_enough_rows_and_numbers_are_there(num_rows, size, num_threads, started):
    found, scores = [], np.random.default_rng(4).normal(0, 3, (num_rows, size)).astype(np.float32)

    @IN_THREADS
    def one_after_the_other(run, work, count, flags):
        found.append(count)
        for _ in range(count):
            run(work)

    address = ctypes.cast(one_after_the_other, ctypes.c_void_p).value
    laws = [filter_laws(scores, num_threads=num_threads, in_threads=place)[0] for place in (address, 0)]
    assert found == started and laws[0].tobytes() == laws[1].tobytes() == laws_of(scores).tobytes()


def test_the_environment_can_ask_for_the_plain_instructions():
    command = [sys.executable, "-c", "from stand.laws.filters import VECTORS; print(*VECTORS)"]
    environment = {**os.environ, "STAND_PORTABLE": "1"}
    result = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert result.stdout.split() == ["portable"], result.stderr


@pytest.mark.parametrize("count", [0, 1, 10, 600, 1000])
@pytest.mark.parametrize("filters", [{}, {"top_p": 0.9}, {"top_k": 4}, {"top_p": 1e-9}])
def test_best_tokens(filters, count):
    """They come from the filtered law; where fewer stay, the best of the others follow with probability 0."""
    scores = random_scores(1000)
    laws, ids, probabilities = filter_laws(scores, temperature=TEMPERATURE, count=count, **filters)
    for law, row, best, values in zip(laws, scores, ids, probabilities, strict=True):
        order = np.lexsort((np.arange(1000), -row, -law))[:count]
        assert best.tolist() == order.tolist()
        assert np.array_equal(values, law[order])


def test_best_tokens_of_equal_scores_are_those_that_top_p_keeps():
    _, ids, probabilities = filter_laws(scores_with_ties(), top_p=0.5, count=10)
    assert ids[0].tolist() == list(range(296, 316, 2))
    assert (probabilities == np.float32(1 / 128)).all()


@pytest.mark.parametrize("filters", [{}, {"top_k": 7}, {"top_k": 900}, {"top_p": 0.9}, {"min_p": 0.1}])
@pytest.mark.parametrize("place", [0, 600, 999])
@pytest.mark.parametrize("value", [np.nan, np.inf, NOTHING])
def test_a_broken_row_is_nan_throughout_and_no_other(value, place, filters):
    scores = random_scores(1000)[:3]
    alone = filter_laws(scores[1:2], count=3, **filters)
    scores[0, place] = value
    if value == NOTHING:
        scores[0] = value
    laws, ids, probabilities = filter_laws(scores, count=3, **filters)
    assert np.isnan(laws[0]).all() and np.isnan(probabilities[0]).all() and not ids[0].any()
    for found, expected in zip((laws, ids, probabilities), alone, strict=True):
        assert found[1].tobytes() == expected[0].tobytes()  # to the bit, whatever the batch mates
    assert np.isfinite(laws[2]).all()


@pytest.mark.parametrize("vectors", VECTORS)
def test_a_row_ends_where_the_next_one_begins(vectors):
    scores = random_scores(1024)[:2]
    alone = filter_laws(scores[:1], vectors=vectors)[0]
    scores[1, 0] = np.nan
    laws = filter_laws(scores, vectors=vectors)[0]
    assert laws[0].tobytes() == alone[0].tobytes() and np.isnan(laws[1]).all()


def test_no_rows_give_no_laws():
    shapes = [array.shape for array in filter_laws(np.empty((0, 20), np.float32), top_p=0.9, count=10)]
    assert shapes == [(0, 20), (0, 10), (0, 10)]


@pytest.mark.parametrize(
    ("bad", "rule"),
    [
        ({"temperature": 0.0}, r"temperature must be in \[1e-30, 1e30\], got 0.0; take the best token"),
        ({"top_k": -1}, "top_k must be >= 0, .* got -1"),
        ({"top_p": 0.0}, r"top_p in \(0, 1\]"),
        ({"min_p": 1.1}, "got 0, 1.0 and 1.1; 0, 1 and 0 switch them off"),
        ({"count": 21}, r"count must be in \[0, 20\].* got 21"),
        ({"vectors": "abacus"}, "vectors must be one of .* got 'abacus'"),
    ],
)
def test_bad_settings_name_rule_value_and_remedy(bad, rule):
    with pytest.raises(ValueError, match=rule):
        filter_laws(np.zeros((2, 20), np.float32), **bad)
    with pytest.raises(ValueError, match="at least one column"):
        filter_laws(np.zeros((2, 0), np.float32))


@pytest.mark.parametrize("settings", [{"temperature": 0.0}, {"temperature": 0.6}, {"temperature": 0.6, "top_p": 0.9}])
def test_a_steps_laws_are_the_compiled_ones(settings, monkeypatch):
    """They equal those of the array code, which float64 takes, and need no warper."""
    law, scores = TargetLaw(SamplingParams(**settings)), torch.from_numpy(random_scores(1000)[:3])
    expected = law.laws(scores.double(), 5)
    monkeypatch.setattr(TargetLaw, "warp", None)
    found = law.laws(scores, 5)
    torch.testing.assert_close(found.probabilities, expected.probabilities.float(), rtol=1e-5, atol=0)
    assert found.top_ids.equal(expected.top_ids)
    torch.testing.assert_close(found.top_probs, expected.top_probs.float(), rtol=1e-5, atol=0)
    assert law.laws(scores, 5000).top_ids.shape == (3, 1000)
