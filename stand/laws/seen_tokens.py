"""Which tokens the prefixes of a step's nodes hold, for processors that ask nothing else of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial

import numpy as np
import torch

from stand.forward.devices import uploaded
from stand.laws.node import Node, rows_of
from stand.row import Row


@dataclass(slots=True)
class _Tokens:
    """The distinct tokens of the first `length` tokens of a row."""

    length: int = 0
    known: set[int] = field(default_factory=set)
    ids: np.ndarray = field(default_factory=partial(np.empty, 0, np.int64))  # the same

    def follow(self, history: np.ndarray) -> None:
        """The row has gone on."""
        fresh = [token for token in dict.fromkeys(history[self.length :].tolist()) if token not in self.known]
        self.length = len(history)
        if fresh:
            self.known.update(fresh)
            self.ids = np.concatenate([self.ids, np.array(fresh, dtype=np.int64)])


class SeenTokens:
    """The distinct tokens of every row, kept from step to step: a text of 32,768 tokens has a few thousand of them, and
    only they and the nodes' paths go to the device."""

    def __init__(self) -> None:
        self._of_row: dict[int, _Tokens] = {}

    def prefixes(self, nodes: Sequence[Node], device: torch.device) -> torch.Tensor:
        """[M, N] int64: every token of each node's prefix once or more often, and no other one."""
        rows, owners = rows_of(nodes)
        of_rows = [self._followed(row) for row in rows]
        of_paths = [node.path or node.row.history[-1:] for node in nodes]
        parts = owners, filled_up(of_rows), filled_up(of_paths)
        owners, histories, paths = (uploaded(part, device) for part in parts)
        return torch.cat([histories[owners], paths], dim=1)

    def forget(self, row: Row) -> None:
        """The row has ended."""
        self._of_row.pop(row.index, None)

    def _followed(self, row: Row) -> np.ndarray:
        """[D] int64: distinct tokens of the row as it is now."""
        tokens = self._of_row.setdefault(row.index, _Tokens())
        tokens.follow(row.history)
        return tokens.ids


def filled_up(lines: Sequence[Sequence[int]]) -> np.ndarray:
    """[n, longest] int64: each line, none of them empty, followed by its first number as often as others are longer."""
    filled = np.empty((len(lines), max(map(len, lines))), dtype=np.int64)
    for row, line in zip(filled, lines, strict=True):
        row[: len(line)], row[len(line) :] = line, line[0]
    return filled
