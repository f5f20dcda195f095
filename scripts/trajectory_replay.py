"""Recorded trajectories on a real forward: everything is executed, only the sampled tokens are those of the recording.

For a rule that draws from the target and follows what was drafted this is unbiased: the recorded token is a draw from
the recorded model. It measures tokens per step, step time and host time. It does not measure the law of the output, nor
learning from logits: the lookup tree counts recorded tokens, because the random model's laws mean nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from recordings import Recording

from stand.backend import Backend
from stand.cache import TreeCache
from stand.drafter import BlendedDrafter
from stand.engine import Engine, Run
from stand.gpu.captured_step import CapturedStep
from stand.gpu.device_rule import MatchRule, follow
from stand.gpu.packet import Field
from stand.gpu.step_size import StepSize
from stand.output import GenerationOutput
from stand.step import Step
from stand.trees import BlendedLookup, DraftBatch
from stand.verifiers import VerifierNoise, get_verifier

CONTEXT = 32  # tokens before new ones that the lookup tree is shown; deeper than its contexts


class RecordedRule(MatchRule):
    """Draws as `match` does, then goes on with the recorded token of the position."""

    def __init__(self, streams: Sequence[np.ndarray]):
        self.streams = streams  # per row: prompt, recorded tokens and the end token, int64

    def fields(self, size: StepSize) -> dict[str, Field]:
        return {**super().fields(size), "recorded": (np.int64, (size.num_tokens,))}

    def fill(self, host: Mapping[str, np.ndarray], batch: DraftBatch, noise: VerifierNoise) -> None:
        super().fill(host, batch, noise)
        recorded = host["recorded"]
        recorded[batch.num_nodes :] = 0
        for row, position, first, end in zip(
            noise.rows, noise.positions, batch.offsets[:-1], batch.offsets[1:], strict=True
        ):
            stream = self.streams[row]
            recorded[first:end] = stream[np.minimum(position + batch.depths[first:end], len(stream) - 1)]

    def decide(self, probs: torch.Tensor, step: Mapping[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        super().decide(probs, step)
        return follow(step["recorded"], step)


class CountingDrafter(BlendedDrafter):
    """Learns the tokens that rows have gained, not the target's laws."""

    def __init__(self, lookup: BlendedLookup, *, budget: int):
        super().__init__(lookup, budget=budget, kind="deterministic")
        self._read: dict[int, int] = {}  # per row: tokens learned so far

    def draft(self, histories: Sequence[np.ndarray], *, rows: np.ndarray, problems: np.ndarray, **rest) -> DraftBatch:
        for history, row, problem in zip(histories, rows.tolist(), problems.tolist(), strict=True):
            known = self._read.get(row, len(history))
            if len(history) > known:
                context = history[max(known - CONTEXT, 0) : known]
                self.lookup.learn(context, history[known:], scope=problem % self.NUM_SCOPES)
            self._read[row] = len(history)
        return super().draft(histories, rows=rows, problems=problems, **rest)

    def learn(self, *arguments, **settings) -> None:
        """Nothing: see `draft`."""

    def begin(self) -> None:
        """A new call: its rows start anew."""
        self._read.clear()


class ReplayEngine(Engine):
    """An engine whose rows continue as recorded."""

    def __init__(self, model, *, budget: int, backend: Backend, fusion):
        drafter = CountingDrafter(BlendedLookup(), budget=budget)
        super().__init__(model, None, drafter=drafter, verifier=get_verifier("match"), backend=backend, fusion=fusion)
        self._rule = RecordedRule(())

    def replay(self, recordings: Sequence[Recording], *, end_token: int, draft: bool = True) -> GenerationOutput:
        """Recordings of one problem as the rows of one batch; every row ends where its recording does."""
        longest = max(len(recording.tokens) for recording in recordings) + 1
        self._rule.streams = [
            np.concatenate([recording.prompt, recording.tokens, [end_token]]).astype(np.int64)
            for recording in recordings
        ]
        self.drafter.begin()
        return self.generate(
            input_ids=recordings[0].prompt,
            num_return_sequences=len(recordings),
            max_new_tokens=longest,
            stop_token_ids=[end_token],
            temperature=1.0,
            seed=0,
            draft=draft,
        )

    def _new_step(self, run: Run, cache: TreeCache, sources: list[int]) -> Step:
        if self._captured is None or not self._captured.serves(run.law, len(run.rows)):
            self._captured = CapturedStep(self.model, run.law, self._rule, num_rows=len(run.rows), fusion=self.fusion)
        self._captured.load(cache, sources, run.rows)
        return self._captured


@dataclass(frozen=True, slots=True)
class ReplayFigures:
    """One batch, with and without drafts."""

    rows: int
    budget: int
    tokens_per_step: float
    nodes_per_step: float
    step_ms: float
    plain_step_ms: float
    tokens_per_second: float
    plain_tokens_per_second: float
    host_share: float  # of a step's time, what the host does outside the forward

    @property
    def speedup(self) -> float:
        return self.tokens_per_second / self.plain_tokens_per_second
