"""The two baselines that need no second model: prompt lookup and the table of Token Recycling."""

import dataclasses
import weakref

import numpy as np
import pytest
from draft_requests import draft_request
from tiny_models import tiny_model

import stand
from stand import PromptLookupDrafter, TokenRecyclingDrafter
from stand.trees import DraftBatch, DraftTree, TreeShape

PROMPTS = [[5, 9, 11, 4, 5, 9], [7], [8, 30, 31, 32, 33, 34, 35, 36, 37, 30, 31, 32]]


def drafted(drafter, *histories: list[int], depths: list[int] | None = None) -> DraftBatch:
    request = draft_request([np.array(history, dtype=np.int32) for history in histories])
    if depths is not None:
        request = dataclasses.replace(request, max_depths=np.array(depths))
    batch = drafter.draft(request)
    batch.check()
    return batch


def taught(drafter: TokenRecyclingDrafter, successors: dict[int, list[int]]) -> None:
    histories = [np.array([token], dtype=np.int32) for token in successors]
    batch = DraftBatch.concatenate([DraftTree.chain(history) for history in histories])
    top_ids = np.array(list(successors.values()), dtype=np.int32)
    nothing = [np.zeros(0, dtype=np.int32)] * len(histories)
    next_tokens, top_probs = np.zeros(len(histories), dtype=np.int64), np.full(top_ids.shape, 0.1, dtype=np.float32)
    drafter.learn(stand.Lesson(draft_request(histories), batch, nothing, next_tokens, top_ids, top_probs))


def chains(batch: DraftBatch) -> list[list[int]]:
    return [batch[row].token_ids.tolist() for row in range(len(batch))]


def test_prompt_lookup_copies_what_followed():
    drafter = PromptLookupDrafter(gamma=3)
    history = [1, 2, 3, 4, 5, 6, 9, 2, 3, 7, 8, 1, 2, 3]
    assert chains(drafted(drafter, history)) == [[3, 4, 5, 6]]  # 1 2 3 stands once before: longer beats newer
    assert chains(drafted(drafter, history[1:])) == [[3, 7, 8, 1]]  # of two 2 3 the newer one
    assert chains(drafted(drafter, [1, 2, 1])) == [[1, 2, 1]]  # what follows may be short
    assert chains(drafted(drafter, [4, 4])) == [[4, 4]]
    assert chains(drafted(drafter, [1, 2, 3], [5])) == [[3], [5]]  # nothing occurred before
    assert chains(drafted(drafter, history, history, depths=[0, 1])) == [[3], [3, 4]]


def test_prompt_lookup_keeps_to_its_lengths():
    history = [1, 2, 3, 9, 3, 8, 1, 2, 3]
    assert chains(drafted(PromptLookupDrafter(gamma=1, longest=1), history)) == [[3, 8]]
    assert chains(drafted(PromptLookupDrafter(gamma=1, shortest=2), history)) == [[3, 9]]
    assert chains(drafted(PromptLookupDrafter(gamma=1, longest=4, shortest=4), history)) == [[3]]


def test_the_table_unrolls_into_the_shape():
    drafter = TokenRecyclingDrafter(TreeShape.from_branching([2, 2, 1]), num_successors=3)
    assert chains(drafted(drafter, [4])) == [[4]]
    taught(drafter, {4: [5, 6, 7], 5: [4, 8, 9], 6: [1, 2, 3]})
    draft = drafted(drafter, [1, 4])[0]
    paths = {}
    for node in range(draft.num_nodes):
        parent = draft.parents[node]
        paths[node] = (*paths.get(parent, ()), int(draft.token_ids[node]))
    children = {(4, 5), (4, 6)}
    assert {path for path in paths.values() if len(path) == 2} == children
    assert {(4, 5, 4), (4, 5, 4, 5), (4, 6, 1)} <= set(paths.values())
    assert all(path[:-1] == () or path[:-1] in paths.values() for path in paths.values())
    assert not any(path[-2:-1] in ((1,), (2,), (8,)) for path in paths.values())  # unknown tokens have no children
    assert np.count_nonzero(draft.law[1:], axis=1).tolist() == [1] * (draft.num_nodes - 1)


def test_the_table_holds_no_array_of_a_step():
    """A step of many nodes would stay in memory for each token that came last in it."""
    drafter, top_ids = TokenRecyclingDrafter(TreeShape.chain(2)), np.array([[5, 6], [6, 5]], dtype=np.int32)
    batch, held = DraftBatch.pending([4, 5]), weakref.ref(top_ids)
    drafter.learn(stand.Lesson(None, batch, [], None, top_ids, None))
    del top_ids
    assert held() is None and chains(drafted(drafter, [4])) == [[4, 5, 6]]


def test_the_table_keeps_the_newest_row_and_the_depth():
    drafter = TokenRecyclingDrafter(TreeShape.chain(4), num_successors=2)
    taught(drafter, {4: [5, 6]})
    taught(drafter, {4: [6, 5], 6: [4, 5]})
    assert chains(drafted(drafter, [4], [4], [4], depths=[9, 2, 0])) == [[4, 6, 4, 6, 4], [4, 6, 4], [4]]


@pytest.mark.parametrize(
    "make", [PromptLookupDrafter, lambda: TokenRecyclingDrafter(TreeShape.from_branching([3, 2, 1, 1]))]
)
@pytest.mark.parametrize("temperature", [0.0, 0.6])
def test_the_output_is_plain_samplings(make, temperature):
    """`match` draws a row's tokens from (seed, row, position) alone, so drafts must not change them."""
    engine = stand.wrap(tiny_model("llama"), verifier="match", drafter=make())
    settings = {"input_ids": PROMPTS, "num_return_sequences": 3, "max_new_tokens": 60, "temperature": temperature}
    plain = engine.generate(**settings, seed=1, draft=False)
    output = engine.generate(**settings, seed=1)
    assert output.token_ids == plain.token_ids
    assert output.stats.num_accepted_draft_tokens > 5


@pytest.mark.parametrize(
    "settings", [{"gamma": 0}, {"shortest": 0}, {"longest": 1, "shortest": 2}, {"gamma": 2.5}, {"gamma": 10**40}]
)
def test_lengths_out_of_range_are_refused(settings):
    with pytest.raises(ValueError, match=r"(gamma|shortest|longest) must be an integer (in \[1, 65536\]|of at least)"):
        PromptLookupDrafter(**settings)


def test_a_table_has_the_papers_shape_by_default():
    assert TokenRecyclingDrafter().shape == TreeShape.paper()


def test_a_table_without_successors_is_refused():
    with pytest.raises(ValueError, match="num_successors must be an integer of at least 1"):
        TokenRecyclingDrafter(TreeShape.chain(2), num_successors=0)


def test_a_rule_for_chains_is_refused_before_a_shape_drafts():
    """The table is empty at first, so its first drafts would be chains."""
    model = tiny_model("qwen2")
    with pytest.raises(ValueError, match="'block' must get chains, got two siblings"):
        stand.wrap(model, drafter=TokenRecyclingDrafter(), verifier="block")
    stand.wrap(model, drafter=TokenRecyclingDrafter(TreeShape.chain(4)), verifier="block")
    stand.wrap(model, drafter=TokenRecyclingDrafter(num_successors=1), verifier="block")
