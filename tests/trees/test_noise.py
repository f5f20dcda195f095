"""Noise: equal to its slow twin bit by bit, uniform, and independent between words of the key.

All statistical tests have a fixed seed, so they pass or fail for good; their odds of failing for an ideal generator
are stated all the same, because they say how strict a bound is.
"""

import numpy as np
import pytest
from reference import chi_square_bound, uniform

from stand.trees import noise

FALSE_ALARM = 1e-6


def test_equals_slow_twin_bit_by_bit():
    rng = np.random.default_rng(1)
    words = rng.integers(0, 2**32, size=(3, 200))
    seed = 2**64 - 12345
    got = noise.uniforms(seed, noise.RESAMPLE, *words, slot=7)
    expected = [uniform(seed, noise.RESAMPLE, *map(int, word), 7) for word in words.T]
    assert got.tolist() == expected


def test_numbers_of_packed_nodes_are_those_of_their_rows_and_steps():
    rows, steps = np.array([3, 4]), np.array([1, 9])
    offsets, depths = np.array([0, 3, 5], dtype=np.int32), np.array([0, 1, 1, 0, 1], dtype=np.int32)
    row_of, step_of, local = np.repeat(rows, [3, 2]), np.repeat(steps, [3, 2]), np.array([0, 1, 2, 0, 1])
    by_node = noise.node_uniforms(7, noise.ACCEPT, rows, steps, offsets)
    assert by_node.tolist() == noise.uniforms(7, noise.ACCEPT, row_of, step_of, local).tolist()
    by_depth = noise.node_uniforms(7, noise.TARGET, rows, steps, offsets, depths)
    assert by_depth.tolist() == noise.uniforms(7, noise.TARGET, row_of, step_of + depths, 0 * local).tolist()
    with pytest.raises(ValueError, match="number rows and steps from 0"):
        noise.node_uniforms(7, noise.TARGET, rows, steps - 10, offsets, depths)
    with pytest.raises(ValueError, match=r"must be \[2\] as the offsets say"):
        noise.node_uniforms(7, noise.ACCEPT, rows[:1], steps, offsets)


def test_numbers_of_a_steps_tests_are_those_of_their_streams():
    rows, steps, offsets = np.array([3, 4]), np.array([1, 9]), np.array([0, 3, 5], dtype=np.int32)
    accept, resample = np.full(7, -1.0), np.full(3, -1.0)
    noise.fill_tests(7, rows, steps, offsets, accept, resample)
    assert accept.tolist() == [*noise.node_uniforms(7, noise.ACCEPT, rows, steps, offsets), -1.0, -1.0]
    assert resample.tolist() == [*noise.uniforms(7, noise.RESAMPLE, rows, steps, 0), -1.0]
    fitting = np.empty(5), np.empty(2)
    noise.fill_tests(7, rows, steps, offsets, *fitting)
    assert fitting[0].tolist() == accept[:5].tolist() and fitting[1].tolist() == resample[:2].tolist()
    written = np.empty(6)
    assert noise.node_uniforms(7, noise.ACCEPT, rows, steps, offsets, out=written) is written
    assert written[:5].tolist() == accept[:5].tolist()
    for wrong in (
        lambda: noise.fill_tests(7, rows, steps, offsets, accept[:4], resample),
        lambda: noise.fill_tests(7, rows[:1], steps, offsets, accept, resample),
        lambda: noise.fill_tests(7, rows - 10, steps, offsets, accept, resample),
        lambda: noise.node_uniforms(7, noise.ACCEPT, rows, steps, offsets, out=written[:3]),
    ):
        with pytest.raises(ValueError):
            wrong()


@pytest.mark.parametrize("offsets", [[0, 9, 5], [0, -3, 5], [1, 3, 5], [-1, 3, 5], [3, 2, 0], [0, 10**7, 5], []])
def test_offsets_that_do_not_ascend_from_0_are_refused(offsets):
    """What lies beyond the arrays is neither read nor written."""
    rows, offsets = np.array([3, 4]), np.array(offsets, dtype=np.int32)
    with pytest.raises(ValueError, match="offsets"):
        noise.node_uniforms(7, noise.ACCEPT, rows, rows, offsets)
    with pytest.raises(ValueError, match="offsets"):
        noise.fill_tests(7, rows, rows, offsets, np.empty(5), np.empty(2))


def test_every_node_has_a_depth():
    rows, offsets = np.array([3, 4]), np.array([0, 3, 5], dtype=np.int32)
    with pytest.raises(ValueError, match="must hold 5 nodes"):
        noise.node_uniforms(7, noise.TARGET, rows, rows, offsets, np.zeros(4, np.int32))


