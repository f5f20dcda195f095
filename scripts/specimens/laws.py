"""Kernels from logits to laws, and the best tokens of a law."""

from __future__ import annotations

from specimens.specimen import Specimen
from stand.gpu.kernels.verification import filter, softmax, top_tokens


def of_softmax() -> list[Specimen]:
    """Both kernels as launched for 152,064 logits (75 chunks)."""
    sizes = {"row_stride": "i32", "vocabulary_size": "i32", "temperature": "fp32"}
    found = []
    for dtype in ("bf16", "fp16", "fp32"):
        scratch = {"logits": f"*{dtype}", "maxima": "*fp32", "sums": "*fp32"}
        merged = {**scratch, "laws": "*fp32", "law_stride": "i32", **sizes}
        found += [
            Specimen(f"sum_chunk_{dtype}", softmax._sum_chunk, {**scratch, **sizes}, {"BLOCK": softmax.CHUNK}),
            Specimen(
                f"normalise_chunk_{dtype}",
                softmax._normalise_chunk,
                merged,
                {"BLOCK": softmax.CHUNK, "BLOCK_CHUNKS": 128},
            ),
        ]
    return found


def of_filter() -> list[Specimen]:
    """The kernels as launched for 152,064 tokens (75 chunks)."""
    laws, sizes = {"laws": "*fp32", "largest_keys": "*i32"}, {"row_stride": "i32", "vocabulary_size": "i32"}
    first = {"first_way": "i32"}
    seen, found = {"counts": "*fp32", "masses": "*fp64"}, {"cuts": "*i32", "firsts": "*i32", "totals": "*fp64"}
    chosen = {"num_chunks": "i32", "top_k": "i32", "top_p": "fp32", "top_p_rest": "fp32", "min_p": "fp32"}
    cut = {"laws": "*fp32", "largest_of": "*i32", **seen, "taken": "*i32", **found, **sizes, **first, **chosen}
    blocks = {"BLOCK": filter.CHUNK, "BLOCK_CHUNKS": 128}
    blocks |= {"CAPACITY": filter.CAPACITY, "FEW": filter.FEW, "PAIRS": filter.PAIRS, "HALVINGS": filter.HALVINGS}
    cases = []
    for name, has_top_k, has_top_p in (("top_k", True, False), ("top_p", False, True), ("both", True, True)):
        flags = {"HAS_TOP_K": has_top_k, "HAS_TOP_P": has_top_p}
        cases.append(
            Specimen(f"look_{name}", filter._look, {**laws, **seen, **sizes, **first}, {"BLOCK": filter.CHUNK, **flags})
        )
        cases.append(
            Specimen(f"find_cut_{name}", filter._find_cut, cut, {**blocks, **flags}, num_warps=filter.CUT_WARPS)
        )
    return [*cases, Specimen("write_chunk", filter._write_chunk, {**laws, **found, **sizes}, {"BLOCK": filter.CHUNK})]


def of_top_tokens() -> list[Specimen]:
    """All kernels as launched for ten of 152,064 tokens (75 chunks)."""
    law, sizes = {"probs": "*fp32", "largest": "*i64"}, {"vocabulary_size": "i32", "row_stride": "i32"}
    search = {**law, "best": "*i64", **sizes, "num_chunks": "i32", "count": "i32"}
    merge = {"best": "*i64", "ids": "*i32", "values": "*fp32", "num_candidates": "i32", "count": "i32"}
    return [
        Specimen("largest_in_chunk", top_tokens._largest_in_chunk, {**law, **sizes}, {"BLOCK": top_tokens.CHUNK}),
        Specimen("best_in_chunk", top_tokens._best_in_chunk, search, {"BLOCK": top_tokens.CHUNK, "BLOCK_CHUNKS": 128}),
        Specimen("top_of_chunks", top_tokens._best_of_chunks, merge, {"BLOCK": 128}),
    ]
