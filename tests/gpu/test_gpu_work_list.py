"""The work list covers every (token, slot) pair exactly once, in an order that depends on the row alone."""

from math import ceil

import numpy as np
import pytest
import torch

from stand.gpu.work_list import ITEM_FIELDS, Splitting, WorkList


def random_step(seed: int):
    generator = np.random.default_rng(seed)
    rows = int(generator.integers(1, 7))
    counts = generator.integers(0 if seed % 3 == 0 else 1, 40, rows)
    lengths = generator.integers(0, 700, rows) // 64 * int(generator.choice([1, 64]))
    splitting = Splitting(int(generator.choice([1, 3, 8, 10**6])), int(generator.choice([64, 128, 512])))
    options = {"tile_tokens": int(generator.integers(1, 20)), "splitting": splitting}
    return np.concatenate([[0], np.cumsum(counts)]), lengths, generator.permutation(rows + 3)[:rows], options


def slow_list(offsets, lengths, cache_rows, *, tile_tokens, splitting):
    """The same list, one item at a time; and the number of splits of each token."""
    items, num_splits = [], []
    for row, length in enumerate(lengths):
        first, end = int(offsets[row]), int(offsets[row + 1])
        tiles = -(-(end - first) // tile_tokens)
        wanted = max(splitting.row_items // max(tiles, 1), 1)
        split_length = max(ceil(ceil(int(length) / wanted) / 64) * 64, splitting.shortest)
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
    assert work.items.dtype == np.int32 and work.partial_starts.dtype == np.int32
    assert work.items.shape == (len(items), len(ITEM_FIELDS))
    assert work.items.tolist() == [list(map(int, item)) for item in items]
    assert work.partial_starts.tolist() == [0, *np.cumsum(num_splits)]


@pytest.mark.parametrize("seed", range(40))
def test_every_visible_slot_once(seed):
    offsets, lengths, cache_rows, options = random_step(seed)
    work = WorkList.build(offsets, lengths, cache_rows, **options)
    width = int((lengths + np.diff(offsets)).max(initial=0))
    seen = np.zeros((int(offsets[-1]), width), dtype=int)
    for row_first, q_first, q_count, _, length, k_first, k_end, split in work.items.tolist():
        assert 0 < q_count <= options["tile_tokens"] and k_first % 64 == 0
        assert 0 <= split < np.diff(work.partial_starts)[q_first] and k_end <= length + q_first + q_count - row_first
        seen[q_first : q_first + q_count, k_first:k_end] += 1
    for row, length in enumerate(lengths):
        for token in range(offsets[row], offsets[row + 1]):
            needed = length + token - offsets[row] + 1  # the prefix and every token up to its own place
            assert (seen[token, :needed] == 1).all() and (seen[token] <= 1).all()


def test_a_row_has_the_same_items_in_any_batch():
    offsets, lengths = np.array([0, 9, 14, 40]), np.array([500, 64, 1000])
    options = {"tile_tokens": 8, "splitting": Splitting(6)}
    work = WorkList.build(offsets, lengths, np.array([2, 0, 1]), **options)
    own = work.items[work.items[:, 0] == 9]
    alone = WorkList.build(np.array([0, 5]), lengths[1:2], np.array([0]), **options).items
    own[:, :2] -= 9
    assert np.array_equal(own, alone)


@pytest.mark.parametrize("seed", range(40))
def test_bounds_hold(seed):
    offsets, lengths, cache_rows, options = random_step(seed)
    room = int((lengths + np.diff(offsets)).max())
    work, splitting = WorkList.build(offsets, lengths, cache_rows, **options), options["splitting"]
    size = (int(offsets[-1]), len(lengths), room)
    assert len(work.items) <= splitting.most_items(*size, tile_tokens=options["tile_tokens"])
    assert work.partial_starts[-1] <= splitting.most_partials(*size, tile_tokens=options["tile_tokens"])
    assert np.diff(work.partial_starts).max(initial=0) <= splitting.most_splits(room)


def test_bounds_are_reached():
    counts, lengths = np.array([1, 1, 1 + 2 * 18]), np.full(3, 1024)
    offsets = np.concatenate([[0], np.cumsum(counts)])
    splitting = Splitting(10**6, 512)
    work = WorkList.build(offsets, lengths, np.arange(3), tile_tokens=18, splitting=splitting)
    assert len(work.items) == splitting.most_items(39, 3, 1024, tile_tokens=18) == 10
    assert work.partial_starts[-1] == splitting.most_partials(39, 3, 1024, tile_tokens=18) == 78
    assert splitting.most_items(2, 16, 0, tile_tokens=18) == 2


@pytest.mark.parametrize(
    ("tokens", "length", "items", "split_length"),
    [(1, 2048, 32, 64), (80, 2048, 30, 384), (80, 16384, 30, 2752), (7, 16384, 32, 512), (1, 32768, 32, 1024)],
)
def test_one_row_of_a_7b_fills_132_processors(tokens, length, items, split_length):
    """4 key heads, 18 tokens per tile: one program per item and key head."""
    work = WorkList.build(
        np.array([0, tokens]), np.array([length]), np.array([0]), tile_tokens=18, splitting=Splitting(132 // 4)
    )
    assert len(work.items) == items and 4 * items <= 132
    assert work.items[0, 6] == split_length


def test_rows_of_a_call_share_the_processors():
    cpu = torch.device("cpu")
    assert [Splitting.filling(cpu, key_heads=2, num_rows=rows).row_items for rows in (1, 2, 4, 99)] == [4, 2, 1, 1]
    assert [Splitting.filling(cpu, key_heads=2, num_rows=rows, programs=2).row_items for rows in (1, 3, 8)] == [8, 2, 1]


def test_a_shorter_list_leaves_no_items_of_a_longer_one():
    work = WorkList(np.zeros((9, 8), dtype=np.int32), np.full(7, 7, dtype=np.int32))
    settings = {"tile_tokens": 1, "splitting": Splitting(10**6)}
    row = np.array([0], dtype=np.int64)
    used = work.list(np.array([0, 4], dtype=np.int32), np.array([128]), row, **settings, num_used=9)
    assert used == 8 and work.items[:8, 2].all() and not work.items[8:].any()
    used = work.list(np.array([0, 2], dtype=np.int32), np.array([70]), row, **settings, num_used=used)
    assert used == 4 and work.items[:4, 2].all() and not work.items[4:].any()
    assert work.partial_starts.tolist() == [0, 2, 4, 4, 4, 4, 4]


@pytest.mark.parametrize("sizes", [(3, 9), (4, 2)])
def test_what_does_not_fit_is_refused(sizes):
    items, tokens = sizes
    work = WorkList(np.zeros((items, 8), dtype=np.int32), np.zeros(tokens, dtype=np.int32))
    with pytest.raises(ValueError, match="must hold the whole list"):
        work.list(
            np.array([0, 2], dtype=np.int32), np.array([70]), np.array([0]), tile_tokens=1,
            splitting=Splitting(10**6), num_used=0,
        )  # fmt: skip


def test_wrong_sizes_are_refused():
    with pytest.raises(ValueError, match="multiple of 64"):
        Splitting(3, 100)
    with pytest.raises(ValueError, match="row_items must be at least 1"):
        Splitting(0)
    with pytest.raises(ValueError, match="tile_tokens must be at least 1"):
        WorkList.build(np.array([0, 2]), np.array([70]), np.array([0]), tile_tokens=0, splitting=Splitting(1))
