"""The plan of a set of siblings: feasible, and by the least cut no other carries more, however little there is."""

from itertools import product

import numpy as np
import pytest

from stand.verifiers.transport import largest_transport

NUM_TOKENS = 4


def least_cut(supply, members, capacity) -> float:
    """What no plan can exceed: tokens cut off by their capacity, and every set that still reaches another token."""
    cuts = []
    for cut in product([False, True], repeat=NUM_TOKENS):
        reaches = (members & ~np.array(cut)).any(axis=1)
        cuts.append(capacity[np.array(cut)].sum() + supply[reaches].sum())
    return min(cuts)


@pytest.mark.parametrize("unit", [1.0, 1e-8])
@pytest.mark.parametrize("seed", range(20))
def test_a_plan_carries_what_the_least_cut_lets_through(seed, unit):
    generator = np.random.default_rng(seed)
    members = np.array([[number >> token & 1 for token in range(NUM_TOKENS)] for number in range(1, 16)], dtype=bool)
    members = members[generator.permutation(15)[:7]]
    supply, capacity = unit * generator.dirichlet(np.ones(7)), unit * generator.dirichlet(np.ones(NUM_TOKENS))
    plan = largest_transport(supply, members, capacity)
    rounding = 1e-12 * unit + 1e-14
    assert plan.min() >= 0 and plan[~members].max(initial=0.0) == 0
    assert (plan.sum(axis=1) <= supply + rounding).all() and (plan.sum(axis=0) <= capacity + rounding).all()
    assert plan.sum() == pytest.approx(least_cut(supply, members, capacity), rel=1e-5)
