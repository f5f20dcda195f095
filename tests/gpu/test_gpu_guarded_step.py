"""A captured step that fails during a generation: the rows go on by eager steps, and lose nothing."""

import gc
from weakref import WeakSet

import numpy as np
import pytest
import torch

pytest.importorskip("triton")

from failures import failing_after
from page_tables import alike
from plain_kernels import use_plain_kernels
from tiny_models import kernel_model

import stand
from stand.backend import CapturedBackend
from stand.call import Call
from stand.forward.cache.key_shape import LayerKeys
from stand.gpu.captured_step import CapturedStep
from stand.gpu.device_cache import DeviceCache
from stand.gpu.packets import page_table
from stand.gpu.packets.page_table import PageTable
from stand.trees import DraftBatch, DraftTree, TreeShape

PROMPTS = [[3, 4, 5, 6, 7, 3, 4], [8, 9]]
SETTINGS = {"num_return_sequences": 2, "max_new_tokens": 40, "temperature": 0.6, "seed": 4}


@pytest.fixture
def plain_kernels(monkeypatch):
    use_plain_kernels(monkeypatch)


def engine_of(backend, *, budget=None):
    drafter = stand.BlendedDrafter(budget=budget)
    return stand.wrap(kernel_model("qwen2"), drafter=drafter, verifier="match", backend=backend, fuse=False)


FAILURES = {
    "a capture is refused": ("_record", 1, RuntimeError("operation not permitted when stream is capturing")),
    "a kernel cannot be launched": ("launch", 9, Exception("out of resource: shared memory")),
    "a verdict does not come": ("verdicts", 9, torch.OutOfMemoryError("CUDA out of memory")),
    "the very first step": ("_prepare", 0, MemoryError("no room")),
}


@pytest.mark.parametrize("failure", FAILURES)
def test_the_tokens_are_those_of_eager_steps(plain_kernels, monkeypatch, caplog, failure):
    name, count, error = FAILURES[failure]
    expected = engine_of("sdpa").generate(input_ids=PROMPTS, **SETTINGS)
    engine, lessons, learn = engine_of("triton"), [], stand.BlendedDrafter.learn
    monkeypatch.setattr(
        stand.BlendedDrafter, "learn", lambda self, lesson: lessons.append(lesson) or learn(self, lesson)
    )
    monkeypatch.setattr(CapturedStep, name, failing_after(count, getattr(CapturedStep, name), error))
    with pytest.warns(UserWarning, match="decoding goes on with eager steps"):
        output = engine.generate(input_ids=PROMPTS, **SETTINGS)
    assert output.token_ids == expected.token_ids
    assert [len(lesson.top_ids) for lesson in lessons] == [lesson.batch.num_nodes for lesson in lessons]
    assert len(lessons) == output.stats.num_forwards  # no step's lesson is lost
    assert str(engine.backend) == "sdpa" and str(error) in engine.backend.reason
    logged = [record.exc_info[1] for record in caplog.records if record.exc_info]  # with its traceback
    assert [str(one) for one in logged] == [str(error)]
    assert engine.generate(input_ids=PROMPTS, **SETTINGS).token_ids == expected.token_ids  # without another warning


def test_rows_that_ended_before_stay_ended_and_places_are_kept(plain_kernels, monkeypatch):
    """Of six rows some end early; the rest no longer lie in their places' order when the step fails."""
    settings = {**SETTINGS, "num_return_sequences": 3, "stop_token_ids": [27, 42], "max_new_tokens": 60, "seed": 13}
    expected = engine_of("sdpa").generate(input_ids=PROMPTS, **settings)
    lengths = sorted(len(tokens) for tokens in expected.token_ids)
    assert lengths[1] < 13 and lengths[-2] > 30
    engine = engine_of("triton")
    monkeypatch.setattr(CapturedStep, "launch", failing_after(8, CapturedStep.launch, RuntimeError("gone")))
    with pytest.warns(UserWarning):
        assert engine.generate(input_ids=PROMPTS, **settings).token_ids == expected.token_ids


@pytest.mark.parametrize("count", [0, 1, 4, 7])
def test_a_row_that_cannot_enter(plain_kernels, monkeypatch, count):
    """At the beginning, and in the place of one that has ended; those that are live go on beside it."""
    settings = {**SETTINGS, "num_return_sequences": 4, "stop_token_ids": [27, 42], "max_new_tokens": 60}
    expected = engine_of("sdpa").generate(input_ids=PROMPTS, **settings)
    engine = engine_of("triton")
    error = RuntimeError("out of memory")
    monkeypatch.setattr(PageTable, "enter", failing_after(count, PageTable.enter, error, times=1))
    with pytest.warns(UserWarning, match="decoding goes on with eager steps"):
        assert engine.generate(input_ids=PROMPTS, **settings, max_rows=3).token_ids == expected.token_ids
    assert str(engine.backend) == "sdpa"