def test_broadcasts_and_keeps_the_shape():
    grid = noise.uniforms(5, noise.ACCEPT, np.arange(3)[:, None], 9, np.arange(4)[None, :])
    assert grid.shape == (3, 4)
    assert grid[2, 1] == noise.uniforms(5, noise.ACCEPT, 2, 9, 1)


def test_lies_strictly_inside_the_unit_interval():
    values = noise.uniforms(0, noise.DRAFT, 0, 0, np.arange(100_000))
    assert values.min() > 0.0 and values.max() < 1.0


@pytest.mark.parametrize(
    "bad",
    [
        {"seed": -1},
        {"seed": 2**64},
        {"rows": -1},
        {"steps": 2**32},
        {"nodes": [-5]},
        {"slot": 2**32},
        {"stream": 2**64},
    ],
)
def test_refuses_words_out_of_range(bad):
    arguments = {"seed": 0, "stream": noise.DRAFT, "rows": 0, "steps": 0, "nodes": 0} | bad
    with pytest.raises(ValueError, match="must be in"):
        noise.uniforms(**arguments)


def varied(word, number):
    """`number` uniforms that differ in one word of the key alone."""
    key = {"seed": 3, "stream": 1, "rows": 0, "steps": 0, "nodes": 0, "slot": 0}
    counter = np.arange(number)
    if word in ("rows", "steps", "nodes"):
        return noise.uniforms(**(key | {word: counter}))
    return np.array([noise.uniforms(**(key | {word: int(value)})) for value in counter])


@pytest.mark.parametrize("word", ["seed", "stream", "rows", "steps", "nodes", "slot"])
def test_uniform_and_serially_independent_in_every_word(word):
    values = varied(word, 20_000)
    counts = np.bincount((values * 64).astype(int), minlength=64)
    assert chi_square(counts) < chi_square_bound(63, FALSE_ALARM)
    cells = (values * 8).astype(int)
    for lag in (1, 2, 4, 32):
        pairs = np.bincount(cells[:-lag] * 8 + cells[lag:], minlength=64)
        assert chi_square(pairs) < chi_square_bound(63, FALSE_ALARM)


def test_a_bad_generator_is_caught():
    """Control: a Weyl sequence is uniform but its neighbours are not independent."""
    values = (np.arange(20_000) * 0.6180339887498949) % 1.0
    cells = (values * 8).astype(int)
    assert chi_square(np.bincount(cells[:-1] * 8 + cells[1:], minlength=64)) > chi_square_bound(63, FALSE_ALARM)


def test_streams_rows_and_steps_are_uncorrelated():
    nodes = np.arange(20_000)
    columns = [
        noise.uniforms(seed, stream, row, step, nodes)
        for seed, stream, row, step in [
            (0, 1, 0, 0), (0, 2, 0, 0), (0, 3, 0, 0), (0, 4, 0, 0), (1, 1, 0, 0), (0, 1, 1, 0), (0, 1, 0, 1),
            (0, 1, 1, 1), (2**63, 1, 0, 0),
        ]
    ]  # fmt: skip
    correlation = np.corrcoef(columns) - np.eye(len(columns))
    # 36 pairs at 6 standard deviations: odds of about 7e-8
    assert np.abs(correlation).max() < 6.0 / np.sqrt(len(nodes))


def test_single_bits_of_the_key_flip_half_of_the_output():
    """Avalanche: each of the low 16 bits of row, step and node, and of the slot."""
    base = (np.arange(500) * 2654435761) % 2**16
    for word in ("rows", "steps", "nodes"):
        for bit in range(16):
            key = {"rows": base, "steps": base + 1, "nodes": base + 2}
            flipped = key | {word: key[word] ^ (1 << bit)}
            before, after = (
                (noise.uniforms(11, noise.DRAFT, **words) * 2.0**52).astype(np.uint64) for words in (key, flipped)
            )
            changed = np.unpackbits((before ^ after).view(np.uint8)).sum() / len(base)
            assert abs(changed - 26.0) < 6.0 * np.sqrt(52 * 0.25 / len(base))


def chi_square(counts):
    expected = counts.sum() / len(counts)
    return float(((counts - expected) ** 2).sum() / expected)


def test_rows_without_nodes_have_none():
    rows, steps, offsets = np.array([3, 4]), np.array([1, 9]), np.array([0, 0, 2], dtype=np.int32)
    both = noise.node_uniforms(7, noise.ACCEPT, rows, steps, offsets)
    assert (
        both.tolist() == noise.node_uniforms(7, noise.ACCEPT, rows[1:], steps[1:], np.array([0, 2], np.int32)).tolist()
    )
    with pytest.raises(ValueError, match="offsets must ascend from 0"):
        noise.node_uniforms(7, noise.ACCEPT, rows, steps, np.array([0, 2, 1], dtype=np.int32))
