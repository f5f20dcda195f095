"""Log-probabilities of the tokens that rows gain, and of the likeliest tokens in the same places."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch

from stand.argument_checks import whole_number
from stand.row import Row
from stand.trees import DraftBatch

RAW, PROCESSED = MODES = "raw_logprobs", "processed_logprobs"  # vLLM's names


@dataclass(frozen=True, slots=True, eq=False)
class TokenLogprobs:
    """Of the n new tokens of a row; natural logarithms, -inf where a token has no probability."""

    of_tokens: np.ndarray  # [n] float32
    top_ids: np.ndarray  # [n, k] int32: the likeliest tokens of each place, best first
    top: np.ndarray  # [n, k] float32: their log-probabilities


class Drawn(NamedTuple):
    """What is asked of n nodes of a step: their places among its nodes, and the token that came behind each."""

    nodes: np.ndarray  # [n] int64
    tokens: np.ndarray  # [n] int64
    count: int  # likeliest tokens that are asked for beside

    def of_scores(self, scores: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """The three fields of `TokenLogprobs` under the softmax of scores [M, V]; -inf is no mass."""
        scores = scores[_on(scores, self.nodes)].float()
        own, ids, top = self._picked(scores)
        total = torch.logsumexp(scores, dim=-1)
        return own - total, ids, top - total[:, None]

    def of_probabilities(self, laws: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """The same under laws [M, V]."""
        own, ids, top = self._picked(laws[_on(laws, self.nodes)])
        return own.log(), ids, top.log()

    def _picked(self, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        top = torch.topk(values, self.count, dim=-1)
        return values.gather(1, _on(values, self.tokens)[:, None])[:, 0], top.indices.to(torch.int32), top.values


class LogprobNotes:
    """What a call writes down of its rows while it decodes them."""

    def __init__(self, count: int, mode: str):
        """count: likeliest tokens per place.

        mode: RAW for the model's law, before processors, temperature and filters; PROCESSED for the one that is drawn
        from, under greedy decoding before the best token is taken."""
        self.mode = mode
        self._count = count
        self._noted: dict[int, list[tuple[np.ndarray, ...]]] = {}  # by row index, step by step

    def note(
        self,
        logprobs: Callable[[Drawn], tuple[torch.Tensor, torch.Tensor, torch.Tensor]],
        rows: Sequence[Row],
        batch: DraftBatch,
        accepted: Sequence[np.ndarray],
        gained: Sequence[list[int]],
    ) -> None:
        """Of a step in which row i gained the tokens gained[i]: those of the path accepted[i] and the one behind it, as
        far as they count. logprobs: as `Step.logprobs`."""
        nodes = [
            first + node
            for first, path, tokens in zip(batch.offsets.tolist(), accepted, gained, strict=False)
            for node in [0, *path.tolist()][: len(tokens)]
        ]
        tokens = [token for tokens in gained for token in tokens]
        found = logprobs(Drawn(np.array(nodes, dtype=np.int64), np.array(tokens, dtype=np.int64), self._count))
        ends = np.cumsum([len(tokens) for tokens in gained])[:-1]
        parts = zip(*(np.split(numbers.cpu().numpy(), ends) for numbers in found), strict=True)
        for row, part in zip(rows, parts, strict=True):
            self._noted.setdefault(row.index, []).append(part)

    def take(self, row: Row) -> TokenLogprobs:
        """Of a row that has ended, once."""
        return TokenLogprobs(*map(np.concatenate, zip(*self._noted.pop(row.index), strict=True)))


def _on(tensor: torch.Tensor, numbers: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(numbers).to(tensor.device)


def logprob_notes(count: object, mode: object, *, vocabulary_size: int) -> LogprobNotes | None:
    """As a call asks for them, mode None: RAW. Raises ValueError for what does not fit, a mode without a count among
    it."""
    if count is None and mode is None:
        return None
    if count is None:
        raise ValueError(f"logprobs_mode needs logprobs, got {mode!r} alone; give logprobs=0, or leave it out")
    if mode not in (None, *MODES):
        raise ValueError(f"logprobs_mode must be one of {', '.join(MODES)}, got {mode!r}; leave it out for {RAW}")
    count = whole_number("logprobs", count, "0 asks for those of the new tokens alone", least=0)
    if count > vocabulary_size:
        raise ValueError(
            f"logprobs must be at most the vocabulary's {vocabulary_size} tokens, got {count}; ask for fewer"
        )
    return LogprobNotes(count, RAW if mode is None else mode)