def test_no_memory_for_growth(plain_kernels, monkeypatch):
    monkeypatch.setattr(page_table, "FIRST_ROOM", 1)
    monkeypatch.setattr(page_table, "DRAFT_ROOM", 16)
    settings = {**SETTINGS, "max_new_tokens": 150, "stop_token_ids": []}
    expected = engine_of("sdpa", budget=16).generate(input_ids=PROMPTS, **settings)
    engine, error = engine_of("triton", budget=16), torch.OutOfMemoryError("CUDA out of memory")
    monkeypatch.setattr(DeviceCache, "grow", failing_after(0, DeviceCache.grow, error, times=1))
    with pytest.warns(UserWarning, match="out of memory"):
        assert engine.generate(input_ids=PROMPTS, **settings).token_ids == expected.token_ids


def test_no_memory_for_the_cache(plain_kernels, monkeypatch):
    expected = engine_of("sdpa").generate(input_ids=PROMPTS, **SETTINGS)
    monkeypatch.setattr(DeviceCache, "like", failing_after(0, None, MemoryError("no room")))
    with pytest.warns(UserWarning, match="no room"):
        engine = engine_of("sdpa")
        engine.backend = CapturedBackend(engine.model, "for this test")
        assert engine.generate(input_ids=PROMPTS, **SETTINGS).token_ids == expected.token_ids


def test_what_the_step_refuses_is_not_a_failure(plain_kernels, monkeypatch):
    refusal = ValueError("every position needs a finite best logit")
    monkeypatch.setattr(CapturedStep, "verdicts", failing_after(3, CapturedStep.verdicts, refusal))
    with pytest.raises(ValueError, match="finite best logit"):
        engine_of("triton").generate(input_ids=PROMPTS, **SETTINGS)


def test_an_error_of_the_drafter_is_no_failure_of_the_device(plain_kernels, monkeypatch):
    error = TypeError("this drafter cannot learn")
    monkeypatch.setattr(stand.BlendedDrafter, "learn", failing_after(2, stand.BlendedDrafter.learn, error))
    with pytest.raises(TypeError, match="cannot learn"):
        engine_of("triton").generate(input_ids=PROMPTS, **SETTINGS)


def test_nothing_is_kept_of_a_call_that_a_lessons_error_has_ended(plain_kernels, monkeypatch):
    calls, run, error = WeakSet(), Call.run, TypeError("this drafter cannot learn")
    monkeypatch.setattr(Call, "run", lambda self: calls.add(self) or run(self))
    monkeypatch.setattr(stand.BlendedDrafter, "learn", failing_after(2, stand.BlendedDrafter.learn, error))
    engine = engine_of("triton")
    with pytest.raises(TypeError, match="cannot learn"):
        engine.generate(input_ids=PROMPTS, **SETTINGS)
    gc.collect()
    assert not calls and engine.backend.name == "triton"


def test_an_error_that_the_device_does_not_survive_is_raised(plain_kernels, monkeypatch):
    engine = engine_of("triton")
    error = RuntimeError("an illegal memory access was encountered")
    monkeypatch.setattr(CapturedStep, "launch", failing_after(3, CapturedStep.launch, error))
    monkeypatch.setattr(PageTable, "reorder", failing_after(0, None, error))
    with pytest.raises(RuntimeError, match="illegal memory access"):
        engine.generate(input_ids=PROMPTS, **SETTINGS)


def small_cache(num_pages=6):
    """Two layers alike, and one with values narrower than keys."""
    layers = [*alike([0, 1], 1, 4), (2, LayerKeys(2, 3, 2))]
    cache = DeviceCache(
        layers=layers, num_pages=num_pages, page_size=4, dtype=torch.float32, device=torch.device("cpu")
    )
    for block in cache.blocks:
        block.copy_(torch.arange(block.numel()).view(block.shape))
    assert [tuple(block.shape) for block in cache.blocks] == [(4, 7, 1, 4, 4), (1, 7, 2, 4, 3), (1, 7, 2, 4, 2)]
    return cache


@pytest.mark.parametrize("left", [float("inf"), 0])
def test_growth_keeps_the_keys_with_room_for_both_blocks_or_for_one(monkeypatch, left):
    from stand.gpu import device_cache

    cache, answers = small_cache(), iter([left, 1e9])
    monkeypatch.setattr(device_cache, "_free_bytes", lambda device: next(answers))
    before, zeros, held = cache.blocks, device_cache._zeros, []

    def noting(shapes, **asked):
        held.append(len(cache.blocks))
        return zeros(shapes, **asked)

    monkeypatch.setattr(device_cache, "_zeros", noting)
    cache.grow(10)
    assert held == [3 if left else 0]  # blocks that lie on the device while the new ones come
    assert cache.num_pages == 10 and cache.spare_slot == 43 and cache.get_seq_length() == 40
    for block, own in zip(cache.blocks, before, strict=True):
        assert torch.equal(block[:, :6], own[:, :6]) and not block[:, 6:].any()


