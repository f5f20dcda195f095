"""Tiles of the attention kernel by what GPUs allow, without one."""

from types import SimpleNamespace

import pytest
import torch

from stand.forward.attention_shape import HeadSizes
from stand.gpu.tuning.attention_tiles import Limits, blocks, limits_of, programs_at_once, refusal, tile_tokens

LIMITS = {  # shared memory that one program may have
    "sm_80": Limits(80, 163 * 1024),
    "sm_86": Limits(86, 99 * 1024),
    "sm_89": Limits(89, 99 * 1024),
    "sm_90": Limits(90, 227 * 1024),
    "sm_100": Limits(100, 227 * 1024),
    "sm_120": Limits(120, 99 * 1024),
}


@pytest.mark.parametrize("limits", LIMITS.values(), ids=LIMITS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_every_tile_fits_the_gpu(limits, dtype):
    for head_size, value_size in (*((size, size) for size in (16, 64, 80, 96, 128, 192, 256, 512)), (192, 128)):
        for groups in (1, 7, 8 if (head_size, dtype) == (512, torch.float32) else 64):
            kind = HeadSizes(head_size, value_size)
            rows = tile_tokens(1000, groups, kind, dtype, limits=limits) * groups
            sizes = blocks(rows, kind, dtype, limits=limits)
            assert sizes.rows >= rows and 64 % sizes.keys == 0
            assert 0 < limits.needs(sizes) <= limits.shared_bytes


def test_smaller_shared_memory_takes_shorter_key_blocks():
    """Head sizes 96 (Phi-3), 128 (Qwen2.5-7B) and 256 (Gemma 2): the first choice asks for more than 99 KiB."""
    for head_size, num_rows, first in ((96, 128, (64, 3)), (128, 128, (64, 3)), (256, 64, (32, 3))):
        hopper = blocks(num_rows, HeadSizes.alike(head_size), torch.bfloat16, limits=LIMITS["sm_90"])
        assert (hopper.keys, hopper.num_stages) == first
        for name in ("sm_86", "sm_89", "sm_120"):
            assert blocks(num_rows, HeadSizes.alike(head_size), torch.bfloat16, limits=LIMITS[name]) != hopper
    assert blocks(128, HeadSizes.alike(96), torch.bfloat16, limits=LIMITS["sm_80"]).keys == 64
    assert blocks(128, HeadSizes.alike(128), torch.bfloat16, limits=LIMITS["sm_80"]).keys == 32  # 64 would spill


def test_blackwell_takes_tiles_by_what_its_own_instructions_ask_for():
    """Of latents of 512 numbers (DeepSeek's) the first choice asks for 245 KB there, which no program may have."""
    latents, alike = HeadSizes(512, 64, True), HeadSizes.alike(128)
    keys = [blocks(64, latents, torch.bfloat16, limits=LIMITS[name]).keys for name in ("sm_80", "sm_90", "sm_100")]
    assert keys == [32, 32, 16]
    assert blocks(64, latents, torch.bfloat16, limits=Limits(103, 227 * 1024)).keys == 16
    assert blocks(128, alike, torch.bfloat16, limits=LIMITS["sm_100"]).keys == 32  # 64 would spill


def test_gpus_that_cannot_are_refused():
    with pytest.raises(ValueError, match="8.0 or higher, got 7.5"):
        blocks(16, HeadSizes.alike(128), torch.bfloat16, limits=Limits(75, 64 * 1024))
    with pytest.raises(ValueError, match="must fit into shared memory, got 40960 bytes"):
        blocks(16, HeadSizes.alike(128), torch.bfloat16, limits=Limits(80, 40 * 1024))
    assert refusal(Limits(80, 1)) is None


def test_narrow_values_and_latents_have_tables_of_their_own():
    sizes = {(128, 128): 128, (144, 128): 128, (256, 128): 128, (256, 144): 64, (272, 128): 64}
    for (key, value), rows in sizes.items():  # the largest tile of each
        assert tile_tokens(1000, 1, HeadSizes(key, value), torch.bfloat16) == rows
    narrow, alike = (blocks(64, sizes, torch.bfloat16) for sizes in (HeadSizes(144, 128), HeadSizes.alike(144)))
    assert (narrow.num_warps, alike.num_warps) == (4, 8)
    small, large = (blocks(64, HeadSizes(rank, 64, True), torch.bfloat16) for rank in (256, 272))
    assert small.wgmma_bytes < large.wgmma_bytes
    assert blocks(32, HeadSizes(256, 32, True), torch.float32) == blocks(32, HeadSizes(512, 64, True), torch.float32)
    with pytest.raises(ValueError, match="at most 64 turned numbers beside latents, got .* turned parts of 80"):
        blocks(16, HeadSizes(512, 80, True), torch.bfloat16)


def test_limits_are_the_gpus(monkeypatch):
    offered = SimpleNamespace(shared_memory_per_block_optin=101376)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 6))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: offered)
    assert limits_of(torch.device("cuda")) == LIMITS["sm_86"] and limits_of(torch.device("cpu")) == LIMITS["sm_90"]


def test_tiles_by_rows_and_groups():
    assert tile_tokens(80, 7, HeadSizes.alike(128), torch.bfloat16) == 18
    assert tile_tokens(8, 7, HeadSizes.alike(128), torch.bfloat16) == 9
    assert tile_tokens(1, 1, HeadSizes.alike(64), torch.float16) == 64
    assert tile_tokens(80, 2, HeadSizes.alike(256), torch.bfloat16) == 32
    assert tile_tokens(1, 71, HeadSizes.alike(64), torch.bfloat16) == 1
    assert tile_tokens(64, 1, HeadSizes.alike(112), torch.float16) == 64
    assert tile_tokens(80, 8, HeadSizes.alike(512), torch.bfloat16) == 8
    assert [tile_tokens(80, 1, HeadSizes(192, size), torch.bfloat16) for size in (128, 192)] == [128, 64]
    with pytest.raises(ValueError, match="at most 64 query rows"):
        tile_tokens(1, 71, HeadSizes.alike(64), torch.float32)
    for sizes in ((528, 528), (192, 100), (100, 192), (64, 0), (0, 64)):
        with pytest.raises(ValueError, match="head sizes up to 512 that are multiples of 16"):
            blocks(16, HeadSizes(*sizes), torch.bfloat16)


def test_two_programs_share_a_processor_where_registers_and_shared_memory_allow():
    hopper = {size: programs_at_once(size, HeadSizes.alike(128), torch.bfloat16) for size in (16, 64, 128)}
    assert hopper == {16: 2, 64: 2, 128: 1}  # 4 warps with 64 KB, 8 warps with 128 KB
    small = Limits(86, 99 * 1024)
    assert programs_at_once(16, HeadSizes.alike(128), torch.bfloat16, limits=small) == 1  # 2 x 52 KB are too many
    assert programs_at_once(16, HeadSizes.alike(64), torch.bfloat16, limits=small) == 2
    assert programs_at_once(64, HeadSizes.alike(128), torch.float32) == 1
