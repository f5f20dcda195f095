"""Drafts that end where a node costs more than it brings."""

import numpy as np
import pytest
from draft_requests import draft_request
from tiny_models import tiny_model

import stand
from stand.drafters.blended import BlendedDrafter
from stand.drafters.costs.step_cost import CostTable, StepCost
from stand.trees import BlendedLookup


def lookup_of(seed=0, count=4000):
    lookup = BlendedLookup()
    tokens = np.random.default_rng(seed).integers(0, 8, count).astype(np.int32)
    lookup.learn(tokens[:1], tokens[1:])
    return lookup, [tokens[:50], tokens[60:130]]


def draft(lookup, histories, kind="deterministic", **settings):
    rows = np.arange(len(histories))
    return lookup.draft(histories, 100, seed=3, rows=rows, steps=rows, kind=kind, **settings)


@pytest.mark.parametrize("kind", ["deterministic", "sampled", "mixed"])
def test_growth_ends_by_the_marginal_rule(kind):
    """Every node was worth its price when it came, and prices decide how many come."""
    lookup, histories = lookup_of()
    sizes = []
    for price in (0.0, 0.005, 0.02, 0.2):
        batch = draft(lookup, histories, kind, rises=np.full(100, price, dtype=np.float32))
        batch.check()
        sizes.append(batch.num_nodes - len(histories))
        nodes = batch.depths > 0
        total = len(histories) + batch.path_probabilities[nodes].sum()
        if kind == "deterministic" and price:
            assert np.all(batch.path_probabilities[nodes] >= price * len(histories))  # the bar rises from there
            free = draft(lookup, histories, kind)
            missing = np.sort(free.path_probabilities[free.depths > 0])[::-1][sizes[-1] :]
            assert missing[0] <= 1.05 * price * total  # the best one left out did not pay
    assert sizes[0] == 100 and sizes == sorted(sizes, reverse=True) and sizes[1] > sizes[2] > sizes[3] >= 0


def test_free_nodes_change_nothing():
    lookup, histories = lookup_of()
    free, plain = draft(lookup, histories, rises=np.zeros(100, dtype=np.float32)), draft(lookup, histories)
    assert np.array_equal(free.token_ids, plain.token_ids) and np.array_equal(free.parents, plain.parents)


def test_too_few_prices_are_refused():
    lookup, histories = lookup_of()
    with pytest.raises(ValueError, match="one entry per node"):
        draft(lookup, histories, rises=np.zeros(99, dtype=np.float32))


def test_drafts_stay_within_what_was_timed():
    lookup, histories = lookup_of()
    table = CostTable((StepCost(1, 100, tokens=(1, 30), seconds=(1.0, 1.0)),))
    drafter = BlendedDrafter(lookup, budget=100, costs=table, kind="deterministic")
    assert drafter.draft(draft_request(histories)).num_nodes == 30


def engine_of(costs: CostTable) -> stand.Engine:
    return stand.wrap(tiny_model("qwen2"), drafter=stand.BlendedDrafter(costs=costs))


def test_the_output_is_a_function_of_seed_and_costs():
    table = CostTable((StepCost(1, 16, tokens=(1, 8, 40), seconds=(1.0, 1.2, 4.0)),))
    settings = {"input_ids": [[3, 4, 5, 3, 4]], "num_return_sequences": 3, "max_new_tokens": 30, "seed": 5}
    outputs = [engine_of(table).generate(**settings) for _ in range(2)]
    assert outputs[0].token_ids == outputs[1].token_ids
    assert outputs[0].stats.num_draft_tokens == outputs[1].stats.num_draft_tokens > 0
    dear = CostTable((StepCost(1, 16, tokens=(1, 8, 40), seconds=(1.0, 8.0, 40.0)),))
    fewer = engine_of(dear).generate(**settings)
    assert fewer.stats.num_draft_tokens < outputs[0].stats.num_draft_tokens
