"""The work list covers every (token, slot) pair exactly once, in an order that depends on the row alone."""

import numpy as np
import pytest

from stand.gpu.work_list import ITEM_FIELDS, WorkList, most_items, most_splits


def random_step(seed: int):
    generator = np.random.default_rng(seed)
    rows = int(generator.integers(1, 7))
    counts = generator.integers(0 if seed % 3 == 0 else 1, 40, rows)
    lengths = generator.integers(0, 700, rows) // 64 * int(generator.choice([1, 64]))
    options = {"tile_tokens": int(generator.integers(1, 20)), "split_length": int(generator.choice([64, 128, 512]))}
    return np.concatenate([[0], np.cumsum(counts)]), lengths, generator.permutation(rows + 3)[:rows], options


def slow_list(offsets, lengths, cache_rows, *, tile_tokens, split_length):
    """The same list, one item at a time."""
    items, num_splits = [], []
    for row, length in enumerate(lengths):
        first, end = int(offsets[row]), int(offsets[row + 1])
        splits = max(-(-int(length) // split_length), 1)
        num_splits += [splits] * (end - first)
        for split in range(splits):
            for tile in range(first, end, tile_tokens):
                count = min(tile_tokens, end - tile)
                last = split == splits - 1
                k_end = length + (tile - first) + count if last else (split + 1) * split_length
                items.append((first, tile, count, cache_rows[row], length, split * split_length, k_end, split))
    return items, num_splits


@pytest.mark.parametrize("seed", range(40))
def test_equals_the_slow_list(seed):
    offsets, lengths, cache_rows, options = random_step(seed)
    work = WorkList.build(offsets, lengths, cache_rows, **options)
    items, num_splits = slow_list(offsets, lengths, cache_rows, **options)
    assert work.items.dtype == np.int32 and work.num_splits.dtype == np.int32
    assert work.items.shape == (len(items), len(ITEM_FIELDS))
    assert work.items.tolist() == [list(map(int, item)) for item in items]
    assert work.num_splits.tolist() == num_splits


@pytest.mark.parametrize("seed", range(40))
def test_every_visible_slot_once(seed):
    offsets, lengths, cache_rows, options = random_step(seed)
    work = WorkList.build(offsets, lengths, cache_rows, **options)
    width = int((lengths + np.diff(offsets)).max(initial=0))
    seen = np.zeros((int(offsets[-1]), width), dtype=int)
    for row_first, q_first, q_count, _, length, k_first, k_end, split in work.items.tolist():
        assert 0 < q_count <= options["tile_tokens"] and k_first % 64 == 0
        assert 0 <= split < work.num_splits[q_first] and k_end <= length + q_first + q_count - row_first
        seen[q_first : q_first + q_count, k_first:k_end] += 1
    for row, length in enumerate(lengths):
        for token in range(offsets[row], offsets[row + 1]):
            needed = length + token - offsets[row] + 1  # the prefix and every token up to its own place
            assert (seen[token, :needed] == 1).all() and (seen[token] <= 1).all()


def test_a_row_has_the_same_items_in_any_batch():
    offsets, lengths = np.array([0, 9, 14, 40]), np.array([500, 64, 1000])
    work = WorkList.build(offsets, lengths, np.array([2, 0, 1]), tile_tokens=8, split_length=128)
    own = work.items[work.items[:, 0] == 9]
    alone = WorkList.build(np.array([0, 5]), lengths[1:2], np.array([0]), tile_tokens=8, split_length=128).items
    own[:, :2] -= 9
    assert np.array_equal(own, alone)


@pytest.mark.parametrize("seed", range(40))
def test_bounds_hold(seed):
    offsets, lengths, cache_rows, options = random_step(seed)
    room = int((lengths + np.diff(offsets)).max())
    work = WorkList.build(offsets, lengths, cache_rows, **options)
    assert len(work.items) <= most_items(int(offsets[-1]), len(lengths), room, **options)
    assert work.num_splits.max(initial=0) <= most_splits(room, options["split_length"])


def test_bounds_are_reached():
    counts = np.array([1, 1, 1 + 2 * 18])
    lengths = np.full(3, 1024)
    work = WorkList.build(
        np.concatenate([[0], np.cumsum(counts)]), lengths, np.arange(3), tile_tokens=18, split_length=512
    )
    assert len(work.items) == most_items(39, 3, 1024, tile_tokens=18, split_length=512) == 10
    assert most_items(2, 16, 0, tile_tokens=18, split_length=512) == 2


def test_fill_pads_with_empty_items():
    work = WorkList.build(np.array([0, 2]), np.array([70]), np.array([0]), tile_tokens=4, split_length=64)
    items, num_splits = np.full((5, 8), 7, dtype=np.int32), np.full(6, 7, dtype=np.int32)
    work.fill(items, num_splits)
    assert np.array_equal(items[:2], work.items) and not items[2:].any()
    assert num_splits.tolist() == [2, 2, 0, 0, 0, 0]
    with pytest.raises(ValueError, match="items must hold the whole list"):
        work.fill(items[:1], num_splits)
    with pytest.raises(ValueError, match="num_splits must hold the whole list"):
        work.fill(items, num_splits[:1])


def test_wrong_sizes_are_refused():
    step = (np.array([0, 2]), np.array([70]), np.array([0]))
    with pytest.raises(ValueError, match="multiple of 64"):
        WorkList.build(*step, tile_tokens=4, split_length=100)
    with pytest.raises(ValueError, match="tile_tokens must be at least 1"):
        WorkList.build(*step, tile_tokens=0, split_length=64)
