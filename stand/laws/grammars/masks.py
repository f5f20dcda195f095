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
from stand.laws.grammars.matchers import Matcher, allows, forbidden, matcher_for
from stand.laws.node import Node, nodes_of, rows_of
from stand.row import Row
from stand.trees import DraftBatch, TokenMasks


@dataclass(slots=True)
class _Walk:
    """Of a row's matcher, along the drafts of one step and back."""

    matcher: Matcher  # behind the row's last token
    words: dict[tuple[int, ...], np.ndarray] = field(default_factory=dict)  # of this step, by path: its mask
    errors: dict[tuple[int, ...], Exception] = field(default_factory=dict)  # of this step: paths without a mask

    def follow(self, row: Row) -> None:
        """The row has gone on."""
        fresh = row.new_token_ids[self.matcher.num_taken :].tolist()
        if fresh:
            self.words, self.errors = {}, {}
            try:
                self.matcher.follow(fresh)
            except RuntimeError as error:  # a token that another processor has brought back
                self.errors[()] = error

    def write(self, paths: dict[int, tuple[int, ...]], words: np.ndarray) -> None:
        """Masks of these nodes, by their lines of `words`; each path begins where the last one ended. The grammar is
        asked for those that are not known from a plan of this step."""
        begun, current = self.matcher.num_taken, ()
        try:
            for line in sorted(paths, key=paths.__getitem__):
                path = paths[line]
                if path in self.words:
                    words[line] = self.words[path]
                    continue
                if path[:-1] in self.errors:
                    self.errors[path] = self.errors[path[:-1]]
                    continue
                same = len(commonprefix([current, path[:-1]]))
                self.matcher.go_back(len(current) - same)
                current = current[:same]
                try:
                    for token in path[same:]:
                        self._take(current, token)
                        current = (*current, token)
                    self._write(words[line], path)
                except (RuntimeError, ValueError) as error:
                    words[line], self.errors[path] = -1, error
        finally:
            self.matcher.go_back(self.matcher.num_taken - begun)

    def _take(self, path: tuple[int, ...], token: int) -> None:
        """Behind this path, whose mask is known unless any token may come there."""
        if not (self.matcher.takes_any(token) or allows(self.words[path], token)):
            raise RuntimeError(forbidden(token, self.matcher.num_taken))
        self.matcher.take(token)

    def _write(self, words: np.ndarray, path: tuple[int, ...]) -> None:
        self.matcher.write_mask(words)
        if not words.any():
            raise ValueError("a grammar must allow a token behind each text that it allows, got none; mend the grammar")
        self.words[path] = words


