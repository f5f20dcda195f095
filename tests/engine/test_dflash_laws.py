"""Laws that a block head says: against the formulas, and as what the default drafter looks up."""

import copy

import numpy as np
import pytest
import torch
from draft_requests import draft_request
from estimated_rows import EstimatedBlocks
from noisy_walks import draft
from plain_dflash import BlockFormulas, plain_block
from plain_eagle3 import deep_target
from plain_lessons import texts
from random_dflash import CONVOLUTIONS, MARKOV, SELECTOR, random_dflash
from two_tokens import assert_greedy_equals_transformers

import stand
from stand.drafters.dflash import laws as dflash_laws
from stand.drafters.dflash.followed_blocks import FollowedBlocks
from stand.drafters.dflash.pairs import MarkovHead
from stand.trees import BlendedLookup, OutsideLaws

KNOWN = [2, 3, 5, 8, 13, 21, 34, 60]
GATED = {**MARKOV, "markov_head_type": "gated"}
SOFT = {"output_multiplier": 0.5, "final_logit_softcapping": 2.0}
UNARY = {
    "plain": {},
    "the first place guesses": {"has_anchor_law": True},
    "scales": {"input_embedding_scale": 3.0, **SOFT},
    "some tokens": {"vocabulary": KNOWN},
}
PAIRED = {
    "selector": {**CONVOLUTIONS, **SELECTOR},
    "selector, scales": {**SELECTOR, **SOFT, "has_anchor_law": True},
    "a narrow selector": {"selector_rank": 6, "selector_top_k": 3},
    "a selector of all tokens": {"selector_rank": 6, "selector_top_k": 100},
    "a selector, some tokens": {**SELECTOR, "vocabulary": KNOWN},
    "Markov": {**MARKOV, "has_anchor_law": True},
    "gated": GATED,
    "gated, some tokens": {**GATED, "vocabulary": [*KNOWN, 7, 9, 11, 40]},
}
HISTORIES = texts([5, 9, 11, 4, 5, 9, 30, 31], [7, 8, 9], [3])
COUNT, WIDTH = 6, 4
COUNT_ALL = 100  # more than there are tokens


@pytest.fixture(autouse=True)
def few_candidates(monkeypatch):
    """A tiny model has fewer tokens than a Markov head changes."""
    monkeypatch.setattr(MarkovHead, "num_candidates", 9)


def head_of(**settings):
    return random_dflash(deep_target(), **{"feature_layers": (3, 1, 4)} | settings)


@torch.inference_mode()
def said(head, *, temperature: float = 0.7, width: int = WIDTH):
    estimates = EstimatedBlocks(deep_target(), head).run(HISTORIES)
    pending = torch.tensor([int(history[-1]) for history in HISTORIES])
    return head.laws(estimates, pending, temperature=temperature, count=COUNT, width=width)


def assert_best(ids: torch.Tensor, probs: torch.Tensor, law: np.ndarray) -> None:
    """The likeliest tokens of a law, and their probabilities."""
    ids, probs = ids.numpy(), probs.numpy()
    assert len(set(ids.tolist())) == len(ids) and ids.dtype == np.int32 and probs.dtype == np.float32
    np.testing.assert_allclose(probs, law[ids], atol=2e-4)
    np.testing.assert_allclose(probs, np.sort(law)[::-1][: len(probs)], atol=2e-4)
    assert (np.diff(probs) <= 0).all()


@pytest.mark.parametrize("temperature", [0.7, 1.0])
@pytest.mark.parametrize("settings", [*UNARY.values(), *PAIRED.values()], ids=[*UNARY, *PAIRED])
@torch.inference_mode()
def test_laws_are_those_of_the_formulas(settings, temperature):
    head = head_of(**settings)
    found, formulas = said(head, temperature=temperature), BlockFormulas(head, deep_target())
    assert (found.before is None) == (head.pairs is None)
    for row, history in enumerate(HISTORIES):
        before = [int(history[-1])] * WIDTH
        for place, estimate in enumerate(plain_block(head, deep_target(), history.tolist())):
            law = formulas.law(estimate, temperature=temperature)
            assert_best(found.ids[row, place], found.probs[row, place], law)
            if found.before is not None:
                assert found.before[row, place].tolist() == before
                for number, token in enumerate(before):
                    law = formulas.law(estimate, before=token, temperature=temperature)
                    assert_best(found.pair_ids[row, place, number], found.pair_probs[row, place, number], law)
                before = found.ids[row, place, :WIDTH].tolist()


