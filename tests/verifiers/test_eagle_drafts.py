"""The adapted promise of EAGLE's growth: all joint drafts of two rows, by a head whose laws stand in a table, and by
an EAGLE-3 head."""

from functools import cache, partial
from itertools import product

import numpy as np
import pytest
import torch
from draft_requests import draft_request
from draft_worlds import dense_world
from exact_drafts import (
    RULES,
    SET_RULES,
    JointDraft,
    assert_adapted,
    assert_refused_where_widths_are_not_settled,
    chi_square,
    distance_from_target,
    joint_drafts,
)
from plain_eagle3 import random_eagle3
from tiny_models import SHAPE
from transformers import AutoModelForCausalLM, LlamaConfig

import stand
from stand.drafters.eagle.followed_rows import FollowedRows, NodeLaws
from stand.drafters.eagle.growth import BestFirstGrowth
from stand.drafters.heads.trained_part import likeliest
from stand.trees import DraftBatch, TreeShape
from stand.verifiers import get_verifier

SIZE = 3
HISTORIES = [np.array([0, 1, 0], np.int32), np.array([2, 0, 2], np.int32)]
SAME = [HISTORIES[0], HISTORIES[0]]
LOGITS = torch.from_numpy(0.4 * np.random.default_rng(3).normal(size=(5000, SIZE)))  # all tokens are likely


class TableRows:
    """A feature is the number of its context; the table has a law for each."""

    def __init__(self, **settings):
        self._settings = settings

    def catch_up(self, histories):
        numbers = [[int("".join(map(str, history.tolist())), SIZE)] for history in histories]
        return np.arange(len(histories)), self._laws(torch.tensor(numbers))

    def extend(self, rows, tokens, parents, features):
        assert list(rows) == sorted(rows) and len(parents) == len(tokens)
        return self._laws(torch.stack(list(features)) * SIZE + torch.tensor(tokens)[:, None] + 7)

    def _laws(self, features: torch.Tensor) -> NodeLaws:
        ids, probs = likeliest(LOGITS[features[:, 0].long() % len(LOGITS)], **self._settings)
        return NodeLaws(features, ids.to(torch.int32).numpy(), probs.numpy())


class TableEagle(stand.EagleDrafter):
    def __init__(self, **settings):
        super().__init__("no head", num_candidates=SIZE, **settings)
        self._rows = TableRows(temperature=self.temperature, count=SIZE)


class HeadEagle(stand.EagleDrafter):
    """A target and an EAGLE-3 head of three tokens; rows are begun anew for every draft."""

    def __init__(self, *, vocabulary=None, **settings):
        torch.manual_seed(0)
        target = AutoModelForCausalLM.from_config(LlamaConfig(**{**SHAPE, "vocab_size": SIZE})).eval()
        super().__init__(random_eagle3(target, vocabulary=vocabulary), num_candidates=SIZE, **settings)
        self.attach(target, b"")
        self._target = target

    def draft(self, request):
        self._rows = FollowedRows(self._target, self.head, temperature=self.temperature, count=self.law_size)
        return super().draft(request)


def draft(drafter, seed, *, histories=HISTORIES, depth=3, rows=None, step=0) -> DraftBatch:
    request = draft_request(histories, seed=seed, step=step)
    request.max_depths[:] = depth
    if rows is not None:
        request.rows[:] = rows
    return drafter.draft(request)


GROWN = {
    "budget 2": ({"budget": 2}, {}),
    "budget 3": ({"budget": 3}, {}),
    "one run": ({"budget": 3, "runs": 1}, {}),
    "two runs": ({"budget": 3, "runs": 2, "temperature": 3.0}, {}),
    "peaked": ({"budget": 3, "temperature": 0.9}, {"histories": SAME}),
    "depth 1": ({"budget": 4}, {"depth": 1}),
}
SHAPED = {  # name: shape, depths of the two rows
    "siblings": (TreeShape.from_branching([2]), 1),
    "more than there are": (TreeShape.from_branching([4]), 1),
    "two levels": (TreeShape.from_branching([2, 1]), (2, 0)),
    "chain": (TreeShape.chain(2), (2, 1)),
}
worlds = [dense_world(seed, SIZE, 2).as_float() for seed in (5, 6)]


@cache
def joint_growth(name: str) -> list[JointDraft]:
    settings, request = GROWN[name]
    return joint_drafts(partial(draft, TableEagle(**settings), **request))


@pytest.mark.parametrize("name", GROWN)
def test_growth_is_adapted(name):
    joint = joint_growth(name)
    assert len(joint) > 5
    assert_adapted(joint, worlds, RULES)


