"""What steps over trees would have shown to a drafter that reads inner layers: one plain forward per node."""

from collections.abc import Sequence
from types import SimpleNamespace

import numpy as np
import torch
from plain_eagle3 import layer_inputs
from transformers import PreTrainedModel

from stand.trees import DraftBatch, DraftTree


def texts(*histories: Sequence[int]) -> list[np.ndarray]:
    return [np.array(history, dtype=np.int32) for history in histories]


def path_to(parents: Sequence[int], node: int) -> list[int]:
    """Nodes from the one below the root to `node`."""
    return [] if node == 0 else [*path_to(parents, parents[node]), node]


def plain_lesson(
    target: PreTrainedModel,
    layers: tuple[int, ...],
    histories: Sequence[np.ndarray],
    tokens: np.ndarray,
    parents: Sequence[int],
    keeps: Sequence[int],
) -> SimpleNamespace:
    """tokens [R, n]: of a tree with these parents behind each row; keeps: of each row the node whose path is kept."""
    no_laws = {"support_ids": np.full((len(parents), 1), -1, np.int32), "law": np.zeros((len(parents), 1), np.float32)}
    trees = [DraftTree(row.astype(np.int32), np.array(parents, np.int32), **no_laws) for row in tokens]
    features = [
        layer_inputs(target, [*history.tolist(), *row[path_to(parents, node)].tolist()], layers)[-1]
        for history, row in zip(histories, tokens, strict=True)
        for node in range(len(parents))
    ]
    return SimpleNamespace(
        batch=DraftBatch.concatenate(trees), request=SimpleNamespace(histories=histories),
        accepted=[np.array(path_to(parents, node), int) for node in keeps], features=torch.stack(features),
    )  # fmt: skip
