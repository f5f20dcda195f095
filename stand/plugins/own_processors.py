"""Which of the processors and criteria that transformers' `generate` has prepared its caller gave."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from transformers import GenerationConfig, LogitsProcessorList, PreTrainedModel, StoppingCriteriaList


def own_processors(
    model: PreTrainedModel,
    input_ids: torch.Tensor,
    prepared: LogitsProcessorList,
    config: GenerationConfig,
    model_kwargs: Mapping[str, object],
    prefix_allowed_tokens_fn: object = None,
) -> list:
    """Those of the prepared processors that the caller gave.

    `generate` puts them after the config's processors and before its sampling filters; but one of a class that the
    config asks for too takes that one's place.
    """
    marker = LogitsProcessorList([_nothing])
    made = model._get_logits_processor(
        config,
        input_ids_seq_length=input_ids.shape[1],
        encoder_input_ids=input_ids[:: config.num_return_sequences or 1],
        logits_processor=marker,
        prefix_allowed_tokens_fn=prefix_allowed_tokens_fn,
        device=input_ids.device,
        model_kwargs=dict(model_kwargs),
    )
    place = made.index(_nothing)
    end = len(prepared) - (len(made) - place - 1)
    replacing = [own for own, default in zip(prepared[:place], made[:place], strict=True) if not _same(own, default)]
    return [*replacing, *prepared[place:end]]


def _nothing(input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
    """A processor that marks the place where `generate` puts the caller's."""
    return scores


def own_criteria(model: PreTrainedModel, prepared: StoppingCriteriaList, config: GenerationConfig) -> list:
    """Those of the prepared stopping criteria that the caller gave: they follow the config's."""
    made = model._get_stopping_criteria(config, StoppingCriteriaList())
    for own, default in zip(prepared, made, strict=False):
        if not _same(own, default):
            raise ValueError(
                f"{type(own).__name__} in stopping_criteria takes the place of the config's own, which the engine "
                "cannot honour; give max_new_tokens, max_time or eos_token_id instead"
            )
    return list(prepared[len(made) :])


def _same(own: object, default: object) -> bool:
    """Whether two processors or criteria of one class were made with equal arguments; when does not count."""
    first, second = vars(own), vars(default)
    if type(own) is not type(default) or first.keys() != second.keys():
        return False
    return all(_equal(first[name], second[name]) for name in first if name != "initial_timestamp")


def _equal(one: object, other: object) -> bool:
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        return torch.equal(one, other)
    if isinstance(one, (list, tuple)) and isinstance(other, (list, tuple)):
        return len(one) == len(other) and all(map(_equal, one, other))
    if isinstance(one, torch.Tensor) or isinstance(other, torch.Tensor):
        return False
    return bool(one == other)
