"""A stage for the proposer of vLLM with laws: rows of a batch, a small model, and a model runner whose `_sample` is
called as vLLM's is: with the scores of all verified positions, before anything is sampled."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import torch
from sglang_stage import logits_after

LONGEST = 256


class ModelRunner:
    """`_sample` keeps of each draft what the best tokens follow, and one more token: vLLM's rule for greedy rows."""

    def __init__(self, proposer: object):
        self.drafter = proposer
        self.input_batch = SimpleNamespace(sampling_metadata=SimpleNamespace(temperature=None))

    def _sample(self, logits: torch.Tensor, spec_decode_metadata: SimpleNamespace | None) -> list[list[int]]:
        best = logits.argmax(dim=-1).tolist()
        logits.fill_(0.0)  # vLLM writes into them as well
        if spec_decode_metadata is None:
            return [[token] for token in best]
        rows, drafted = [], spec_decode_metadata.draft_token_ids.tolist()
        for count in spec_decode_metadata.num_draft_tokens:
            wanted, best = best[: count + 1], best[count + 1 :]
            draft, drafted = drafted[:count], drafted[count:]
            num_kept = next((place for place in range(count) if draft[place] != wanted[place]), count)
            rows.append(wanted[: num_kept + 1])
        return rows


class Stage:
    """vLLM's batch: rows of tokens, of which some are still reading their prompts."""

    def __init__(self, runner: ModelRunner, most_rows: int = 6):
        self.runner = runner
        self.tokens = np.zeros((most_rows, LONGEST), dtype=np.int32)
        self.lengths = np.zeros(most_rows, dtype=np.int32)
        self.drafts: list[list[int]] = []  # of the rows that are there
        self.num_row_steps = self.num_tokens = 0

    def texts(self) -> list[list[int]]:
        return [self.tokens[row, : self.lengths[row]].tolist() for row in range(len(self.drafts))]

    def put(self, row: int, text: list[int]) -> None:
        """A new request, in a row of its own or behind the last one."""
        self.tokens[row, : len(text)] = text
        self.lengths[row] = len(text)
        self.drafts[row : row + 1] = [[]]

    def swap(self, one: int, other: int) -> None:
        self.tokens[[one, other]] = self.tokens[[other, one]]
        self.lengths[[one, other]] = self.lengths[[other, one]]
        self.drafts[one], self.drafts[other] = self.drafts[other], self.drafts[one]

    def step(
        self,
        temperatures: list[float] | None = None,
        *,
        reading: tuple[int, ...] = (),
        spoilt: tuple[int, ...] = (),
        is_asked: bool = True,
    ) -> None:
        """temperatures: of the rows, 0 where greedy; None as vLLM says that all are. reading: rows whose prompts have
        not ended. spoilt: positions without finite scores. is_asked: whether the proposer is called."""
        given = None if temperatures is None else torch.tensor(temperatures)
        self.runner.input_batch.sampling_metadata.temperature = given
        paths = [text + draft[:end] for text, draft in zip(self.texts(), self.drafts, strict=True)
                 for end in range(len(draft) + 1)]  # fmt: skip
        logits = torch.from_numpy(np.stack([logits_after(path) for path in paths]))
        logits[list(spoilt)] = float("nan")
        sampled = self.runner._sample(logits, self._metadata())
        sampled = [[] if row in reading else new for row, new in enumerate(sampled)]
        for row, new in enumerate(sampled):
            self.tokens[row, self.lengths[row] : self.lengths[row] + len(new)] = new
            self.lengths[row] += len(new)
        self.num_row_steps += sum(map(bool, sampled))
        self.num_tokens += sum(map(len, sampled))
        self.drafts = [[] for _ in sampled]
        if is_asked:
            self.drafts = self.runner.drafter.propose(sampled, self.lengths, self.tokens)

    def _metadata(self) -> SimpleNamespace | None:
        counts = list(map(len, self.drafts))
        if not any(counts):
            return None
        return SimpleNamespace(
            draft_token_ids=torch.tensor(sum(self.drafts, []), dtype=torch.int32),
            num_draft_tokens=counts,
            cu_num_sampled_tokens=torch.tensor(np.cumsum(counts) + np.arange(1, len(counts) + 1), dtype=torch.int32),
        )
