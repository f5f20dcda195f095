"""Recordings decoded side by side without a model: one draft a step for all rows, which go on as recorded."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from workloads.recordings import Recording

from replay_parts.drafters import accepted_path, grown_guess
from stand.trees import BlendedLookup, DraftBatch


class SideBySide:
    """`live`: the rows that have not come to their ends; row r is recording r.

    The first token of a recording comes from its prompt; what the lookup knows of either is the caller's choice.
    kind: of drafts. scopes: of the recordings in the lookup, one each; None for 0.
    """

    def __init__(
        self,
        lookup: BlendedLookup,
        recordings: Sequence[Recording],
        *,
        kind: str = "deterministic",
        scopes: Sequence[int] | None = None,
    ):
        self._lookup, self._kind = lookup, kind
        self._scopes = [0] * len(recordings) if scopes is None else list(scopes)
        self._streams = [np.concatenate([one.prompt, one.tokens]).astype(np.int32) for one in recordings]
        self._ends = [len(one.prompt) + 1 for one in recordings]
        self.live = list(range(len(recordings)))
        self.num_steps = 0

    @property
    def least_left(self) -> int:
        """Tokens to come of the live row that is nearest to its end."""
        return min(len(self._streams[row]) - self._ends[row] for row in self.live)

    def request(self, **limits: object) -> dict[str, object]:
        """What `BlendedLookup.draft` is asked for in the next step; limits: budget, rises and others of its own."""
        request = {
            "histories": [self._streams[row][: self._ends[row]] for row in self.live],
            "seed": 0,
            "rows": np.array(self.live),
            "steps": np.full(len(self.live), self.num_steps),
            "kind": self._kind,
            "scopes": [self._scopes[row] for row in self.live],
        }
        return request | limits

    def draft(self, **limits: object) -> DraftBatch:
        return self._lookup.draft(**self.request(**limits))

    def follow(self, batch: DraftBatch) -> int:
        """Go on as recorded, and learn; the number of tokens."""
        self.num_steps += 1
        coming = [self._streams[row][self._ends[row] :] for row in self.live]
        paths = [accepted_path(grown_guess(batch[place]), run[:-1]) for place, run in enumerate(coming)]
        accepted = [np.array(path, np.int32) + 1 for path in paths]  # `accepted_path` counts without the root
        next_tokens = [int(run[len(path)]) for run, path in zip(coming, paths, strict=True)]
        self._lookup.record_outcome(batch, accepted, next_tokens, kind=self._kind)
        gained = [len(path) + 1 for path in paths]
        for row, run, count in zip(self.live, coming, gained, strict=True):
            self._lookup.learn(self._streams[row][: self._ends[row]], run[:count], scope=self._scopes[row])
            self._ends[row] += count
        self.live = [row for row in self.live if self._ends[row] < len(self._streams[row])]
        return sum(gained)
