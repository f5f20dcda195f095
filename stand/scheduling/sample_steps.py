"""Decoding steps of rows that are all alike, over and over, for whoever times them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np
from transformers import PreTrainedModel

from stand.argument_checks import whole_number
from stand.backend import Backend
from stand.forward.devices import input_device
from stand.forward.long_factors import served_positions
from stand.forward.model import prefill, text_config
from stand.forward.tree_attention import exclusive, tree_attention
from stand.laws.sampling import SamplingParams, TargetLaw
from stand.row import LiveRows, Row
from stand.step import StepStart
from stand.trees import DraftBatch
from stand.verifiers import Verifier, VerifierNoise


def checked_sizes(
    model: PreTrainedModel, backend: Backend, num_rows: object, length: object, most_tokens: object
) -> tuple[int, int, int]:
    """As `Engine.measure_cost` takes them, most_tokens None for the default; the length within the model's context.

    Raises ValueError for numbers that no step has."""
    num_rows = whole_number("num_rows", num_rows, "1 is usual")
    length = whole_number("length", length, "1024 is usual")
    if most_tokens is None:
        most_tokens = 32 * num_rows if input_device(model).type == "cpu" else max(256, num_rows + 1)
        most_tokens = min(most_tokens, num_rows + (backend.most_drafted or most_tokens))
    most_tokens = whole_number("most_tokens", most_tokens, "leave it out for the default")
    if most_tokens <= num_rows:
        raise ValueError(
            f"most_tokens must be above num_rows, got {most_tokens} and {num_rows}; a step holds one token per row "
            "and its drafts"
        )
    if (context := served_positions(model)) is not None:
        depth = (-(-most_tokens // num_rows)).bit_length()  # of a draft of two branches, its root included
        length = max(min(length, context - depth), 1)
    return num_rows, length, most_tokens


@contextmanager
def sample_steps(
    model: PreTrainedModel, backend: Backend, verifier: Verifier, *, num_rows: int, length: int
) -> Iterator[Callable[[DraftBatch], None]]:
    """Within the block: runs forward and verdict of drafts for `num_rows` rows of `length` cached tokens each, under
    plain sampling: a call's settings, which may replace those of the model, do not matter."""
    prompt = np.arange(length + 1, dtype=np.int32) % text_config(model).vocab_size
    rows = [Row(row, prompt, 1) for row in range(num_rows)]
    live = LiveRows.of(rows)
    noise = VerifierNoise(seed=0, rows=live.indices, steps=live.steps, positions=live.lengths + 1)
    law = TargetLaw(SamplingParams())
    with exclusive(model):
        with tree_attention(model):
            keys = backend.key_maker()(length + 1)
            prefill(model, keys, prompt[:-1], row=0)
        step = backend.new_step(StepStart(num_rows, rows, keys, law, verifier, num_top=0))

        def run_step(batch: DraftBatch) -> None:
            step.forward(batch, live, noise)
            step.verify()

        try:
            for place, row in enumerate(rows):
                step.enter(row, place, keys)
            with step.attention():
                yield run_step
        finally:
            step.close()
