"""Where packed tokens lie: row by row, along their paths, on another device; and which plan runs."""

import numpy as np
import pytest
import torch

from stand.forward.packed_plan import StepPlan, running, running_step
from stand.trees import DraftBatch, DraftTree

CHAIN, FORK, ALONE = DraftTree.chain([3, 4]), DraftTree.branching([5, 6, 7, 8, 9], 2), DraftTree.pending(2)


def plan_of(*drafts: DraftTree) -> StepPlan:
    lengths = np.arange(7, 7 + len(drafts))
    return StepPlan.for_drafts(DraftBatch.concatenate(drafts), lengths)


def plain_paths(drafts: tuple[DraftTree, ...], count: int) -> list[list[int]]:
    """As `StepPlan.paths_back`, node by node."""
    expected, first = [], len(drafts) * (count - 1)
    for row, draft in enumerate(drafts):
        for node in range(draft.num_nodes):
            path = [node]
            while draft.parents[path[0]] >= 0:
                path.insert(0, int(draft.parents[path[0]]))
            committed = range(row * (count - 1), (row + 1) * (count - 1))
            expected.append([*committed, *(first + one for one in path)][-count:])
        first += draft.num_nodes
    return expected


@pytest.mark.parametrize("drafts", [(FORK, CHAIN, ALONE), (CHAIN, FORK), (ALONE,)])
@pytest.mark.parametrize("count", [1, 2, 4])
def test_paths_go_back_to_committed_tokens(drafts, count):
    plan = plan_of(*drafts)
    assert plan.paths_back(count).tolist() == plain_paths(drafts, count)
    assert plan.paths_back(count) is plan.paths_back(count)


def test_rotary_positions_go_on_from_what_a_row_has_shown():
    """Images take fewer positions than places, or more; slots and masks count places."""
    batch = DraftBatch.concatenate([FORK, CHAIN])
    plan = StepPlan.for_drafts(batch, np.array([7, 20]), rotary_offsets=np.array([-3, 5]))
    begun = np.repeat([7 - 3, 20 + 5], [FORK.num_nodes, CHAIN.num_nodes])
    assert plan.position_ids[0].tolist() == (begun + batch.depths).tolist()
    assert plan.cache_slots.tolist() == [*range(7, 7 + FORK.num_nodes), *range(20, 20 + CHAIN.num_nodes)]


def test_rows_are_padded_to_the_longest():
    plan, packed = plan_of(CHAIN, FORK, ALONE), torch.randn(8, 2, 3)
    padded = plan.pad_rows(packed)
    assert padded.shape == (3, 5, 2, 3)
    for row, (first, end) in enumerate([(0, 2), (2, 7), (7, 8)]):
        assert torch.equal(padded[row, : end - first], packed[first:end]) and not padded[row, end - first :].any()
    assert torch.equal(plan.unpad_rows(padded), packed)


@pytest.mark.parametrize("drafts", [(FORK, FORK), (CHAIN, CHAIN, CHAIN)])
def test_rows_of_one_length_are_not_copied(drafts):
    plan = plan_of(*drafts)
    packed = torch.randn(plan.num_tokens, 2)
    padded = plan.pad_rows(packed)
    assert padded.shape == (len(drafts), drafts[0].num_nodes, 2)
    assert padded.data_ptr() == plan.unpad_rows(padded).data_ptr() == packed.data_ptr()


def test_places_of_rows_tokens_are_among_all():
    assert plan_of(CHAIN, FORK, ALONE).packed_places([1, 3, 0]).tolist() == [1, 2 + 3, 7]


def test_a_plan_goes_to_a_device_once():
    plan, meta = plan_of(CHAIN), torch.device("meta")
    there = plan.on(meta)
    assert there is not plan and there.input_ids.device == meta
    assert plan.on(meta) is there and there.on(meta) is there


def test_a_step_runs_where_its_plan_does_and_a_prompt_is_none():
    plan, prompt = plan_of(CHAIN), StepPlan.for_prompt(np.array([5, 6]), 0, row=0)
    assert running_step() is None
    with running(plan):
        assert running_step() is plan
        with running(prompt):
            assert running_step() is None
        assert running_step() is plan
    assert running_step() is None
