"""Tree attention in Triton's interpreter against explicit softmax in float64, token by token."""

import numpy as np
import pytest
import torch

pytest.importorskip("triton")

import triton
from attention_cases import Case, difference, expected, make_case, run
from widened_bfloat16 import widened_bfloat16

from stand.gpu.kernels import attention as attention_kernel
from stand.gpu.kernels.attention import tree_attention
from stand.gpu.kernels.merge import merge_splits, merged_splits


@pytest.fixture(autouse=True)
def real_bfloat16_products():
    with widened_bfloat16():
        yield


@pytest.mark.parametrize("groups, heads", [(1, 2), (4, 4), (7, 7), (3, 6)])
def test_ragged_rows_of_every_grouping(groups, heads):
    case = make_case([1, 12, 5], [70, 1, 130], heads=heads, groups=groups)
    assert difference(case, tile=7) < 2e-6


@pytest.mark.parametrize("size", [16, 64, 80, 96, 128, 192, 256, 512])
def test_head_sizes(size):
    assert difference(make_case([3, 9], [65, 20], size=size)) < 2e-6


@pytest.mark.parametrize("size, value_size", [(192, 128), (48, 32), (32, 80), (96, 64)])
def test_values_of_another_size_than_keys(size, value_size):
    """DeepSeek's 192 and 128, MiniCPM 3's 96 and 64: split rows, whole ones, and tokens without an item."""
    case = make_case([3, 9], [130, 20], size=size, value_size=value_size, padding=4)
    assert run(case).shape == (16, 2, value_size) and difference(case) < 2e-6
    assert difference(case, row_items=1) < 2e-6


@pytest.mark.parametrize("sizes", [(512, 64), (256, 32), (16, 16)])
def test_latents(sizes):
    """One key head; what is mixed is the first part of keys. Split rows, whole ones, a window, padding."""
    size, turned = sizes
    kind = {"heads": 4, "groups": 4, "size": size, "value_size": turned, "is_latent": True}
    case = make_case([3, 9], [130, 20], padding=4, **kind)
    assert run(case).shape == (16, 4, size) and difference(case) < 4e-6
    assert difference(case, row_items=1) < 4e-6 and difference(case, window=40) < 4e-6


def test_latents_of_more_than_a_word_of_tokens():
    case = make_case([80], [70], heads=2, groups=2, size=32, value_size=16, is_latent=True)
    assert difference(case, softcap=3.0) < 2e-6
    case.values[..., 0] += 1.0  # of the turned part alone
    assert float((run(case).double() - expected(case)).abs().max()) < 2e-6


def test_turned_parts_count():
    case = make_case([5], [40], heads=2, groups=2, size=32, value_size=16, is_latent=True)
    before = run(case)
    case.values[...] = torch.randn_like(case.values)
    assert float((run(case) - before).abs().max()) > 1e-2


@pytest.mark.parametrize("window", [1, 40, 64, 100])
def test_a_list_that_begins_where_the_window_does(window):
    """No key that a token sees is left out: the whole list gives the same up to rounding."""
    case = make_case([30, 2], [300, 64], heads=2, groups=2)
    assert difference(case, window=window) < 2e-6 and difference(case, window=window, is_cut=False) < 2e-6
    assert difference(case, window=window, row_items=2) < 2e-6


@pytest.mark.parametrize("dtype, tolerance", [(torch.bfloat16, 2e-2), (torch.float16, 2e-3)])
@pytest.mark.parametrize("size", [64, 128, 256, 512, "latent"])
def test_sixteen_bits(dtype, tolerance, size):
    kind = {"size": 256, "value_size": 32, "groups": 2, "is_latent": True} if size == "latent" else {"size": size}
    case = make_case([20, 2], [100, 10], dtype=dtype, **kind)
    assert difference(case) < tolerance
    assert run(case).dtype == dtype


@pytest.mark.parametrize("lengths", [[0, 0], [0, 1], [63, 64], [65, 128], [127, 0]])
def test_lengths_at_the_borders_of_blocks_and_splits(lengths):
    assert difference(make_case([1, 10], lengths)) < 2e-6


