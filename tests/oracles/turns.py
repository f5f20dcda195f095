"""Calls of one engine that take turns, step by step."""

import torch


def take_turns(engine, prompts, *, max_new_tokens):
    """A call per prompt, all begun before any goes on, until one has ended; the calls."""
    settings = {"max_new_tokens": max_new_tokens, "temperature": 1.0, "seed": 1}
    calls = [engine._new_call(prompt, None, **settings)[0] for prompt in prompts]
    with torch.inference_mode():
        for _ in zip(*(call.steps() for call in calls), strict=False):
            pass
    return calls
