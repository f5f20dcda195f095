"""Laws from outside in the default drafter: EAGLE's against a plain forward, what calls and rows may do, the law."""

from functools import partial

import numpy as np
import pytest
import torch
from draft_requests import draft_request
from plain_eagle import plain_logits, random_head
from plain_eagle3 import plain_logits3, random_eagle3
from tiny_models import SHAPE, tiny_model
from transformers import AutoModelForCausalLM, LlamaConfig
from turns import PROMPTS, restless_calls, take_turns
from two_tokens import assert_greedy_equals_transformers, two_token_statistic

import stand
from stand.drafters.eagle.eagle3_head import Eagle3Head
from stand.trees import DraftBatch

HEADS = [  # targets, and how heads are made for them: EAGLE-3's for any
    ("llama", random_head),
    ("qwen2", random_head),
    ("llama", random_eagle3),
    ("qwen3", partial(random_eagle3, kind="qwen3", num_layers=2, vocabulary=list(range(0, 61, 2)), fc_norm=True)),
]


class CheckedLaws(stand.EagleLaws):
    """Compares every law with a plain forward over the node's whole context."""

    num_checked = deepest = 0

    def attach(self, model):
        super().attach(model)
        self._model = model

    def laws(self, request, plan):
        self._histories, self._paths = request.histories, {}
        return super().laws(request, plan)

    def _added(self, trees, places, laws):
        logits, known, plain = self.head.logits(laws.estimates).numpy(), self.head.vocabulary, plain_logits
        if isinstance(self.head, Eagle3Head):
            plain = plain_logits3
        for (row, parent, token), found in zip(places, logits, strict=True):
            path = [] if parent < 0 else [*self._paths[row][parent], token]
            self._paths.setdefault(row, []).append(path)
            expected = plain(self.head, self._model, self._histories[row].tolist(), path)
            np.testing.assert_allclose(found, expected if known is None else expected[known], atol=2e-3)
            self.num_checked += 1
            self.deepest = max(self.deepest, len(path))
        return super()._added(trees, places, laws)


def blended(target, *, make=random_head, budget=14, laws=stand.EagleLaws, runs=3, **settings) -> stand.BlendedDrafter:
    return stand.BlendedDrafter(budget=budget, source=laws(make(target, scale=1.5), runs=runs, **settings))


@pytest.mark.parametrize(("target", "make"), HEADS)
def test_laws_are_the_heads_own_whatever_happens_to_the_rows(target, make):
    drafter = blended(tiny_model(target), make=make, laws=CheckedLaws, runs=4)
    engine = stand.wrap(tiny_model(target), drafter=drafter)
    restless_calls(engine, seed=2)
    assert drafter.source.num_checked > 60 and drafter.source.deepest >= 2


def test_calls_that_take_turns_keep_their_rows_apart():
    drafter = blended(tiny_model("llama"), laws=CheckedLaws, budget=6)
    engine = stand.wrap(tiny_model("llama"), drafter=drafter)
    take_turns(engine, PROMPTS[:2], max_new_tokens=5)
    assert drafter.source.num_checked > 15


@pytest.mark.parametrize(("target", "make"), HEADS)
def test_greedy_equals_transformers(target, make):
    engine = stand.wrap(tiny_model(target), drafter=blended(tiny_model(target), make=make))
    assert_greedy_equals_transformers(engine, tiny_model(target), PROMPTS)


class Flattering(stand.BlendedDrafter):
    """Records laws of another temperature than it draws from."""

    sharpened = 1.0

    def draft(self, request) -> DraftBatch:
        drawn = super().draft(request)
        law = drawn.law**self.sharpened
        drawn.law[:] = law / np.maximum(law.sum(axis=1, keepdims=True), 1e-9)
        return drawn


