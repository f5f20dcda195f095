"""The kept path of every row, from its stop up to its root: one launch, one program per row."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from stand.gpu.kernels.launch import launch_device
from stand.gpu.kernels.specimen import Specimen


@triton.jit
def _climb(stops, parents, firsts, depths, path, max_depth, BLOCK: tl.constexpr):
    """Program (row): path[d - 1] is the row-local node at depth d; -1 below the stop."""
    row, places = tl.program_id(0), tl.arange(0, BLOCK)
    node = tl.load(stops + row)
    first, depth = tl.load(firsts + node), tl.load(depths + node).to(tl.int32)
    nodes = tl.full([BLOCK], -1, tl.int64)
    for step in range(0, depth):
        nodes = tl.where(places == depth - 1 - step, node - first, nodes)
        node = tl.load(parents + node)
    tl.store(path + row * max_depth + places, nodes, mask=places < max_depth)


@torch.library.custom_op("stand::path_to", mutates_args=())
def path_to(
    stops: torch.Tensor, parents: torch.Tensor, firsts: torch.Tensor, depths: torch.Tensor, max_depth: int
) -> torch.Tensor:
    """[B, max_depth] int64: row-local nodes kept at depths 1, 2, ... by rows that stop at packed `stops`; then -1.

    stops: [B] int64; parents, firsts, depths: [M] int64 as in `StepPacket`. No depth exceeds `max_depth`.
    """
    arrays = (stops, parents, firsts, depths)
    if any(tensor.dtype != torch.int64 or not tensor.is_contiguous() for tensor in arrays):
        raise ValueError(
            f"path_to needs contiguous int64 arrays, got {[tensor.dtype for tensor in arrays]}; pass the packet's own"
        )
    path = stops.new_empty((len(stops), max_depth))
    with launch_device(_climb, stops):
        _climb[(len(stops),)](
            stops, parents, firsts, depths, path, max_depth, BLOCK=triton.next_power_of_2(max_depth), num_warps=1
        )
    return path


@path_to.register_fake
def _(stops, parents, firsts, depths, max_depth):
    return stops.new_empty((len(stops), max_depth))


def specimens() -> list[Specimen]:
    """As launched for rows of up to 64 and up to 256 nodes."""
    arrays = dict.fromkeys(("stops", "parents", "firsts", "depths", "path"), "*i64")
    return [
        Specimen(f"climb_{block}", _climb, {**arrays, "max_depth": "i32"}, {"BLOCK": block}, num_warps=1)
        for block in (64, 256)
    ]
