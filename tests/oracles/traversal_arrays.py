"""The arrays of a batch that traversal's kernel takes, made node by node."""

import numpy as np
import torch
from gpu_parts.kernel_bench import ancestor_words, turns_of

from stand.trees import DraftBatch


def traversal_arrays(batch: DraftBatch, uniforms) -> list[torch.Tensor]:
    """What follows `probs` among the arguments of `traverse`; uniforms: [M]."""
    turns, words, width = [], [], -(-int(batch.sizes.max()) // 64)
    known: dict[bytes, tuple[np.ndarray, np.ndarray]] = {}
    for first, end in zip(batch.offsets[:-1], batch.offsets[1:], strict=True):
        parents = batch.parents[first:end]
        if parents.tobytes() not in known:
            own = ancestor_words(parents)
            known[parents.tobytes()] = turns_of(parents), np.pad(own, ((0, 0), (0, width - own.shape[1])))
        turn, word = known[parents.tobytes()]
        turns.append(turn)
        words.append(word)
    arrays = (
        batch.token_ids, batch.parents, batch.offsets, batch.support_ids, batch.law,
        np.asarray(uniforms, dtype=np.float64), np.concatenate(turns), np.concatenate(words),
    )  # fmt: skip
    return [torch.tensor(array) for array in arrays]