def test_a_pool_may_take_all_that_is_left(monkeypatch):
    from stand.gpu import device_cache

    assert device_cache._free_bytes(torch.device("cpu")) == float("inf")
    needed = sum(block.nbytes for block in small_cache().blocks)
    monkeypatch.setattr(device_cache, "_free_bytes", lambda device: needed)
    small_cache()
    monkeypatch.setattr(device_cache, "_free_bytes", lambda device: needed - 1)
    with pytest.raises(MemoryError, match="must fit into the device's free memory"):
        small_cache()


def test_growth_that_fails_leaves_the_keys(monkeypatch):
    from stand.gpu import device_cache

    cache = small_cache()
    monkeypatch.setattr(device_cache, "_free_bytes", lambda device: 100)
    before = [block.clone() for block in cache.blocks]
    with pytest.raises(MemoryError, match="must fit into the device's free memory"):
        cache.grow(10)
    assert all(map(torch.equal, cache.blocks, before))


def test_the_step_before_gives_its_memory_back_before_the_next_one_takes_some(plain_kernels, monkeypatch):
    engine = engine_of("triton")
    engine.generate(input_ids=PROMPTS, **SETTINGS)
    first = engine.backend._previous.captured
    alive = []
    like = DeviceCache.like

    def watched(*arguments, **options):
        alive.append(first._table)
        return like(*arguments, **options)

    monkeypatch.setattr(DeviceCache, "like", watched)
    engine.generate(input_ids=PROMPTS, **{**SETTINGS, "temperature": 0.7})
    assert alive == [None] and engine.backend._previous.captured.runner is first.runner


@pytest.mark.parametrize(
    ("drafter", "num_rows", "rule"),
    [
        (lambda: WideDrafter(70), 8, "a captured step holds at most 512 tokens of all rows together, got"),
        (lambda: WideDrafter(300), 1, "a captured step takes at most 256 nodes of a row, got 300"),
    ],
)
def test_drafts_beyond_a_captured_step_are_decoded_by_eager_ones(plain_kernels, drafter, num_rows, rule):
    settings = SETTINGS | {"num_return_sequences": num_rows, "max_new_tokens": 12}
    engines = [
        stand.wrap(kernel_model("qwen2"), drafter=drafter(), verifier="match", backend=backend, fuse=False)
        for backend in ("sdpa", "triton")
    ]
    expected = engines[0].generate(input_ids=PROMPTS[:1], **settings).token_ids
    with pytest.warns(UserWarning, match=f"StepLimitError: {rule}.*decoding goes on with eager steps"):
        assert engines[1].generate(input_ids=PROMPTS[:1], **settings).token_ids == expected


class WideDrafter(stand.Drafter):
    """Chains of so many nodes, the pending token included."""

    def __init__(self, num_nodes: int) -> None:
        self.num_nodes = num_nodes

    def draft(self, request: stand.DraftRequest) -> DraftBatch:
        return DraftBatch.concatenate([self._tree(int(history[-1])) for history in request.histories])

    def _tree(self, pending: int) -> DraftTree:
        """Known tokens: deterministic, so every law is one-hot."""
        ids = np.full((self.num_nodes, 1), 5, dtype=np.int32)
        tokens = np.concatenate([[pending], np.full(self.num_nodes - 1, 5)]).astype(np.int32)
        laws = np.ones((self.num_nodes, 1), dtype=np.float32)
        return DraftTree(tokens, np.arange(-1, self.num_nodes - 1, dtype=np.int32), ids, laws)


def test_a_lookup_that_learns_more_than_a_recorded_step_returns(plain_kernels):
    lookup = stand.LookupTree(num_candidates=16)
    engine = stand.wrap(
        kernel_model("qwen2"), drafter=stand.FixedShapeDrafter(lookup, TreeShape.chain(3)), verifier="match",
        backend="triton", fuse=False,
    )  # fmt: skip
    with pytest.warns(UserWarning, match="the drafter learns 16 tokens of a node, a recorded step returns 10"):
        output = engine.generate(input_ids=PROMPTS, **SETTINGS)
    assert output.token_ids == engine_of("sdpa").generate(input_ids=PROMPTS, **SETTINGS).token_ids
    assert str(engine.backend) == "triton"
