"""EAGLE's drafts: recorded laws against a slow twin, what calls and rows may do, and settings."""

from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from estimated_rows import EstimatedRows
from failures import failing_after
from plain_eagle import plain_logits, random_head
from plain_eagle3 import plain_logits3, random_eagle3
from tiny_models import SHAPE, VOCABULARY_SIZE, tiny_model
from transformers import AutoModelForCausalLM, LlamaConfig
from turns import PROMPTS, restless_calls, take_turns
from two_tokens import assert_greedy_equals_transformers, two_token_statistic

import stand
from stand.drafters.eagle import followed_rows
from stand.drafters.eagle.eagle3_head import Eagle3Head
from stand.drafters.eagle.growth import PAPER_SHAPE
from stand.drafters.heads import followed_features
from stand.fusion.forwards.attention import FusedAttention
from stand.trees import DraftBatch, DraftTree, LookupTree, TreeShape
from stand.verifiers import fitting_names

TARGETS = ("llama", "qwen2")
FREQUENT = list(range(0, VOCABULARY_SIZE, 2))
HEADS = [  # targets, and how heads are made for them: EAGLE-3's for any
    *((target, random_head) for target in TARGETS),
    ("qwen2", random_eagle3),
    ("qwen3", partial(random_eagle3, kind="qwen3", num_layers=2, vocabulary=FREQUENT, norm_output=True)),
]


unproven_model = tiny_model.__wrapped__  # another one at every call


class CheckedDrafter(stand.EagleDrafter):
    """Compares every recorded law with a plain forward over the node's whole context."""

    num_checked = 0

    def draft(self, request) -> DraftBatch:
        batch = super().draft(request)
        batch.check()
        for row, history in enumerate(request.histories):
            self._check_row(batch[row], history.tolist(), int(request.max_depths[row]))
        return batch

    def _check_row(self, draft, history: list[int], max_depth: int) -> None:
        paths, taken = {0: []}, {}
        for node in range(1, draft.num_nodes):
            parent = int(draft.parents[node])
            paths[node] = [*paths[parent], int(draft.token_ids[node])]
            assert len(paths[node]) <= min(max_depth, self.runs)
            plain = plain_logits3 if isinstance(self.head, Eagle3Head) else plain_logits
            logits = plain(self.head, self._model, history, paths[parent]) / self.temperature
            best = np.argsort(-logits)[: self.law_size]
            law = np.exp(logits - logits.max()) * np.isin(np.arange(len(logits)), best)
            law[taken.setdefault(parent, [])] = 0.0
            taken[parent].append(int(draft.token_ids[node]))
            recorded = np.zeros(VOCABULARY_SIZE)
            support = draft.support_ids[parent]
            recorded[support[support >= 0]] = draft.law[node][support >= 0]
            np.testing.assert_allclose(recorded, law / law.sum(), atol=1e-4)
            self.num_checked += 1

    def attach(self, model, fingerprint):
        super().attach(model, fingerprint)
        self._model = model


def checked(target: str, make=random_head, **settings) -> CheckedDrafter:
    return CheckedDrafter(make(tiny_model(target), scale=1.5), num_candidates=7, temperature=1.3, **settings)


@pytest.mark.parametrize(("target", "make"), HEADS)
@pytest.mark.parametrize("settings", [{"budget": 14, "runs": 4}, {"shape": TreeShape.parse("branching:2,2,1")}])
def test_recorded_laws_are_the_heads_own_whatever_happens_to_the_rows(target, make, settings):
    drafter = checked(target, make, **settings)
    engine = stand.wrap(tiny_model(target), drafter=drafter)
    restless_calls(engine, seed=3)
    assert drafter.num_checked > 60


def test_a_row_that_goes_on_is_begun_once(monkeypatch):
    """Its features are noted from step to step; it would be run from its first token on otherwise."""
    begun, begin = [], followed_rows.FollowedRows._begin
    monkeypatch.setattr(
        followed_rows.FollowedRows,
        "_begin",
        lambda self, place, *given: begun.append(place) or begin(self, place, *given),
    )
    engine = stand.wrap(tiny_model("llama"), drafter=checked("llama", budget=6))
    output = engine.generate(input_ids=PROMPTS[:2], max_new_tokens=9, stop_token_ids=[], temperature=1.0, seed=3)
    assert output.stats.num_forwards > 2 and sorted(begun) == [0, 1]


@pytest.mark.parametrize("fuse", [True, False])
def test_the_heads_runs_are_fused_where_the_targets_are(fuse, monkeypatch):
    fused, own = set(), FusedAttention.__call__

    def watched(self, *args, **kwargs):
        fused.add(self.module)
        return own(self, *args, **kwargs)

    monkeypatch.setattr(FusedAttention, "__call__", watched)
    model = unproven_model("llama")
    drafter = stand.EagleDrafter(random_head(model), budget=4)
    engine = stand.wrap(model, drafter=drafter, fuse=fuse)
    engine.generate(input_ids=PROMPTS[:2], max_new_tokens=4, temperature=0.0)
    assert (drafter.head.layers[0].self_attn in fused) == fuse


