"""What EAGLE-3's head says of rows and of trees behind them: its formulas, and what is told of rows in between."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from estimated_rows import EstimatedRows
from plain_eagle3 import deep_target, layer_inputs, plain_logits3, random_eagle3
from plain_lessons import path_to, plain_lesson, texts

import stand
from stand.drafters.eagle import followed_rows
from stand.drafters.heads import followed_features

LAYERS = (3, 1, 4)
NORMS = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")
HEADS = {
    "llama": {},
    "llama, two layers": {"num_layers": 2},
    "qwen3": {"kind": "qwen3"},
    **{norm: {norm: True} for norm in NORMS},
    "qwen3, two layers, all norms": {"kind": "qwen3", "num_layers": 2, **dict.fromkeys(NORMS, True)},
    "some tokens": {"vocabulary": [2, 3, 5, 8, 13, 21, 34, 60]},
    "another size": {"size": 24, "norm_output": True},
}
LONG, SHORT, PENDING = [5, 9, 11, 4, 5, 9, 30, 31, 32, 33, 7], [7, 8, 9], [3]  # more than two chunks; no pair at all
PARENTS = [-1, 0, 0, 2, 2, 4]  # of the nodes of every row's tree
RUNS = [(1, 2), (3, 4), (5,)]  # siblings in one run


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch):
    monkeypatch.setattr(followed_rows, "PROMPT_CHUNK", 4)


def rows_of(head) -> EstimatedRows:
    return EstimatedRows(deep_target(), head)


def step(rows, head, histories, *, keeps) -> list[np.ndarray]:
    """A tree behind each row, every node's estimate against the formulas; the texts behind it.

    keeps: of each row the node whose path is kept.
    """
    tokens = np.random.default_rng(len(histories[0])).integers(3, 61, (len(histories), len(PARENTS)))
    tokens[:, 0] = [history[-1] for history in histories]
    places, estimates = rows.catch_up(histories)
    assert places.tolist() == [row for row, history in enumerate(histories) if len(history) > 1]
    known = {(row, 0): estimate for row, estimate in zip(places.tolist(), estimates, strict=True)}
    for nodes in RUNS:
        asked = [(row, node) for row in places.tolist() for node in nodes]
        above = [(row, PARENTS[node]) for row, node in asked]
        estimates = rows.extend(
            [row for row, _ in asked], [int(tokens[place]) for place in asked],
            [None if node == 0 else node - 1 for _, node in above], torch.stack([known[place] for place in above]),
        )  # fmt: skip
        known |= zip(asked, estimates, strict=True)
    guessed = slice(None) if head.vocabulary is None else head.vocabulary.numpy()
    for (row, node), estimate in known.items():
        drafted = tokens[row, path_to(PARENTS, node)].tolist()
        expected = plain_logits3(head, deep_target(), histories[row].tolist(), drafted)[guessed]
        np.testing.assert_allclose(head.logits(estimate).numpy(), expected, atol=1e-4)
    rows.follow(lesson(histories, tokens, keeps))
    kept = [tokens[row, path_to(PARENTS, node)].tolist() for row, node in enumerate(keeps)]
    return texts(*([*history, *path, 6] for history, path in zip(histories, kept, strict=True)))


def lesson(histories, tokens, keeps) -> SimpleNamespace:
    return plain_lesson(deep_target(), LAYERS, histories, tokens, PARENTS, keeps)


@pytest.mark.parametrize("settings", HEADS.values(), ids=HEADS)
@torch.inference_mode()
def test_estimates_are_those_of_the_formulas(settings, monkeypatch):
    """Rows come, go and change places, one is begun beside a held one; features of those that stay are not run anew."""
    run_anew, prefill_features = [], followed_features.prefill_features

    def watched(model, cache, token_ids, **asked):
        run_anew.append(token_ids.tolist())
        return prefill_features(model, cache, token_ids, **asked)

    monkeypatch.setattr(followed_features, "prefill_features", watched)
    head = random_eagle3(deep_target(), feature_layers=LAYERS, **settings)
    rows = rows_of(head)
    long, short, _ = step(rows, head, texts(LONG, SHORT, PENDING), keeps=(4, 0, 0))
    joining = texts([40, 41, 42, 43, 44, 45])[0]
    step(rows, head, [short, joining, long], keeps=(5, 0, 1))
    assert run_anew == [LONG[:-1], SHORT[:-1], [40, 41, 42, 43, 44]]


@torch.inference_mode()
def test_rows_that_another_call_interrupted_are_run_anew():
    head = random_eagle3(deep_target(), feature_layers=LAYERS)
    rows = rows_of(head)
    long, short = step(rows, head, texts(LONG, SHORT), keeps=(4, 1))
    rows.hold(texts([50, 51, 52]))
    step(rows, head, [short, long], keeps=(0, 0))


@torch.inference_mode()
def test_features_are_combined_once(monkeypatch):
    """A prompt's wait for its first draft, those of a step for the next one; the target runs for none of them."""
    head, seen = random_eagle3(deep_target(), feature_layers=LAYERS, fc_norm=True), []
    combined = head.combined
    monkeypatch.setattr(head, "combined", lambda hidden: seen.append(len(hidden)) or combined(hidden))
    monkeypatch.setattr(followed_features, "prefill_features", None)  # calling it would fail
    rows = rows_of(head)
    for history in texts(LONG, SHORT, PENDING):
        given = layer_inputs(deep_target(), history.tolist(), LAYERS)[:-1]
        rows.follow_prompt(history, given)
    assert seen == [len(LONG) - 1, len(SHORT) - 1, 0]
    histories = step(rows, head, texts(LONG, SHORT, PENDING), keeps=(4, 0, 0))
    assert seen[3:] == [5]  # the roots of three rows and two kept nodes
    step(rows, head, histories, keeps=(0, 0, 0))


@torch.inference_mode()
def test_a_step_of_rows_that_are_not_held_is_passed_over():
    head = random_eagle3(deep_target(), feature_layers=LAYERS, norm_before_fc=True)
    rows = rows_of(head)
    rows.hold(texts(LONG))
    rows.follow(lesson(texts(SHORT), np.full((1, len(PARENTS)), 9), (1,)))
    step(rows, head, texts(LONG), keeps=(0,))


def test_prompts_that_nobody_drafts_for_are_not_kept():
    laws = stand.EagleLaws(random_eagle3(deep_target(), feature_layers=LAYERS))
    engine = stand.wrap(deep_target(), drafter=stand.BlendedDrafter(source=laws, budget=0))
    engine.generate(input_ids=[LONG, SHORT, PENDING], max_new_tokens=3, max_rows=2)
    assert not laws._rows._prompts
