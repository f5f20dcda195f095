"""Memory as the operating system deals it out, page by page: given when it is first written, shared until one side
writes, given back at once. Linux alone.

With it the pages of a key-value cache need no copies: attention reads a row's keys as one piece, and the processor's
own page table says where they are. vAttention (Prabhu et al. 2024, arXiv 2405.04437) does so on GPUs.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import sys
from functools import lru_cache
from pathlib import Path

import torch

SYSTEM_PAGE = mmap.PAGESIZE  # bytes
FIXED, NORESERVE = 0x10, 0x4000  # of mmap, as in Linux's generic headers
PUNCH_HOLE = 0x01 | 0x02  # of fallocate: the file keeps its size
FILE_NAME = "stand-keys"  # as /proc/self/maps shows it
FAILED = ctypes.c_void_p(-1).value


class AddressSpace:
    """`nbytes` of addresses that read as zeros; a system page of them takes memory when it is first written.

    Ranges are whole system pages. Raises OSError where the system refuses.
    """

    def __init__(self, nbytes: int):
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | NORESERVE
        self._memory = mmap.mmap(-1, nbytes, flags=flags)  # unmapped with the last tensor on it
        self.start = ctypes.addressof(ctypes.c_char.from_buffer(self._memory))
        self._keep_pages_small(0, nbytes)

    @property
    def nbytes(self) -> int:
        return len(self._memory)

    def tensor(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """The addresses from the first one on as a tensor, which keeps them alive."""
        flat = torch.frombuffer(self._memory, dtype=dtype, count=torch.Size(shape).numel())
        return flat.view(shape)

    def show(self, first: int, nbytes: int, block: SharedBlock, offset: int) -> None:
        """From byte `first` on the bytes of `block` from `offset` on, without a copy until they are written here."""
        _map(self.start + first, nbytes, mmap.MAP_PRIVATE, block.file.number, block.offset + offset)

    def drop(self, first: int, nbytes: int) -> None:
        """Zeros again; what was written is given back to the system."""
        _map(self.start + first, nbytes, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | NORESERVE, -1, 0)
        self._keep_pages_small(first, nbytes)

    def _keep_pages_small(self, first: int, nbytes: int) -> None:
        try:
            self._memory.madvise(mmap.MADV_NOHUGEPAGE, first, nbytes)
        except OSError:
            pass  # a kernel without huge pages


class SharedFile:
    """An unnamed file in memory, of which blocks are shared; closed with the last of them."""

    number = -1  # until the system has given one

    def __init__(self) -> None:
        self.number = os.memfd_create(FILE_NAME)
        self.process = os.getpid()
        self.size = 0

    def __del__(self) -> None:
        if self.number >= 0:
            os.close(self.number)


class SharedBlock(AddressSpace):
    """Addresses that other address spaces can show. Its memory is given back when it is gone: what shows it must
    hold it."""

    file: SharedFile | None = None  # until there are addresses

    def __init__(self, file: SharedFile, nbytes: int):
        super().__init__(nbytes)
        self.file, self.offset = file, file.size
        file.size += nbytes
        os.ftruncate(file.number, file.size)
        _map(self.start, nbytes, mmap.MAP_SHARED, file.number, self.offset)

    def __del__(self) -> None:
        if self.file is None:
            return
        if os.getpid() == self.file.process:  # a child's copy of this object must not empty its parent's file
            _libc().fallocate(self.file.number, PUNCH_HOLE, self.offset, self.nbytes)


@lru_cache
def is_available() -> bool:
    """Whether this system offers all of it, and addresses without end; tried once."""
    if not sys.platform.startswith("linux") or not hasattr(os, "memfd_create"):
        return False
    try:
        if not _addresses_are_free():
            return False
        block, space = SharedBlock(SharedFile(), SYSTEM_PAGE), AddressSpace(SYSTEM_PAGE)
        source, target = block.tensor((4,), torch.int32), space.tensor((4,), torch.int32)
        source[0] = 7
        space.show(0, SYSTEM_PAGE, block, 0)
        target[1] = 5
        seen = target.tolist(), source.tolist()
        space.drop(0, SYSTEM_PAGE)
        return seen == ([7, 5, 0, 0], [7, 0, 0, 0]) and target.tolist() == [0] * 4
    except (OSError, AttributeError):
        return False


def _addresses_are_free() -> bool:
    """Whether only memory that is written counts: neither a strict commit limit nor one of this process's addresses."""
    import resource

    policy = Path("/proc/sys/vm/overcommit_memory").read_text(encoding="ascii").strip()
    return policy != "2" and resource.getrlimit(resource.RLIMIT_AS)[0] == resource.RLIM_INFINITY


@lru_cache
def _libc() -> ctypes.CDLL:
    libc = ctypes.CDLL(None, use_errno=True)
    pointer, size, offset = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int64
    libc.mmap.restype = pointer
    libc.mmap.argtypes = (pointer, size, ctypes.c_int, ctypes.c_int, ctypes.c_int, offset)
    libc.fallocate.argtypes = (ctypes.c_int, ctypes.c_int, offset, offset)
    return libc


def _map(address: int, nbytes: int, flags: int, file: int, offset: int) -> None:
    """Over what is there. Both numbers of bytes and the address are whole system pages."""
    prot = mmap.PROT_READ | mmap.PROT_WRITE
    if _libc().mmap(address, nbytes, prot, flags | FIXED, file, offset) == FAILED:
        number = ctypes.get_errno()
        raise OSError(number, f"pages of the key-value cache must be mapped, got {os.strerror(number)}")
