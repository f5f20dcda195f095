"""Attention over pages in no order equals attention over rooms, to the bit, in Triton's interpreter."""

import numpy as np
import pytest
import torch

pytest.importorskip("triton")

from attention_cases import Case, difference, expected, make_case, run

from stand.gpu.tuning.attention_tiles import BLOCKS_16_BIT, BLOCKS_FLOAT32, PAGE_SIZE


def paged(case: Case, page_size: int = PAGE_SIZE, *, shared: tuple[int, ...] = ()) -> tuple[Case, torch.Tensor]:
    """The same keys and values in a pool of pages in no order, and its table; what no row has is NaN.

    shared: places of rows, the first of them the one whose whole committed pages the others have too.
    """
    generator = np.random.default_rng(5)
    rooms, _, room, _ = case.keys.shape
    width = -(-room // page_size)
    numbers = generator.permutation(rooms * width).astype(np.int32).reshape(rooms, width)
    pools = []
    for states in (case.keys, case.values):
        pool = torch.full((rooms * width + 1, states.shape[1], page_size, states.shape[3]), float("nan"))
        for row in range(rooms):
            for slot in range(room):
                pool[numbers[row, slot // page_size], :, slot % page_size] = states[row, :, slot]
        pools.append(pool.to(states.dtype))
    if shared:
        first, *others = (case.cache_rows[place] for place in shared)
        whole = int(min(case.lengths[list(shared)])) // page_size
        for row in others:
            for states in (case.keys, case.values):
                states[row, :, : whole * page_size] = states[first, :, : whole * page_size]
            numbers[row, :whole] = numbers[first, :whole]
    table = np.full((rooms, width + 1), rooms * width, dtype=np.int32)  # behind a row's pages: the one of NaN
    table[:, :width] = numbers
    fields = {name: getattr(case, name) for name in Case.__dataclass_fields__}
    return Case(**{**fields, "keys": pools[0], "values": pools[1]}), torch.from_numpy(table)


CASES = {
    "ragged rows, several pages": ((9, 5, 11), (130, 300, 40), {}),
    "borders of pages and blocks": ((3, 3, 3, 3), (63, 64, 65, 127), {}),
    "two words of ancestors across a border": ((130,), (61,), {}),
    "nothing committed": ((70, 1), (0, 0), {}),
    "grouped heads": ((7, 2), (90, 20), {"heads": 7, "groups": 7}),
    "long heads": ((4,), (150,), {"size": 128}),
}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("row_items", [1, 10**6], ids=["one split", "many splits"])
def test_pages_equal_rooms(name, row_items):
    counts, lengths, options = CASES[name]
    case = make_case(counts, lengths, **options)
    pool, pages = paged(case)
    assert torch.equal(run(pool, pages=pages, row_items=row_items), run(case, row_items=row_items))


@pytest.mark.parametrize("page_size", [64, 128, 256])
@pytest.mark.parametrize("options", [{"window": 90}, {"softcap": 2.0, "sinks": torch.tensor([0.5, -2.0])}])
def test_page_sizes_windows_caps_and_sinks(page_size, options):
    case = make_case([12, 3], [200, 77])
    pool, pages = paged(case, page_size)
    assert torch.equal(run(pool, pages=pages, **options), run(case, **options))


def test_rows_that_share_a_prompt():
    case = make_case([5, 6, 2], [150, 140, 200])
    pool, pages = paged(case, shared=(0, 1, 2))
    rows = case.cache_rows
    assert (pages[rows[1], :2] == pages[rows[0], :2]).all() and pages[rows[1], 2] != pages[rows[0], 2]
    assert difference(case) < 2e-6
    assert torch.equal(run(pool, pages=pages), run(case))


def test_whoever_finishes_last_sums_in_the_same_order():
    case = make_case([3, 1], [150, 70])
    pool, pages = paged(case)
    wanted = run(case, tile=2)
    for order in (-1, 0):
        assert torch.equal(run(pool, pages=pages, tile=2, order=order), wanted)


@pytest.mark.parametrize("place", [0, 1, 2])
def test_a_wrong_page_is_noticed(place):
    """Control: the number of one page of a row is another row's; the last place holds the end of the draft."""
    case = make_case([6, 4], [125, 130])
    pool, pages = paged(case)
    wanted = expected(case)
    assert float((run(pool, pages=pages).double() - wanted).abs().max()) < 2e-6
    row, other = case.cache_rows
    pages[row, place] = pages[other, place]
    mixed = run(pool, pages=pages).double()
    assert float((mixed[:6] - wanted[:6]).abs().max()) > 1e-3 and float((mixed[6:] - wanted[6:]).abs().max()) < 2e-6


def test_pages_shorter_than_a_block_of_keys_are_refused():
    case = make_case([3], [70])
    pool, pages = paged(case, 16)
    with pytest.raises(ValueError, match="pages must have at least 32 slots here, got 16"):
        run(pool, pages=pages)


def test_no_block_of_keys_is_longer_than_a_page():
    tables = [*BLOCKS_16_BIT.values(), *BLOCKS_FLOAT32.values()]
    assert max(one.keys for table in tables for tile in table for one in tile) == PAGE_SIZE
