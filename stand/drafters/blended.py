"""The default drafter: the blended lookup, grown under a node budget."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from stand.drafters.drafter import check_kind
from stand.drafters.step_cost import CostTable
from stand.trees import BlendedLookup, DraftBatch
from stand.trees.longest_match.lookup import KINDS


class BlendedDrafter:
    """All context lengths blended, drafts grown best-first under one node budget for all live rows.

    budget: the most nodes of all rows of a step together; a row that ends hands its share on. floor: no node that is
    less likely to be accepted (estimated). costs: what steps cost on this machine, by which growth ends as soon as a
    node adds a larger share to the step's time than to its expected tokens.
    """

    NUM_SCOPES = 255  # a scope is a byte; the last one stands for what came from a file

    def __init__(
        self,
        lookup: BlendedLookup,
        *,
        budget: int,
        floor: float = 0.0,
        costs: CostTable | None = None,
        kind: str = "sampled",
    ):
        check_kind(kind, KINDS, "growth under a budget")
        self.lookup = lookup
        self.budget = budget
        self.floor = floor
        self.costs = costs
        self.kind = kind
        self.row_size = lookup.row_size
        self._lengths: dict[int, int] = {}  # of the histories of the last draft, by row
        self._has_learned = False  # since the last draft
        self._known_rises: dict[tuple[int, int, int], np.ndarray] = {}  # by measured length, rows and budget

    def draft(
        self,
        histories: Sequence[np.ndarray],
        *,
        seed: int,
        rows: np.ndarray,
        steps: np.ndarray,
        problems: np.ndarray,
        max_depths: np.ndarray,
        is_greedy: bool,
    ) -> DraftBatch:
        if self._has_learned:  # a caller who does not teach wants the same drafts again
            self._judge(histories, rows, problems)
        self._has_learned = False
        self._lengths = {row: len(history) for row, history in zip(rows.tolist(), histories, strict=True)}
        budget, rises = self._limits(histories)
        return self.lookup.draft(
            histories,
            budget,
            seed=seed,
            rows=rows,
            steps=steps,
            kind="deterministic" if is_greedy else self.kind,
            floor=self.floor,
            rises=rises,
            max_depths=max_depths,
            scopes=problems % self.NUM_SCOPES,
        )

    def _limits(self, histories: Sequence[np.ndarray]) -> tuple[int, np.ndarray | None]:
        """The most nodes, never beyond what was timed, and what each adds to the cost of a step, as a share of it."""
        if self.costs is None:
            return self.budget, None
        num_rows = len(histories)
        cost = self.costs.at(sum(map(len, histories)) / num_rows)
        budget = max(min(self.budget, cost.most_tokens - num_rows), 0)
        key = cost.length, num_rows, budget
        if key not in self._known_rises:
            self._known_rises[key] = cost.rises(num_rows, budget)
        return budget, self._known_rises[key]

    def learn_prompt(self, token_ids: np.ndarray, *, problem: int) -> None:
        self.lookup.learn(token_ids[:1], token_ids[1:], scope=problem % self.NUM_SCOPES)

    def learn(
        self,
        batch: DraftBatch,
        histories: Sequence[np.ndarray],
        row_ids: np.ndarray,
        row_probabilities: np.ndarray,
        *,
        problems: np.ndarray,
    ) -> None:
        self.lookup.learn_batch(batch, histories, row_ids, row_probabilities, scopes=problems % self.NUM_SCOPES)
        self._has_learned = True

    def _judge(self, histories: Sequence[np.ndarray], rows: np.ndarray, problems: np.ndarray) -> None:
        """Teach what became of the last draft; rows that ended since are left out."""
        drafted = [(place, self._lengths.get(row, 0)) for place, row in enumerate(rows.tolist())]
        drafted = [(place, length) for place, length in drafted if 0 < length < len(histories[place])]
        self.lookup.judge(
            [histories[place][:length] for place, length in drafted],
            [histories[place][length:] for place, length in drafted],
            scopes=[int(problems[place]) % self.NUM_SCOPES for place, _ in drafted],
        )
