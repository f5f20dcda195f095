"""Continuations of fixed prompts: what is drawn, and the law that it should have."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from measuring.setup import BOXED_INSTRUCTION, REASONER, WORD_PROBLEMS, prompt_ids
from workloads.problem_sets import generated_tasks, read_tasks
from workloads.problems import write_prompt

import stand
from law_parts.continuation_law import SMALLEST_CELL, ContinuationLaw, continuation_law

LONGEST_CUT = 6  # tokens of a solution that a prompt may hold
MOST_ROWS = 500  # of a call
MOST_SCORES = 20_000_000  # probabilities of a call's step; they decide how many rows it has
NODES_PER_ROW = 3
WHOLE_LAW = {"temperature": 1.0, "top_p": 1.0}  # the softmax


def fixed_prompts(engine: stand.Engine, count: int, law: dict[str, float], *, seed: int = 0) -> list[list[int]]:
    """Token ids of `count` held-out problems, each with the first tokens of a solution by the model itself."""
    cuts = random.Random(f"cuts {seed}")
    prompts = problem_prompts(engine.tokenizer, count, seed=seed)
    drawn = engine.generate(input_ids=prompts, max_new_tokens=LONGEST_CUT, **settings(law), seed=seed, draft=False)
    return [
        prompt + solution[: cuts.randrange(LONGEST_CUT)]
        for prompt, solution in zip(prompts, drawn.token_ids, strict=True)
    ]


def problem_prompts(tokenizer, count: int, *, seed: int) -> list[list[int]]:
    """Of the bundled model's own problems, or of the word problems for a model with a chat template."""
    if is_bundled(tokenizer):
        return [tokenizer(write_prompt(task.statement))["input_ids"] for task in generated_tasks(count, seed=seed)]
    tasks = read_tasks(str(WORD_PROBLEMS), count=count)
    return [prompt_ids(tokenizer, task, BOXED_INSTRUCTION) for task in tasks]


def is_bundled(tokenizer) -> bool:
    return Path(tokenizer.name_or_path).resolve() == REASONER


def settings(law: dict[str, float]) -> dict[str, object]:
    """Arguments of `generate` that mean this law; transformers keeps 50 tokens where top_k is not given."""
    return {**law, "top_k": 0}


def rows_per_call(model) -> int:
    return max(1, min(MOST_ROWS, MOST_SCORES // ((NODES_PER_ROW + 1) * model.config.vocab_size)))


def continuations(
    engine: stand.Engine,
    prompt: Sequence[int],
    rows: int,
    law: dict[str, float],
    *,
    tokens: int,
    seed: int,
    draft: bool,
) -> tuple[Counter, stand.Stats]:
    """How often each continuation came; the drafter is left as it is."""
    counter, stats, most = Counter(), stand.Stats(), rows_per_call(engine.model)
    for start in range(0, rows, most):
        output = engine.generate(
            input_ids=[list(prompt)],
            num_return_sequences=min(most, rows - start),
            max_new_tokens=tokens,
            **settings(law),
            seed=seed + start // most,
            draft=draft,
            learn=False,
        )
        counter.update(map(tuple, output.token_ids))
        stats += output.stats
    return counter, stats


def law_of(model, prompt: Sequence[int], law: dict[str, float], *, tokens: int, rows: int) -> ContinuationLaw:
    """The exact law of plain sampling, in cells that `rows` continuations can test."""
    ends = np.atleast_1d(model.generation_config.eos_token_id).tolist()
    return continuation_law(model, prompt, tokens=tokens, smallest=SMALLEST_CELL / rows, **law, ends=ends)
