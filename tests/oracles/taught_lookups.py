"""Lookups of a few tokens that were taught known laws after all contexts of three tokens, for enumerations."""

from itertools import product

import numpy as np

from stand.trees import BlendedLookup

SCOPES = (1, 2)


def broad_law(generator, context, scope) -> np.ndarray:
    """Three tokens, all of them likely, also to the power of 1.5, by which children are drawn: no draft is rare."""
    return (np.roll([4.0, 3.0, 2.0], context[-1] + scope) + 2 * generator.random(3)) ** 0.7


def peaked_law(generator, context, scope) -> np.ndarray:
    """Eight tokens, one of them likely: where a mixed draft has a child to draw."""
    return np.roll([5.0, 1, 1, 1, 1, 1, 1, 1], context[-1] + scope) + 0.05 * generator.random(8)


def laws_of(law, size: int):
    """(scope, context, best tokens [1, V], their probabilities [1, V]) for all contexts of three tokens."""
    generator = np.random.default_rng(1)
    for scope in SCOPES:
        for context in product(range(size), repeat=3):
            weights = law(generator, context, scope)
            best = np.argsort(-weights, kind="stable").astype(np.int32)
            probabilities = (weights[best] / weights.sum()).astype(np.float32)
            yield scope, np.array(context, np.int32), best[None], probabilities[None]


def taught_lookups() -> dict[str, tuple[BlendedLookup, int]]:
    """{kind of draft: (lookup, vocabulary size)}; each law is taught three times."""
    broad, peaked = BlendedLookup(depth=3), BlendedLookup(depth=3)
    for lookup, law, size in ((broad, broad_law, 3), (peaked, peaked_law, 8)):
        for scope, context, best, probabilities in laws_of(law, size):
            for _ in range(3):
                lookup.learn(context, best[0, :1], top_ids=best, top_probs=probabilities, scope=scope)
    return {"sampled": (broad, 3), "mixed": (peaked, 8), "deterministic": (peaked, 8)}
