"""How a DFlash head runs on the rows that it follows: one block behind each of them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from transformers import PreTrainedModel

from stand.drafters.dflash.block_run import BlockRun
from stand.drafters.dflash.head import BlockLaws, DFlashHead
from stand.drafters.heads.followed_features import FollowedFeatures
from stand.drafters.heads.packed_run import PackedRun
from stand.forward.few_tokens.linear_layers import few_token_layers
from stand.forward.model import PROMPT_CHUNK
from stand.forward.packed_plan import StepPlan


class FollowedBlocks(FollowedFeatures):
    """The cache holds the keys of a row's features; a block is written behind them and forgotten."""

    _head: DFlashHead

    def __init__(
        self, target: PreTrainedModel, head: DFlashHead, *, temperature: float, count: int, width: int
    ) -> None:
        """temperature, count, width: of laws; see `DFlashHead.laws`."""
        super().__init__(target, head)
        self._asked = {"temperature": temperature, "count": count, "width": width}

    def run(self, histories: Sequence[np.ndarray]) -> BlockLaws:
        """Run the head behind the rows: their laws, on the CPU."""
        self.hold(histories)
        keys, self._keys = self._keys, []  # where an error ends this, no row is held
        fresh = self._fresh_run(histories)
        self._lengths = self._lengths + np.diff(fresh.offsets)
        blocks = self._block_runs(np.array([history[-1] for history in histories], dtype=np.int32))
        found = self._results(self._body, [fresh, *blocks], self._fresh, count=len(histories))
        self._fresh = [rest[:0] for rest in self._fresh]
        self._keys = keys
        return BlockLaws(**found)

    def _fresh_run(self, histories: Sequence[np.ndarray]) -> PackedRun:
        """All features that have come since the last run. No token attends: their keys are written alone."""
        counts = np.array([len(fresh) for fresh in self._fresh])
        places = zip(histories, self._lengths, counts, strict=True)
        tokens = [history[length : length + count] for history, length, count in places]
        depths = np.concatenate([np.arange(count) for count in counts])
        nothing = np.zeros((len(depths), 0), dtype=bool)
        offsets = np.concatenate([[0], counts.cumsum()])
        return PackedRun(np.concatenate(tokens), offsets, depths, nothing, self._lengths)

    def _block_runs(self, pending: np.ndarray) -> list[BlockRun]:
        """One block per row, for each kind of layers."""
        settings = self._head.settings
        token_ids = np.full((len(pending), settings.block_size), settings.mask_token_id, dtype=np.int32)
        token_ids[:, 0] = pending
        told = {"has_windows": self._head.has_windows}
        return [BlockRun.of(token_ids, self._lengths, is_causal=kind, **told) for kind in self._kinds]

    @property
    def _kinds(self) -> list[bool]:
        """Whether places see those before them alone, of the kinds of layers that there are."""
        return list(dict.fromkeys(self._head.settings.is_causal))

    def _body(
        self, plans: Sequence[StepPlan], features: torch.Tensor, ends: torch.Tensor | None
    ) -> dict[str, torch.Tensor]:
        """Write the keys of features [F, D], run the blocks, read their laws."""
        pending = plans[1].input_ids.view(-1, self._head.settings.block_size)[:, 0]
        laws = self._head.laws(self._estimates(plans, features), pending, **self._asked)
        return {name: found for name in BlockLaws.__slots__ if (found := getattr(laws, name)) is not None}

    def _estimates(self, plans: Sequence[StepPlan], features: torch.Tensor) -> torch.Tensor:
        """[A, G, D] at the places that guess."""
        head, (fresh, *blocks) = self._head, plans
        first, by_kind = blocks[0], dict(zip(self._kinds, blocks, strict=True))
        with few_token_layers(head):
            if fresh is not None:
                self._cache.begin(fresh)
                head.remember(features[None], fresh.position_ids, self._cache)
            self._cache.begin(first)
            seen = [{"stand_plan": by_kind[kind].told, "attention_mask": None} for kind in head.settings.is_causal]
            return head(first.input_ids, first.position_ids, cache=self._cache, seen=seen)

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