@pytest.mark.parametrize("make", [random_head, random_eagle3])
def test_calls_that_take_turns_keep_their_rows_apart(make):
    """What is held is known by its text: two streams of one engine, step by step."""
    drafter = checked("llama", make, budget=4, runs=3)
    engine = stand.wrap(tiny_model("llama"), drafter=drafter)
    calls = take_turns(engine, PROMPTS[:2], max_new_tokens=5)
    assert drafter.num_checked > 15
    assert all(call.stats.num_draft_tokens > 4 for call in calls)


@pytest.mark.parametrize("num_runs", range(4))
def test_after_an_error_rows_begin_anew(num_runs, monkeypatch):
    """Where the head fails on a prompt, on the first draft or on a later one."""
    drafter = checked("llama", budget=4, runs=3)
    engine = stand.wrap(tiny_model("llama"), drafter=drafter)
    settings = {"input_ids": PROMPTS[:1], "max_new_tokens": 6, "temperature": 1.0, "seed": 1, "stop_token_ids": []}
    with monkeypatch.context() as patch:
        work = drafter.head.forward
        patch.setattr(drafter.head, "forward", failing_after(num_runs, work, MemoryError("no room")))
        with pytest.raises(MemoryError, match="no room"):
            engine.generate(**settings)
    before = drafter.num_checked
    assert engine.generate(**settings).stats.num_draft_tokens == drafter.num_checked - before > 4


@pytest.mark.parametrize(("target", "make"), HEADS)
@pytest.mark.parametrize("settings", [{"budget": 16}, {"shape": PAPER_SHAPE}])
def test_greedy_equals_transformers(target, make, settings):
    drafter = stand.EagleDrafter(make(tiny_model(target)), **settings)
    engine = stand.wrap(tiny_model(target), drafter=drafter)
    assert_greedy_equals_transformers(engine, tiny_model(target), PROMPTS)


@pytest.fixture(scope="module")
def small_target():
    """Seven tokens, so that an untrained head's drafts are often kept."""
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(LlamaConfig(**{**SHAPE, "vocab_size": 7})).eval()


@pytest.mark.parametrize("sharpened", [1.0, 0.5])
def test_the_first_two_tokens_follow_the_target(small_target, sharpened):
    """Chi-square against the exact law; a head that records a flatter law than it draws from must be seen."""
    drafter = LyingDrafter(random_head(small_target, scale=1.5), budget=3 * 1000, runs=2)
    drafter.sharpened = sharpened
    engine = stand.wrap(small_target, drafter=drafter)
    statistic = two_token_statistic(engine, small_target)
    assert (statistic < 50) == (sharpened == 1.0), statistic


class LyingDrafter(stand.EagleDrafter):
    """Draws from laws sharpened to temperature `sharpened`, and records the flatter ones."""

    sharpened = 1.0

    def draft(self, request) -> DraftBatch:
        self.temperature = self.sharpened
        drawn = super().draft(request)
        law = drawn.law**self.sharpened
        law /= np.maximum(law.sum(axis=1, keepdims=True), 1e-9)
        columns = {name: getattr(drawn, name) for name in drawn.__dataclass_fields__}
        return DraftBatch(**{**columns, "law": law.astype(np.float32)})


def test_a_fresh_engine_repeats_itself_and_a_used_one_too():
    """Nothing is learned: earlier calls change nothing."""
    settings = {"input_ids": PROMPTS, "max_new_tokens": 10, "temperature": 1.0, "seed": 7}
    fresh, used = (
        stand.wrap(tiny_model("llama"), drafter=stand.EagleDrafter(random_head(tiny_model("llama")), budget=8))
        for _ in range(2)
    )
    used.generate(**{**settings, "seed": 8})
    first = fresh.generate(**settings).token_ids
    assert used.generate(**settings).token_ids == first == fresh.generate(**settings, learn=False).token_ids


def test_the_most_nodes_of_a_step_are_known_before_it():
    assert stand.EagleDrafter("head", shape=TreeShape.chain(3)).most_nodes(4) == 12
    assert stand.EagleDrafter("head", budget=7).most_nodes(4) == 7


@pytest.mark.parametrize(
    ("settings", "rule"),
    [
        ({"shape": TreeShape.chain(3), "budget": 2}, "budget and runs follow from the shape, got budget=2, runs=None"),
        ({"shape": TreeShape.chain(3), "runs": 2}, "budget and runs follow from the shape"),
        ({"shape": "paper"}, "shape must be a TreeShape, got 'paper'; PAPER_SHAPE"),
    ],
)
def test_settings_that_a_shape_would_ignore_are_refused(settings, rule):
    with pytest.raises(ValueError, match=rule):
        stand.EagleDrafter("head", **settings)


