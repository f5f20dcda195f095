"""Presence and frequency penalties, as OpenAI and vLLM define them: of a row's own new tokens, not of its prompt."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial

import numpy as np
import torch

from stand.forward.devices import uploaded
from stand.laws.engine_processor import EngineProcessor
from stand.laws.node import Node, rows_of
from stand.laws.seen_tokens import filled_up
from stand.row import Row
from stand.trees.arguments import within

MOST = 1e4  # of a penalty


class OutputPenalties(EngineProcessor):
    """Takes `presence + frequency * count` from the score of each token that a row has drawn `count` times, which is
    once at least. Negative penalties favour such tokens. Sources: OpenAI's reference of chats, and vLLM.

    For `logits_processors=` of this engine, `custom_generate` included; transformers by itself cannot call it, for it
    does not say where a prompt ends.
    """

    def __init__(self, *, presence: float = 0.0, frequency: float = 0.0):
        """Raises ValueError for what is no number in [-10000, 10000]; OpenAI allows -2 to 2."""
        for name, value in {"presence": presence, "frequency": frequency}.items():
            if isinstance(value, bool):
                raise ValueError(f"{name} must be a number, got {value}; 0.5 is usual")
        self.presence = within(presence, "presence", -MOST, MOST, 0.5)
        self.frequency = within(frequency, "frequency", -MOST, MOST, 0.5)

    def penalties(self, counts: np.ndarray) -> np.ndarray:
        """float32, for tokens that were drawn so often; 0 for 0."""
        return ((counts > 0) * self.presence + counts * self.frequency).astype(np.float32)


@dataclass(slots=True)
class _Counts:
    """How often each token is among the first `length` new ones of a row."""

    length: int = 0
    places: dict[int, int] = field(default_factory=dict)  # by token: in the arrays, which are longer
    ids: np.ndarray = field(default_factory=partial(np.zeros, 64, np.int64))
    counts: np.ndarray = field(default_factory=partial(np.zeros, 64, np.int64))

    def follow(self, new_token_ids: np.ndarray) -> None:
        """The row has gone on."""
        for token in new_token_ids[self.length :].tolist():
            place = self.places.setdefault(token, len(self.places))
            if place == len(self.ids):
                self.ids, self.counts = (np.pad(array, (0, place)) for array in (self.ids, self.counts))
            self.ids[place] = token
            self.counts[place] += 1
        self.length = len(new_token_ids)

    def of(self, token: int) -> int:
        place = self.places.get(token)
        return 0 if place is None else int(self.counts[place])


@dataclass(slots=True)
class PenalisedNodes:
    """The penalties at all nodes of a step. Counts are kept from step to step; they and the nodes' paths go up."""

    by_request: dict[int, OutputPenalties]  # all of one call, with the same penalties
    _of_row: dict[int, _Counts] = field(default_factory=dict)

    def __call__(self, scores: torch.Tensor, nodes: Sequence[Node]) -> torch.Tensor:
        """[n, V] float32 of `nodes` -> the same shape."""
        penalties = self.by_request[nodes[0].row.request].penalties
        rows, owners = rows_of(nodes)
        row_ids, row_counts = self._of_rows(rows)
        path_ids, path_counts = self._of_paths(nodes)
        parts = owners, row_ids, penalties(row_counts), path_ids, penalties(path_counts)
        owners, row_ids, of_rows, path_ids, of_paths = (uploaded(part, scores.device) for part in parts)
        row_ids, of_rows = row_ids[owners], of_rows[owners]
        penalised = scores.scatter(1, row_ids, scores.gather(1, row_ids) - of_rows)
        return penalised.scatter_(1, path_ids, scores.gather(1, path_ids) - of_paths)

    def forget(self, row: Row, *, is_last: bool) -> None:
        """As `ProcessorChain.forget`."""
        self._of_row.pop(row.index, None)
        if is_last:
            self.by_request.pop(row.request, None)

    def _of_rows(self, rows: Sequence[Row]) -> tuple[np.ndarray, np.ndarray]:
        """[R, N] int64 each: the distinct new tokens of the rows, and how often each was drawn. Where a row has fewer
        than others, its first one is there again, or token 0 with its own count, 0."""
        ids, drawn = [], []
        for row in rows:
            counts = self._of_row.setdefault(row.index, _Counts())
            counts.follow(row.new_token_ids)
            count = max(len(counts.places), 1)
            ids.append(counts.ids[:count])
            drawn.append(counts.counts[:count])
        return filled_up(ids), filled_up(drawn)

    def _of_paths(self, nodes: Sequence[Node]) -> tuple[np.ndarray, np.ndarray]:
        """[n, D] int64 each: the tokens of each node's path, and how often each is drawn there, row and path together.
        Where a path is shorter than others, its first token is there again; behind a root, which adds none, token 0."""
        ids, drawn = [], []
        for node in nodes:
            of_row, path = self._of_row[node.row.index].of, node.path or (0,)
            ids.append(path)
            drawn.append([of_row(token) + node.path.count(token) for token in path])
        return filled_up(ids), filled_up(drawn)
