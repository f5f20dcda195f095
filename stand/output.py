"""What `Engine.generate` returns."""

from __future__ import annotations

from dataclasses import dataclass

from stand.stats import Stats


@dataclass(frozen=True, slots=True)
class GenerationOutput:
    """All rows of a call, prompt-major: row r is sample r % N of prompt r // N, N = num_return_sequences."""

    token_ids: list[list[int]]  # per row: the new tokens, an end token included
    texts: list[str] | None  # per row, special tokens dropped; None without a tokenizer
    finish_reasons: list[str]  # per row: "eos", "stop" or "length"
    num_return_sequences: int
    seed: int  # the seed that was used, also when none was given
    stats: Stats

    def __len__(self) -> int:
        return len(self.token_ids)

    def of_prompt(self, prompt: int) -> list[int]:
        """Row indices of the samples of one prompt."""
        first = prompt * self.num_return_sequences
        return list(range(first, first + self.num_return_sequences))
