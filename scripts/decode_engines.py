"""Plain decoding by this engine and by transformers, one function each: (prompts, new tokens per row) -> tokens."""

from __future__ import annotations

from collections.abc import Callable

import torch
from transformers import PreTrainedModel

from stand.engine import Engine

Generate = Callable[[list[list[int]], int], int]
TEMPERATURE = 0.6


def decode_engines(model: PreTrainedModel, engine: Engine, *, with_compile: bool) -> dict[str, Generate]:
    """This engine at one token per step, generate with a growing cache, and with a static cache and torch.compile."""
    engines: dict[str, Generate] = {
        "stand, no drafts": lambda prompts, count: _with_stand(engine, prompts, count),
        "generate, eager": lambda prompts, count: _with_generate(model, prompts, count),
    }
    if with_compile:
        engines["generate, static + compile"] = lambda prompts, count: _with_generate(
            model, prompts, count, cache_implementation="static"
        )
    return engines


def _with_stand(engine: Engine, prompts: list[list[int]], count: int) -> int:
    output = engine.generate(
        input_ids=prompts, max_new_tokens=count, temperature=TEMPERATURE, stop_token_ids=[], seed=0, draft=False
    )
    return sum(map(len, output.token_ids))


def _with_generate(model: PreTrainedModel, prompts: list[list[int]], count: int, **settings: str) -> int:
    """A static cache makes generate compile the forward of a decoding step."""
    input_ids = torch.tensor(prompts, device=model.device)
    output = model.generate(
        input_ids,
        attention_mask=torch.ones_like(input_ids),
        do_sample=True,
        temperature=TEMPERATURE,
        top_k=0,
        max_new_tokens=count,
        min_new_tokens=count,
        eos_token_id=None,
        pad_token_id=0,
        **settings,
    )
    return output.shape[0] * (output.shape[1] - input_ids.shape[1])
