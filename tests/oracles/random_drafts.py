"""Drafts that a policy of an exact world can grow, drawn at random: to list all of them takes seconds."""

import numpy as np
from exact import Draft, Policy, World


def random_drafts(world: World, policy: Policy, number: int, *, seed: int = 5) -> list[Draft]:
    """Each child's token is drawn evenly from those that its law gives any mass."""
    generator = np.random.default_rng(seed)
    return [_random_draft(world, policy, generator) for _ in range(number)]


def _random_draft(world: World, policy: Policy, generator: np.random.Generator) -> Draft:
    draft = Draft()
    while step := policy(world, draft):
        parent, law = step
        draft = draft.grown(parent, int(generator.choice(np.flatnonzero(law))), law)
    return draft
