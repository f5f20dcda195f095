"""The law of the first two tokens that an engine writes, against the exact one of a small target; greedy tokens too."""

from collections import Counter

import torch

COUNT, SIZE = 4000, 4  # continuations; likeliest tokens that each law is cut to
PROMPT = [3, 5, 1, 3]


def two_token_statistic(engine, target) -> float:
    """Chi-square on 15 degrees of freedom: above 50 once in 80,000 seeds. Drafted tokens must have been kept."""
    seen: Counter[tuple] = Counter()
    for seed in range(COUNT // 1000):
        output = engine.generate(
            input_ids=[PROMPT], num_return_sequences=1000, max_new_tokens=2, temperature=1.0, top_k=SIZE, seed=seed,
            stop_token_ids=[],
        )  # fmt: skip
        seen.update(map(tuple, output.token_ids))
    law = {
        (token, after): first * share
        for token, first in truncated(target, PROMPT).items()
        for after, share in truncated(target, [*PROMPT, token]).items()
    }
    assert set(seen) <= set(law) and output.stats.num_accepted_draft_tokens > 100
    return sum((seen[pair] - COUNT * share) ** 2 / (COUNT * share) for pair, share in law.items())


@torch.inference_mode()
def truncated(model, context: list[int]) -> dict[int, float]:
    best = model(torch.tensor([context]), use_cache=False).logits[0, -1].double().topk(SIZE)
    return dict(zip(best.indices.tolist(), best.values.softmax(0).tolist(), strict=True))


def assert_greedy_equals_transformers(engine, model, prompts: list[list[int]]) -> None:
    output = engine.generate(input_ids=prompts, max_new_tokens=20, temperature=0.0)
    for prompt, tokens in zip(prompts, output.token_ids, strict=True):
        plain = model.generate(
            torch.tensor([prompt]), attention_mask=torch.ones(1, len(prompt)), do_sample=False, max_new_tokens=20
        )
        assert tokens == plain[0, len(prompt) :].tolist()
