"""Counts of every step of every row. Engines that count steps with drafts alone show more tokens per step than there
are."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(slots=True)
class RowSteps:
    """A row-step is one row in one step that decoded it; the token that follows a prompt is none."""

    num_row_steps: int = 0
    num_tokens: int = 0  # the one after the accepted tokens included
    num_drafts: int = 0  # row-steps with a draft
    num_drafted: int = 0  # tokens of drafts

    @property
    def tokens_per_row_step(self) -> float:
        """1 is decoding without drafts."""
        return self.num_tokens / self.num_row_steps if self.num_row_steps else 1.0

    @property
    def acceptance_rate(self) -> float:
        """Share of the drafted tokens that were accepted."""
        accepted = self.num_tokens - self.num_row_steps
        return accepted / self.num_drafted if self.num_drafted else 0.0

    def add(self, num_new: Iterable[int], num_drafted: Iterable[int]) -> None:
        """Per row: tokens that it got, and tokens drafted for it; negative for a row without a step before, which is
        not counted."""
        num_row_steps = num_tokens = num_drafts = tokens_drafted = 0
        for new, drafted in zip(num_new, num_drafted, strict=True):
            if drafted >= 0:
                num_row_steps += 1
                num_tokens += new
                tokens_drafted += drafted
                num_drafts += drafted > 0
        self.num_row_steps += num_row_steps
        self.num_tokens += num_tokens
        self.num_drafted += tokens_drafted
        self.num_drafts += num_drafts

    def __str__(self) -> str:
        return (
            f"{self.tokens_per_row_step:.3f} tokens per row-step, {self.num_row_steps} row-steps, "
            f"{self.num_drafted / max(1, self.num_row_steps):.2f} tokens drafted per row-step, "
            f"{self.acceptance_rate:.0%} of them accepted"
        )


class Reporter:
    """Writes counts to a log every so many row-steps."""

    def __init__(self, counts: RowSteps, logger: logging.Logger, *, every: int, exchange: object = None):
        """exchange: what is written beside the counts; None for nothing."""
        self._counts, self._logger, self._every, self._exchange = counts, logger, every, exchange
        self._next = every

    def look(self) -> None:
        if self._every and self._counts.num_row_steps >= self._next:
            self._next = self._counts.num_row_steps + self._every
            self._logger.info("STAND: %s%s", self._counts, "" if self._exchange is None else f"; {self._exchange}")