@pytest.mark.parametrize("sharpened", [1.0, 0.5])
def test_the_first_two_tokens_follow_the_target(sharpened):
    """Chi-square against the exact law; recorded laws that were not drawn from must be seen."""
    torch.manual_seed(0)
    target = AutoModelForCausalLM.from_config(LlamaConfig(**{**SHAPE, "vocab_size": 7})).eval()
    drafter = Flattering(
        budget=3 * 1000, source=stand.EagleLaws(random_head(target, scale=1.5), runs=3, num_candidates=7)
    )
    drafter.sharpened = sharpened
    engine = stand.wrap(target, drafter=drafter)
    statistic = two_token_statistic(engine, target)
    assert (statistic < 50) == (sharpened == 1.0), statistic


class FixedLaws(stand.LawSource):
    """The same law for every row, and a count of what was asked."""

    def __init__(self, token: int):
        self.token, self.plans = token, []

    def laws(self, request, plan):
        shape = (len(request.histories), 1, 1)
        laws = stand.OutsideLaws.of_heads(np.full(shape, self.token), np.full(shape, 0.9))
        self.plans.append((plan(None), plan(laws)))
        return laws


def test_plans_have_no_noise_and_follow_the_laws():
    source = FixedLaws(token=40)
    drafter = stand.BlendedDrafter(stand.BlendedLookup(), budget=6, source=source)
    drafter.lookup.learn([], np.tile(np.arange(30, dtype=np.int32), 20))
    histories = [np.array([50, 51], dtype=np.int32)]
    for seed in range(3):
        batch = drafter.draft(draft_request(histories, seed=seed))
        assert batch.outside_laws is not None
    first = source.plans[0]
    for plans in source.plans:
        for plan, same in zip(plans, first, strict=True):
            assert np.array_equal(plan.token_ids, same.token_ids)
    assert 40 not in first[0].token_ids and 40 in first[1].token_ids


def test_without_nodes_no_law_is_asked_for():
    source = FixedLaws(token=40)
    drafter = stand.BlendedDrafter(stand.BlendedLookup(), budget=0, source=source)
    assert drafter.draft(draft_request([np.array([3], np.int32)])).num_nodes == 1 and source.plans == []


def test_odds_of_laws_are_learned_from_lessons_alone():
    """Steps of a call that must not learn leave drafts as they are; steps that teach do not."""
    model, shares = tiny_model("llama"), {}
    for learn in (False, True):
        drafter = blended(model)
        engine = stand.wrap(model, drafter=drafter)
        for _ in range(2):
            engine.generate(input_ids=PROMPTS[:1], max_new_tokens=20, temperature=1.0, seed=3, learn=learn)
        laws = stand.OutsideLaws.of_heads(np.full((1, 1, 1), 60), np.full((1, 1, 1), 0.9))
        keys = {"seed": 0, "rows": [0], "steps": [0]}
        batch = drafter.lookup.draft([np.array([2], np.int32)], 1, **keys, outside=laws)
        shares[learn] = float(batch.path_estimates[1])
    fresh = stand.BlendedLookup().draft([np.array([2], np.int32)], 1, **keys, outside=laws)
    assert shares[False] == pytest.approx(float(fresh.path_estimates[1]))
    assert shares[True] != pytest.approx(shares[False], rel=0.05)


@pytest.mark.parametrize(
    ("name", "value"), [("runs", 0), ("temperature", 0.0), ("num_candidates", 0), ("num_candidates", 65)]
)
def test_settings_out_of_range_are_refused(name, value):
    with pytest.raises(ValueError, match=name):
        stand.EagleLaws("head", **{name: value})


def test_a_head_of_another_model_is_refused():
    with pytest.raises(ValueError, match="another model"):
        stand.wrap(tiny_model("llama"), drafter=blended(tiny_model("qwen2")))


def test_only_sources_that_read_hidden_states_make_steps_deliver_them():
    for make, layers in ((random_head, ()), (random_eagle3, (1, 0, 1))):
        drafter = blended(tiny_model("llama"), make=make)
        assert drafter.requires_features
        stand.wrap(tiny_model("llama"), drafter=drafter)
        assert drafter.asked_features == layers
    assert stand.BlendedDrafter().asked_features is None
    assert not stand.BlendedDrafter(source=FixedLaws(1)).requires_features
    assert not stand.BlendedDrafter().requires_features
