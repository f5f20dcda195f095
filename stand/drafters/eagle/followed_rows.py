"""What a head of EAGLE's kind remembers of the rows that it follows, and how it runs on drafts behind them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from transformers import PreTrainedModel

from stand.drafters.eagle.feature_head import FeatureHead
from stand.drafters.heads.followed_features import FollowedFeatures
from stand.forward.few_tokens.linear_layers import few_token_layers
from stand.forward.model import PROMPT_CHUNK, fused
from stand.forward.packed_plan import StepPlan


class FollowedRows(FollowedFeatures):
    """A *pair* is a feature and the token after it: what the head makes keys of."""

    def __init__(self, target: PreTrainedModel, head: FeatureHead) -> None:
        super().__init__(target, head)
        self._paths: list[list[int]] = []  # per place: of each node written in this step, bits of those it sees

    def catch_up(self, histories: Sequence[np.ndarray]) -> tuple[np.ndarray, torch.Tensor]:
        """Run the head over all pairs of `histories` that it has not seen.

        (rows that have a pair at all, the head's estimates [rows, D] of the features of their pending tokens).
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
            return rows, torch.cat(self._fresh)
        ancestors = np.zeros((counts.sum(), counts.max()), dtype=bool)
        offsets = np.concatenate([[0], counts.cumsum()])
        for first, count in zip(offsets, counts, strict=False):
            ancestors[first : first + count, :count] = np.tri(count, dtype=bool)
        depths = np.concatenate([np.arange(count) for count in counts])
        plan = StepPlan(
            np.concatenate(chunks), offsets, depths, ancestors, self._lengths, device=self._target.device
        )  # fmt: skip
        estimates = self._run(plan, torch.cat(self._fresh))
        self._lengths = self._lengths + counts
        self._fresh = [fresh[:0] for fresh in self._fresh]
        return rows, estimates[torch.from_numpy(offsets[1:][rows] - 1).to(estimates.device)]

    def extend(
        self, rows: Sequence[int], tokens: Sequence[int], parents: Sequence[int | None], features: torch.Tensor
    ) -> torch.Tensor:
        """Run the head on drafted nodes: estimates [n, D] of the features after them.

        rows ascend; parents: of each node its parent's number among the nodes that this step has written for its row,
        None below the root; features [n, D]: the estimates for the parents.
        """
        counts = np.bincount(rows, minlength=len(self._keys))
        starts = np.array([len(paths) for paths in self._paths])
        for row, parent in zip(rows, parents, strict=True):
            paths = self._paths[row]
            paths.append((paths[parent] if parent is not None else 0) | 1 << len(paths))
        seen = [bits for paths, start in zip(self._paths, starts, strict=True) for bits in paths[start:]]
        width = int((starts + counts).max())
        ancestors = np.array([[bits >> node & 1 for node in range(width)] for bits in seen], dtype=bool)
        plan = StepPlan(
            np.array(tokens, dtype=np.int32), np.concatenate([[0], counts.cumsum()]), ancestors.sum(axis=1) - 1,
            ancestors, self._lengths, starts=starts, device=self._target.device,
        )  # fmt: skip
        return self._run(plan, features)

    def _run(self, plan: StepPlan, features: torch.Tensor) -> torch.Tensor:
        """The head on the plan's pairs: [M, D]."""
        keys, self._keys = self._keys, []  # where an error ends this, no row is held
        self._cache.begin(plan)
        with few_token_layers(self._head), fused(self._target, self._cache):
            estimates = self._head(
                features[None], plan.input_ids, plan.position_ids,
                attention_mask=None, cache=self._cache, use_cache=True, stand_plan=plan,
            )[0]  # fmt: skip
        self._keys = keys
        return estimates

    def _fill(self, place: int, history: np.ndarray, features: torch.Tensor) -> None:
        """All pairs but the last one, whose token is pending."""
        length = len(features)
        for start in range(0, length - 1, PROMPT_CHUNK):
            end = min(start + PROMPT_CHUNK, length - 1)
            plan = StepPlan.for_prompt(history[start + 1 : end + 1], start, row=place, device=self._target.device)
            self._run(plan, features[start:end])
        self._fresh[place], self._lengths[place] = features[length - 1 :], length - 1
