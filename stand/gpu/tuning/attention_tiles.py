"""Tiles of the attention kernel: how many query rows and keys a program holds at once, by what the GPU allows."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from stand.forward.attention_shape import HeadSizes


@dataclass(frozen=True, slots=True)
class Blocks:
    """Sizes of one specialisation: query rows (tokens times grouped heads) and keys per block.

    The last three are what the compiler asks for in bytes of shared memory: with the matrix instructions of all GPUs
    from sm_80 on, with those of sm_90, and with those of sm_100. 0: not to be used there.
    """

    rows: int
    keys: int
    num_warps: int
    num_stages: int
    mma_bytes: int
    wgmma_bytes: int
    tcgen05_bytes: int


@dataclass(frozen=True, slots=True)
class Limits:
    """What a GPU allows: compute capability (80, 90, ...) and bytes of shared memory per program."""

    capability: int
    shared_bytes: int

    def needs(self, sizes: Blocks) -> int:
        """Bytes of shared memory, 0 where the sizes are not to be used."""
        own = {9: sizes.wgmma_bytes, 10: sizes.tcgen05_bytes}
        return own.get(self.capability // 10, sizes.mma_bytes)

    def programs(self, sizes: Blocks) -> int:
        """How many programs of these sizes a processor holds at once: two, where registers and shared memory allow."""
        by_registers = REGISTERS // (REGISTERS_PER_THREAD * 32 * sizes.num_warps)
        return max(min(MOST_AT_ONCE, by_registers, self.shared_bytes // self.needs(sizes)), 1)


# By the largest head size that they serve, small tiles first; of one tile the first choice that fits is taken. Chosen
# by what the compiler says for sm_80, sm_89, sm_90, sm_100 and sm_120: no spilled registers in 16 bits (small tiles of
# head size 96 on sm_120 excepted: 40 bytes; on sm_100 those of head size 64 and of more than 128 numbers or latents).
SMALL_32 = Blocks(64, 32, 4, 3, 53248, 65536, 65568)
BLOCKS_16_BIT = {
    64: ((Blocks(64, 64, 4, 3, 49152, 57344, 57376),), (Blocks(128, 64, 8, 3, 65536, 65536, 66592),)),
    96: ((SMALL_32,), (Blocks(128, 64, 8, 3, 114688, 131072, 0), Blocks(128, 32, 8, 3, 73728, 81920, 82976))),
    128: ((SMALL_32,), (Blocks(128, 64, 8, 3, 0, 131072, 0), Blocks(128, 32, 8, 3, 73728, 81920, 82976))),
    256: ((Blocks(64, 32, 8, 3, 102400, 135168, 131616), Blocks(64, 32, 8, 2, 69632, 102400, 98848)),),
    512: ((Blocks(64, 32, 8, 2, 135168, 200704, 197152), Blocks(64, 16, 8, 2, 100352, 133120, 131616)),),
}
# Keys of up to 256 numbers with values of up to 128: DeepSeek's 192 and 128.
NARROW_VALUES_16_BIT = (
    (Blocks(64, 32, 4, 3, 86016, 106496, 106528),),
    (Blocks(128, 32, 8, 3, 122880, 139264, 140320), Blocks(128, 32, 8, 2, 98304, 114688, 115744)),
)
# Latents beside up to 64 turned numbers: MiniCPM 3's 256 and 32, DeepSeek's 512 and 64 (32 bytes spilled on sm_80, 24
# on sm_90: half as many keys would need none and twice as many blocks).
LATENT_16_BIT = {
    256: ((Blocks(64, 32, 8, 3, 86016, 106496, 135728),),),
    512: ((Blocks(64, 32, 8, 3, 151552, 188416, 250416), Blocks(64, 16, 8, 2, 94208, 131072, 143920)),),
}
LATENT_FLOAT32 = {512: ((Blocks(32, 16, 8, 1, 110592, 110592, 110592), Blocks(16, 16, 4, 1, 73728, 73728, 73728)),)}
MOST_TURNED = 64
BLOCKS_FLOAT32 = {
    64: ((Blocks(64, 32, 4, 2, 41216, 41216, 41216),),),
    96: ((Blocks(64, 32, 8, 1, 65536, 65536, 65536),),),
    128: ((Blocks(64, 32, 8, 1, 65536, 65536, 65536),),),
    256: ((Blocks(64, 16, 8, 1, 98304, 98304, 98304),),),
    512: ((Blocks(32, 16, 8, 1, 131072, 131072, 131072), Blocks(16, 16, 4, 1, 65536, 65536, 65536)),),
}
PAGE_SIZE = 64  # slots of a page of the cache: as many as the longest block of keys, so that a block lies in two pages
LEAST_CAPABILITY = 80  # below, the compiler has no fitting matrix instructions and spills kilobytes
REGISTERS, REGISTERS_PER_THREAD = 65536, 256  # of a processor; of a thread, at most
MOST_AT_ONCE = 2  # programs of a processor that split keys are meant for
HOPPER = Limits(90, 227 * 1024)  # what the interpreter stands in for


def blocks(num_rows: int, sizes: HeadSizes, dtype: torch.dtype, *, limits: Limits = HOPPER) -> Blocks:
    """The fixed sizes for tiles of `num_rows` query rows on a GPU of these limits. Raises ValueError where none fit."""
    offered = _offered(sizes, dtype, limits)
    fitting = [tile for tile in offered if tile.rows >= num_rows]
    if not fitting:
        raise ValueError(
            f"a tile of {_described(sizes)} in {dtype} must have at most {offered[-1].rows} query rows "
            f"(tokens times query heads per key head), got {num_rows}; "
            "take fewer tokens per tile, or the masked attention of stand.forward.tree_attention for more grouped heads"
        )
    return fitting[0]


def tile_tokens(
    tokens_per_row: int, groups: int, sizes: HeadSizes, dtype: torch.dtype, *, limits: Limits = HOPPER
) -> int:
    """Tokens per item of the work list for rows of up to `tokens_per_row` tokens.

    Every tile reads all keys of its row, so the largest tile is best unless a smaller one holds a whole row. `groups`
    query heads share a key head and lie in the same tile. Raises ValueError when a tile cannot hold them.
    """
    offered = _offered(sizes, dtype, limits)
    num_rows = max(min(tokens_per_row * groups, offered[-1].rows), groups)
    return blocks(num_rows, sizes, dtype, limits=limits).rows // groups


def programs_at_once(num_rows: int, sizes: HeadSizes, dtype: torch.dtype, *, limits: Limits = HOPPER) -> int:
    """Programs that a processor holds at once, with tiles of `num_rows` query rows. Raises ValueError as `blocks`."""
    return limits.programs(blocks(num_rows, sizes, dtype, limits=limits))


def limits_of(device: torch.device) -> Limits:
    """Of the GPU; in the interpreter, those of an sm_90."""
    if device.type != "cuda":
        return HOPPER
    major, minor = torch.cuda.get_device_capability(device)
    return Limits(10 * major + minor, torch.cuda.get_device_properties(device).shared_memory_per_block_optin)


def refusal(limits: Limits) -> str | None:
    """Why the kernels are not for such a GPU, or None."""
    if limits.capability >= LEAST_CAPABILITY:
        return None
    return f"the kernels need compute capability 8.0 or higher, got {limits.capability // 10}.{limits.capability % 10}"


def _offered(sizes: HeadSizes, dtype: torch.dtype, limits: Limits) -> tuple[Blocks, ...]:
    """The tiles of the next larger size in the tables, each by its first choice that fits; small ones first."""
    tiles = _tiles_for(sizes, dtype)
    if obstacle := refusal(limits):
        raise ValueError(f"{obstacle}; use the masked attention of stand.forward.tree_attention")
    choices = [[one for one in tile if 0 < limits.needs(one) <= limits.shared_bytes] for tile in tiles]
    offered = tuple(tile[0] for tile in choices if tile)
    if not offered:
        raise ValueError(
            f"a tile of {_described(sizes)} in {dtype} must fit into shared memory, got {limits.shared_bytes} bytes; "
            "use the masked attention of stand.forward.tree_attention"
        )
    return offered


def _tiles_for(sizes: HeadSizes, dtype: torch.dtype) -> tuple[tuple[Blocks, ...], ...]:
    half, whole = (LATENT_16_BIT, LATENT_FLOAT32) if sizes.is_latent else (BLOCKS_16_BIT, BLOCKS_FLOAT32)
    table = {torch.float32: whole, torch.float16: half, torch.bfloat16: half}.get(dtype, {})
    fitting = [size for size in table if size >= max(sizes.key, sizes.value)]
    is_odd = min(sizes.key, sizes.value) < 1 or sizes.key % 16 or sizes.value % 16
    if not fitting or is_odd or (sizes.is_latent and sizes.value > MOST_TURNED):
        raise ValueError(
            "tree attention needs float32, float16 or bfloat16, head sizes up to 512 that are multiples of 16 and at "
            f"most {MOST_TURNED} turned numbers beside latents, got {dtype} and {_described(sizes)}; use the masked "
            "attention of stand.forward.tree_attention"
        )
    if table is BLOCKS_16_BIT and 128 < sizes.key <= 256 and sizes.value <= 128:
        return NARROW_VALUES_16_BIT
    return table[min(fitting)]


def _described(sizes: HeadSizes) -> str:
    kinds = ("latents", "turned parts") if sizes.is_latent else ("keys", "values")
    return f"{kinds[0]} of {sizes.key} numbers and {kinds[1]} of {sizes.value}"
