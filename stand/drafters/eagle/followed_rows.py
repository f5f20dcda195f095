"""What a head of EAGLE's kind remembers of the rows that it follows, and how it runs on drafts behind them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from transformers import PreTrainedModel

from stand.drafters.eagle.feature_head import FeatureHead
from stand.drafters.heads.followed_features import FollowedFeatures
from stand.drafters.heads.packed_run import PackedRun
from stand.forward.few_tokens.linear_layers import few_token_layers
from stand.forward.model import PROMPT_CHUNK, fused
from stand.forward.packed_plan import StepPlan


@dataclass(frozen=True, slots=True, eq=False)
class NodeLaws:
    """Of n nodes: estimates [n, D] of the features after them, on the target's device; the likeliest tokens there, ids
    int32 and probs float32 [n, K]."""

    estimates: torch.Tensor
    ids: np.ndarray
    probs: np.ndarray


class FollowedRows(FollowedFeatures):
    """A *pair* is a feature and the token after it: what the head makes keys of."""

    def __init__(self, target: PreTrainedModel, head: FeatureHead, *, temperature: float, count: int) -> None:
        """temperature, count: of laws; see `TrainedPart.best_tokens`."""
        super().__init__(target, head)
        self._asked = {"temperature": temperature, "count": count}
        self._paths: list[list[int]] = []  # per place: of each node written in this step, bits of those it sees

    def catch_up(self, histories: Sequence[np.ndarray]) -> tuple[np.ndarray, NodeLaws | None]:
        """Run the head over all pairs of `histories` that it has not seen.

        (rows that have a pair at all, the laws behind their pending tokens; None where there are none).
        """
        self.hold(histories)
        chunks = [
            history[length + 1 : length + 1 + len(fresh)]
            for history, length, fresh in zip(histories, self._lengths.tolist(), self._fresh, strict=True)
        ]
        counts = np.array([len(chunk) for chunk in chunks])
        self._paths = [[] for _ in chunks]
        rows = np.flatnonzero(counts)
        if len(rows) == 0:
            return rows, None
        ancestors = np.zeros((counts.sum(), counts.max()), dtype=bool)
        offsets = np.concatenate([[0], counts.cumsum()])
        for first, count in zip(offsets, counts, strict=False):
            ancestors[first : first + count, :count] = np.tri(count, dtype=bool)
        depths = np.concatenate([np.arange(count) for count in counts])
        run = PackedRun(np.concatenate(chunks), offsets, depths, ancestors, self._lengths)
        laws = self._laws(run, self._fresh, ends=offsets[1:][rows] - 1)
        self._lengths = self._lengths + counts
        self._fresh = [fresh[:0] for fresh in self._fresh]
        return rows, laws

    def extend(
        self,
        rows: Sequence[int],
        tokens: Sequence[int],
        parents: Sequence[int | None],
        features: Sequence[torch.Tensor],
    ) -> NodeLaws:
        """Run the head on n drafted nodes: the laws behind them.

        rows ascend; parents: of each node its parent's number among the nodes that this step has written for its row,
        None below the root; features: n estimates [D] for the parents.
        """
        counts = np.bincount(rows, minlength=len(self._keys))
        starts = np.array([len(paths) for paths in self._paths])
        for row, parent in zip(rows, parents, strict=True):
            paths = self._paths[row]
            paths.append((paths[parent] if parent is not None else 0) | 1 << len(paths))
        seen = [bits for paths, start in zip(self._paths, starts, strict=True) for bits in paths[start:]]
        width = int((starts + counts).max())
        ancestors = np.array([[bits >> node & 1 for node in range(width)] for bits in seen], dtype=bool)
        run = PackedRun(
            np.array(tokens, dtype=np.int32), np.concatenate([[0], counts.cumsum()]), ancestors.sum(axis=1) - 1,
            ancestors, self._lengths, starts,
        )  # fmt: skip
        return self._laws(run, [torch.stack(list(features))])

    def _laws(self, run: PackedRun, features: Sequence[torch.Tensor], *, ends: np.ndarray | None = None) -> NodeLaws:
        """The head on the run's pairs, and laws behind those at `ends`, None: behind all."""
        keys, self._keys = self._keys, []  # where an error ends this, no row is held
        count = run.num_tokens if ends is None else len(ends)
        found = self._results(self._body, [run], features, ends=ends, count=count, stays=("estimates",))
        self._keys = keys
        return NodeLaws(found["estimates"], found["ids"].numpy(), found["probs"].numpy())

    def _body(
        self, plans: Sequence[StepPlan], features: torch.Tensor, ends: torch.Tensor | None
    ) -> dict[str, torch.Tensor]:
        estimates = self._run(plans[0], features)
        estimates = estimates if ends is None else estimates[ends]
        ids, probs = self._head.best_tokens(estimates, **self._asked)
        return {"estimates": estimates, "ids": ids, "probs": probs}

    def _run(self, plan: StepPlan, features: torch.Tensor) -> torch.Tensor:
        """The head on the plan's pairs: [M, D]."""
        self._cache.begin(plan)
        with few_token_layers(self._head), fused(self._target, self._cache):
            return self._head(
                features[None], plan.input_ids, plan.position_ids,
                attention_mask=None, cache=self._cache, use_cache=True, stand_plan=plan.told,
            )[0]  # fmt: skip

    def _fill(self, place: int, history: np.ndarray, features: torch.Tensor) -> None:
        """All pairs but the last one, whose token is pending."""
        length = len(features)
        for start in range(0, length - 1, PROMPT_CHUNK):
            end = min(start + PROMPT_CHUNK, length - 1)
            plan = StepPlan.for_prompt(history[start + 1 : end + 1], start, row=place, device=self._target.device)
            self._run(plan, features[start:end])
        self._fresh[place], self._lengths[place] = features[length - 1 :], length - 1
