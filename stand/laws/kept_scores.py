"""Numbers over the whole vocabulary for every new token: transformers' `output_logits` and `output_scores`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import torch
from transformers import GenerationConfig

from stand.forward.devices import uploaded
from stand.laws.sampling import TargetLaw
from stand.laws.scored import LOGITS, SCORES, Scored
from stand.row import Row
from stand.trees import DraftBatch

SETTINGS = {"output_logits": LOGITS, "output_scores": SCORES}  # fields of a `GenerationConfig`


class KeptScores:
    """Of each kind one float32 tensor [rows, V] per position behind the prompts, on the model's device; zeros behind a
    row's end. They take 4 * V bytes per kind, row and position."""

    def __init__(self, kinds: Iterable[str], *, num_rows: int):
        """kinds: LOGITS, the model's own, or SCORES, those behind processors, temperature and filters, or both.
        num_rows: of the call, numbered from 0 on."""
        self._num_rows = num_rows
        self._tensors: dict[str, list[torch.Tensor]] = {kind: [] for kind in kinds}

    def held(self, law: TargetLaw) -> frozenset[str]:
        """What `keep` asks of a step, whatever its law, as in `StepStart.held`."""
        return frozenset(self._tensors)

    def keep(
        self,
        scored: Scored,
        batch: DraftBatch,
        accepted: Sequence[np.ndarray],
        rows: Sequence[Row],
        counts: Iterable[int],
    ) -> None:
        """Of each row's next tokens so many, which it does not have yet: each was drawn at a node of the path
        accepted[i], the first one at the root."""
        nodes: list[int] = []
        places: list[tuple[int, int]] = []  # position and row of each token
        for first, path, row, count in zip(batch.offsets.tolist(), accepted, rows, counts, strict=False):
            begun = len(row.new_token_ids)
            nodes += [first, *(first + path).tolist()][:count]
            places += [(begun + number, row.index) for number in range(count)]
        for kind, tensors in self._tensors.items():
            for (position, line), values in zip(places, _values(kind, scored, nodes), strict=True):
                while position >= len(tensors):
                    tensors.append(self._blank(values))
                tensors[position][line] = values

    def of(self, kind: str) -> tuple[torch.Tensor, ...] | None:
        """By position; None for a kind that was not asked for."""
        return tuple(self._tensors[kind]) if kind in self._tensors else None

    def _blank(self, values: torch.Tensor) -> torch.Tensor:
        """A tensor that gradients may be taken with later, though the call runs in inference mode."""
        with torch.inference_mode(False):
            return torch.zeros(self._num_rows, len(values), dtype=torch.float32, device=values.device)


def new_kept_scores(config: GenerationConfig, *, num_rows: int) -> KeptScores | None:
    """As a call's settings ask for them."""
    kinds = [kind for name, kind in SETTINGS.items() if getattr(config, name, None)]
    return KeptScores(kinds, num_rows=num_rows) if kinds else None


def refuse_kept_scores(config: GenerationConfig) -> None:
    """Raise ValueError by name where a call asks for them that does not give its rows all together."""
    for name in SETTINGS:
        if getattr(config, name, None):
            raise ValueError(
                f"{name} must be None or False in a run or a stream, got True: tensors of all rows are given when the "
                "last one has ended; use engine.generate, or logprobs= for some tokens of each place"
            )


def _values(kind: str, scored: Scored, nodes: list[int]) -> Iterable[torch.Tensor]:
    """[V] of each node, to be copied at once."""
    if kind == LOGITS:
        return (scored.logits[node] for node in nodes)
    return scored.filtered(uploaded(np.array(nodes, dtype=np.int64), scored.scores.device))
