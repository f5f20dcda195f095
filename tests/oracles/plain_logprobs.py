"""Log-probabilities of a text's tokens by a plain forward over all of it and transformers' processors, prefix by
prefix, and how far what an engine returns is from them."""

from collections.abc import Sequence

import numpy as np
import torch
from transformers import LogitsProcessor, PreTrainedModel

from stand.laws.logprobs import TokenLogprobs


@torch.inference_mode()
def plain_scores(
    model: PreTrainedModel, prompt: list[int], new: list[int], processors: Sequence[LogitsProcessor] = (), **shown
) -> torch.Tensor:
    """[n, V] float32: at the place of each new token what the processors make of the logits.

    shown: what the prompt shows besides tokens, as the model's forward takes it."""
    text = torch.tensor([[*prompt, *new]])
    logits = model(input_ids=text, use_cache=False, **shown).logits[0].float()
    places = []
    for length in range(len(prompt), len(prompt) + len(new)):
        scores = logits[length - 1][None].clone()
        for processor in processors:
            scores = processor(text[:, :length], scores)
        places.append(scores[0])
    return torch.stack(places)


def plain_log_laws(
    model: PreTrainedModel, prompt: list[int], new: list[int], processors: Sequence[LogitsProcessor] = (), **shown
) -> torch.Tensor:
    """The log-softmax of `plain_scores`."""
    return torch.log_softmax(plain_scores(model, prompt, new, processors, **shown), dim=-1)


def difference(found: TokenLogprobs, tokens: list[int], laws: torch.Tensor) -> float:
    """The largest error of the tokens' own and of the likeliest ones', infinity where a number of them is off.

    laws [n, V]: the right ones. Of equally likely tokens any may be among the likeliest."""
    places, count = np.arange(len(tokens)), found.top.shape[1]
    right = laws.numpy()
    if found.of_tokens.shape != (len(tokens),) or found.top_ids.shape != found.top.shape != (len(tokens), count):
        return np.inf
    errors = [
        _errors(found.of_tokens, right[places, tokens]),
        _errors(found.top, torch.topk(laws, count, dim=-1).values.numpy()),
        _errors(found.top, np.take_along_axis(right, found.top_ids.astype(np.int64), axis=1)),
    ]
    return float(max(error.max(initial=0.0) for error in errors))


def largest_error(output, model: PreTrainedModel, prompts, processors: Sequence[LogitsProcessor] = ()) -> float:
    """Of all rows of a `GenerationOutput`."""
    return max(
        difference(
            output.logprobs[row],
            output.token_ids[row],
            plain_log_laws(model, prompt, output.token_ids[row], processors),
        )
        for place, prompt in enumerate(prompts)
        for row in output.of_prompt(place)
    )


def _errors(found: np.ndarray, right: np.ndarray) -> np.ndarray:
    """Equal infinities are no error."""
    with np.errstate(invalid="ignore"):
        errors = np.abs(found.astype(np.float64) - right)
    return np.where(found == right, 0.0, np.nan_to_num(errors, nan=np.inf))