@pytest.mark.parametrize("settings", PAIRED.values(), ids=PAIRED)
@torch.inference_mode()
def test_paired_laws_depend_on_the_token_before_alone(settings):
    """They are others than the law whatever stands before, and than those behind other tokens."""
    head = head_of(**settings)
    formulas, (estimate, *_) = BlockFormulas(head, deep_target()), plain_block(head, deep_target(), [5, 9, 11])
    laws = [formulas.law(estimate, before=before) for before in (None, 7, 8)]
    distances = [np.abs(one - other).sum() for place, one in enumerate(laws) for other in laws[:place]]
    assert min(distances) > 0.01 and all(0.5 < law.sum() < 1.0001 for law in laws)


@pytest.mark.parametrize("kind", ["selector", "Markov", "gated"])
@torch.inference_mode()
def test_laws_of_other_formulas_are_told_apart(kind, monkeypatch):
    head = head_of(**PAIRED[kind])
    found, estimates = said(head, temperature=1.0), plain_block(head, deep_target(), HISTORIES[0].tolist())
    law = BlockFormulas(head, deep_target()).law(estimates[1], before=int(found.ids[0, 0, 0]))
    assert_best(found.pair_ids[0, 1, 0], found.pair_probs[0, 1, 0], law)
    others = [
        BlockFormulas(head, deep_target()).law(estimates[1], before=int(found.ids[0, 0, 1])),
        BlockFormulas(head, deep_target()).law(estimates[0], before=int(found.ids[0, 0, 0])),
        BlockFormulas(head, deep_target()).law(estimates[1]),
    ]
    monkeypatch.setattr(type(head.pairs), "num_candidates", 2, raising=False)
    monkeypatch.setattr(head.pairs, "num_candidates", 2)
    others.append(BlockFormulas(head, deep_target()).law(estimates[1], before=int(found.ids[0, 0, 0])))
    for other in others:
        with pytest.raises(AssertionError):
            assert_best(found.pair_ids[0, 1, 0], found.pair_probs[0, 1, 0], other)


@pytest.mark.parametrize("settings", [{}, SELECTOR, MARKOV, {**GATED, "vocabulary": KNOWN}])
@torch.inference_mode()
def test_fewer_tokens_can_be_guessed(settings, monkeypatch):
    """Those alone that the head knows; pairs of them keep their scores."""
    head = head_of(**settings)
    if head.pairs is not None:
        monkeypatch.setattr(head.pairs, "num_candidates", COUNT_ALL)
    formulas = BlockFormulas(head, deep_target())
    estimates = plain_block(head, deep_target(), HISTORIES[0].tolist())
    whole = [(before, formulas.law(estimates[1], before=before)) for before in (None, 7, 8)]
    head.restrict([59, 60, 5, 21, 34, 8])
    known = [5, 8, 21, 34, 60] if "vocabulary" in settings else [5, 8, 21, 34, 59, 60]
    assert head.vocabulary.tolist() == known and head.num_guessed == len(known)
    for before, law in whole[: 1 if head.pairs is None else 3]:
        pending = torch.tensor([7 if before is None else before])
        found = head.laws(estimates[None, 1:2], pending, temperature=1.0, count=COUNT, width=1)
        ids, probs = (
            (found.ids, found.probs) if before is None else (found.pair_ids[:, :, 0], found.pair_probs[:, :, 0])
        )
        kept = np.zeros(len(law))
        kept[known] = law[known] / law[known].sum()
        assert_best(ids[0, 0], probs[0, 0], kept)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("settings", [{}, SELECTOR, GATED])
@torch.inference_mode()
def test_laws_that_are_not_finite_say_nothing(settings, value):
    """Of that place, and of no other one."""
    head = head_of(**settings)
    estimates = torch.randn(2, 4, 32, generator=torch.Generator().manual_seed(0))
    asked = {"temperature": 0.7, "count": COUNT, "width": WIDTH}
    sound = head.laws(estimates, torch.tensor([5, 9]), **asked)
    estimates[1, 2, 3] = value
    found = head.laws(estimates, torch.tensor([5, 9]), **asked)
    assert not found.probs[1, 2].any() and torch.equal(found.probs[0], sound.probs[0])
    assert len(found.ids[1, 2].unique()) == COUNT
    if found.before is not None:
        assert not found.pair_probs[1, 2].any() and torch.equal(found.pair_probs[0], sound.pair_probs[0])
        assert torch.equal(found.pair_probs[1, :2], sound.pair_probs[1, :2])
    make = dflash_laws._alone if found.before is None else dflash_laws._in_levels
    assert len(make(found, 0)) == 2  # which checks them