@pytest.mark.long
@pytest.mark.parametrize("name", SHAPED)
def test_shapes_are_adapted(name):
    shape, depth = SHAPED[name]
    joint = joint_drafts(partial(draft, TableEagle(shape=shape), depth=depth))
    assert_adapted(joint, worlds, (*RULES, *SET_RULES))
    for each, rule in product(joint, (*RULES, *SET_RULES)):
        get_verifier(rule).check_draft(DraftBatch.concatenate(each.drafts))


@pytest.mark.long
@pytest.mark.parametrize(
    ("settings", "depth", "rules"),
    [
        ({"budget": 3, "runs": 2, "vocabulary": [0, 2]}, 2, RULES),
        ({"shape": TreeShape.from_branching([2, 1]), "vocabulary": [1, 2]}, (2, 0), (*RULES, *SET_RULES)),
        ({"shape": TreeShape.chain(2)}, (2, 0), (*RULES, *SET_RULES)),
    ],
)
def test_drafts_of_an_eagle3_head_are_adapted(settings, depth, rules):
    """Behind its own estimates, too, and where it knows some of the target's tokens alone."""
    joint = joint_drafts(partial(draft, HeadEagle(**settings), depth=depth), most_seeds=2000)
    known = {int(token) for each in joint for one in each.drafts for token in one.token_ids[1:]}
    assert known == set(settings.get("vocabulary", range(SIZE)))
    assert len(joint) > 5 and any((one.parents > 0).any() for each in joint for one in each.drafts)
    assert_adapted(joint, worlds, rules)


def test_a_shape_of_the_root_alone_drafts_nothing():
    batch = draft(TableEagle(shape=TreeShape.empty()), 0)
    assert batch.sizes.tolist() == [1, 1] and batch.slots.tolist() == [0, 0]


@pytest.mark.parametrize("rule", SET_RULES)
def test_rules_over_sets_refuse_grown_drafts(rule):
    joint = joint_growth("one run")
    assert_refused_where_widths_are_not_settled(joint, worlds, rule)


@pytest.mark.long
def test_drafts_come_as_often_as_their_laws_say():
    draft_with = partial(draft, TableEagle(budget=3))
    statistic, degrees = chi_square(draft_with, joint_growth("budget 3"), num_seeds=1500)
    assert degrees > 10 and statistic < degrees + 5 * np.sqrt(2 * degrees)


def test_growth_shares_its_budget_among_the_rows():
    """All of it is used, and who gets more of it follows from what is drawn: fixed halves would be 6 and 6."""
    drafter, generator = TableEagle(budget=12, temperature=0.15), np.random.default_rng(0)
    sizes = set()
    for seed in range(40):
        histories = list(generator.integers(0, SIZE, (2, 3)).astype(np.int32))
        sizes.add(tuple((draft(drafter, seed, histories=histories, depth=5).sizes - 1).tolist()))
    assert all(sum(pair) == 12 for pair in sizes) and len(sizes) > 2


# What breaks the promise must be seen: by the sum of the drafts' probabilities, and by the law.


class LooksAhead(BestFirstGrowth):
    """Reveals one node less where the last one would be token 0."""

    def grow(self, drafts, *, is_last):
        asked = super().grow(drafts, is_last=is_last)
        for each in drafts:
            if self._room == 0 and len(each.token_ids) > 2 and each.token_ids[-1] == 0:
                for column in (each.token_ids, each.parents, each.depths, each.chances, each.laws):
                    column.pop()
                self._room = -1
        return asked


def shared_noise(seed):
    return draft(TableEagle(budget=2, runs=1), seed, histories=SAME, rows=(0, 0))


def looks_ahead(seed, monkeypatch):
    with monkeypatch.context() as patched:
        patched.setattr("stand.drafters.eagle.drafter.BestFirstGrowth", LooksAhead)
        return draft(TableEagle(budget=3, runs=1), seed)


def flattened(seed):
    """Records flatter laws than it draws from."""
    batch = draft(TableEagle(budget=3, runs=1), seed)
    law = np.where(batch.law > 0, 0.5 * batch.law + 0.5 / np.maximum((batch.law > 0).sum(1, keepdims=True), 1), 0)
    return type(batch)(**{name: getattr(batch, name) for name in batch.__dataclass_fields__} | {
        "law": law.astype(np.float32)
    })  # fmt: skip


def test_broken_promises_are_seen(monkeypatch):
    for builder in (shared_noise, partial(looks_ahead, monkeypatch=monkeypatch)):
        joint = joint_drafts(builder, most_seeds=600)
        assert abs(sum(each.probability for each in joint) - 1.0) > 0.01
        assert distance_from_target(joint, worlds, get_verifier("traversal")) > 0.003
    joint = joint_drafts(flattened, most_seeds=600)
    statistic, degrees = chi_square(flattened, joint, num_seeds=1500)
    assert statistic > degrees + 10 * np.sqrt(2 * degrees)
