"""Drafts that end where a node costs more than it brings."""

from dataclasses import replace

import numpy as np
import pytest
from draft_requests import draft_request
from tiny_models import tiny_model

import stand
from stand.drafters.blended import BlendedDrafter
from stand.drafters.costs.step_cost import CostTable, StepCost, best_size
from stand.trees import BlendedLookup, DraftBatch, DraftTree


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


STAIRS = StepCost(1, 32, tokens=(1, 2, 3, 4, 8, 16), seconds=(9.0, 17.3, 19.5, 20.8, 29.5, 42.3))  # of llama.cpp, ms


def planned_batch(*chances):
    """Of two rows, with so many nodes in all."""
    trees = [DraftTree.chain(range(1 + (len(chances) + row) // 2)) for row in (0, 1)]
    batch = DraftBatch.concatenate(trees)
    paths = np.ones(batch.num_nodes, dtype=np.float32)
    paths[np.setdiff1d(np.arange(batch.num_nodes), batch.offsets[:-1])] = chances
    return replace(batch, path_probabilities=paths)


def test_a_draft_that_pays_stays_and_of_others_the_best_part():
    seconds = np.array([10.0, 19.0, 19.0, 30.0, 60.0])
    assert (
        best_size(planned_batch(0.9, 0.2, 0.8), seconds) == 0
    )  # tokens by second: 2 / 10, 2.9 / 19, 3.7 / 19, 3.9 / 30
    assert best_size(planned_batch(0.9, 0.2, 1.0), seconds) == 2  # 3.9 / 19
    assert (
        best_size(planned_batch(0.9, 0.99, 0.98), np.array([10.0, 12.0, 12.0, 20.0])) == 3
    )  # not the best, but it pays
    assert best_size(planned_batch(1.0), np.array([10.0, 15.0])) == 1  # just
    assert best_size(planned_batch(), seconds) == 0


def test_jumps_are_what_lies_above_the_curve():
    assert StepCost(1, 0, (1, 2, 4), (1.0, 1.04, 1.06)).jumps(1, 3) is None  # above a curve of 1.02 by 2 %
    assert StepCost(1, 0, (1, 2, 4), (1.0, 1.2, 1.6)).jumps(1, 3) is None  # on it
    assert np.allclose(StepCost(1, 0, (1, 2, 4), (1.0, 1.1, 1.12)).jumps(1, 3), [1.0, 1.1, 1.11, 1.12])
    assert STAIRS.jumps(1, 0) is None and STAIRS.jumps(1, 1)[1] == 17.3


def by_plan(lookup, histories, cost, *, kind="deterministic", seed=3):
    drafter = BlendedDrafter(lookup, costs=CostTable((cost,)), kind=kind)
    return drafter.draft(draft_request(histories, seed=seed))


@pytest.mark.parametrize("kind", ["deterministic", "sampled", "mixed"])
def test_a_draft_that_would_end_within_a_jump_is_another_size(kind):
    lookup, _ = lookup_of()
    histories = [np.random.default_rng(9).integers(0, 8, 50).astype(np.int32)]  # it was never seen: no token is likely
    jump = StepCost(1, 32, tokens=(1, 2, 16), seconds=(1.0, 2.2, 2.6))
    limits = {"rises": jump.rises(1, 15), "rows": [0], "steps": [0], "seed": 3, "kind": "deterministic"}
    assert lookup.draft(histories, 15, **limits).num_nodes > 1  # by the curve nodes pay, and by the times they do not
    assert by_plan(lookup, histories, jump, kind=kind).num_nodes == 1
    flat = StepCost(1, 32, tokens=(1, 2, 16), seconds=(1.0, 1.1, 1.2))
    assert by_plan(lookup, histories, flat, kind=kind).num_nodes > 10


def test_how_much_is_drafted_does_not_follow_from_what_is_drawn():
    """After one of two tokens all is known, after the other nothing: a draft that begins with the first would pay."""
    lookup, generator = BlendedLookup(), np.random.default_rng(0)
    for turn in range(60):
        lookup.learn([5, 6, 7], [1, 4, 4, 4, 4] if turn % 5 < 3 else [2, *generator.integers(10, 40, 4)])
    history = [np.array([5, 6, 7], dtype=np.int32)]
    cost = StepCost(1, 32, tokens=(1, 2, 12), seconds=(1.0, 2.0, 2.4))

    def sizes(decide):
        limits = {"rises": cost.rises(1, 11), "rows": [0], "steps": [0]}
        drafts = [lookup.draft(history, 11, seed=seed, kind=decide, **limits) for seed in range(40)]
        return {best_size(batch, cost.jumps(1, 11)) for batch in drafts}

    assert len(sizes("sampled")) > 1 == len(sizes("deterministic"))
    batches = [by_plan(lookup, history, cost, kind="sampled", seed=seed) for seed in range(40)]
    assert len({batch.token_ids.tobytes() for batch in batches}) > 1
    assert {batch.num_nodes - 1 for batch in batches} == sizes("deterministic")