# What the default drafter looks up.

DRAFTED = 4  # tokens of a law


def asked_laws(head) -> OutsideLaws:
    """What a source says of HISTORIES."""
    source = stand.DFlashLaws(head, always=True, temperature=0.7, num_candidates=DRAFTED)
    stand.wrap(deep_target(), drafter=stand.BlendedDrafter(source=source))
    return source.laws(draft_request(HISTORIES), plan=None)


def drafted_laws(outside: OutsideLaws, row: int) -> dict[tuple[int, ...], dict[int, float]]:
    """By the tokens that lead to it, each law as an empty lookup drafts from it, likeliest token first."""
    batch = draft(BlendedLookup(), HISTORIES, 3000, kind="deterministic", outside=outside)[row]
    paths, found = {0: ()}, {}
    for node in range(1, batch.num_nodes):
        paths[node] = (*paths[int(batch.parents[node])], int(batch.token_ids[node]))
        found.setdefault(paths[node][:-1], {})[paths[node][-1]] = float(batch.path_estimates[node])
    return {path: dict(sorted(law.items(), key=lambda item: -item[1])) for path, law in found.items()}


def assert_looked_up(found: dict[int, float], ids: torch.Tensor, probs: torch.Tensor) -> None:
    """The likeliest tokens of the law were drafted, in its order and in the proportions of their probabilities."""
    shares, expected = np.array(list(found.values())), probs[: len(found)].double().numpy()
    assert list(found) == ids[: len(found)].tolist()
    np.testing.assert_allclose(shares / shares.sum(), expected / expected.sum(), rtol=1e-3)


@pytest.mark.parametrize("width", [1, 2, 8])
@pytest.mark.parametrize("kind", ["selector", "selector, scales", "Markov", "gated, some tokens"])
def test_a_node_goes_on_by_the_law_of_its_own_token(kind, width, monkeypatch):
    """Of the level of its depth; by the law whatever stands before where its token has none."""
    monkeypatch.setattr(dflash_laws, "MOST_BEFORE", width)
    head = head_of(**PAIRED[kind])
    outside, known = asked_laws(head), said(head, width=width)
    assert outside.num_nodes == 3 * (1 + (head.settings.num_guesses - 1) * (width + 1))
    paired, alone = 0, 0
    for row, history in enumerate(HISTORIES):
        for path, law in drafted_laws(outside, row).items():
            place, token = len(path), path[-1] if path else int(history[-1])
            before = known.before[row, place].tolist()
            if token in before:
                number = before.index(token)
                ids, probs = known.pair_ids[row, place, number], known.pair_probs[row, place, number]
            else:
                ids, probs = known.ids[row, place], known.probs[row, place]
            assert_looked_up(law, ids, probs)
            paired, alone = paired + (token in before), alone + (token not in before)
    assert paired > 20 and (alone > 20 or width == 8)


@pytest.mark.parametrize("settings", UNARY.values(), ids=UNARY)
def test_places_of_a_head_without_pairs_have_one_law_each(settings):
    head = head_of(**settings)
    outside, known = asked_laws(head), said(head)
    assert outside.num_nodes == 3 * head.settings.num_guesses
    for row in range(3):
        laws = drafted_laws(outside, row)
        assert {0, 1, 2} <= {len(path) for path in laws} <= set(range(head.settings.num_guesses))
        for path, law in laws.items():
            assert_looked_up(law, known.ids[row, len(path)], known.probs[row, len(path)])


@pytest.mark.parametrize("settings", [SELECTOR, {}])
def test_a_head_may_guess_one_place(settings):
    outside = asked_laws(head_of(block_size=2, **settings))
    assert outside.num_nodes == 3 and all(list(drafted_laws(outside, row)) == [()] for row in range(3))


def test_sources_are_numbered_and_settings_checked():
    head = head_of(**SELECTOR)
    source = stand.DFlashLaws(head, always=True, source=2)
    stand.wrap(deep_target(), drafter=stand.BlendedDrafter(source=source))
    assert source.laws(draft_request(HISTORIES), plan=None).source == 2
    for settings, message in (
        ({"always": "no"}, "always must be True or False, got 'no'"),
        ({"temperature": 0.0}, "temperature must be .*, got 0.0"),
        ({"num_candidates": 65}, "num_candidates must be .*, got 65"),
        ({"num_candidates": 0}, "num_candidates must be .*, got 0"),
        ({"source": 4}, "source must be .*, got 4"),
    ):
        with pytest.raises(ValueError, match=message):
            stand.DFlashLaws(head, **settings)


