"""Calls whose tokens are compared on a pretended device and on the CPU."""

from __future__ import annotations

import warnings

from transformers import PreTrainedModel

import stand

PROMPTS = [[5, 6, 7, 8, 5, 6], [9, 10, 11]]


def tokens_of(
    model: PreTrainedModel, drafter: stand.Drafter, *, fuse: bool = True, **settings: object
) -> list[list[int]]:
    """Of eager steps."""
    engine = stand.wrap(model, drafter=drafter, fuse=fuse)
    assert str(engine.backend) == "sdpa"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # greedy rows are all equal
        return engine.generate(input_ids=PROMPTS, seed=3, num_return_sequences=2, **settings).token_ids
