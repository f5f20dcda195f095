"""Cache compaction equals indexing that reads before it writes, also where sources and targets overlap."""

import pytest
import torch

pytest.importorskip("triton")

from stand.gpu.kernels.compact import compact

PATHS = {
    "empty": [],
    "in place": [1, 2, 3],
    "in place, then a gap": [1, 2, 5, 9],
    "shifted chain": [2, 3, 4, 5, 6],
    "gaps": [3, 4, 8, 20],
    "one": [17],
    "long": [*range(1, 10), *range(12, 40)],  # takes three turns
}


def random_storage(shape=(4, 3, 2, 64, 24), dtype=torch.float32) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(1)).to(dtype)


def compact_rooms(storage, rows, lengths, paths) -> None:
    """A row's page is as long as the row."""
    num_rows = storage.shape[-4]
    compact(storage, torch.arange(num_rows, dtype=torch.int32)[:, None], rows, lengths, paths)


def packed(paths: list[list[int]], depth: int = 40) -> torch.Tensor:
    return torch.tensor([path + [-1] * (depth - len(path)) for path in paths])


def expect(storage: torch.Tensor, rows: list[int], lengths: list[int], paths: list[list[int]]) -> torch.Tensor:
    """[C, R, Hkv, S, D] by indexing."""
    expected = storage.clone()
    for row, length, path in zip(rows, lengths, paths, strict=True):
        sources = torch.tensor(path, dtype=torch.int64) + length
        expected[:, row, :, length + 1 : length + 1 + len(path)] = storage[:, row][:, :, sources]
    return expected


@pytest.mark.parametrize("path", PATHS.values(), ids=PATHS.keys())
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_equals_indexing(path, dtype):
    storage = random_storage(dtype=dtype)
    expected = expect(storage, [2], [20], [path])
    compact_rooms(storage, torch.tensor([2]), torch.tensor([20]), packed([path]))
    assert torch.equal(storage, expected)


def test_moving_in_the_wrong_order_is_noticed():
    """Control: some of the paths do overlap, so that a copy from the deepest node up loses tokens."""
    storage = random_storage()
    expected = expect(storage, [0], [5], [PATHS["shifted chain"]])
    for depth, node in reversed(list(enumerate(PATHS["shifted chain"]))):
        storage[:, 0, :, 6 + depth] = storage[:, 0, :, 5 + node]
    assert not torch.equal(storage, expected)


@pytest.mark.parametrize("integer", [torch.int32, torch.int64])
def test_rows_of_their_own_lengths_in_any_order(integer):
    storage, rows, lengths = random_storage(), [1, 2, 0], [0, 40, 7]
    paths = [PATHS["gaps"], PATHS["one"], PATHS["empty"]]
    expected = expect(storage, rows, lengths, paths)
    compact_rooms(storage, torch.tensor(rows, dtype=integer), torch.tensor(lengths), packed(paths).to(integer))
    assert torch.equal(storage, expected)


def test_rows_of_padding_may_name_any_row():
    storage = random_storage()
    expected = expect(storage, [0], [3], [PATHS["gaps"]])
    paths = packed([PATHS["gaps"], [], []])
    compact_rooms(storage, torch.tensor([0, 0, 0]), torch.tensor([3, 0, 60]), paths)
    assert torch.equal(storage, expected)


def test_a_view_of_layers_and_kinds():
    """A cache's block [layers, 2, R, Hkv, S, D], and a slice of its rows and slots."""
    block = random_storage((3, 2, 4, 2, 70, 24))
    before = block.clone()
    view = block[:, :, 1:3, :, 4:68]
    expected = expect(view.flatten(0, 1), [1, 0], [9, 2], [PATHS["gaps"], PATHS["long"]])
    compact_rooms(view, torch.tensor([1, 0]), torch.tensor([9, 2]), packed([PATHS["gaps"], PATHS["long"]]))
    assert torch.equal(view.flatten(0, 1), expected)
    outside = torch.ones_like(block, dtype=torch.bool)
    outside[:, :, 1:3, :, 4:68] = False
    assert torch.equal(block[outside], before[outside])


def test_refuses_storage_that_flattening_would_copy():
    block, path = random_storage((3, 2, 4, 2, 40, 24)), packed([[2]])
    for bad in (block[:, :1], block.transpose(-1, -2)):
        with pytest.raises(ValueError, match="the cache's own block"):
            compact_rooms(bad, torch.tensor([0]), torch.tensor([0]), path)
    with pytest.raises(ValueError, match="one entry per row"):
        compact_rooms(block, torch.tensor([0, 1]), torch.tensor([0]), path)


@pytest.mark.parametrize("path", PATHS.values(), ids=PATHS.keys())
def test_pages_in_no_order_equal_rooms(path):
    """Paths that cross the borders of pages of 8 slots, in two rows."""
    rooms, size = random_storage(), 8
    pages = torch.randperm(3 * 8, generator=torch.Generator().manual_seed(2)).view(3, 8)
    pool = torch.full((4, 3 * 8 + 1, 2, size, 24), float("nan"))
    pool[:, pages] = rooms.unflatten(3, (8, size)).permute(0, 1, 3, 2, 4, 5)
    arguments = torch.tensor([2, 0]), torch.tensor([20, 7]), packed([path, PATHS["gaps"]])
    compact_rooms(rooms, *arguments)
    compact(pool, pages.to(torch.int32), *arguments)
    assert torch.equal(pool[:, pages].permute(0, 1, 3, 2, 4, 5).flatten(3, 4), rooms)
    assert pool[:, -1].isnan().all()


def test_a_wrong_page_is_noticed():
    """Control: two numbers of a row exchanged."""
    rooms = random_storage()
    pages = torch.arange(3 * 8, dtype=torch.int32).view(3, 8)
    pool = rooms.unflatten(3, (8, 8)).permute(0, 1, 3, 2, 4, 5).flatten(1, 2).contiguous()
    arguments = torch.tensor([2]), torch.tensor([20]), packed([PATHS["gaps"]])
    compact_rooms(rooms, *arguments)
    wrong = pages.clone()
    wrong[2, 3], wrong[2, 4] = pages[2, 4], pages[2, 3]
    compact(pool, wrong, *arguments)
    assert not torch.equal(pool[:, pages.long()].permute(0, 1, 3, 2, 4, 5).flatten(3, 4), rooms)


def test_a_table_of_other_numbers_is_refused():
    storage, one = random_storage(), torch.tensor([0])
    with pytest.raises(ValueError, match="pages \\[R, T\\] int32"):
        compact(storage, torch.zeros(3, 1), one, one, packed([[2]]))
