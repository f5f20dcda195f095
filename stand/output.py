"""What `Engine.generate` returns."""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from transformers import PreTrainedTokenizerBase

from stand.laws.logprobs import TokenLogprobs
from stand.laws.scored import LOGITS, SCORES
from stand.stats import Stats

if TYPE_CHECKING:
    from stand.call import Call


@dataclass(frozen=True, slots=True)
class GenerationOutput:
    """All rows of a call, prompt-major: row r is sample r % N of prompt r // N, N = num_return_sequences."""

    token_ids: list[list[int]]  # per row: the new tokens, an end token included
    texts: list[str] | None  # per row, special tokens dropped; None without a tokenizer
    finish_reasons: list[str]  # per row: "eos", "stop", "criteria", "length" or "time"; see `StopRule.cut`
    num_return_sequences: int
    seed: int  # the seed that was used, also when none was given
    stats: Stats
    logprobs: list[TokenLogprobs] | None = None  # per row, where they were asked for
    logits: tuple[torch.Tensor, ...] | None = None  # per position [rows, V] float32, where output_logits asks for them
    scores: tuple[torch.Tensor, ...] | None = None  # the same behind processors and filters, as output_scores asks

    def __len__(self) -> int:
        return len(self.token_ids)

    def of_prompt(self, prompt: int) -> list[int]:
        """Row indices of the samples of one prompt. Raises IndexError for one that the call had not."""
        prompt = operator.index(prompt)
        if not 0 <= prompt < len(self) // self.num_return_sequences:
            number = len(self) // self.num_return_sequences
            raise IndexError(f"prompt must be in [0, {number}), got {prompt}; the call had so many prompts")
        first = prompt * self.num_return_sequences
        return list(range(first, first + self.num_return_sequences))

    def padded(self, pad_token_id: int, *, side: str = "right") -> torch.Tensor:
        """The new tokens as one tensor [rows, longest] int64, with `pad_token_id` after ("right") or before them.

        Raises ValueError for another side and for what is no integer."""
        if side not in ("left", "right"):
            raise ValueError(f"side must be 'left' or 'right', got {side!r}; transformers' generate pads on the right")
        try:
            token = operator.index(None if isinstance(pad_token_id, bool) else pad_token_id)
        except TypeError:
            raise ValueError(
                f"pad_token_id must be a token id, got {pad_token_id!r}; give the model's padding or end token"
            ) from None
        longest = max(map(len, self.token_ids))
        tensor = torch.full((len(self.token_ids), longest), token, dtype=torch.int64)
        for row, tokens in zip(tensor, self.token_ids, strict=True):
            place = slice(len(tokens)) if side == "right" else slice(longest - len(tokens), None)
            row[place] = torch.tensor(tokens)
        return tensor


def output_of(call: Call, tokenizer: PreTrainedTokenizerBase | None, *, num_return_sequences: int) -> GenerationOutput:
    """Of a call whose rows have all ended; to be called once."""
    rows = sorted((row for _, row in call.scheduler.ended), key=lambda row: row.index)
    token_ids = [row.new_token_ids.tolist() for row in rows]
    return GenerationOutput(
        token_ids=token_ids,
        texts=None if tokenizer is None else tokenizer.batch_decode(token_ids, skip_special_tokens=True),
        finish_reasons=[row.finish_reason for row in rows],
        num_return_sequences=num_return_sequences,
        seed=call.seed,
        stats=call.stats,
        logprobs=None if call.logprobs is None else list(map(call.logprobs.take, rows)),
        logits=None if call.kept_scores is None else call.kept_scores.of(LOGITS),
        scores=None if call.kept_scores is None else call.kept_scores.of(SCORES),
    )
