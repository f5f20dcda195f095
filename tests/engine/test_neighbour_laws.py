"""Nearest neighbours as a source: states against plain forwards, the target's law, and what calls may leave behind."""

import itertools

import numpy as np
import pytest
import torch
from draft_requests import draft_request
from plain_eagle import plain_features
from tiny_models import SHAPE, tiny_model
from transformers import AutoModelForCausalLM, LlamaConfig
from turns import PROMPTS, restless_calls, take_turns
from two_tokens import assert_greedy_equals_transformers, two_token_statistic

import stand
from stand.drafters.neighbours import laws
from stand.drafters.neighbours.memory import NeighbourMemory


class CheckedLaws(stand.NeighbourLaws):
    """Compares every state of a row with a plain forward over its text, and what is remembered with one over a path."""

    num_checked = num_missing = num_remembered = 0

    def attach(self, model):
        super().attach(model)
        self._model = model

    def _expected(self, tokens):
        return self._projected(plain_features(self._model, tokens)[-1:])[0]

    def _state_of(self, request, row):
        state, before = super()._state_of(request, row), request.histories[row][:-1].tolist()
        if state is None:
            self.num_missing += len(before) > 0
        else:
            np.testing.assert_allclose(state, self._expected(before), atol=2e-3)
            self.num_checked += 1
        return state

    def learn(self, lesson):
        shown, batch = self._shown, lesson.batch
        for node, before, after in list(zip(shown.nodes, shown.befores, shown.afters, strict=True))[::5]:
            row = int(np.searchsorted(batch.offsets, node, side="right")) - 1
            path, history = [], lesson.request.histories[row].tolist()
            while node > batch.offsets[row]:
                path.insert(0, int(batch.token_ids[node]))
                node = batch.offsets[row] + batch.parents[node]
            np.testing.assert_allclose(before, self._expected((history + path)[:-1]), atol=2e-3)
            np.testing.assert_allclose(after, self._expected(history + path), atol=2e-3)
            self.num_remembered += bool(path)
        super().learn(lesson)


def blended(*, budget=14, laws=stand.NeighbourLaws, **settings) -> stand.BlendedDrafter:
    return stand.BlendedDrafter(budget=budget, source=laws(**{"runs": 3, "dim": 16} | settings))


@pytest.mark.parametrize("target", ["llama", "qwen2"])
def test_states_are_the_rows_own_whatever_happens_to_them(target):
    drafter = blended(laws=CheckedLaws)
    engine = stand.wrap(tiny_model(target), drafter=drafter)
    restless_calls(engine, seed=4, second=PROMPTS[:2] * 2, max_rows=2)
    source = drafter.source
    assert source.num_checked > 20 and source.num_remembered > 20 and source.num_missing == 0


def test_calls_that_take_turns_keep_their_rows_apart():
    drafter = blended(laws=CheckedLaws, budget=6)
    take_turns(stand.wrap(tiny_model("llama"), drafter=drafter), PROMPTS[:2], max_new_tokens=5)
    assert drafter.source.num_checked > 8 and drafter.source.num_missing == 0


@pytest.mark.parametrize("target", ["llama", "gemma2"])
def test_greedy_equals_transformers(target):
    engine = stand.wrap(tiny_model(target), drafter=blended())
    assert_greedy_equals_transformers(engine, tiny_model(target), PROMPTS)
    assert len(engine.drafter.source.memory) > 50


@pytest.mark.parametrize(("runs", "least", "most"), [(1, 150, 240), (None, 16, 60)])
def test_it_asks_as_often_as_pays(monkeypatch, runs, least, most):
    """In a call with a seed by size: a model that is read in no time goes on without, but for what is tried again."""
    asked, nearest = [], NeighbourMemory.nearest
    monkeypatch.setattr(NeighbourMemory, "nearest", lambda self, *question: asked.append(1) or nearest(self, *question))
    engine = stand.wrap(tiny_model("llama"), drafter=blended(runs=runs, budget=1))
    for seed in range(3):
        engine.generate(input_ids=PROMPTS[:1], max_new_tokens=80, stop_token_ids=[], temperature=5.0, seed=seed)
    assert least <= len(asked) <= most and len(engine.drafter.source.memory) > 200


def test_the_first_two_tokens_follow_the_target():
    """Chi-square against the exact law; `test_law_source.py` has the control."""
    torch.manual_seed(0)
    target = AutoModelForCausalLM.from_config(LlamaConfig(**{**SHAPE, "vocab_size": 7})).eval()
    drafter = blended(budget=3 * 1000)
    assert two_token_statistic(stand.wrap(target, drafter=drafter), target) < 50
    assert len(drafter.source.memory) > 1000


