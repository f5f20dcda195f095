"""One seed in many calls: the second call's law is the target's too, though its drafts depend on the first outcome.

The production drafter, rules, noise and seeds, around a target that is a small Markov chain, so that thousands of pairs
of calls take seconds.
"""

import itertools

import numpy as np
import torch
from scipy_free import chi_square_p

import stand
from stand.seeds import call_seed
from stand.trees import BlendedLookup, LookupTree, TreeShape
from stand.verifiers import TargetRows, VerifierNoise, get_verifier

SIZE, LENGTH = 3, 4  # tokens of the vocabulary, tokens of a call
NUM_SEEDS = 3000
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
        request = stand.DraftRequest(history, own_seed, seed, row, steps, problem, np.full(1, depth), False)
        batch = drafter.draft(request)
        laws = CHAIN[batch.token_ids].astype(np.float32)
        noise = VerifierNoise(own_seed, row, steps, np.full(1, len(tokens)), seed)
        verdicts = rule.verify(batch, TargetRows(torch.from_numpy(laws)), noise)
        top_ids = np.argsort(-laws, axis=1, kind="stable").astype(np.int32)
        top_probs = np.take_along_axis(laws, top_ids, axis=1)
        drafter.learn(stand.Lesson(request, batch, verdicts.accepted, verdicts.next_tokens, top_ids, top_probs))
        tokens += [*batch.token_ids[verdicts.accepted[0]].tolist(), int(verdicts.next_tokens[0])]
        step += 1
    return tuple(tokens[len(PROMPT) : len(PROMPT) + LENGTH])


def p_of_second_calls(make_drafter, verifier: str, *, shares_numbers: bool, num_seeds: int = NUM_SEEDS) -> float:
    """Of the law of a second call with the first one's seed, over many seeds; chi-square against the target's."""
    rule, counts = get_verifier(verifier), dict.fromkeys(EXPECTED, 0)
    for seed in range(num_seeds):
        drafter = make_drafter()
        for _ in range(2):
            own_seed = seed if shares_numbers else call_seed(seed, drafter.digest)
            outcome = one_call(drafter, rule, seed=seed, own_seed=own_seed)
        counts[outcome] += 1
    return chi_square_p(list(counts.values()), [num_seeds * share for share in EXPECTED.values()])


def blended(kind: str):
    return lambda: stand.BlendedDrafter(BlendedLookup(num_candidates=SIZE), budget=5, kind=kind)


def shaped(kind: str):
    shape = TreeShape.from_branching([2, 1, 1])
    return lambda: stand.FixedShapeDrafter(LookupTree(num_candidates=SIZE), shape, kind=kind)


KINDS = ("sampled", "mixed", "deterministic")
DRAFTERS = {f"{make.__name__} {kind}": make(kind) for make in (blended, shaped) for kind in KINDS}
