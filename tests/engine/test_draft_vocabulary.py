"""A head or streams that guess frequent tokens alone: what they say, what is saved, and the law that comes out."""

import copy
from functools import partial

import pytest
import torch
from plain_eagle import random_head
from plain_eagle3 import random_eagle3
from tiny_models import SHAPE, tiny_model
from transformers import AutoModelForCausalLM, LlamaConfig
from two_tokens import assert_greedy_equals_transformers, two_token_statistic

import stand
from stand.drafters.eagle.eagle3_head import Eagle3Head
from stand.drafters.eagle.head import EagleHead
from stand.drafters.streams.weights import Streams

FREQUENT = [2, 3, 5, 8, 13, 21, 34]
PROMPTS = [[5, 9, 11, 4, 5, 9], [7, 8]]


def part_of(kind: str, target):
    torch.manual_seed(0)
    return random_head(target, scale=1.5) if kind == "head" else Streams(target, num_layers=1, rank=4).eval()


@pytest.mark.parametrize("kind", ["head", "streams"])
def test_guesses_are_those_of_the_lm_heads_rows(kind):
    target = tiny_model("qwen2")
    part, features = part_of(kind, target), torch.randn(2, 3, target.config.hidden_size)
    whole_ids, whole = part.best_tokens(features, temperature=0.7, count=10**6)
    logits = target.get_output_embeddings()(features)
    assert torch.equal(whole_ids[..., 0].long(), logits.argmax(dim=-1))
    torch.testing.assert_close(whole.sum(dim=-1), torch.ones(2, 3))
    part.restrict(torch.tensor(FREQUENT[::-1]))
    ids, probs = part.best_tokens(features, temperature=0.7, count=3)
    law = torch.softmax(logits[..., FREQUENT] / 0.7, dim=-1)
    expected = torch.topk(law, 3, dim=-1)
    assert torch.equal(ids, torch.tensor(FREQUENT, dtype=torch.int32)[expected.indices])
    torch.testing.assert_close(probs, expected.values)


@pytest.mark.parametrize("kind", ["head", "streams"])
def test_a_run_costs_its_weights_or_its_layers_whichever_are_more(kind):
    config = copy.deepcopy(tiny_model("qwen2").config)
    config.vocab_size = 5000
    part = part_of(kind, AutoModelForCausalLM.from_config(config).eval())
    assert 0.8 < part.share_of_step() < 1  # its LM head alone is most of the target's weights
    part.restrict(FREQUENT)
    assert part.share_of_step() == (1 + 1.5) / (2 + 1)


@pytest.mark.parametrize("kind", ["head", "streams"])
def test_frequent_tokens_go_along_where_a_part_is_cast(kind):
    target = copy.deepcopy(tiny_model("llama"))
    part = part_of(kind, target)
    part.restrict(FREQUENT)
    part.to(torch.bfloat16), target.to(torch.bfloat16)
    features = torch.randn(3, target.config.hidden_size).bfloat16()
    ids, _ = part.best_tokens(features, temperature=1.0, count=1)
    best = target.get_output_embeddings()(features)[:, FREQUENT].argmax(dim=-1)
    assert torch.equal(ids[:, 0].long(), part.vocabulary[best]) and part.vocabulary.tolist() == FREQUENT


@pytest.mark.parametrize("kind", ["head", "streams"])
def test_a_path_is_read_again_for_another_model(kind, tmp_path):
    """Or for the same one that was cast; elsewhere what was read is kept."""
    first, second = (copy.deepcopy(tiny_model("llama")) for _ in range(2))
    part_of(kind, first).save(tmp_path)
    drafter = stand.EagleDrafter(tmp_path) if kind == "head" else stand.StreamingDrafter(tmp_path)
    read = []
    for model, dtype in ((first, "float32"), (first, "float32"), (second, "float32"), (second, "bfloat16")):
        stand.wrap(model.to(getattr(torch, dtype)), drafter=drafter)
        read.append(drafter.head if kind == "head" else drafter.rider.streams)
        assert read[-1].is_of(model) and next(read[-1].parameters()).dtype is model.dtype
    assert len({id(part) for part in read}) == 3


@pytest.mark.parametrize("kind", ["head", "streams"])
def test_the_file_keeps_the_vocabulary(kind, tmp_path):
    target = tiny_model("llama")
    part = part_of(kind, target)
    part.restrict(FREQUENT)
    part.save(tmp_path)
    again = type(part).load(target, tmp_path)
    assert again.vocabulary.tolist() == FREQUENT
    features = torch.randn(4, target.config.hidden_size)
    for one, other in zip(*(one.best_tokens(features, temperature=1.0, count=4) for one in (part, again)), strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("kind", ["head", "streams"])
def test_the_first_and_the_last_token_may_be_guessed(kind):
    part = part_of(kind, tiny_model("llama"))
    assert part.num_guessed == 61
    part.restrict([60, 0, 7])
    assert part.num_guessed == 3 and part.vocabulary.tolist() == [0, 7, 60]


@pytest.mark.parametrize(
    ("ids", "got"),
    [([], "none"), ([3, -1], "-1 to 3"), ([10**6], "1000000 to 1000000"), ([0, 61], "0 to 61")],
)
def test_tokens_that_the_target_does_not_have_are_refused(ids, got):
    with pytest.raises(ValueError, match=f"a vocabulary must be some tokens from 0 to 60, got {got}; give"):
        random_head(tiny_model("llama")).restrict(ids)


def restricted_head(target, ids, make=random_head) -> EagleHead:
    head = make(target, scale=1.5)
    head.restrict(ids)
    return head


def knowing_head(target, ids) -> Eagle3Head:
    """That has never known others."""
    return random_eagle3(target, scale=1.5, vocabulary=ids)


MAKERS = [restricted_head, partial(restricted_head, make=random_eagle3), knowing_head]


@pytest.mark.parametrize("make", MAKERS)
@pytest.mark.parametrize("blended", [False, True])
def test_drafts_hold_frequent_tokens_and_greedy_stays(blended, make):
    target = tiny_model("llama")
    head = make(target, FREQUENT)
    source = stand.EagleLaws(head, runs=3)
    drafter = stand.BlendedDrafter(budget=12, source=source) if blended else stand.EagleDrafter(head, budget=12)
    engine, batches = stand.wrap(target, drafter=drafter), []
    draft = drafter.draft
    drafter.draft = lambda request: batches.append(draft(request)) or batches[-1]
    engine.generate(input_ids=PROMPTS, max_new_tokens=20, temperature=1.0, seed=1, learn=False)
    drawn = {int(token) for batch in batches for token in batch.token_ids[batch.depths > 0]}
    assert drawn and drawn <= set(FREQUENT)
    assert_greedy_equals_transformers(engine, target, PROMPTS)


@pytest.mark.long
@pytest.mark.parametrize("make", MAKERS)
def test_the_first_two_tokens_follow_the_target(make):
    """Chi-square against the exact law; the target itself says tokens that are never guessed."""
    torch.manual_seed(0)
    target = AutoModelForCausalLM.from_config(LlamaConfig(**{**SHAPE, "vocab_size": 7})).eval()
    drafter = stand.EagleDrafter(make(target, [1, 3, 4]), budget=3 * 1000, runs=2)
    assert two_token_statistic(stand.wrap(target, drafter=drafter), target) < 50
