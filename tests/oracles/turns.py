"""Calls whose rows come, go and repeat themselves, and calls of one engine that take turns, step by step."""

import torch
from tiny_models import VOCABULARY_SIZE

PROMPTS = [[5, 9, 11, 4, 5, 9], [7, 8], [8, 30, 31, 32, 33, 34, 35, 36, 37, 30, 31, 32], [3]]
ENDS = list(range(0, VOCABULARY_SIZE, 9))  # rows end at different steps


def restless_calls(engine, *, seed, second=(PROMPTS[0], PROMPTS[0]), **settings):
    """Rejections, rows that end and move, a prompt of one token; then a call whose prompts are known, equal ones among
    them: `second`, with settings of its own."""
    drawn = {"temperature": 1.0, "top_k": 0, "seed": seed}
    output = engine.generate(input_ids=PROMPTS, stop_token_ids=ENDS, max_new_tokens=9, **drawn)
    assert len({len(tokens) for tokens in output.token_ids}) > 1
    engine.generate(input_ids=list(second), stop_token_ids=[], **{"max_new_tokens": 4, **settings}, **drawn)


def take_turns(engine, prompts, *, max_new_tokens):
    """A call per prompt, all begun before any goes on, until one has ended; the calls."""
    settings = {"max_new_tokens": max_new_tokens, "temperature": 1.0, "seed": 1}
    calls = [engine._new_call(prompt, None, **settings)[0] for prompt in prompts]
    with torch.inference_mode():
        for _ in zip(*(call.steps() for call in calls), strict=False):
            pass
    return calls
