"""How far `logits` and `scores` of a call are from right ones: transformers' own, or those of plain forwards."""

from collections.abc import Sequence

import torch
from plain_logprobs import plain_scores


def differing(found: Sequence[torch.Tensor], right: Sequence[torch.Tensor], lengths: Sequence[int]) -> float:
    """The largest error up to each row's end, infinity where numbers or tensors are missing or an infinity is off.

    found: by position [rows, V], whose rows have so many tokens; right: by row [its length or more, V]."""
    if len(found) != max(lengths) or {values.shape[0] for values in found} != {len(lengths)}:
        return float("inf")
    errors = [
        difference(values[row], right[row][position])
        for position, values in enumerate(found)
        for row, length in enumerate(lengths)
        if position < length
    ]
    return max(errors)


def difference(found: torch.Tensor, right: torch.Tensor) -> float:
    """Equal infinities are no error."""
    errors = (found.double() - right.double()).abs().nan_to_num(nan=torch.inf)
    return float(torch.where(found == right, 0.0, errors).max())


def largest_errors(output, model, prompts, processors=()) -> tuple[float, float]:
    """Of the logits and of the scores of a `GenerationOutput`, against plain forwards."""
    lengths, rows = list(map(len, output.token_ids)), range(len(output))
    asked = [(prompts[row // output.num_return_sequences], output.token_ids[row]) for row in rows]
    logits = [plain_scores(model, prompt, tokens) for prompt, tokens in asked]
    scores = [plain_scores(model, prompt, tokens, processors) for prompt, tokens in asked]
    return differing(output.logits, logits, lengths), differing(output.scores, scores, lengths)
