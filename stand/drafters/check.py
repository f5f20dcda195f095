"""What every step checks of a drafter's answer, before the model sees it: cheap, and enough to name a wrong drafter."""

from __future__ import annotations

import numpy as np

from stand.backend import Backend
from stand.drafters.drafter import Drafter, DraftRequest
from stand.step_compiled import is_sound
from stand.trees import DraftBatch
from stand.trees.draft import check_packing

# Of a sum over a float32 law. A step refuses what is plainly no law; `DraftBatch.check` has a closer look.
SUM_TOLERANCE = 1e-3
INT32, FLOAT32, FLOAT64 = map(np.dtype, (np.int32, np.float32, np.float64))
WHOLE = ("token_ids", "parents", "offsets", "support_ids", "depths", "ranks")


def check_most_nodes(drafter: Drafter, num_rows: int, backend: Backend) -> None:
    """Raise ValueError where drafts of so many rows may have more nodes than a step holds."""
    most, drafted = backend.most_drafted, drafter.most_nodes(num_rows)
    if most is not None and drafted is not None and drafted > most:
        raise ValueError(
            f"drafts of all rows together must have at most {most} nodes in steps of {backend.name}, got "
            f"{type(drafter).__name__} with {drafted} for {num_rows} rows; lower its budget, or max_rows"
        )


def check_within(border: int, batch: DraftBatch, request: DraftRequest) -> None:
    """Raise ValueError where a draft begins before the border and ends behind it: its nodes would be scored by factors
    of another length, see `stand.forward.long_factors`."""
    lengths = np.array([len(history) for history in request.histories])
    ends = lengths + np.maximum.reduceat(batch.depths, batch.offsets[:-1])
    crossing = (lengths <= border) & (ends > border)
    if crossing.any():
        row = int(crossing.argmax())
        raise ValueError(
            f"drafts of a LongRoPE model must end within {border} tokens where its factors change, got {lengths[row]} "
            f"tokens and {ends[row] - lengths[row]} drafted ones; a drafter must heed request.max_depths"
        )


def check_batch(batch: DraftBatch, request: DraftRequest, *, vocabulary_size: int) -> None:
    """Raise ValueError unless there is a draft per row, its root the pending token, its tokens in the vocabulary, and
    every child's law a law that could have drawn it."""
    try:
        integers = (batch.token_ids, batch.parents, batch.offsets, batch.support_ids)
        depths, ranks, law = batch.depths, batch.ranks, batch.law
    except AttributeError as error:
        raise ValueError(
            f"a drafter must answer a DraftBatch, got {type(batch).__name__}; return DraftBatch.concatenate(trees)"
        ) from error
    token_ids, parents, offsets, support_ids = integers
    try:  # without a call: every step comes here
        is_taken = INT32 == token_ids.dtype == parents.dtype == offsets.dtype == support_ids.dtype
        is_taken = is_taken and INT32 == depths.dtype == ranks.dtype and law.flags.c_contiguous
        is_taken = is_taken and (law.dtype == FLOAT32 or law.dtype == FLOAT64)
    except AttributeError:
        is_taken = False
    if not is_taken:
        _name_the_array(batch)
    if len(batch) != len(request.histories):
        raise ValueError(
            f"a drafter must answer one draft per row, got {len(batch)} for {len(request.histories)}; "
            "return DraftTree.pending(token) for a row without a draft"
        )
    law = law.astype(FLOAT32, copy=False)
    try:
        is_right = is_sound(*integers, law, depths, ranks, request.histories, vocabulary_size, SUM_TOLERANCE)
    except ValueError:  # arrays of other dimensions, or in pieces
        is_right = False
    if not is_right:
        _name_the_fault(batch, request, vocabulary_size)


def _name_the_array(batch: DraftBatch) -> None:
    """Of another type than rules take, or in pieces."""
    for name in (*WHOLE, "law"):
        array, types = getattr(batch, name), (FLOAT32, FLOAT64) if name == "law" else (INT32,)
        if not isinstance(array, np.ndarray) or array.dtype not in types:
            raise ValueError(
                f"{name} of a drafter's answer must be an array of {' or '.join(map(str, types))}, got "
                f"{getattr(array, 'dtype', type(array).__name__)}; build the batch by concatenate(), which converts"
            )
        if not array.flags.c_contiguous:
            raise ValueError(
                f"{name} of a drafter's answer must lie in one piece, row by row, got an array with strides "
                f"{array.strides}; build the batch by concatenate(), which copies"
            )


def _name_the_fault(batch: DraftBatch, request: DraftRequest, vocabulary_size: int) -> None:
    """Once more, with the place of the fault."""
    _name_the_array(batch)
    check_packing(batch)
    roots = batch.token_ids[batch.offsets[:-1]]
    pending = np.array([history[-1] for history in request.histories], dtype=np.int32)
    if not np.array_equal(roots, pending):
        row = int(np.flatnonzero(roots != pending)[0])
        raise ValueError(
            f"the root of a draft must be its row's pending token {pending[row]}, got {roots[row]} in row {row}; "
            "begin every draft with the last token of its history"
        )
    least = min(int(batch.token_ids.min()), 0)
    most = max(int(batch.token_ids.max()), int(batch.support_ids.max(initial=-1)))
    if least < 0 or most >= vocabulary_size:
        raise ValueError(
            f"drafted tokens must be in [0, {vocabulary_size}), got {least if least < 0 else most}; "
            "use a drafter that learned with the model's own tokenizer"
        )
    if batch.num_nodes > len(batch):
        sums = batch.law.sum(axis=1)[batch.parents >= 0]
        if not np.all(np.abs(sums - 1.0) <= SUM_TOLERANCE):
            worst = float(sums[np.abs(sums - 1.0).argmax()])
            raise ValueError(
                f"the law of every drafted node must sum to 1, got {worst:.4g}; "
                "record the law that the node was drawn from, over its parent's support"
            )
    batch.check()
    raise ValueError("a drafter must answer sound drafts, got others; see DraftTree for what a draft is")
