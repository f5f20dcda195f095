"""On an Apple chip's GPU, as far as that is known without one: it has no 64-bit floats, and the system's memory."""

import copy

import numpy as np
import pytest
import torch
from plain_eagle import random_head
from plain_streams import random_streams
from pretended_calls import PROMPTS, tokens_of
from pretended_device import OnMps, move_to, pretended
from tiny_models import CONFIGS, tiny_model

import stand
from stand.forward.cache import tree_cache
from stand.forward.cache.tree_cache import CacheMemoryError, available_bytes, check_fits
from stand.trees import DraftBatch, DraftTree
from stand.verifiers import TargetRows, VerifierNoise, draw_tokens, get_verifier

CALL = {"fuse": False, "max_new_tokens": 14}
GREEDY = {**CALL, "temperature": 0.0, "repetition_penalty": 1.2, "min_new_tokens": 6}
SAMPLED = {**CALL, "temperature": 0.8, "top_p": 0.9, "top_k": 30, "no_repeat_ngram_size": 3}
DRAFTERS = {  # for a model: what drafts, and the module that lies beside the model
    "lookup": lambda model: (stand.BlendedDrafter(budget=12), None),
    "model": lambda model: (stand.ModelDrafter(other := copy.deepcopy(model)), other),
    "eagle": lambda model: (stand.EagleDrafter(head := random_head(model), budget=6), head),
    "streams": lambda model: (stand.StreamingDrafter(streams := random_streams(model), budget=6), streams),
    "neighbours": lambda model: (stand.BlendedDrafter(budget=12, source=stand.NeighbourLaws()), None),
}


@pytest.fixture(autouse=True)
def memory(monkeypatch):
    """Metal recommends 1000 bytes at most; torch has taken 300 of them, and uses 200."""
    for name, nbytes in (("recommended_max", 1000), ("driver_allocated", 300), ("current_allocated", 200)):
        monkeypatch.setattr(torch.mps, f"{name}_memory", lambda nbytes=nbytes: nbytes)


@pytest.mark.parametrize("family", CONFIGS)
def test_greedy_tokens_are_those_of_the_cpu(family):
    expected = tokens_of(tiny_model(family), stand.BlendedDrafter(budget=12), **GREEDY, max_rows=3)
    model = copy.deepcopy(tiny_model(family))
    with pretended(OnMps) as mode:
        move_to(OnMps, model)
        assert tokens_of(model, stand.BlendedDrafter(budget=12), **GREEDY, max_rows=3) == expected
    assert len(mode.operations) > 30


@pytest.mark.long
@pytest.mark.parametrize("name", DRAFTERS)
def test_every_drafter_serves_there(name):
    """Whatever rounding does to a law, a seed draws the same tokens but in one of very many calls."""
    drafted = []
    for on in (torch.no_grad, lambda: pretended(OnMps)):
        model = copy.deepcopy(tiny_model("llama"))
        drafter, part = DRAFTERS[name](model)
        with on():
            if on is not torch.no_grad:
                move_to(OnMps, model, *([] if part is None else [part]))
            drafted.append(tokens_of(model, drafter, **SAMPLED, max_rows=4))
    assert drafted[0] == drafted[1]


@pytest.mark.long
def test_steps_are_timed_first_and_few_are_drafted_where_nothing_may_be_timed(monkeypatch, tmp_path):
    """By the time of day: this thread waits for the device."""
    for costs, budget in (("off", 32), (str(tmp_path), None)):
        monkeypatch.setenv("STAND_COSTS", costs)
        model = copy.deepcopy(tiny_model("llama"))
        with pretended(OnMps):
            move_to(OnMps, model)
            engine = stand.wrap(model, fuse=False)
            assert engine.backend.computes_elsewhere and engine.drafter.budget == budget
            engine.generate(input_ids=PROMPTS, max_new_tokens=4, seed=3, temperature=0.8)
    (first, *_) = sorted(path.name for path in tmp_path.iterdir())
    assert "-sdpa-unfused-" in first


def test_a_rule_computes_on_the_host():
    """Laws of a user's own, on a device without 64-bit floats: every lossless rule answers as it does elsewhere."""
    batch = DraftBatch.concatenate([DraftTree.chain([4, 2, 3])])
    laws = torch.softmax(torch.randn(3, 8, generator=torch.Generator().manual_seed(0)), dim=1)
    noise = VerifierNoise(seed=1, rows=np.array([0]), steps=np.array([0]), positions=np.array([1]))
    for name in ("traversal", "match", "coupled"):
        expected = get_verifier(name).verify(batch, TargetRows(laws), noise)
        got = get_verifier(name).verify(batch, TargetRows(OnMps(laws)), noise)
        assert got.next_tokens.tolist() == expected.next_tokens.tolist()
        assert [path.tolist() for path in got.accepted] == [path.tolist() for path in expected.accepted]
    points = np.array([0.1, 0.5, 0.9])
    assert draw_tokens(OnMps(laws), points).tolist() == draw_tokens(laws, points).tolist()


def test_it_has_what_metal_recommends_and_the_system_holds(monkeypatch):
    """Memory is the system's; what torch holds of it unused counts as free."""
    monkeypatch.setattr(tree_cache, "whole_memory", lambda: 5000)
    for available, free in ((10_000, 700 + 100), (50, 50 + 100)):
        monkeypatch.setattr(tree_cache, "available_memory", lambda available=available: available)
        assert available_bytes(OnMps.place) == free
    check_fits(5000, OnMps.place)
    with pytest.raises(CacheMemoryError):
        check_fits(5001, OnMps.place)


def test_no_more_than_metal_recommends_is_free(monkeypatch):
    monkeypatch.setattr(torch.mps, "recommended_max_memory", lambda: 250)
    assert available_bytes(OnMps.place) == 100


def test_rows_take_turns_where_memory_is_short():
    with pretended(OnMps):
        move_to(OnMps, model := copy.deepcopy(tiny_model("qwen2")))
        output = stand.wrap(model, drafter=stand.BlendedDrafter(budget=4)).generate(
            input_ids=PROMPTS, max_new_tokens=5, num_return_sequences=4, seed=1, temperature=1.0, stop_token_ids=[]
        )
    assert [len(tokens) for tokens in output.token_ids] == [5] * 8
    assert output.stats.num_forwards > 20  # one row at a time, which is admitted in any case
