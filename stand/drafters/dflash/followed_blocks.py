"""How a DFlash head runs on the rows that it follows: one block behind each of them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from stand.drafters.dflash.block_plan import BlockPlan
from stand.drafters.dflash.head import DFlashHead
from stand.drafters.heads.followed_features import FollowedFeatures
from stand.forward.few_tokens.linear_layers import few_token_layers
from stand.forward.model import PROMPT_CHUNK
from stand.forward.packed_plan import StepPlan


class FollowedBlocks(FollowedFeatures):
    """The cache holds the keys of a row's features; a block is written behind them and forgotten."""

    _head: DFlashHead

    def run(self, histories: Sequence[np.ndarray]) -> torch.Tensor:
        """Run the head behind the rows: estimates [rows, G, D] at the places that guess."""
        self.hold(histories)
        keys, self._keys = self._keys, []  # where an error ends this, no row is held
        with few_token_layers(self._head):
            self._remember(histories)
            pending = np.array([history[-1] for history in histories], dtype=np.int32)
            plans = self._plans(pending)
            first = next(iter(plans.values()))
            self._cache.begin(first)
            seen = [
                {"stand_plan": plans[is_causal], "attention_mask": None} for is_causal in self._head.settings.is_causal
            ]
            estimates = self._head(first.input_ids, first.position_ids, cache=self._cache, seen=seen)
        self._keys = keys
        return estimates

    def _remember(self, histories: Sequence[np.ndarray]) -> None:
        """Write the keys of all features that have come since the last run."""
        counts = np.array([len(fresh) for fresh in self._fresh])
        if not counts.any():
            return
        places = zip(histories, self._lengths, counts, strict=True)
        tokens = [history[length : length + count] for history, length, count in places]
        depths = np.concatenate([np.arange(count) for count in counts])
        nothing = np.zeros((len(depths), int(counts.max())), dtype=bool)  # is asked by nobody: no token attends
        plan = StepPlan(
            np.concatenate(tokens), np.concatenate([[0], counts.cumsum()]), depths, nothing, self._lengths,
            device=self._target.device,
        )  # fmt: skip
        self._cache.begin(plan)
        self._head.remember(torch.cat(self._fresh)[None], plan.position_ids, self._cache)
        self._lengths = self._lengths + counts
        self._fresh = [fresh[:0] for fresh in self._fresh]

    def _plans(self, pending: np.ndarray) -> dict[bool, BlockPlan]:
        """Of one block per row, by whether its places see those before them alone."""
        settings = self._head.settings
        token_ids = np.full((len(pending), settings.block_size), settings.mask_token_id, dtype=np.int32)
        token_ids[:, 0] = pending
        told = {"has_windows": self._head.has_windows, "device": self._target.device}
        kinds = dict.fromkeys(settings.is_causal)
        return {kind: BlockPlan(token_ids, self._lengths, is_causal=kind, **told) for kind in kinds}

    def _fill(self, place: int, history: np.ndarray, features: torch.Tensor) -> None:
        """The keys of all features."""
        with few_token_layers(self._head):
            for start in range(0, len(features), PROMPT_CHUNK):
                chunk = features[start : start + PROMPT_CHUNK]
                tokens = history[start : start + len(chunk)]
                plan = StepPlan.for_prompt(tokens, start, row=place, device=self._target.device)
                self._cache.begin(plan)
                self._head.remember(chunk[None], plan.position_ids, self._cache)
        self._lengths[place] = len(features)
