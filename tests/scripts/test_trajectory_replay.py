"""Recorded trajectories on a real forward: rows follow their recordings, whatever the model says."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

pytest.importorskip("triton")

from draft_requests import draft_request
from fake_events import use_fake_events
from gpu_parts.bench_model import BenchModel
from gpu_parts.trajectory_replay import (
    RecordedRule,
    ReplayBackend,
    ReplayBench,
    ReplayEngine,
    ReplaySizes,
    TimedStep,
    batches_of,
    free_token,
    made_up_recordings,
)
from plain_kernels import use_plain_kernels
from table_parts.token_drafter import TokenDrafter
from tiny_models import tiny_model
from workloads.model_shapes import SMOKE_SHAPE
from workloads.recordings import Recording

import stand
from stand.drafters.costs.step_cost import CostTable, StepCost
from stand.gpu.captured_step import CapturedStep
from stand.gpu.device_rule import MatchRule
from stand.gpu.packets.step_size import CLOSE_NUM_TOKENS, NUM_TOKENS
from stand.trees import BlendedLookup, DraftBatch, DraftTree
from stand.verifiers import VerifierNoise

END = 299
FREE_NODES = CostTable((StepCost(num_rows=1, length=50, tokens=(1, 40), seconds=(1.0, 1.0)),))
DEAR_NODES = CostTable((StepCost(num_rows=1, length=50, tokens=(1, 40), seconds=(1.0, 4000.0)),))


@pytest.fixture(scope="module")
def bench(interpreter) -> BenchModel:
    with pytest.MonkeyPatch.context() as patch:
        use_plain_kernels(patch)
        found = BenchModel(SMOKE_SHAPE, device=torch.device("cpu"), dtype=torch.float32, max_positions=256)
        found.engine.backend.fusion = None  # interpreted norms and products would take seconds
        yield found


def recordings(num_samples: int = 2, tokens: int = 30) -> list[Recording]:
    """Samples of one problem, of different lengths, that repeat a phrase with a number of their own."""
    phrase = np.array([50, 51, 52, 53, 54], dtype=np.int32)
    prompt = np.array([7, 50, 51], dtype=np.int32)
    lengths = [tokens + 3 * sample for sample in range(num_samples)]
    return [
        Recording(0, sample, prompt, np.append(np.resize(phrase, length), np.int32(60)))
        for sample, length in enumerate(lengths)
    ]


def engine_of(bench: BenchModel, *, budget: int = 12) -> ReplayEngine:
    engine = ReplayEngine(bench.engine)
    engine.drafter = TokenDrafter(BlendedLookup(), budget=budget, kind="deterministic")
    return engine


@pytest.mark.long
def test_rows_continue_as_recorded_and_drafts_save_steps(bench):
    engine, rows = engine_of(bench), recordings()
    expected = [[*recording.tokens.tolist(), END] for recording in rows]
    plain = engine.replay(rows, end_token=END, draft=False)
    drafted = engine.replay(rows, end_token=END)
    assert plain.token_ids == drafted.token_ids == expected
    assert plain.stats.mean_acceptance_length == 1.0 and plain.stats.num_draft_tokens == 0
    assert drafted.stats.mean_acceptance_length > 2  # drafts were accepted and their keys moved
    again = engine.replay(rows, end_token=END)
    assert again.stats.num_forwards < drafted.stats.num_forwards  # the lookup knows the samples by now


def test_ends_of_rows_are_noted(bench):
    engine, rows = engine_of(bench), recordings(3)
    output = engine.replay(rows, end_token=END, draft=False)
    assert [(finish.row, finish.tokens) for finish in engine.finishes] == [(0, 32), (1, 35), (2, 38)]
    assert [finish.steps for finish in engine.finishes] == [32, 35, 38]
    seconds = [finish.seconds for finish in engine.finishes]
    assert 0 < seconds[0] < seconds[1] < seconds[2] <= output.stats.wall_seconds
    assert 0 < engine.step.recording_seconds and engine.step.device_seconds() is None


def test_a_row_that_leaves_its_recording_is_noticed(bench, monkeypatch):
    monkeypatch.setattr(RecordedRule, "decide", MatchRule.decide)
    with pytest.raises(RuntimeError, match="must end as recorded"):
        engine_of(bench).replay(recordings(), end_token=END)


def test_the_rule_fills_in_what_was_recorded_at_each_depth():
    streams = [np.arange(100, 110), np.arange(200, 206)]
    tree = DraftTree(
        np.array([1, 2, 3, 4], dtype=np.int32),
        np.array([-1, 0, 0, 2], dtype=np.int32),
        np.full((4, 1), -1, dtype=np.int32),
        np.zeros((4, 1), dtype=np.float32),
    )
    noise = VerifierNoise(
        seed=0, rows=np.array([1, 0]), steps=np.zeros(2, dtype=np.int64), positions=np.array([3, 8])
    )  # fmt: skip
    host = {"target_uniforms": np.ones(10), "recorded": np.full(10, -5, dtype=np.int64)}
    RecordedRule(streams).fill(host, DraftBatch.concatenate([tree, tree]), noise)
    assert host["recorded"].tolist() == [203, 204, 204, 205, 108, 109, 109, 109, 0, 0]  # behind the end: the last one
    assert host["target_uniforms"][:8].max() < 1


def test_the_drafter_learns_committed_tokens_alone():
    learned = []

    class Lookup(BlendedLookup):
        def learn(self, context, token_ids, **settings):
            learned.append((context.tolist(), token_ids.tolist()))
            return super().learn(context, token_ids, **settings)

    drafter, history = TokenDrafter(Lookup(), budget=4, kind="deterministic"), np.arange(1, 5, dtype=np.int32)
    request = draft_request([history])
    drafter.learn_prompt(np.array([3, 4, 7, 8, 4, 7, 8], dtype=np.int32), problem=0)
    learned.clear()
    batch = drafter.draft(request)
    assert batch.token_ids[:2].tolist() == [4, 7]
    nothing = np.zeros((batch.num_nodes, 10))
    drafter.learn(
        stand.Lesson(
            request, batch, [np.array([1], dtype=np.int32)], np.array([9]), nothing.astype(np.int32),
            nothing.astype(np.float32),
        )
    )  # fmt: skip
    assert learned == [([1, 2, 3, 4], [7, 9])]


def families() -> list[Recording]:
    first = [Recording(0, r.sample, r.prompt, r.tokens + 100) for r in recordings(2)]
    second = [Recording(1, r.sample, r.prompt, r.tokens) for r in recordings(4)]
    return first + second


def test_arms_are_compared_on_the_same_batches(bench):
    replay = ReplayBench(bench, ReplaySizes(rows=(2,), batches=2, warm_up=3, fixed_nodes=8), {"f": families()})
    free, fixed = (replay.figures("f", 2, costs) for costs in (FREE_NODES, DEAR_NODES))
    plain, eight, many = free
    none = fixed[2]
    assert [figure.drafts for figure in free] == ["no drafts", "8 nodes", "measured costs"]
    assert {figure.num_tokens for figure in (*free, none)} == {sum(len(r.tokens) + 1 for r in families()[2:])}
    assert all(figure.samples == 4 and [len(rows) for rows in figure.finishes] == [2, 2] for figure in free)
    assert plain.tau == 1.0 and plain.nodes_per_step == 0.0
    assert 0 < none.nodes_per_step <= 2  # a step of two rows has room for four tokens: two nodes cost nothing
    assert 1.5 < eight.tau and 0 < eight.nodes_per_step <= 8 < many.nodes_per_step <= 38
    assert plain.speedup is None and eight.speedup == eight.tokens_per_second / plain.tokens_per_second
    assert eight.step_seconds * eight.num_steps * eight.tokens_per_second == pytest.approx(eight.num_tokens)
    assert 0 < eight.host_share < 1 and eight.idle is None and 1 <= eight.live_rows <= eight.rows
    assert len(eight.cells()) == len(eight.HEADER)


def test_problems_with_too_few_samples_are_left_out(bench):
    replay = ReplayBench(bench, ReplaySizes(rows=(2, 16), batches=1, warm_up=3, fixed_nodes=8), {"f": families()})
    obstacles = {measurement.label: measurement.obstacle for measurement in replay.measurements(FREE_NODES)}
    assert obstacles == {"replay, f, 2 rows": None, "replay, f, 16 rows": "a problem has 2 samples only"}


def test_drafts_end_at_the_sizes_that_steps_of_the_model_are_padded_to():
    sizes = [ReplayBackend(tiny_model(family), None).step_sizes for family in ("qwen2", "qwen3_moe")]
    assert sizes == [NUM_TOKENS, CLOSE_NUM_TOKENS]


def test_time_on_the_device_is_that_between_marks(monkeypatch):
    clock = []
    step = object.__new__(TimedStep)
    device = SimpleNamespace(type="cuda")
    step._model, step._marks, step._spare_marks = SimpleNamespace(device=device), [], []
    monkeypatch.setattr(CapturedStep, "launch", lambda self: clock.append("a launch of 1 ms"))
    use_fake_events(monkeypatch, clock, device)
    for _ in range(3):
        step.launch()
        clock.append("an idle millisecond")
    assert step.device_seconds() == pytest.approx(3e-3)
    assert step.device_seconds() == 0.0  # since the last time it was asked
    step.launch()
    assert step.device_seconds() == pytest.approx(1e-3) and len(step._spare_marks) == 3  # made once


def test_batches_are_full_and_of_one_problem():
    batches = batches_of([*families(), *recordings(1)], 2, 1)
    assert [[(r.problem, r.sample) for r in batch] for batch in batches] == [[(0, 0), (0, 1)], [(1, 0), (1, 1)]]
    assert len(batches_of(families(), 2, 5)) == 3


def test_what_cannot_be_replayed_is_refused(bench):
    sizes = ReplaySizes(rows=(1,), batches=1, warm_up=1, fixed_nodes=1)
    with pytest.raises(ValueError, match="two problems"):
        ReplayBench(bench, sizes, {"f": recordings()})
    without = [Recording(r.problem, r.sample, r.prompt[:0], r.tokens) for r in families()]
    with pytest.raises(ValueError, match="empty prompt"):
        ReplayBench(bench, sizes, {"f": without})
    with pytest.raises(ValueError, match="below the shape's vocabulary of 100"):
        free_token(families(), 100)


def test_the_end_token_is_one_that_no_recording_has():
    top = [Recording(0, 0, np.array([299]), np.array([298, 3]))]
    assert free_token(top, 300) == 297
    assert all(token < 297 for r in made_up_recordings(300, tokens=5) for token in r.tokens)
