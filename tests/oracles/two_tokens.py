"""The law of the first two tokens that an engine writes, against the exact one of a small target; greedy tokens too."""

from collections import Counter
from collections.abc import Sequence
from functools import lru_cache

import torch

COUNT, CALLS, SIZE = 2000, 2, 4  # continuations; calls that write them; likeliest tokens that each law is cut to
PROMPT = [3, 5, 1, 3]


def two_token_statistic(engine, target, *, written: int = 3, prompt: Sequence[int] = PROMPT) -> float:
    """Chi-square on up to 15 degrees of freedom: above 50 once in 80,000 seeds. Drafted tokens must have been kept.

    More than two tokens are written, so that the second may be a drafted one too. Pairs of fewer than 5 expected are
    one cell.
    """
    seen: Counter[tuple] = Counter()
    for seed in range(CALLS):
        output = engine.generate(
            input_ids=[prompt], num_return_sequences=COUNT // CALLS, max_new_tokens=written, temperature=1.0,
            top_k=SIZE, seed=seed, stop_token_ids=[],
        )  # fmt: skip
        seen.update((tokens[0], tokens[1]) for tokens in output.token_ids)
    law = {
        (token, after): first * share
        for token, first in truncated(target, prompt).items()
        for after, share in truncated(target, [*prompt, token]).items()
    }
    assert set(seen) <= set(law) and output.stats.num_accepted_draft_tokens > 100
    cells = {pair: pair if COUNT * share >= 5 else "rare" for pair, share in law.items()}
    counts, expected = Counter(), Counter()
    for pair, cell in cells.items():
        counts[cell] += seen[pair]
        expected[cell] += COUNT * law[pair]
    return sum((counts[cell] - mean) ** 2 / mean for cell, mean in expected.items())


@torch.inference_mode()
def truncated(model, context: list[int]) -> dict[int, float]:
    best = model(torch.tensor([context]), use_cache=False).logits[0, -1].double().topk(SIZE)
    return dict(zip(best.indices.tolist(), best.values.softmax(0).tolist(), strict=True))


def assert_greedy_equals_transformers(engine, model, prompts: list[list[int]]) -> None:
    output = engine.generate(input_ids=prompts, max_new_tokens=20, temperature=0.0)
    for prompt, tokens in zip(prompts, output.token_ids, strict=True):
        assert tokens == plain_greedy(model, tuple(prompt), 20)


@lru_cache
def plain_greedy(model, prompt: tuple[int, ...], max_new_tokens: int, **settings) -> list[int]:
    """By transformers' `generate`."""
    plain = model.generate(
        torch.tensor([prompt]),
        attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
        do_sample=False,
        max_new_tokens=max_new_tokens,
        **settings,
    )
    return plain[0, len(prompt) :].tolist()