@dataclass(slots=True)
class GrammarMasks:
    """A processor of a grammar library at all nodes. It asks nothing of the scores, so masks are made while they are
    being computed. Below a token that the grammar forbids scores stay, and no row may come there."""

    by_request: dict[int, LogitsProcessor]
    _num_tokens: int = 0
    _of_row: dict[int, _Walk] = field(default_factory=dict)

    def __call__(self, scores: torch.Tensor, nodes: Sequence[Node]) -> torch.Tensor:
        """[n, V] float32 of `nodes` -> the same shape; parents were asked about before their children or with them."""
        self.expect(scores.shape[1])
        if self._are_free(nodes):
            return scores
        words, allows_beyond = self._words(nodes)
        return _masked(scores, words, allows_beyond=allows_beyond)

    def expect(self, num_tokens: int) -> None:
        """The model has so many tokens, and scores at every node."""
        self._num_tokens = num_tokens

    def is_plannable(self, rows: Sequence[Row]) -> bool:
        """Whether masks at planned nodes are worth their time: some row has no free choice now, and all their matchers
        go back quickly."""
        matchers = [self._followed(row).matcher for row in rows]
        return all(one.goes_back_quickly for one in matchers) and not all(one.is_free for one in matchers)

    def planned(self, plan: DraftBatch, rows: Sequence[Row]) -> TokenMasks:
        """Masks at the nodes of drafts that are only planned."""
        words, allows_beyond = self._words(nodes_of(plan, rows))
        return TokenMasks(plan, _within(words, self._num_tokens), allows_beyond=allows_beyond)

    def _are_free(self, nodes: Sequence[Node]) -> bool:
        """Whether it is known without masks that any token may come behind each of them."""
        rows, owners = rows_of(nodes)
        num_free = [self._followed(row).matcher.num_free for row in rows]
        return all(len(node.path) < num_free[owner] for node, owner in zip(nodes, owners.tolist(), strict=True))

    def _words(self, nodes: Sequence[Node]) -> tuple[np.ndarray, bool]:
        """The masks of nodes, [n, W] int32, and whether tokens beyond them are allowed."""
        lines_of: dict[int, list[int]] = {}
        for line, node in enumerate(nodes):
            lines_of.setdefault(node.row.index, []).append(line)
        walks = [self._followed(nodes[lines[0]].row) for lines in lines_of.values()]
        words = np.full((len(nodes), walks[0].matcher.num_words), -1, dtype=np.int32)
        for walk, lines in zip(walks, lines_of.values(), strict=True):
            walk.write({line: nodes[line].path for line in lines}, words)
        return words, walks[0].matcher.allows_beyond

    def error_at(self, node: Node) -> Exception | None:
        """What is wrong with a node of the last step, if no text of the grammar comes there."""
        return self._of_row[node.row.index].errors.get(node.path)

    def forget(self, row: Row, *, is_last: bool) -> None:
        """As `ProcessorChain.forget`."""
        self._of_row.pop(row.index, None)
        if is_last:
            self.by_request.pop(row.request, None)

    def _followed(self, row: Row) -> _Walk:
        """The row's, behind its new tokens: a grammar begins after the prompt."""
        walk = self._of_row.get(row.index)
        if walk is None:
            walk = _Walk(matcher_for(self.by_request[row.request], row, self._num_tokens))
            self._of_row[row.index] = walk
        walk.follow(row)
        return walk


def _masked(scores: torch.Tensor, words: np.ndarray, *, allows_beyond: bool) -> torch.Tensor:
    """[n, V] scores, and -inf where `words` [n, W] have no bit. Beyond them scores stay where that is allowed, and
    where a mask has all bits; else they are -inf."""
    is_open = (words == -1).all(axis=1)
    if is_open.all():
        return scores
    if is_open.any() and scores.device.type == "cpu":  # a GPU masks all lines before it could learn which ones
        lines = torch.from_numpy(np.flatnonzero(~is_open))
        return scores.index_copy(0, lines, _masked(scores[lines], words[~is_open], allows_beyond=allows_beyond))
    num_beyond = -(-scores.shape[1] // 32) - words.shape[1]
    if num_beyond > 0:
        beyond = np.where(is_open | allows_beyond, -1, 0).astype(np.int32)
        words = np.concatenate([words, np.repeat(beyond[:, None], num_beyond, axis=1)], axis=1)
    bits = _bits(words.view(np.uint8), scores.device)[:, : scores.shape[1]]
    return torch.where(bits.view(torch.bool), scores, -math.inf)


def _within(words: np.ndarray, num_tokens: int) -> np.ndarray:
    """[n, W] masks without bits of tokens that the model does not have: a tokenizer may have more."""
    if 32 * words.shape[1] <= num_tokens:
        return words
    words = words[:, : -(-num_tokens // 32)].copy()
    if num_tokens % 32:
        words[:, -1] &= (1 << num_tokens % 32) - 1
    return words


def _bits(octets: np.ndarray, device: torch.device) -> torch.Tensor:
    """[n, N] uint8 -> [n, 8 N] of 0 and 1 on the device, the lowest bit of each first."""
    if device.type == "cpu":
        return torch.from_numpy(np.unpackbits(octets, axis=1, bitorder="little"))
    places = torch.arange(8, dtype=torch.uint8, device=device)
    return uploaded(octets, device)[:, :, None].bitwise_right_shift(places).bitwise_and(1).flatten(1)
