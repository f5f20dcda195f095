"""Presence and frequency penalties, as OpenAI and vLLM define them: of a row's own new tokens, not of its prompt."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial

import numpy as np
import torch

from stand.forward.devices import uploaded
from stand.laws.engine_processor import EngineProcessor
from stand.laws.node import Node
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

    by_request: dict[int, OutputPenalties]
    _of_row: dict[int, _Counts] = field(default_factory=dict)

    def __call__(self, scores: torch.Tensor, nodes: Sequence[Node]) -> torch.Tensor:
        """[n, V] float32 of `nodes` -> the same shape."""
        rows = list({node.row.index: node.row for node in nodes}.values())
        lines = {row.index: line for line, row in enumerate(rows)}
        owners = np.array([lines[node.row.index] for node in nodes], dtype=np.int64)
        of_rows = _filled_up([self._of_row_now(row) for row in rows])
        of_paths = _filled_up([self._of_path(node) for node in nodes])
        owners, ids, values, path_ids, path_values = (
            uploaded(part, scores.device) for part in (owners, *of_rows, *of_paths)
        )
        ids, values = ids[owners], values[owners]
        penalised = scores.scatter(1, ids, scores.gather(1, ids) - values)
        return penalised.scatter_(1, path_ids, scores.gather(1, path_ids) - path_values)

    def forget(self, row: Row, *, is_last: bool) -> None:
        """As `ProcessorChain.forget`."""
        self._of_row.pop(row.index, None)
        if is_last:
            self.by_request.pop(row.request, None)

    def _of_row_now(self, row: Row) -> tuple[np.ndarray, np.ndarray]:
        """Distinct new tokens of the row, and their penalties; where there are none, any token and its own, 0."""
        found = self._of_row.setdefault(row.index, _Counts())
        found.follow(row.new_token_ids)
        count = max(len(found.places), 1)
        return found.ids[:count], self.by_request[row.request].penalties(found.counts[:count])

    def _of_path(self, node: Node) -> tuple[np.ndarray, np.ndarray]:
        """Distinct tokens of its path, and their penalties there. Behind a root no token more is drawn than in the row:
        any token, and its own penalty."""
        counts = self._of_row[node.row.index]
        ids = list(dict.fromkeys(node.path)) or [0]
        drawn = np.array([counts.of(token) + node.path.count(token) for token in ids])
        return np.array(ids, dtype=np.int64), self.by_request[node.row.request].penalties(drawn)


def _filled_up(lines: Sequence[tuple[np.ndarray, np.ndarray]]) -> tuple[np.ndarray, np.ndarray]:
    """[n, longest] int64 tokens and float32 penalties: each line, followed by its first pair as often as needed."""
    longest = max(len(ids) for ids, _ in lines)
    return tuple(
        np.stack([np.concatenate([part, np.repeat(part[:1], longest - len(part))]) for part in parts])
        for parts in zip(*lines, strict=True)
    )
