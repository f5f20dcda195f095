"""Matrix instructions: which thread holds which element, and where wgmma finds its operands in shared memory.

Fragments as in the PTX ISA: mma.m16n8k16, ldmatrix and stmatrix of 8 x 8 matrices of 16 bits, wgmma.m64nNk16. Sums are
in float64 and rounded once.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from ptx.arithmetic import from_bfloat16

LANES, HALF = np.arange(32), np.arange(2)
ROW, PAIR = LANES // 4, LANES % 4 * 2  # of a fragment: the lane's row, and the first of its two columns
SWIZZLE_BYTES = {0: 16, 1: 128, 2: 64, 3: 32}  # by the descriptor's code: the width of a swizzled row


def halves(words: np.ndarray) -> np.ndarray:
    """uint32 [..., 32] registers of a warp to uint16 [..., 32, 2], the lower half first."""
    return np.stack([words & np.uint32(0xFFFF), words >> np.uint32(16)], axis=-1).astype(np.uint16)


def numbers_of(bits: np.ndarray, kind: str) -> np.ndarray:
    """float64 of 16-bit numbers: "bf16" or "f16"."""
    return (from_bfloat16(bits) if kind == "bf16" else bits.view(np.float16)).astype(np.float64)


def fragment_a(words: np.ndarray) -> np.ndarray:
    """uint16 [W, 16, 16] of the registers uint32 [4, W, 32] of a 16 x 16 operand."""
    matrix = np.zeros((words.shape[1], 16, 16), dtype=np.uint16)
    down, right = np.array([0, 8, 0, 8])[:, None, None], np.array([0, 0, 8, 8])[:, None, None]
    matrix[:, ROW[:, None] + down, PAIR[:, None] + HALF + right] = halves(words).swapaxes(0, 1)
    return matrix


def fragment_b(words: np.ndarray) -> np.ndarray:
    """uint16 [W, 16, 8] of the registers uint32 [2, W, 32]."""
    matrix = np.zeros((words.shape[1], 16, 8), dtype=np.uint16)
    down = np.array([0, 8])[:, None, None]
    matrix[:, PAIR[:, None] + HALF + down, ROW[:, None] + 0 * HALF] = halves(words).swapaxes(0, 1)
    return matrix


def _accumulator_places(count: int) -> tuple[np.ndarray, np.ndarray]:
    """Rows and columns [count, 32] of `count` registers: of mma's C and, per warp, of wgmma's."""
    tile, part = np.divmod(np.arange(count)[:, None], 4)
    return ROW + 8 * (part // 2), 8 * tile + PAIR + part % 2


def gather_accumulator(registers: np.ndarray) -> np.ndarray:
    """[W, 16, N] of float32 registers [N / 2, W, 32]."""
    matrix = np.zeros((registers.shape[1], 16, 2 * len(registers)), dtype=np.float32)
    rows, columns = _accumulator_places(len(registers))
    matrix[:, rows, columns] = registers.swapaxes(0, 1)
    return matrix


def scatter_accumulator(matrix: np.ndarray) -> np.ndarray:
    """The registers [N / 2, W, 32] of [W, 16, N]."""
    rows, columns = _accumulator_places(matrix.shape[2] // 2)
    return matrix[:, rows, columns].swapaxes(0, 1)


def multiply_fragments(a: np.ndarray, b: np.ndarray, c: np.ndarray, kind: str) -> np.ndarray:
    """mma.m16n8k16: registers [4, W, 32] and [2, W, 32] uint32 and [4, W, 32] float32 to [4, W, 32] float32."""
    product = numbers_of(fragment_a(a), kind) @ numbers_of(fragment_b(b), kind)
    return scatter_accumulator((product + gather_accumulator(c)).astype(np.float32))


@dataclass(frozen=True, slots=True)
class Descriptor:
    """A matrix in shared memory as wgmma is told of it (PTX ISA, "matrix descriptor"); all in bytes."""

    start: int
    leading: int
    stride: int
    row_bytes: int

    @classmethod
    def decode(cls, word: int) -> Descriptor:
        if (word >> 49) & 7:
            raise NotImplementedError("a matrix descriptor with a base offset")
        start, leading, stride = ((word >> shift & 0x3FFF) << 4 for shift in (0, 16, 32))
        return cls(start, leading, stride, SWIZZLE_BYTES[word >> 62])

    def addresses(self, rows: int, depth: int, *, is_transposed: bool) -> np.ndarray:
        """int64 [rows, depth] of 16-bit elements; `rows` counts M or N, `depth` K. Transposed: rows are contiguous.

        A swizzled row of 16, 32, 64 or 128 bytes repeats over 8 rows; these groups lie `stride` apart. Rows that are
        contiguous go on after `leading` bytes where they are longer than a swizzled row.
        """
        row, depth_index = np.arange(rows)[:, None], np.arange(depth)[None, :]
        per_row = self.row_bytes // 2
        if is_transposed and self.row_bytes == 16:
            raise NotImplementedError("a transposed matrix that is not swizzled")
        if is_transposed:
            inner = row % per_row * 2 + row // per_row * self.leading
            offset = inner + depth_index % 8 * self.row_bytes + depth_index // 8 * self.stride
        elif self.row_bytes == 16:
            inner = depth_index % 8 * 2 + depth_index // 8 * self.leading
            offset = inner + row % 8 * 16 + row // 8 * self.stride
        else:
            offset = depth_index * 2 + row % 8 * self.row_bytes + row // 8 * self.stride
        linear = self.start + offset
        swizzled_bits = self.row_bytes // 16 - 1  # 7, 3, 1 or 0
        return linear ^ (((linear >> 7) & swizzled_bits) << 4)


@lru_cache(maxsize=4096)
def pieces(word: int, rows: int, is_transposed: bool) -> np.ndarray:
    """uint64 [2 * rows]: addresses of the pieces of eight elements, side by side in memory, of the operand [rows, 16]
    that a descriptor tells of. No swizzle parts them."""
    addresses = Descriptor.decode(word).addresses(rows, 16, is_transposed=is_transposed)
    return (addresses[::8] if is_transposed else addresses[:, ::8]).ravel().astype(np.uint64)


def from_pieces(elements: np.ndarray, is_transposed: bool) -> np.ndarray:
    """[rows, 16] of the elements [2 * rows, 8] of its pieces."""
    if is_transposed:
        return elements.reshape(-1, 16, 8).swapaxes(1, 2).reshape(-1, 16)
    return elements.reshape(-1, 16)
