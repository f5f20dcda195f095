"""The work list covers every (token, slot) pair exactly once, in an order that depends on the row alone."""

from math import ceil

import numpy as np
import pytest
import torch

from stand.gpu.packets.work_list import ITEM_FIELDS, Splitting, Tiling, WorkList
from stand.step_compiled import ListArrays


def random_step(seed: int):
    generator = np.random.default_rng(seed)
    rows = int(generator.integers(1, 7))
    counts = generator.integers(0 if seed % 3 == 0 else 1, 40, rows)
    lengths = generator.integers(0, 700, rows) // 64 * int(generator.choice([1, 64]))
    window = int(generator.choice([0, 1, 64, 200, 300]))
    splitting = Splitting(int(generator.choice([1, 3, 8, 10**6])), int(generator.choice([64, 128, 512])), window)
    tiling = Tiling(int(generator.integers(1, 20)), splitting)
    return np.concatenate([[0], np.cumsum(counts)]), lengths, generator.permutation(rows + 3)[:rows], tiling


def begin_of(length, window):
    """The first slot that a row's work is about."""
    return max(int(length) - window + 1, 0) // 64 * 64 if window else 0


def slow_list(offsets, lengths, cache_rows, tiling):
    """The same list, one item at a time; and the number of splits of each token."""
    tile_tokens, splitting = tiling.tile_tokens, tiling.splitting
    items, num_splits = [], []
    for row, length in enumerate(lengths):
        first, end, begin = int(offsets[row]), int(offsets[row + 1]), begin_of(length, splitting.window)
        slots = int(length) - begin
        tiles = -(-(end - first) // tile_tokens)
        wanted = max(splitting.row_items // max(tiles, 1), 1)
        split_length = max(ceil(ceil(slots / wanted) / 64) * 64, splitting.shortest)
        splits = max(-(-slots // split_length), 1)
        num_splits += [splits] * (end - first)
        for split in range(splits):
            for tile in range(first, end, tile_tokens):
                count = min(tile_tokens, end - tile)
                last = split == splits - 1
                k_end = length + (tile - first) + count if last else begin + (split + 1) * split_length
                items.append((first, tile, count, cache_rows[row], length, begin + split * split_length, k_end, split))
    return items, num_splits


@pytest.mark.parametrize("seed", range(40))
def test_equals_the_slow_list(seed):
    offsets, lengths, cache_rows, tiling = random_step(seed)
    work = WorkList.build(offsets, lengths, cache_rows, tiling)
    items, num_splits = slow_list(offsets, lengths, cache_rows, tiling)
    assert work.items.dtype == np.int32 and work.partial_starts.dtype == np.int32
    assert work.items.shape == (len(items), len(ITEM_FIELDS))
    assert work.items.tolist() == [list(map(int, item)) for item in items]
    assert work.partial_starts.tolist() == [0, *np.cumsum(num_splits)]


@pytest.mark.parametrize("seed", range(40))
def test_every_visible_slot_once(seed):
    offsets, lengths, cache_rows, tiling = random_step(seed)
    work = WorkList.build(offsets, lengths, cache_rows, tiling)
    width = int((lengths + np.diff(offsets)).max(initial=0))
    seen = np.zeros((int(offsets[-1]), width), dtype=int)
    for row_first, q_first, q_count, _, length, k_first, k_end, split in work.items.tolist():
        assert 0 < q_count <= tiling.tile_tokens and k_first % 64 == 0
        assert 0 <= split < np.diff(work.partial_starts)[q_first] and k_end <= length + q_first + q_count - row_first
        seen[q_first : q_first + q_count, k_first:k_end] += 1
    for row, length in enumerate(lengths):
        for token in range(offsets[row], offsets[row + 1]):
            needed = length + token - offsets[row] + 1  # the prefix and every token up to its own place
            begin = begin_of(length, tiling.splitting.window)  # no token sees more, at whatever depth it is
            assert (seen[token, begin:needed] == 1).all() and (seen[token] <= 1).all() and not seen[token, :begin].any()


def test_a_row_has_the_same_items_in_any_batch():
    offsets, lengths = np.array([0, 9, 14, 40]), np.array([500, 64, 1000])
    tiling = Tiling(8, Splitting(6))
    work = WorkList.build(offsets, lengths, np.array([2, 0, 1]), tiling)
    own = work.items[work.items[:, 0] == 9]
    alone = WorkList.build(np.array([0, 5]), lengths[1:2], np.array([0]), tiling).items
    own[:, :2] -= 9
    assert np.array_equal(own, alone)


@pytest.mark.parametrize("seed", range(40))
def test_bounds_hold(seed):
    offsets, lengths, cache_rows, tiling = random_step(seed)
    room = int((lengths + np.diff(offsets)).max())
    work = WorkList.build(offsets, lengths, cache_rows, tiling)
    size = (int(offsets[-1]), len(lengths), room)
    assert len(work.items) <= tiling.most_items(*size)
    assert work.partial_starts[-1] <= tiling.most_partials(*size)
    assert np.diff(work.partial_starts).max(initial=0) <= tiling.splitting.most_splits(room)


def test_bounds_are_reached():
    counts, lengths = np.array([1, 1, 1 + 2 * 18]), np.full(3, 1024)
    offsets = np.concatenate([[0], np.cumsum(counts)])
    tiling = Tiling(18, Splitting(10**6, 512))
    work = WorkList.build(offsets, lengths, np.arange(3), tiling)
    assert len(work.items) == tiling.most_items(39, 3, 1024) == 10
    assert work.partial_starts[-1] == tiling.most_partials(39, 3, 1024) == 78
    assert tiling.most_items(2, 16, 0) == 2


@pytest.mark.parametrize(("window", "length", "begin", "splits"), [
    (1024, 32768, 31744, 16), (1024, 32700, 31616, 17), (1024, 1000, 0, 16), (128, 5000, 4864, 3),
])  # fmt: skip
def test_a_window_is_split_and_what_is_before_it_is_not(window, length, begin, splits):
    """A window that begins within a block takes the block along. Without it a row of 32,768 has splits of 1,024."""
    tiling = Tiling(8, Splitting(33, window=window))
    work = WorkList.build(np.array([0, 3]), np.array([length]), np.array([0]), tiling)
    assert len(work.items) == splits and work.items[0, 5] == begin and work.items[-1, 6] == length + 3
    assert splits <= tiling.most_items(3, 1, length + 3) <= splits + 1


@pytest.mark.parametrize(
    ("tokens", "length", "items", "split_length"),
    [(1, 2048, 32, 64), (80, 2048, 30, 384), (80, 16384, 30, 2752), (7, 16384, 32, 512), (1, 32768, 32, 1024)],
)
def test_one_row_of_a_7b_fills_132_processors(tokens, length, items, split_length):
    """4 key heads, 18 tokens per tile: one program per item and key head."""
    work = WorkList.build(
        np.array([0, tokens]), np.array([length]), np.array([0]), Tiling(18, Splitting(132 // 4))
    )  # fmt: skip
    assert len(work.items) == items and 4 * items <= 132
    assert work.items[0, 6] == split_length


def test_rows_of_a_call_share_the_processors():
    cpu = torch.device("cpu")
    assert [Splitting.filling(cpu, key_heads=2, num_rows=rows).row_items for rows in (1, 2, 4, 99)] == [4, 2, 1, 1]
    assert [Splitting.filling(cpu, key_heads=2, num_rows=rows, programs=2).row_items for rows in (1, 3, 8)] == [8, 2, 1]


def test_a_shorter_list_leaves_no_items_of_a_longer_one():
    work = WorkList(np.full((9, 8), 7, dtype=np.int32), np.full(7, 7, dtype=np.int32))
    arrays = ListArrays(work.items, work.partial_starts, Tiling(1, Splitting(10**6)))
    row = np.array([0], dtype=np.int64)
    assert arrays.list(np.array([0, 4], dtype=np.int32), np.array([128]), row) == 8
    assert work.items[:8, 2].all() and not work.items[8:].any()
    assert arrays.list(np.array([0, 2], dtype=np.int32), np.array([70]), row) == 4
    assert work.items[:4, 2].all() and not work.items[4:].any()
    assert work.partial_starts.tolist() == [0, 2, 4, 4, 4, 4, 4]


@pytest.mark.parametrize("sizes", [(3, 9), (4, 2)])
def test_what_does_not_fit_is_refused(sizes):
    items, tokens = sizes
    work = WorkList(np.zeros((items, 8), dtype=np.int32), np.zeros(tokens, dtype=np.int32))
    arrays = ListArrays(work.items, work.partial_starts, Tiling(1, Splitting(10**6)))
    with pytest.raises(ValueError, match="must hold the whole list"):
        arrays.list(np.array([0, 2], dtype=np.int32), np.array([70]), np.array([0]))


def test_wrong_sizes_are_refused():
    with pytest.raises(ValueError, match="multiple of 64"):
        Splitting(3, 100)
    for sizes in ((0,), (1, 0)):
        with pytest.raises(ValueError, match="row_items must be at least 1"):
            Splitting(*sizes)
    with pytest.raises(ValueError, match="tile_tokens must be at least 1"):
        Tiling(0, Splitting(1))
    with pytest.raises(ValueError, match="window not negative"):
        Splitting(1, window=-1)
