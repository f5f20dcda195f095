"""What grammars allow at every node of a step's drafts, as bits: one array goes up and is applied once."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from os.path import commonprefix

import numpy as np
import torch
from transformers import LogitsProcessor

from stand.forward.devices import uploaded
from stand.laws.matchers import Matcher, matcher_for
from stand.laws.node import Node
from stand.row import Row


@dataclass(slots=True)
class GrammarMasks:
    """A processor of a grammar library at all nodes. It asks nothing of the scores, so masks are made while they are
    being computed. Below a token that the grammar forbids scores stay: no text comes there."""

    by_request: dict[int, LogitsProcessor]
    _of_row: dict[int, Matcher] = field(default_factory=dict)  # behind the row's last token

    def __call__(self, scores: torch.Tensor, nodes: Sequence[Node]) -> torch.Tensor:
        """[n, V] float32 of `nodes` -> the same shape. In a call without a node's parent its token is allowed."""
        lines_of: dict[int, list[int]] = {}
        for line, node in enumerate(nodes):
            lines_of.setdefault(node.row.index, []).append(line)
        matchers = [self._followed(nodes[lines[0]].row, scores.shape[1]) for lines in lines_of.values()]
        words = np.full((len(nodes), matchers[0].num_words), -1, dtype=np.int32)
        for matcher, lines in zip(matchers, lines_of.values(), strict=True):
            _write_masks(matcher, {line: nodes[line].path for line in lines}, words)
        return _masked(scores, words, allows_beyond=matchers[0].allows_beyond)

    def forget(self, row: Row, *, is_last: bool) -> None:
        """As `ProcessorChain.forget`."""
        self._of_row.pop(row.index, None)
        if is_last:
            self.by_request.pop(row.request, None)

    def _followed(self, row: Row, num_tokens: int) -> Matcher:
        """The row's, behind its new tokens: a grammar begins after the prompt."""
        matcher = self._of_row.get(row.index)
        if matcher is None:
            matcher = matcher_for(self.by_request[row.request], row.index, num_tokens)
            self._of_row[row.index] = matcher
        for token in row.new_token_ids[matcher.num_taken :].tolist():
            matcher.take(token)
        return matcher


def _write_masks(matcher: Matcher, paths: dict[int, tuple[int, ...]], words: np.ndarray) -> None:
    """Walk a row's drafts, each path from where the last one ended; paths: by their lines of `words`."""
    begun, current = matcher.num_taken, ()
    line_of: dict[tuple[int, ...], int] = {}  # of what is reached
    closed: set[tuple[int, ...]] = set()  # what no text reaches
    try:
        for line in sorted(paths, key=paths.__getitem__):
            path = paths[line]
            parent = path[:-1]
            if path and (parent in closed or (parent in line_of and not _allows(words[line_of[parent]], path[-1]))):
                closed.add(path)
                continue
            same = len(commonprefix([current, path]))
            matcher.go_back(len(current) - same)
            for token in path[same:]:
                matcher.take(token)
            current, line_of[path] = path, line
            matcher.write_mask(words[line])
    finally:
        matcher.go_back(matcher.num_taken - begun)


def _allows(words: np.ndarray, token: int) -> bool:
    return token < 32 * len(words) and bool(int(words[token // 32]) >> token % 32 & 1)


def _masked(scores: torch.Tensor, words: np.ndarray, *, allows_beyond: bool) -> torch.Tensor:
    """[n, V] scores, and -inf where `words` [n, W] have no bit; beyond them -inf, or where that is allowed nothing."""
    num_told, octets = min(scores.shape[1], 32 * words.shape[1]), words.view(np.uint8)
    masked = scores.clone()
    masked[:, :num_told].masked_fill_(_bits(octets, scores.device)[:, :num_told] == 0, -math.inf)
    if not allows_beyond:
        masked[:, num_told:] = -math.inf
    return masked


def _bits(octets: np.ndarray, device: torch.device) -> torch.Tensor:
    """[n, N] uint8 -> [n, 8 N] of 0 and 1 on the device, the lowest bit of each first."""
    if device.type == "cpu":
        return torch.from_numpy(np.unpackbits(octets, axis=1, bitorder="little"))
    places = torch.arange(8, dtype=torch.uint8, device=device)
    return uploaded(octets, device)[:, :, None].bitwise_right_shift(places).bitwise_and(1).flatten(1)