# In calls.

CALL = {"input_ids": [[5, 9, 11, 4, 5, 9], [7, 8]], "max_new_tokens": 20, "stop_token_ids": []}


def engine_with(head, **settings):
    source = stand.DFlashLaws(head, **settings)
    return stand.wrap(deep_target(), drafter=stand.BlendedDrafter(source=source, budget=12)), source


@pytest.mark.parametrize("settings", [{}, {**CONVOLUTIONS, **SELECTOR}, {**GATED, "has_anchor_law": True}])
def test_greedy_output_is_that_of_transformers(settings):
    engine, source = engine_with(head_of(**settings), always=True)
    assert_greedy_equals_transformers(engine, deep_target(), CALL["input_ids"])
    assert source.feature_layers == (3, 1, 4)


def test_a_head_that_knows_the_text_is_drafted_from(monkeypatch):
    """Its laws are replaced by the target's own greedy text, as a head that has learned it would say."""
    plain = stand.wrap(deep_target(), drafter=stand.BlendedDrafter(budget=0)).generate(**CALL, temperature=0.0)
    whole = [prompt + tokens for prompt, tokens in zip(CALL["input_ids"], plain.token_ids, strict=True)]
    head = head_of()

    def knowing(self, estimates, pending, *, temperature, count, width):
        rows = request_rows[-1]
        ids = torch.full((len(rows), 4, 1), 0, dtype=torch.int32)
        for row, history in enumerate(rows):
            text = next(one for one in whole if one[: len(history)] == history.tolist())
            rest = text[len(history) : len(history) + 4]
            ids[row, : len(rest), 0] = torch.tensor(rest, dtype=torch.int32)
        return dflash_laws.BlockLaws(ids, torch.full(ids.shape, 0.95))

    request_rows, run = [], FollowedBlocks.run
    monkeypatch.setattr(type(head), "laws", knowing)
    monkeypatch.setattr(FollowedBlocks, "run", lambda rows, given: request_rows.append(given) or run(rows, given))
    engine, _ = engine_with(head, always=True)
    output = engine.generate(**CALL, temperature=0.0)
    assert output.token_ids == plain.token_ids and output.stats.mean_acceptance_length > 3.5


def test_a_run_that_never_paid_is_left_out_where_nothing_is_learned(monkeypatch):
    """A call that learns tries it; one that does not neither runs it nor holds its rows."""
    engine, source = engine_with(head_of())
    runs, run = [], FollowedBlocks.run
    monkeypatch.setattr(FollowedBlocks, "run", lambda rows, given: runs.append(len(given)) or run(rows, given))
    for _ in range(3):
        engine.generate(**CALL, temperature=1.0, seed=0)
    assert len(runs) >= 16
    before, keys = len(runs), list(source._rows._keys)
    first = engine.generate(**CALL, temperature=1.0, seed=1, learn=False)
    again = engine.generate(**CALL, temperature=1.0, seed=1, learn=False)
    assert len(runs) == before and first.token_ids == again.token_ids
    assert not source._rows._prompts and source._rows._keys == keys


def test_an_overflow_costs_a_draft_and_not_the_call(monkeypatch):
    """Every third run has estimates that are not finite."""
    runs, estimates = [], FollowedBlocks._estimates

    def overflowing(rows, *given):
        runs.append(0)
        return estimates(rows, *given) * (float("inf") if len(runs) % 3 == 2 else 1.0)

    monkeypatch.setattr(FollowedBlocks, "_estimates", overflowing)
    engine, _ = engine_with(head_of(**SELECTOR), always=True)
    output = engine.generate(**CALL, temperature=1.0, seed=0)
    assert len(runs) > 5 and {len(tokens) for tokens in output.token_ids} == {20}


def test_a_head_of_another_model_or_dtype_is_refused():
    target = copy.deepcopy(deep_target())
    head = random_dflash(target)
    with pytest.raises(ValueError, match="DFlashHead must be the wrapped model's own, got one .*; make it with"):
        engine_with(head)
    target.to(torch.bfloat16)
    with pytest.raises(ValueError, match="must be where its model is, in torch.bfloat16 on cpu, got torch.float32"):
        stand.wrap(target, drafter=stand.BlendedDrafter(source=stand.DFlashLaws(head)))
    with pytest.raises(ValueError, match="DFlashHead must be one, a file or a folder, got NoneType; pass the path"):
        engine_with(None)
