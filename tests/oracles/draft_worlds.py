"""Kinds of draft with the rules that take them, and worlds made at random: what the enumerations run over."""

import random
from functools import cache
from itertools import product

from exact import (
    WORLDS,
    World,
    deterministic,
    enumerate_drafts,
    law,
    mixed_sampled_first,
    mixed_sampled_last,
    one_hot,
    shaped,
    with_replacement,
    without_replacement,
)

CHAIN_RULES = ["token", "block", "rrs", "traversal", "match", "specinfer", "spectr", "ranked_traversal", "ot_traversal"]
ADAPTED_RULES = ["match", "rrs", "traversal"]
BATCH_RULES = [*ADAPTED_RULES, "ranked_traversal", "ot_traversal"]
INDEPENDENT_RULES = [*ADAPTED_RULES, "specinfer", "spectr"]

KINDS = {  # kind of draft: (policy, rules that take it)
    "chain2": (shaped(with_replacement, 1, 1), CHAIN_RULES),
    "chain3": (shaped(with_replacement, 1, 1, 1), CHAIN_RULES),
    "deterministic chain2": (shaped(deterministic, 1, 1), CHAIN_RULES),
    "deterministic (2,2)": (shaped(deterministic, 2, 2), BATCH_RULES),
    "without replacement (2,1)": (shaped(without_replacement, 2, 1), BATCH_RULES),
    "without replacement (2,2)": (shaped(without_replacement, 2, 2), BATCH_RULES),
    "without replacement (4,1)": (shaped(without_replacement, 4, 1), BATCH_RULES),
    "with replacement (2,1)": (shaped(with_replacement, 2, 1), INDEPENDENT_RULES),
    "with replacement (3)": (shaped(with_replacement, 3), INDEPENDENT_RULES),
    "mixed (2,2), sampled first": (shaped(mixed_sampled_first, 2, 2), BATCH_RULES),
    "mixed (3,1), sampled first": (shaped(mixed_sampled_first, 3, 1), BATCH_RULES),
    "mixed (2,2), sampled last": (shaped(mixed_sampled_last, 2, 2), BATCH_RULES),
}
CASES = [(world, kind, rule) for world in WORLDS for kind, (_, rules) in KINDS.items() for rule in rules]


@cache
def drafts(world: str, kind: str) -> list:
    return enumerate_drafts(WORLDS[world], KINDS[kind][0])


def random_law(generator: random.Random, size: int) -> tuple:
    kind = generator.random()
    if kind < 0.2:
        return one_hot(generator.randrange(size), size)
    weights = [0 if generator.random() < 0.25 else generator.randint(1, 6) for _ in range(size)]
    return law(*weights) if sum(weights) else one_hot(0, size)


def random_world(seed: int, size: int = 3, depth: int = 3) -> World:
    generator = random.Random(seed)
    contexts = [()]
    for _ in range(depth):
        contexts += [(*context, token) for context in contexts for token in range(size)]
    target = {context: random_law(generator, size) for context in sorted(set(contexts))}
    proposal = {context: random_law(generator, size) for context in sorted(set(contexts))}
    return World(target, proposal, (law(*[1] * size), law(*[1] * size)))


def dense_world(seed: int, size: int, depth: int) -> World:
    """Every token of positive mass in every law, so that nothing is decided beforehand."""
    generator = random.Random(seed)
    contexts = [context for length in range(depth + 1) for context in product(range(size), repeat=length)]

    def laws() -> dict:
        return {context: law(*(generator.randint(1, 6) for _ in range(size))) for context in contexts}

    return World(laws(), laws(), (law(*[1] * size), law(*[1] * size)))
