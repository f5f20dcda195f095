"""Kernels of verification rules."""

from __future__ import annotations

from specimens.specimen import Specimen
from stand.gpu.kernels.verification import draw, follow, race, traverse
from stand.gpu.packets.step_size import SUPPORT_SIZES


def of_race() -> list[Specimen]:
    """The two kernels as launched for a law in float32 over 152,064 tokens (149 chunks)."""
    scratch = {"best_scores": "*fp64", "best_tokens": "*i32"}
    return [
        Specimen(
            "race_in_chunk",
            race._race_in_chunk,
            {"probs": "*fp32", "keys": "*i64", **scratch, "vocabulary_size": "i32", "row_stride": "i32"},
            {"BLOCK": race.CHUNK},
            num_warps=4,
        ),
        Specimen(
            "best_of_chunks",
            race._best_of_chunks,
            {**scratch, "winners": "*i64", "num_chunks": "i32"},
            {"BLOCK": 256},
            num_warps=1,
        ),
    ]


def of_traverse() -> list[Specimen]:
    """Both kernels as launched for up to 256 nodes with supports of up to 16 tokens."""
    drafted = {"law": "*fp32", "support_ids": "*i32", "token_ids": "*i64", "parents": "*i32", "offsets": "*i32"}
    gathered = {"mass": "*fp64", "tails": "*fp64", "columns": "*i32", "inverse_laws": "*fp64"}
    order = {"uniforms": "*fp64", "turns": "*i64", "ancestors": "*i64"}
    results = {"scale": "*fp64", "thresholds": "*fp64", "stops": "*i64"}
    gather = {"probs": "*fp32", **drafted, **gathered, "row_stride": "i32", "width": "i32"}
    walked = {"law": "*fp32", "parents": "*i32", "offsets": "*i32", **gathered, **order, **results, "width": "i32"}
    return [
        Specimen(
            "traverse_gather",
            traverse._gather,
            gather,
            {"BLOCK_NODES": traverse.GATHER_NODES, "BLOCK_SLOTS": 16},
            num_warps=4,
        ),
        Specimen(
            "traverse",
            traverse._traverse,
            walked,
            {"NUM_WORDS": 4, "BLOCK_ROW": 256, "BLOCK_SLOTS": 16, "TILE": traverse.TILE_NODES},
            num_warps=4,
            num_stages=1,
        ),
    ]


def of_draw() -> list[Specimen]:
    """All kernels as launched for 152,064 tokens (149 chunks), supports of every size and rows of up to 256 nodes."""
    law = {"probs": "*fp32", "stops": "*i64", "support_ids": "*i32"}
    sums = {"whole_sums": "*fp64", "rest_sums": "*fp64"}
    sizes = {"row_stride": "i32", "vocabulary_size": "i32"}
    owed = {"mass": "*fp64", "scale": "*fp64", "uniforms": "*fp64", "parents": "*i64", "depths": "*i64"}
    verdict = {"offsets": "*i32", "final_stops": "*i64", "next_tokens": "*i64", "is_broken": "*i32", "path": "*i64"}
    residual = {**law, **owed, **sums, **verdict, **sizes}
    residual |= dict.fromkeys(("width", "num_chunks", "path_stride", "max_depth"), "i32")
    node = {"probs": "*fp32", "uniforms": "*fp64", "sums": "*fp64", "drawn": "*i64", **sizes, "num_chunks": "i32"}
    blocks = {"BLOCK": draw.CHUNK, "BLOCK_CHUNKS": 256, "BLOCK_ROW": 256}
    return [
        Specimen(
            "sum_law_chunk", draw._sum_law_chunk, {"probs": "*fp32", "sums": "*fp64", **sizes}, {"BLOCK": draw.CHUNK}
        ),
        Specimen("draw_node", draw._draw_node, node, {"BLOCK": draw.CHUNK, "BLOCK_CHUNKS": 256}),
        Specimen(
            "residual_sum_chunk", draw._sum_chunk, {**law, **sums, **sizes, "width": "i32"}, {"BLOCK": draw.CHUNK}
        ),
        *(
            Specimen(f"residual_draw_{slots}", draw._draw, residual, {**blocks, "BLOCK_SLOTS": slots})
            for slots in SUPPORT_SIZES
        ),
    ]


def of_follow() -> list[Specimen]:
    """As launched for rows of up to 64 and up to 256 nodes."""
    per_node = dict.fromkeys(("drawn", "token_ids", "parents", "follows"), "*i64")
    verdict = {"stops": "*i64", "next_tokens": "*i64", "is_broken": "*i32", "path": "*i64"}
    sizes = dict.fromkeys(("law_stride", "path_stride", "max_depth"), "i32")
    signature = {**per_node, "laws": "*fp32", "offsets": "*i32", **verdict, **sizes}
    return [
        Specimen(f"follow_{block}", follow._follow, signature, {"BLOCK": block}, num_warps=1) for block in (64, 256)
    ]