@pytest.mark.parametrize("count", [64, 80, 200])
def test_trees_of_several_words(count):
    case = make_case([count, 2], [20, 70], heads=1, groups=1)
    assert case.ancestors.shape[1] == -(-count // 64)
    assert difference(case, tile=64) < 2e-6


def test_a_chain_is_causal_attention():
    case = make_case([30], [40], chains=True)
    full = torch.nn.functional.scaled_dot_product_attention(
        torch.cat([torch.zeros(40, 2, 64), case.query]).transpose(0, 1)[None],
        case.keys[case.cache_rows[0], :, :70][None].repeat_interleave(2, dim=1),
        case.values[case.cache_rows[0], :, :70][None].repeat_interleave(2, dim=1),
        is_causal=True,
    )
    assert torch.allclose(run(case), full[0].transpose(0, 1)[40:], atol=2e-6)


@pytest.mark.parametrize("window", [1, 4, 32, 64, 100])
def test_windows_count_positions_not_slots(window):
    case = make_case([14, 3, 1], [150, 40, 129], seed=window)
    assert difference(case, window=window) < 2e-6


@pytest.mark.parametrize("window", [3, 40])
def test_windows_over_long_drafts_in_several_tiles(window):
    case = make_case([70, 5], [50, 9], heads=1, groups=1, chains=True)
    assert difference(case, window=window, tile=24) < 2e-6


def test_soft_caps_and_sinks():
    case = make_case([7, 2], [90, 0], heads=4, groups=2)
    case.query *= 8  # scores far into the cap
    sinks = torch.tensor([0.5, -2.0, 3.0, 0.0])
    assert difference(case, softcap=5.0) < 1e-5
    assert difference(case, sinks=sinks) < 1e-5
    assert difference(case, sinks=sinks, softcap=5.0, window=9) < 1e-5
    assert not torch.allclose(run(case), run(case, sinks=sinks), atol=1e-2)
    assert not torch.allclose(run(case), run(case, softcap=5.0), atol=1e-2)


def test_tiles_and_splits_only_reorder_sums():
    case = make_case([13, 6], [200, 65], heads=1, groups=1)
    for tile, split_length in ((1, 1024), (5, 64), (64, 192)):
        assert difference(case, tile=tile, split_length=split_length) < 2e-6


@pytest.mark.parametrize("row_items", [1, 3, 4, 9])
def test_rows_are_split_by_their_own_length_and_tiles(row_items):
    """Short and long rows, one tile and several, in one step."""
    case = make_case([1, 13, 5], [400, 200, 65], heads=1, groups=1)
    assert difference(case, tile=5, row_items=row_items) < 2e-6


def test_more_splits_than_the_merge_holds_at_once():
    case = make_case([2], [64 * (merged_splits(64) + 2) + 7], heads=1, groups=1)
    assert difference(case) < 2e-6


@pytest.mark.parametrize("options", [{}, {"window": 90, "sinks": torch.tensor([0.5, -2.0])}], ids=["plain", "all"])
def test_splits_in_any_order_give_the_same_sums(options):
    """Bit by bit; the first order is backwards."""
    case = make_case([3, 1], [150, 70])
    wanted = run(case, tile=2, **options)
    for order in (-1, 0, 1):
        assert torch.equal(run(case, tile=2, order=order, **options), wanted)


@pytest.mark.parametrize("size", [64, 80, 256])
def test_the_merge_weighs_results_by_their_mass(size):
    """Of tokens with two results and more; others stay as they are. Control: without a result's mass it is wrong."""
    starts = torch.tensor([0, 2, 2, 3, 3 + 2 * merged_splits(size) + 5], dtype=torch.int32)
    partials, log_sums = torch.randn(int(starts[-1]), 3, size), 9 * torch.randn(int(starts[-1]), 3)
    log_sums[1, 0] = log_sums[5, :] = float("-inf")  # a split that has seen nothing
    mixed = torch.full((4, 3, size), 7.0)
    merge_splits(partials, log_sums, starts, mixed)
    for token in (0, 3):
        own = slice(*starts[token : token + 2].tolist())
        shares = torch.softmax(log_sums[own].double() * np.log(2), dim=0)[..., None]
        assert torch.allclose(mixed[token].double(), (shares * partials[own]).sum(0), atol=2e-6)
        assert not torch.allclose(mixed[token].double(), partials[own].double().mean(0), atol=1e-2)
    assert torch.equal(mixed[1:3], torch.full((2, 3, size), 7.0))


def test_rows_without_splits_need_no_room_for_results():
    case = make_case([4, 2], [60, 10])
    assert torch.equal(run(case, has_room=False), run(case))


def test_storage_may_be_a_strided_view():
    case = make_case([4, 3], [66, 12], heads=4, groups=2)
    wanted = run(case)
    rows, heads, room, size = case.keys.shape
    by_slot = torch.full((3, rows, room, heads, 2, size), float("nan"))  # layers, rows, slots, heads, keys and values
    by_slot[1, ..., 0, :] = case.keys.transpose(1, 2)
    by_slot[1, ..., 1, :] = case.values.transpose(1, 2)
    case.keys, case.values = (by_slot[1, ..., kind, :].transpose(1, 2) for kind in (0, 1))
    case.query = torch.cat([case.query, case.query], dim=2).view(7, 4, 2, 64)[:, :, 1]
    assert not case.query.is_contiguous() and case.keys.stride(2) == 256
    assert torch.equal(run(case), wanted)
    case.values = case.values.contiguous()  # of a layout of its own
    assert torch.equal(run(case), wanted)


def test_large_scores_do_not_overflow():
    case = make_case([4, 2], [70, 10])
    case.query *= 1000.0
    assert difference(case) < 1e-3  # float32 scores of several thousand
    assert difference(case, scale=0.125 / 1000.0) < 2e-6


def test_padding_gives_zeros():
    case = make_case([4, 2], [10, 70], padding=3)
    for options in ({}, {"sinks": torch.ones(2)}, {"window": 5}):
        mixed = run(case, **options)
        assert torch.equal(mixed[6:], torch.zeros(3, 2, 64))
        assert torch.isfinite(mixed).all()


def test_slots_behind_a_row_are_never_read():
    case = make_case([4, 2], [10, 70])
    wanted = run(case)
    for row, length, count in zip(case.cache_rows, case.lengths, np.diff(case.offsets), strict=True):
        for storage in (case.keys, case.values):
            storage[row, :, length + count :] = float("nan")
    assert torch.equal(run(case), wanted)


def test_blocks_before_the_window_are_never_read():
    case = make_case([5], [200])
    wanted = run(case, window=30)
    case.values[case.cache_rows[0], :, :160] = float("nan")  # the first token sees slots from 171 on
    assert torch.equal(run(case, window=30), wanted)
    assert not torch.isfinite(run(case, window=50)).all()


@pytest.mark.parametrize("window", [0, 20])
def test_a_row_does_not_depend_on_its_batch_mates(window):
    """Bit by bit: the same sums in the same order, alone, among others, and with longer ones."""
    together = make_case([9, 5, 11], [130, 300, 40])
    mixed = run(together, tile=16, window=window)
    for row in range(3):
        first, end = together.offsets[row : row + 2]
        alone = Case(
            query=together.query[first:end],
            keys=together.keys,
            values=together.values,
            sees=[together.sees[row]],
            lengths=together.lengths[row : row + 1],
            cache_rows=together.cache_rows[row : row + 1],
            offsets=np.array([0, end - first]),
            ancestors=together.ancestors[first:end],
            positions=together.positions[first:end],
        )
        assert torch.equal(run(alone, tile=16, window=window), mixed[first:end])


def test_a_flipped_bit_is_noticed():
    case = make_case([12], [20])
    wanted = run(case)
    hidden = int(np.flatnonzero(~case.sees[0][11])[0])
    case.ancestors[11, 0] ^= 1 << hidden
    mixed = run(case)
    assert torch.equal(mixed[:11], wanted[:11])
    assert (mixed[11] - wanted[11]).abs().max() > 1e-3
    assert float((mixed.double() - expected(case)).abs().max()) > 1e-3


def test_a_wrong_position_is_noticed():
    case = make_case([12], [40])
    wanted = expected(case, window=10)
    case.positions[5] += 3
    assert float((run(case, window=10).double() - wanted).abs().max()) > 1e-3
    assert float((run(case).double() - expected(case)).abs().max()) < 2e-6  # without a window nobody looks at them


def test_a_wrong_length_in_the_list_is_noticed():
    case = make_case([3], [40])
    wanted = expected(case)
    case.lengths = case.lengths - 1
    assert float((run(case).double() - wanted).abs().max()) > 1e-3


def test_runs_on_tensors_without_values():
    """No look at a value on the way: shapes alone decide what is launched."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode(allow_non_fake_inputs=True), torch.device("cuda"):
        query = torch.empty(8, 4, 64, dtype=torch.bfloat16)
        cache = torch.empty(3, 2, 256, 64, dtype=torch.bfloat16)
        items = torch.empty(12, 8, dtype=torch.int32)
        mixed = tree_attention(
            query,
            cache,
            cache,
            torch.empty(3, 4, dtype=torch.int32),
            torch.empty(8, 2, dtype=torch.int64),
            torch.empty(8, dtype=torch.int64),
            items,
            torch.empty(9, dtype=torch.int32),
            torch.empty(32, 4, 64),
            torch.empty(32, 4),
            0.125,
            8,
        )
        assert mixed.shape == (8, 4, 64) and mixed.dtype == torch.bfloat16 and mixed.device.type == "cuda"


def test_wrong_arguments_are_refused():
    case = make_case([3], [5])
    case.positions = case.positions.int()
    with pytest.raises(ValueError, match="positions must be"):
        run(case)
    case = make_case([3], [5])
    case.ancestors = torch.zeros(3, 5, dtype=torch.int64)
    with pytest.raises(ValueError, match="1 to 4 words"):
        run(case)
    case = make_case([3], [5])
    case.keys = case.keys.transpose(2, 3).contiguous().transpose(2, 3)
    with pytest.raises(ValueError, match="stride 1"):
        run(case)
    with pytest.raises(ValueError, match="scale must be positive"):
        run(make_case([3], [5]), scale=-1.0)
    with pytest.raises(ValueError, match="at most 64 query rows"):
        run(make_case([3], [5]), tile=40)
    with pytest.raises(ValueError, match="multiples of 16"):
        run(make_case([3], [5], size=40))


def test_cpu_tensors_need_the_interpreter(monkeypatch):
    kernel = attention_kernel._tree_attention_kernel
    monkeypatch.setattr(attention_kernel, "_tree_attention_kernel", triton.JITFunction(kernel.fn))
    with pytest.raises(ValueError, match="needs CUDA tensors, got tree_attention_kernel"):
        run(make_case([1], [1]))
