"""Calls around a target that is a small Markov chain, so that thousands take seconds: production drafters, rules, noise
and seeds."""

import itertools

import numpy as np
import torch

import stand
from stand import DraftRequest, Lesson
from stand.verifiers import TargetRows, VerifierNoise

SIZE, LENGTH = 3, 4  # tokens of the vocabulary, tokens of a call
CHAIN = np.array([[0.5, 0.3, 0.2], [0.2, 0.2, 0.6], [0.4, 0.35, 0.25]])
PROMPT = [0, 1, 0]
EXPECTED = {
    path: float(np.prod([CHAIN[before, after] for before, after in zip((PROMPT[-1], *path[:-1]), path, strict=True)]))
    for path in itertools.product(range(SIZE), repeat=LENGTH)
}


def one_call(drafter: stand.Drafter, rule, *, seed: int, own_seed: int) -> tuple[int, ...]:
    """LENGTH tokens after the prompt, learned as they come."""
    tokens, step = list(PROMPT), 0
    row, problem = np.zeros(1, dtype=np.int64), np.zeros(1, dtype=np.int64)
    while len(tokens) < len(PROMPT) + LENGTH:
        depth = len(PROMPT) + LENGTH - len(tokens) - 1
        history, steps = [np.array(tokens, dtype=np.int32)], np.full(1, step)
        request = DraftRequest(history, own_seed, seed, row, steps, problem, np.full(1, depth), False)
        batch = drafter.draft(request)
        laws = CHAIN[batch.token_ids].astype(np.float32)
        noise = VerifierNoise(own_seed, row, steps, np.full(1, len(tokens)), seed)
        verdicts = rule.verify(batch, TargetRows(torch.from_numpy(laws)), noise)
        top_ids = np.argsort(-laws, axis=1, kind="stable").astype(np.int32)
        top_probs = np.take_along_axis(laws, top_ids, axis=1)
        drafter.learn(Lesson(request, batch, verdicts.accepted, verdicts.next_tokens, top_ids, top_probs))
        tokens += [*batch.token_ids[verdicts.accepted[0]].tolist(), int(verdicts.next_tokens[0])]
        step += 1
    return tuple(tokens[len(PROMPT) : len(PROMPT) + LENGTH])
