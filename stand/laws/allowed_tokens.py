"""A function that says which tokens may follow a prefix (`prefix_allowed_tokens_fn`), at nodes of drafts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from transformers import PrefixConstrainedLogitsProcessor

from stand.laws.node import Node
from stand.row import Row


@dataclass(frozen=True, slots=True)
class AllowedByPrompt:
    """A function that gets the number of a row's prompt in the call, as `generate` makes the processor of one."""

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
        for line, node in enumerate(nodes):
            given = self.by_request[node.row.request]
            ask = given._prefix_allowed_tokens_fn
            is_by_prompt = isinstance(ask, AllowedByPrompt)
            number = node.row.request if is_by_prompt else node.row.index // given._num_beams
            processor = PrefixConstrainedLogitsProcessor(partial(_asked_as, ask, number), 1)
            prefix = torch.from_numpy(node.prefix()).to(scores.device)
            scores[line] = processor(prefix[None], scores[line][None])[0]
        return scores

    def forget(self, row: Row, *, is_last: bool) -> None:
        """As `ProcessorChain.forget`."""
        if is_last:
            self.by_request.pop(row.request, None)


def _asked_as(ask: Callable, number: int, place: int, prefix: torch.Tensor) -> Sequence[int]:
    """place: 0, of the only row that is asked about."""
    return ask(number, prefix)
