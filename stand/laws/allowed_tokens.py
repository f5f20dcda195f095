"""A function that says which tokens may follow a prefix (`prefix_allowed_tokens_fn`), at nodes of drafts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
import transformers
from transformers import PrefixConstrainedLogitsProcessor

from stand.laws.node import Node, groups_of
from stand.row import Row

# Up to 5.23 `generate` counts rows where it should count prompts (`PrefixConstrainedLogitsProcessor(..., num_beams)`).
COUNTS_PROMPTS = tuple(map(int, transformers.__version__.split(".")[:2])) >= (5, 24)


@dataclass(frozen=True, slots=True)
class AllowedInCall:
    """The function of a whole call, which gets the number that `generate` would give it: of a row's prompt in the call,
    or of the row."""

    ask: Callable[[int, torch.Tensor], Sequence[int]]

    def __call__(self, number: int, prefix: torch.Tensor) -> Sequence[int]:
        return self.ask(number, prefix)


@dataclass(slots=True)
class AllowedTokens:
    """Transformers' processor of such a function at all nodes. One that the caller has made gets the row's number
    instead, over its number of beams, as in a batch of `generate`."""

    by_request: dict[int, PrefixConstrainedLogitsProcessor]

    def __call__(self, scores: torch.Tensor, nodes: Sequence[Node]) -> torch.Tensor:
        """[n, V] float32 of `nodes` -> the same shape; parents were asked about before their children."""
        scores = scores.clone()
        for lines, prefixes in groups_of(nodes, scores.device).values():
            ask = partial(self._allowed, [nodes[line].row for line in lines])
            scores[lines] = PrefixConstrainedLogitsProcessor(ask, 1)(prefixes, scores[lines])
        return scores

    def _allowed(self, rows: Sequence[Row], place: int, prefix: torch.Tensor) -> Sequence[int]:
        """What the function of this row's request says; place: of the row in `rows`."""
        row = rows[place]
        given = self.by_request[row.request]
        ask = given._prefix_allowed_tokens_fn
        is_by_prompt = isinstance(ask, AllowedInCall) and COUNTS_PROMPTS
        return ask(row.request if is_by_prompt else row.index // given._num_beams, prefix)

    def forget(self, row: Row, *, is_last: bool) -> None:
        """As `ProcessorChain.forget`."""
        if is_last:
            self.by_request.pop(row.request, None)
