"""What a block head says behind rows: its formulas, and what is told of rows in between."""

import copy
from dataclasses import replace

import numpy as np
import pytest
import torch
from estimated_rows import EstimatedBlocks
from plain_dflash import plain_block
from plain_eagle3 import deep_target, layer_inputs
from plain_lessons import path_to, plain_lesson, texts
from random_dflash import CONVOLUTIONS, MARKOV, SELECTOR, random_dflash

import stand
from stand.drafters.dflash import followed_blocks
from stand.drafters.heads import followed_features

LAYERS = (3, 1, 4)
WINDOWS = {"windows": (True, False)}
HEADS = {
    "plain": {},
    "one layer, two places": {"num_layers": 1, "block_size": 2},
    "the first place guesses": {"has_anchor_law": True},
    "windows": WINDOWS,
    "windows shorter than a block": {**WINDOWS, "block_size": 9},
    "causal": {"is_causal": (True, True)},
    "windows, causal there": {**WINDOWS, "is_causal": (True, False)},
    "windows, causal elsewhere": {**WINDOWS, "is_causal": (False, True)},
    "all windows and causal": {"windows": (True, True), "is_causal": (True, True)},
    "DFlash 2": {**CONVOLUTIONS, **SELECTOR},
    "three taps": {"conv_kernel_size": 3, "conv_group_size": 8, **WINDOWS},
    "taps of a whole block": {"conv_kernel_size": 5, "conv_group_size": 32},
    "DSpark": {**MARKOV, "has_anchor_law": True},
    "scales": {"input_embedding_scale": 3.0, "output_multiplier": 0.5, "final_logit_softcapping": 2.0},
    "some tokens": {"vocabulary": [2, 3, 5, 8, 13, 21, 34, 60]},
}
LONG, SHORT, PENDING = [5, 9, 11, 4, 5, 9, 30, 31, 32, 33, 7], [7, 8, 9], [3]  # more than two chunks; no feature at all
PARENTS = [-1, 0, 0, 2, 2, 4]  # of the nodes of every row's tree


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch):
    monkeypatch.setattr(followed_blocks, "PROMPT_CHUNK", 4)


def head_of(**settings):
    return random_dflash(deep_target(), **{"feature_layers": LAYERS} | settings)


def rows_of(head) -> EstimatedBlocks:
    return EstimatedBlocks(deep_target(), head)


@torch.inference_mode()
def assert_formulas(rows, head, histories) -> None:
    estimates = rows.run(histories)
    assert estimates.shape[:2] == (len(histories), head.settings.num_guesses)
    for history, found in zip(histories, estimates, strict=True):
        expected = plain_block(head, deep_target(), history.tolist())
        torch.testing.assert_close(found, expected, atol=2e-4, rtol=1e-4)


def step(rows, histories, *, keeps) -> list[np.ndarray]:
    """The target scores a tree behind each row; the texts behind it.

    keeps: of each row the node whose path is kept.
    """
    tokens = np.random.default_rng(len(histories[0])).integers(3, 61, (len(histories), len(PARENTS)))
    tokens[:, 0] = [history[-1] for history in histories]
    rows.follow(plain_lesson(deep_target(), LAYERS, histories, tokens, PARENTS, keeps))
    kept = [tokens[row, path_to(PARENTS, node)].tolist() for row, node in enumerate(keeps)]
    return texts(*([*history, *path, 6] for history, path in zip(histories, kept, strict=True)))


@pytest.fixture
def run_anew(monkeypatch) -> list[list[int]]:
    """The texts whose features the target computes for a head alone."""
    seen, prefill_features = [], followed_features.prefill_features

    def watched(model, cache, token_ids, **asked):
        seen.append(token_ids.tolist())
        return prefill_features(model, cache, token_ids, **asked)

    monkeypatch.setattr(followed_features, "prefill_features", watched)
    return seen


@pytest.mark.parametrize("settings", HEADS.values(), ids=HEADS)
def test_estimates_are_those_of_the_formulas(settings, run_anew):
    """Rows come, go and change places, one is begun beside held ones; features of those that stay are not run anew."""
    head = head_of(**settings)
    rows = rows_of(head)
    histories = texts(LONG, SHORT, PENDING)
    assert_formulas(rows, head, histories)
    long, short, pending = step(rows, histories, keeps=(4, 0, 5))
    joining = texts([40, 41, 42, 43, 44, 45])[0]
    assert_formulas(rows, head, [short, joining, long])
    assert run_anew == [LONG[:-1], SHORT[:-1], [40, 41, 42, 43, 44]]
    short, joining, long = step(rows, [short, joining, long], keeps=(1, 5, 0))
    assert_formulas(rows, head, [long, short])
    assert len(run_anew) == 3 and len(pending) == 5


CHANGED = {
    "places see each other": ("causal", {"is_causal": (False, False)}),
    "a place sees those before it": ("plain", {"is_causal": (False, True)}),
    "another mask": ("plain", {"mask_token_id": 4}),
    "no scale": ("scales", {"input_embedding_scale": 1.0}),
    "no convolutions": ("DFlash 2", {"conv_kernel_size": 0}),
}


def is_apart(head, **changed) -> bool:
    own = plain_block(head, deep_target(), LONG)
    other = plain_block(head, deep_target(), LONG, settings=replace(head.settings, **changed))
    return float((own - other).abs().max()) > 0.05