def test_a_call_that_must_not_learn_leaves_the_memory_alone():
    drafter = blended()
    engine = stand.wrap(tiny_model("llama"), drafter=drafter)
    settings = {"input_ids": PROMPTS, "max_new_tokens": 12, "temperature": 1.0, "seed": 3}
    engine.generate(**settings, learn=False)
    assert drafter.source.memory is None
    engine.generate(**settings)
    size = len(drafter.source.memory)
    one, two = (engine.generate(**settings, learn=False) for _ in range(2))
    assert one.token_ids == two.token_ids and len(drafter.source.memory) == size > 0


def test_a_call_that_must_not_learn_learns_no_prompt_of_a_call_that_was_given_up():
    """Of a run that is closed before a prompt that is ready enters, the next call may show that prompt."""
    drafter, waiting = blended(), list(range(5, 30))
    engine = stand.wrap(tiny_model("llama"), drafter=drafter)
    requests = [stand.Request([5, 6, 7], max_new_tokens=2), stand.Request([5, 6, 8]), waiting]
    run = engine.run(requests, max_rows=2, max_new_tokens=50, temperature=1.0, seed=3, stop_token_ids=[])
    next(run)
    run.close()
    size = len(drafter.source.memory)
    engine.generate(input_ids=waiting, max_new_tokens=2, learn=False)
    assert drafter.source._prompts and len(drafter.source.memory) == size


def test_states_that_are_not_finite_say_nothing(monkeypatch):
    """As in float16: one overflow costs drafts, and not all later laws."""
    project, numbers = stand.NeighbourLaws._projected, itertools.cycle([0.0, 0.0, np.inf, np.nan])

    def overflowing(source, features):
        return project(source, features + next(numbers))

    monkeypatch.setattr(stand.NeighbourLaws, "_projected", overflowing)
    drafter = blended()
    assert_greedy_equals_transformers(stand.wrap(tiny_model("llama"), drafter=drafter), tiny_model("llama"), PROMPTS)
    token = drafter.source.memory._entries.tokens[0]
    answers = drafter.source.memory.nearest([token], np.ones((1, 16), np.float32))
    assert answers.ids[0, 0] >= 0 and np.isfinite(answers.states).all()


@pytest.mark.parametrize("sizes", [{"hidden_size": 2 * SHAPE["hidden_size"]}, {"vocab_size": 9}])
def test_another_model_finds_the_memory_empty(sizes):
    other = AutoModelForCausalLM.from_config(LlamaConfig(**SHAPE | sizes)).eval()
    source, settings = stand.NeighbourLaws(), {"input_ids": PROMPTS[1], "max_new_tokens": 40, "stop_token_ids": []}
    first = stand.wrap(tiny_model("llama"), drafter=stand.BlendedDrafter(budget=8, source=source))
    first.generate(**settings, temperature=1.0)
    second = stand.wrap(other, drafter=stand.BlendedDrafter(budget=8, source=source))
    assert source.memory is None
    second.generate(**settings, temperature=1.0)
    if "hidden_size" in sizes:
        with pytest.raises(ValueError, match="serves one engine at a time, got a model of hidden size"):
            first.generate(**settings)


def test_states_tell_apart_what_tokens_hide():
    """After one token the law is one of two, by what came long before it: contexts of tokens cannot know which."""
    source = stand.NeighbourLaws(runs=1, dim=2)
    source._projection = torch.eye(2)
    drafter = stand.BlendedDrafter(stand.BlendedLookup(), budget=1, kind="deterministic", source=source)
    hits = 0
    for step in range(80):
        kind = step * step % 7 % 2
        feature = torch.tensor([[1.0, 0.1 * (step % 3)], [-1.0, 0.1 * (step % 4)]])[kind : kind + 1]
        history = np.array([4, 5], dtype=np.int32)
        source.follow_prompt(history, feature)
        request = draft_request([history])
        batch = drafter.draft(request)
        next_token = 20 + kind
        is_hit = batch.num_nodes == 2 and batch.token_ids[1] == next_token
        hits += is_hit and step >= 40
        accepted = [np.array([1], np.int32) if is_hit else np.array([], np.int32)]
        top_ids = np.full((batch.num_nodes, 10), -1, np.int32)
        top_probs = np.zeros((batch.num_nodes, 10), np.float32)
        top_ids[0, 0], top_probs[0, 0] = next_token, 1.0
        features = torch.zeros(batch.num_nodes, 2)
        next_tokens = np.array([9 if is_hit else next_token])
        lesson = stand.Lesson(request, batch, accepted, next_tokens, top_ids, top_probs, features=features)
        drafter.follow(lesson)
        drafter.learn(lesson)
    assert hits >= 36


