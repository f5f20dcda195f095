"""A function that says which tokens may follow a prefix (`prefix_allowed_tokens_fn`), at nodes of drafts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
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
    _errors: dict[int, dict[tuple[int, ...], Exception]] = field(default_factory=dict)  # by row, of a step, and path

    def __call__(self, scores: torch.Tensor, nodes: Sequence[Node]) -> torch.Tensor:
        """[n, V] float32 of `nodes` -> the same shape; parents were asked about before their children."""
        processed = scores.clone()
        self._errors.update({node.row.index: {} for node in nodes if not node.path})
        for lines, prefixes in groups_of(nodes, scores.device).values():
            ask = partial(self._allowed, [nodes[line] for line in lines])
            processed[lines] = PrefixConstrainedLogitsProcessor(ask, 1)(prefixes, scores[lines])
        lost = [line for line, node in enumerate(nodes) if node.path in self._errors[node.row.index]]
        processed[lost] = scores[lost]
        return processed

    def error_at(self, node: Node) -> Exception | None:
        """What is wrong with a node of the last step, if the function allows nothing behind it."""
        return self._errors[node.row.index].get(node.path)

    def _allowed(self, nodes: Sequence[Node], place: int, prefix: torch.Tensor) -> Sequence[int]:
        """What the function of this node's request says; place: of the node in `nodes`."""
        node = nodes[place]
        given = self.by_request[node.row.request]
        ask = given._prefix_allowed_tokens_fn
        is_by_prompt = isinstance(ask, AllowedInCall) and COUNTS_PROMPTS
        allowed = ask(node.row.request if is_by_prompt else node.row.index // given._num_beams, prefix)
        if len(allowed) > 0:
            return allowed
        self._errors[node.row.index][node.path] = ValueError(
            "prefix_allowed_tokens_fn must allow a token behind every text that it allows, got an empty list behind "
            f"token {int(prefix[-1])}; allow an end token there"
        )
        return [0]

    def forget(self, row: Row, *, is_last: bool) -> None:
        """As `ProcessorChain.forget`."""
        self._errors.pop(row.index, None)
        if is_last:
            self.by_request.pop(row.request, None)