@pytest.mark.parametrize(("kind", "changed"), CHANGED.values(), ids=CHANGED)
def test_other_formulas_are_told_apart(kind, changed):
    """By far more than rows may differ from the formulas."""
    head = head_of(**HEADS[kind])
    assert not is_apart(head)
    assert is_apart(head, **changed)


@pytest.mark.parametrize("window", [3, 5, None])
def test_other_windows_are_told_apart(window):
    head = head_of(**WINDOWS)
    config = copy.deepcopy(head.settings.config)
    config.sliding_window, config.layer_types = window, ["sliding_attention" if window else "full_attention"] * 2
    config.layer_types[1] = "full_attention"
    assert is_apart(head, config=config)


def test_prompts_that_were_shown_are_not_run_anew(run_anew):
    head = head_of()
    rows = rows_of(head)
    for history in texts(LONG, PENDING):
        rows.follow_prompt(history, layer_inputs(deep_target(), history.tolist(), LAYERS)[:-1])
    assert_formulas(rows, head, texts(LONG, SHORT, PENDING))
    assert run_anew == [SHORT[:-1]] and not rows._prompts


def test_equal_rows_are_begun_once_and_part(run_anew):
    head = head_of(**WINDOWS)
    rows = rows_of(head)
    assert_formulas(rows, head, texts(SHORT, LONG, LONG, LONG))
    assert run_anew == [SHORT[:-1], LONG[:-1]]
    histories = step(rows, texts(SHORT, LONG, LONG, LONG), keeps=(0, 5, 1, 5))
    assert_formulas(rows, head, histories)
    histories = step(rows, histories, keeps=(5, 0, 3, 1))
    assert_formulas(rows, head, [histories[3], histories[1], histories[0], histories[1]])
    assert len(run_anew) == 2


@torch.inference_mode()
def test_features_of_many_steps_wait_for_a_run(run_anew):
    """As where a run does not pay: rows are held, one of them comes later."""
    head = head_of(**CONVOLUTIONS)
    rows = rows_of(head)
    histories = texts(LONG, SHORT)
    for keeps in ((5, 0), (0, 4), (3, 5)):
        rows.hold(histories)
        histories = step(rows, histories, keeps=keeps)
    histories = [*histories, *texts(PENDING, [50, 51, 52])]
    assert_formulas(rows, head, histories)
    assert run_anew == [LONG[:-1], SHORT[:-1], [50, 51]]


def test_a_run_again_says_the_same():
    """What a block has written is forgotten."""
    head = head_of()
    rows = rows_of(head)
    histories = texts(LONG, SHORT, PENDING)
    with torch.inference_mode():
        first = rows.run(histories)
        assert torch.equal(rows.run(histories), first)
    assert_formulas(rows, head, [histories[1], histories[0]])


@torch.inference_mode()
def test_rows_that_another_call_interrupted_are_run_anew(run_anew):
    head = head_of()
    rows = rows_of(head)
    assert_formulas(rows, head, texts(LONG, SHORT))
    long, short = step(rows, texts(LONG, SHORT), keeps=(4, 1))
    rows.hold(texts([50, 51, 52]))
    assert_formulas(rows, head, [short, long])
    assert len(run_anew) == 5


@torch.inference_mode()
def test_a_step_of_rows_that_are_not_held_is_passed_over():
    head = head_of()
    rows = rows_of(head)
    rows.hold(texts(LONG))
    step(rows, texts(SHORT), keeps=(1,))
    assert_formulas(rows, head, texts(LONG))


@torch.inference_mode()
def test_a_run_that_fails_holds_no_row(monkeypatch, run_anew):
    """Half-written keys are not gone on from."""
    head = head_of()
    rows = rows_of(head)
    assert_formulas(rows, head, texts(LONG, SHORT))
    histories = step(rows, texts(LONG, SHORT), keeps=(4, 1))
    with monkeypatch.context() as broken:
        broken.setattr(type(head), "forward", lambda *_, **__: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            rows.run(histories)
    assert_formulas(rows, head, histories)
    assert len(run_anew) == 4


@pytest.mark.parametrize(("dtype", "tolerance"), [("float64", 1e-5), ("bfloat16", 0.1)])
def test_the_targets_dtype_is_the_heads(dtype, tolerance):
    """Angles stay in float32. Estimates are those of the same weights in float32, but for rounding."""
    target = copy.deepcopy(deep_target()).to(getattr(torch, dtype))
    settings = {"feature_layers": LAYERS, **CONVOLUTIONS, **MARKOV, **WINDOWS}
    head, plain = random_dflash(target, **settings), random_dflash(deep_target(), **settings)
    plain.load_state_dict(head.state_dict())
    histories = texts(LONG, SHORT, PENDING)
    with torch.inference_mode():
        found = EstimatedBlocks(target, head).run(histories)
        expected = rows_of(plain).run(histories)
    assert found.dtype == target.dtype and head._rotary[0].inv_freq.dtype == torch.float32
    assert float((found.float() - expected).norm() / expected.norm()) < tolerance


def test_prompts_that_nobody_drafts_for_are_not_kept():
    laws = stand.DFlashLaws(head_of())
    engine = stand.wrap(deep_target(), drafter=stand.BlendedDrafter(source=laws, budget=0))
    engine.generate(input_ids=[LONG, SHORT, PENDING], max_new_tokens=3, max_rows=2)
    assert not laws._rows._prompts