@pytest.mark.parametrize(
    ("name", "value"), [("runs", 0), ("dim", 0), ("most_entries", 0), ("source", 4), ("dim", 2.0), ("runs", True)]
)
def test_settings_out_of_range_are_refused(name, value):
    with pytest.raises(ValueError, match=f"{name} must be"):
        stand.NeighbourLaws(**{name: value})


def attached(**settings) -> stand.NeighbourLaws:
    source = stand.NeighbourLaws(**settings)
    source.attach(tiny_model("llama"))
    return source


def test_a_prompt_is_remembered_token_by_token():
    """But for its first token, before which there is no state, and its last one, whose state no prompt has."""
    source, prompt = attached(dim=16), np.array([5, 9, 11, 4, 7], np.int32)
    features = plain_features(tiny_model("llama"), prompt[:-1].tolist())
    states = source._projected(features)
    source.learn_prompt(prompt)
    source.follow_prompt(prompt, features)
    held = source.memory._entries
    assert len(source.memory) == 3 and held.tokens[:3].tolist() == [9, 11, 4]
    assert held.top_ids[:3, 0].tolist() == [11, 4, 7] and (held.top_probs[:3, 0] == 1).all()
    np.testing.assert_array_equal(held.afters[:3], states[1:])
    np.testing.assert_allclose(held.befores[:3], source.memory._directions(states[:-1]), atol=1e-6)


def test_projected_states_are_as_long_as_they_were_and_finite():
    source = attached(dim=256)
    features = torch.randn(64, SHAPE["hidden_size"], generator=torch.Generator().manual_seed(0))
    ratios = np.linalg.norm(source._projected(features), axis=1) / features.norm(dim=1).numpy()
    assert abs(ratios.mean() - 1) < 0.1
    features[0, 0], features[1, 0], features[2] = torch.inf, -torch.inf, torch.nan
    states = source._projected(features)
    assert (states[:3] == 0).all() and (states[3:] != 0).any(axis=1).all()


def test_what_a_run_costs_of_a_step_follows_from_the_bytes_of_the_weights():
    num_bytes = sum(weight.nbytes for weight in tiny_model("llama").parameters())
    assert laws._share_of_step(tiny_model("llama")) == pytest.approx(0.4e-3 * 15e9 / num_bytes)


def test_the_oldest_state_goes(monkeypatch):
    monkeypatch.setattr(laws, "MOST_ROWS", 3)
    states: dict[int, np.ndarray] = {}
    for key in range(5):
        laws._keep(states, key, np.zeros(2))
    assert list(states) == [2, 3, 4]


def test_a_row_keeps_its_newest_state_alone():
    drafter, sizes = blended(), []
    engine = stand.wrap(tiny_model("llama"), drafter=drafter)
    settings = {"max_new_tokens": 12, "temperature": 1.0, "seed": 3, "stop_token_ids": [], "max_rows": 3}
    list(engine.run(PROMPTS[:3], on_step=lambda run: sizes.append(len(drafter.source._states)), **settings))
    assert max(sizes) == 3


def test_a_rows_own_state_comes_before_its_prompts():
    source, history = attached(dim=4), np.array([5, 9, 11], np.int32)
    own, of_prompt = np.ones(4, np.float32), np.zeros(4, np.float32)
    source._prompts[laws._digest(history[:-1])] = of_prompt
    first, later = draft_request([history]), draft_request([history], step=3)
    assert source._state_of(first, 0) is of_prompt and source._state_of(later, 0) is None
    source._states[laws._key(first, 0, history[:-1], 2)] = own
    assert source._state_of(first, 0) is own and source._state_of(later, 0) is own


def test_a_lesson_that_was_not_followed_teaches_nothing():
    """As where a call was given up between the two."""
    drafter, lessons = blended(), []
    engine = stand.wrap(tiny_model("llama"), drafter=drafter)
    source, learn = drafter.source, drafter.source.learn
    source.learn = lambda lesson: lessons.append(lesson) or learn(lesson)
    engine.generate(input_ids=PROMPTS[1], max_new_tokens=4, seed=3, stop_token_ids=[])
    size = len(source.memory)
    learn(lessons[0])
    source.follow(lessons[0])
    learn(lessons[1])
    assert len(lessons) > 1 and len(source.memory) == size
