"""A node of a step's drafts, as processors see it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from stand.forward.devices import uploaded
from stand.row import Row
from stand.trees import DraftBatch


@dataclass(frozen=True, slots=True)
class Node:
    """A node of a step's drafts, with what was drafted before it."""

    place: int  # in the packed batch
    parent: int  # its parent's place; a root's own
    row: Row
    path: tuple[int, ...]  # draft tokens from the row's pending token down to the node itself

    def prefix(self) -> np.ndarray:
        """[L] int64: the row's tokens and the path."""
        return np.concatenate([self.row.history, np.array(self.path, dtype=np.int32)]).astype(np.int64)


def nodes_of(batch: DraftBatch, rows: Sequence[Row]) -> list[Node]:
    """All nodes of the packed drafts of `rows`, parents before children."""
    nodes: list[Node] = []
    offsets, parents, token_ids = batch.offsets.tolist(), batch.parents.tolist(), batch.token_ids.tolist()
    for row, first, end in zip(rows, offsets[:-1], offsets[1:], strict=True):
        nodes.append(Node(first, first, row, ()))
        for place in range(first + 1, end):
            parent = first + parents[place]
            nodes.append(Node(place, parent, row, (*nodes[parent].path, token_ids[place])))
    return nodes


def rows_of(nodes: Sequence[Node]) -> tuple[list[Row], np.ndarray]:
    """The rows of nodes, each once, and [n] int64: which of them is each node's."""
    rows = list({node.row.index: node.row for node in nodes}.values())
    lines = {row.index: line for line, row in enumerate(rows)}
    return rows, np.array([lines[node.row.index] for node in nodes], dtype=np.int64)


def groups_of(nodes: Sequence[Node], device: torch.device) -> dict[tuple[int, int], tuple[list[int], torch.Tensor]]:
    """By request and length of prefix: where its nodes are in `nodes`, and their prefixes [n, length] int64."""
    members: dict[tuple[int, int], list[int]] = {}
    for line, node in enumerate(nodes):
        members.setdefault((node.row.request, len(node.row.history) + len(node.path)), []).append(line)
    return {
        key: (lines, uploaded(np.stack([nodes[line].prefix() for line in lines]), device))
        for key, lines in members.items()
    }
