"""Texts that are learned a part per step, so that no step waits for a whole prompt."""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Iterable
from dataclasses import dataclass

import numpy as np

from stand.trees import BlendedLookup

MOST_STEPS = 100  # that prompts wait for: after them a request is likely to be over


@dataclass(slots=True)
class _Text:
    token_ids: np.ndarray
    scope: int
    num_done: int = 0
    corpus: Hashable = None

    def __len__(self) -> int:
        """Tokens that wait."""
        return len(self.token_ids) - self.num_done


class Backlog:
    """Prompts, the newest first, then corpora. Where more prompts come than can be learned, the oldest are dropped.

    What is learned, and when, follows from the calls alone: the ranks of one model draft alike.
    tokens_per_step: learned by each `work`. With 0 nothing is taken.
    """

    def __init__(self, lookup: BlendedLookup, *, tokens_per_step: int):
        self._lookup = lookup
        self._tokens_per_step = tokens_per_step
        self._prompts: deque[_Text] = deque()  # the oldest first
        self._num_waiting = 0  # tokens of prompts
        self._corpora: deque[_Text] = deque()

    def __len__(self) -> int:
        """Tokens that wait."""
        return self._num_waiting + sum(map(len, self._corpora))

    def add(self, token_ids: np.ndarray, scope: int, *, num_known: int = 0) -> None:
        """A prompt int32 [L], of which the first tokens are learned already; a copy is kept until the rest is.

        The newest one waits whole, however long it is.
        """
        if self._tokens_per_step > 0 and len(token_ids) > num_known:
            self._prompts.append(_Text(np.array(token_ids, dtype=np.int32), scope, num_known))
            self._num_waiting += len(self._prompts[-1])
            while self._num_waiting > MOST_STEPS * self._tokens_per_step and len(self._prompts) > 1:
                self._num_waiting -= len(self._prompts.popleft())

    def add_corpus(self, name: Hashable, documents: Iterable[np.ndarray], scope: int) -> None:
        """int32 [L] each, kept until they are learned. None is dropped."""
        if self._tokens_per_step > 0:
            self._corpora.extend(_Text(one, scope, corpus=name) for one in documents if len(one) > 0)

    def remove_corpus(self, name: Hashable) -> None:
        """What waits of it is never learned."""
        self._corpora = deque(text for text in self._corpora if text.corpus != name)

    def work(self) -> None:
        """Learn the next part."""
        num_learned = self._learn(self._prompts, -1, self._tokens_per_step)
        self._num_waiting -= num_learned
        self._learn(self._corpora, 0, self._tokens_per_step - num_learned)

    def _learn(self, texts: deque[_Text], place: int, most: int) -> int:
        """Learn so many tokens of the texts at one end; how many there were."""
        room = most
        while room > 0 and texts:
            text = texts[place]
            start, end = text.num_done, min(len(text.token_ids), text.num_done + room)
            self._lookup.learn(text.token_ids[:start], text.token_ids[start:end], scope=text.scope)
            room -= end - start
            text.num_done = end
            if len(text) == 0:
                del texts[place]
        return most - room