@pytest.mark.parametrize("settings", [{"budget": -1}, {"runs": 0}, {"temperature": 0.0}, {"num_candidates": 0}])
def test_settings_out_of_range_are_refused(settings):
    with pytest.raises(ValueError, match=next(iter(settings))):
        stand.EagleDrafter("head", **settings)


def test_a_rule_for_chains_takes_chains_alone():
    model = tiny_model("llama")
    stand.wrap(model, drafter=stand.EagleDrafter(random_head(model), shape=TreeShape.chain(3)), verifier="block")
    with pytest.raises(ValueError, match="block"):
        stand.wrap(model, drafter=stand.EagleDrafter(random_head(model)), verifier="block")


@pytest.mark.parametrize("rule", ["ranked_traversal", "ot_traversal"])
def test_rules_over_sets_refuse_wide_laws_when_the_engine_is_made(rule):
    model, shape = tiny_model("llama"), TreeShape.parse("branching:2,1")
    for narrow, wide in (
        [stand.EagleDrafter(random_head(model), shape=shape, num_candidates=width) for width in (14, 15)],
        [stand.FixedShapeDrafter(LookupTree(num_candidates=width), shape) for width in (14, 15)],
    ):
        assert rule in fitting_names(stand.wrap(model, drafter=narrow, verifier=rule).drafter.typical_draft())
        with pytest.raises(ValueError, match=f"{rule}.*at most 14 .* got 15; .* rules that fit: traversal, match, c"):
            stand.wrap(model, drafter=wide, verifier=rule)
        assert rule not in fitting_names(wide.typical_draft())


def test_a_head_of_another_model_is_refused():
    with pytest.raises(ValueError, match="another model"):
        stand.wrap(tiny_model("llama"), drafter=stand.EagleDrafter(random_head(tiny_model("qwen2"))))


def test_of_many_prompts_the_oldest_are_forgotten(monkeypatch):
    """Steps without drafts never ask for them: newer ones must still find a place."""
    monkeypatch.setattr(followed_features, "MOST_PROMPTS", 3)
    target = tiny_model("llama")
    rows = EstimatedRows(target, random_head(target))
    prompts = [np.array([5, 6, number, 7], dtype=np.int32) for number in range(6)]
    for number, prompt in enumerate(prompts):
        rows.follow_prompt(prompt, torch.full((3, target.config.hidden_size), float(number)))
    monkeypatch.setattr(followed_features, "prefill_features", None)  # computing one again would fail
    with torch.inference_mode():
        rows.hold(prompts[3:])
    assert [float(fresh[0, 0]) for fresh in rows._fresh] == [3.0, 4.0, 5.0] and not rows._prompts


def test_the_head_does_not_run_again_where_no_node_is_left(monkeypatch):
    """A budget that the first level uses up."""
    drafter, runs = checked("llama", budget=1, runs=5), []
    engine = stand.wrap(tiny_model("llama"), drafter=drafter)
    monkeypatch.setattr(drafter, "_extend", lambda *asked: runs.append(asked))
    engine.generate(input_ids=PROMPTS[0], max_new_tokens=12, temperature=1.0, seed=3, stop_token_ids=[])
    assert drafter.num_checked > 0 and not runs


def new_rows(target="llama") -> EstimatedRows:
    return EstimatedRows(tiny_model(target), random_head(tiny_model(target)))


@torch.inference_mode()
def test_a_row_that_joins_one_that_is_held_is_begun_beside_it():
    held, joining = np.array([5, 6, 7, 8], dtype=np.int32), np.array([9, 6, 7], dtype=np.int32)
    rows = new_rows()
    rows.hold([held])
    for found, expected in zip(rows.catch_up([joining, held]), new_rows().catch_up([joining, held]), strict=True):
        np.testing.assert_allclose(found, expected, atol=1e-5)


@torch.inference_mode()
def test_steps_of_rows_that_are_not_held_are_passed_over():
    """As where the step that they made had no drafts, for which nobody asked."""
    held, others = np.array([5, 6, 7], dtype=np.int32), [np.array([3, number, 7], dtype=np.int32) for number in (4, 8)]
    batch = DraftBatch.concatenate([DraftTree.chain([7])] * 2)
    features = torch.ones(2, tiny_model("llama").config.hidden_size)
    lesson = SimpleNamespace(
        batch=batch, request=SimpleNamespace(histories=others), accepted=[np.zeros(0, int)] * 2, features=features
    )
    rows = new_rows()
    rows.hold([held])
    rows.follow(lesson)
    assert torch.equal(rows.catch_up([held])[1], new_rows().catch_up([held])[1])


def test_a_target_of_one_layer_is_served():
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(LlamaConfig(**{**SHAPE, "num_hidden_layers": 1})).eval()
    drafter = stand.EagleDrafter(random_head(model), budget=6)
    assert_greedy_equals_transformers(stand.wrap(model, drafter=drafter), model, PROMPTS[:2])
