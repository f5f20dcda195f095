"""Runs of trained heads beside captured steps: what runs operation by operation say, in few operations of the host."""

import copy
from collections import Counter
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

pytest.importorskip("triton")

from estimated_rows import EstimatedBlocks
from failures import failing_after
from fake_cuda import onto_fake_device
from fake_device import fake_device
from no_host_copy import HostCopyError
from plain_eagle3 import deep_target, random_eagle3
from plain_kernels import use_plain_kernels
from plain_lessons import path_to, plain_lesson, texts
from random_dflash import CONVOLUTIONS, MARKOV, SELECTOR, random_dflash
from tiny_models import kernel_model
from torch._subclasses.fake_tensor import DataDependentOutputException

import stand
from stand.drafters.dflash.followed_blocks import FollowedBlocks
from stand.drafters.dflash.head import DFlashHead
from stand.drafters.eagle.eagle3_head import Eagle3Head
from stand.drafters.eagle.followed_rows import FollowedRows
from stand.drafters.heads.packed_run import PackedRun
from stand.forward.attention_shape import AttentionShape, HeadSizes
from stand.gpu.head_runs.recorder import HeadRecorder, RecordedRun
from stand.gpu.head_runs.rooms import KernelRooms

LAYERS = (3, 1, 4)
HEADS = {
    "plain": {},
    "windows": {"windows": (True, False)},
    "windows shorter than a block": {"windows": (True, False), "block_size": 9},
    "causal": {"is_causal": (True, True)},
    "windows, causal there": {"windows": (True, False), "is_causal": (True, False)},
    "windows, causal elsewhere": {"windows": (True, False), "is_causal": (False, True)},
    "DFlash 2": {**CONVOLUTIONS, **SELECTOR},
    "DSpark of some tokens": {**MARKOV, "has_anchor_law": True, "vocabulary": [2, 3, 5, 8, 13, 21, 34, 60]},
}
LONG, SHORT, PENDING, JOINING = [5, 9, 11, 4, 5, 9, 30, 31, 32, 33, 7], [7, 8, 9], [3], [40, 41, 42, 43, 44, 45]
PARENTS = [-1, 0, 0, 2, 2, 4]  # of the nodes of every row's tree
PROMPTS = [[3, 4, 5, 6, 7, 3, 4], [8, 9]]
CALL = {"input_ids": PROMPTS, "num_return_sequences": 2, "max_new_tokens": 24, "temperature": 0.8, "seed": 4}


@pytest.fixture
def plain_kernels(monkeypatch):
    use_plain_kernels(monkeypatch)


def block_head(target=None, **settings):
    return random_dflash(target or deep_target(), **{"feature_layers": LAYERS, "head_size": 16} | settings)


class Pair:
    """Rows that run operation by operation, and rows whose runs are recorded, told the same."""

    def __init__(self, target, head, make=EstimatedBlocks):
        self.target, self.rows = target, [make(target, head) for _ in range(2)]
        self.recorder = HeadRecorder(target)
        self.rows[1].record_runs(self.recorder)

    def run(self, histories) -> list[torch.Tensor]:
        """[rows, G, D] of both, without padding."""
        return [rows.run(histories)[: len(histories)] for rows in self.rows]

    def step(self, histories, *, keeps) -> list[np.ndarray]:
        """Both run; then the target scores a tree behind each row. The texts behind it; keeps: as in `plain_lesson`."""
        assert_alike(*self.run(histories))
        tokens = np.random.default_rng(len(histories[0])).integers(3, 61, (len(histories), len(PARENTS)))
        tokens[:, 0] = [history[-1] for history in histories]
        for rows in self.rows:
            rows.follow(plain_lesson(self.target, LAYERS, histories, tokens, PARENTS, keeps))
        kept = [tokens[row, path_to(PARENTS, node)].tolist() for row, node in enumerate(keeps)]
        return texts(*([*history, *path, 6] for history, path in zip(histories, kept, strict=True)))


def assert_alike(one: torch.Tensor, other: torch.Tensor) -> None:
    torch.testing.assert_close(other, one, atol=2e-5, rtol=1e-5)


def walk(pair: Pair) -> None:
    """Rows come, go and change places, and more come than the cache has rooms for."""
    long, short, _ = pair.step(texts(LONG, SHORT, PENDING), keeps=(4, 0, 0))
    short, joining, long = pair.step([short, *texts(JOINING), long], keeps=(5, 0, 1))
    first = pair.step([long, short], keeps=(3, 2))
    pair.step([*first, joining, *texts(PENDING, SHORT)], keeps=(0, 1, 5, 0, 2))


@pytest.mark.parametrize("settings", HEADS.values(), ids=HEADS)
@torch.inference_mode()
def test_recorded_blocks_are_those_of_single_operations(plain_kernels, settings):
    pair = Pair(deep_target(), block_head(**settings))
    walk(pair)
    assert pair.recorder._is_open and len(pair.recorder._recorded) > 0
    assert_same_keys(*(rows._cache for rows in pair.rows), pair.rows[0]._lengths)


def assert_same_keys(one, other, lengths) -> None:
    """Of committed tokens: nothing that pads a run was written among them."""
    for states in ("keys", "values"):
        for layer, own in zip(getattr(one, states), getattr(other, states), strict=True):
            for row, length in enumerate(lengths):
                torch.testing.assert_close(own[row, :, :length], layer[row, :, :length], atol=2e-5, rtol=1e-5)


@pytest.mark.parametrize("name", ["windows shorter than a block", "DFlash 2"])
@torch.inference_mode()
def test_kernels_say_the_same_of_blocks(name):
    pair = Pair(deep_target(), block_head(**HEADS[name]))
    pair.run(texts(LONG, SHORT))
    history = texts([*LONG, 6, 7, 8], SHORT)
    pair.run(history)  # begun anew
    assert_alike(*pair.run(history))
    assert pair.recorder._is_open and pair.recorder._recorded


@torch.inference_mode()
def test_a_tile_that_stops_at_its_own_tokens_is_noticed(plain_kernels, monkeypatch):
    """Control: places of a block would not see those behind their own tile."""
    from stand.gpu.head_runs import run_packet

    tiled = run_packet.PackedRun.ends
    monkeypatch.setattr(run_packet.PackedRun, "ends", property(lambda run: tiled.fget(run) - (run.block_size > 0)))
    pair = Pair(deep_target(), block_head())
    pair.run(texts(LONG))
    with pytest.raises(AssertionError):
        pair.step(texts(LONG, SHORT), keeps=(0, 0))


def decoded(backend, drafter, model, **settings):
    engine = stand.wrap(model, drafter=drafter, verifier="traversal", backend=backend, fuse=False)
    return engine.generate(**CALL | settings)


DRAFTERS = {
    "blocks": lambda model: stand.DFlashDrafter(block_head(model, feature_layers=(1, 0, 1)), budget=8),
    "blocks in one draft": lambda model: stand.BlendedDrafter(
        budget=8,
        source=stand.DFlashLaws(block_head(model, feature_layers=(1, 0, 1), **CONVOLUTIONS, **SELECTOR), always=True),
    ),
    "trees": lambda model: stand.EagleDrafter(random_eagle3(model, head_size=16, scale=1.5), budget=12, runs=4),
    "trees in one draft": lambda model: stand.BlendedDrafter(
        budget=8, source=stand.EagleLaws(random_eagle3(model, num_layers=2, head_size=16, scale=1.5), runs=3)
    ),
}


@pytest.fixture
def run_counts(monkeypatch) -> Counter:
    """Runs that were recorded ones, and recordings."""
    counts, run, record = Counter(), RecordedRun.run, RecordedRun.record
    monkeypatch.setattr(RecordedRun, "run", lambda *given, **more: counts.update(["runs"]) or run(*given, **more))
    monkeypatch.setattr(RecordedRun, "record", lambda *given: counts.update(["recordings"]) or record(*given))
    return counts


@pytest.mark.parametrize("settings", [{}, {"temperature": 0.0}, {"max_rows": 3}], ids=str)
@pytest.mark.parametrize("drafter", DRAFTERS)
@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_calls_draft_as_with_single_operations(plain_kernels, family, drafter, settings, run_counts):
    model = kernel_model(family)
    one, other = (decoded(name, DRAFTERS[drafter](model), model, **settings) for name in ("sdpa", "triton"))
    assert one.token_ids == other.token_ids and one.stats.num_steps == other.stats.num_steps
    assert one.stats.num_draft_tokens == other.stats.num_draft_tokens > 50
    assert run_counts["runs"] >= one.stats.num_forwards - 3 and run_counts["recordings"] < run_counts["runs"]


@pytest.mark.parametrize("drafter", ["blocks", "trees"])
def test_a_second_call_records_nothing_new(plain_kernels, drafter, run_counts):
    model = kernel_model("qwen2")
    engine = stand.wrap(model, drafter=DRAFTERS[drafter](model), backend="triton", fuse=False)
    for _ in range(2):  # the very first run of all shows what the head's layers are
        engine.generate(**CALL)
    before = run_counts["recordings"]
    engine.generate(**CALL)
    assert run_counts["recordings"] == before > 0


def fake_rooms(config, *, num_rows: int) -> KernelRooms:
    rooms = KernelRooms(num_rows, 200)
    shape = (rooms.num_rows, config.num_key_value_heads, rooms.room, config.head_dim)
    for layer in range(config.num_hidden_layers):
        rooms.layer_places[layer] = layer
        for states in (rooms.keys, rooms.values):
            states.append(torch.zeros(shape, device="cuda"))
    return rooms


def block_parts(rows, given) -> list[PackedRun]:
    rows._fresh, rows._lengths = list(given.split([2, 1])), np.array([18, 30])
    fresh = rows._fresh_run([np.zeros(21, np.int32), np.zeros(32, np.int32)])
    rows._lengths = rows._lengths + [2, 1]
    return [fresh, *rows._block_runs(np.array([3, 4], dtype=np.int32))]


def tree_parts() -> list[PackedRun]:
    """The first row has one token from an earlier run."""
    tokens, seen = np.array([3, 4, 5], dtype=np.int32), np.tri(3, 4, k=1, dtype=bool)
    return [PackedRun(tokens, np.array([0, 2, 3]), np.arange(3), seen, np.array([18, 30]), np.array([1, 0]))]


BLOCKS, TREES = "blocks", "trees"


def run_fake_body(kind: str) -> None:
    """A whole recorded run of two rows on the fake device."""
    target = copy.deepcopy(kernel_model("qwen2"))
    if kind == BLOCKS:
        settings = {**CONVOLUTIONS, **SELECTOR, "windows": (True, False), "is_causal": (True, False)}
        head, asked = block_head(target, head_size=64, feature_layers=(1, 0, 1), **settings), {"width": 4}
    else:
        head, asked = random_eagle3(target, head_size=64, num_layers=2), {}
    with fake_device(), torch.inference_mode():
        fake = onto_fake_device(target)
        for part in (head, head._lm_head[0], head._rotary[0]):
            onto_fake_device(part)
        made = FollowedBlocks if kind == BLOCKS else FollowedRows
        rows, recorder = made(fake, head, temperature=1.0, count=4, **asked), HeadRecorder(fake)
        recorder.look_at([head])
        windows = (4, 0) if kind == BLOCKS else (0,)
        recorder.note_shapes([AttentionShape(4, 2, HeadSizes.alike(64), window) for window in windows])
        recorder._runner = SimpleNamespace(record_alone=lambda body: body, forget=lambda: None)
        rows._cache = recorder._rooms = fake_rooms(head.config, num_rows=2)
        given, ends = torch.empty(3, head.config.hidden_size, device="cuda"), np.array([1, 2])
        parts = block_parts(rows, given) if kind == BLOCKS else tree_parts()
        told = (None, given, ()) if kind == BLOCKS else (ends, given, ("estimates",))
        recorder._recorded_for(rows._body, parts, *told)._program()


@pytest.mark.parametrize("kind", [BLOCKS, TREES])
def test_nothing_in_a_body_waits(kind):
    run_fake_body(kind)


@pytest.mark.parametrize("kind", [BLOCKS, TREES])
@pytest.mark.parametrize(
    ("read", "error"),
    [
        (lambda found: found + found.max().item(), DataDependentOutputException),
        (lambda found: found.cpu(), HostCopyError),
    ],
)
def test_a_wait_in_a_body_is_noticed(monkeypatch, kind, read, error):
    for kept in (DFlashHead, Eagle3Head):
        forward = kept.forward
        monkeypatch.setattr(kept, "forward", lambda *given, own=forward, **more: read(own(*given, **more)))
    with pytest.raises(error):
        run_fake_body(kind)


class Operations(TorchDispatchMode):
    """Counts what the host starts."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.names.append(str(function))
        return function(*args, **(kwargs or {}))


@torch.inference_mode()
def host_operations(num_layers: int, *, is_recorded: bool) -> list[str]:
    """Of one run on two rows that hold a new token each, where a replay is nothing to the host."""
    head = block_head(num_layers=num_layers, **CONVOLUTIONS, **SELECTOR)
    pair = Pair(deep_target(), head)
    histories = texts(LONG, SHORT)
    for _ in range(2):
        histories = pair.step(histories, keeps=(0, 0))
    pair.recorder._runner = SimpleNamespace(run_alone=lambda program: None)
    assert pair.recorder._recorded
    with Operations() as found:
        pair.rows[is_recorded].run(histories)
    return found.names


def test_a_run_is_few_operations_of_the_host(plain_kernels):
    """As many with four layers as with one, and a tenth of those of single operations."""
    few, same = (host_operations(count, is_recorded=True) for count in (1, 4))
    many = host_operations(2, is_recorded=False)
    assert Counter(few) == Counter(same) and len(few) <= 20, few
    assert len(many) > 200


@torch.inference_mode()
def test_what_was_recorded_is_forgotten_where_it_would_be_wrong(plain_kernels, run_counts):
    """Rooms that grow, weights that move, and no room for as many rows."""
    target = copy.deepcopy(deep_target())
    head = block_head(target)
    pair = Pair(target, head)
    long, short = pair.step(texts(LONG, SHORT), keeps=(0, 0))
    long, short = pair.step([long, short], keeps=(0, 0))
    assert run_counts["recordings"] == 1
    head.fc.weight.data = head.fc.weight.data.clone()
    head.layers[0].mlp.up_proj.weight = torch.nn.Parameter(head.layers[0].mlp.up_proj.weight * 2)
    long, short = pair.step([long, short], keeps=(0, 0))
    assert run_counts["recordings"] == 2
    pair.rows[1]._cache._grow(4096)
    long, short = pair.step([long, short], keeps=(0, 0))
    assert run_counts["recordings"] == 3
    pair.step([long, short, *texts(JOINING)], keeps=(0, 0, 0))
    assert run_counts["recordings"] == 4 and pair.recorder._is_open


@torch.inference_mode()
def test_hooks_and_autocast_run_operation_by_operation(plain_kernels, run_counts):
    head, seen = block_head(), []
    pair = Pair(deep_target(), head)
    histories = pair.step(texts(LONG, SHORT), keeps=(0, 0))
    hook = head.norm.register_forward_hook(lambda *given: seen.append(1))
    histories = pair.step(histories, keeps=(0, 0))
    assert len(seen) == 2 and not run_counts
    hook.remove()
    with torch.autocast("cpu", torch.bfloat16):
        pair.rows[1].run(texts(JOINING))
    assert not run_counts and pair.recorder._is_open
    assert_alike(*pair.run(texts(JOINING)))  # whose keys had another type
    assert run_counts["runs"] == 1


@pytest.mark.parametrize("drafter", ["blocks", "trees"])
@pytest.mark.parametrize("part", ["record", "run"])
def test_a_failure_goes_on_operation_by_operation(plain_kernels, monkeypatch, drafter, part, run_counts):
    """With the tokens that would have come anyway."""
    model = kernel_model("qwen2")
    expected = decoded("sdpa", DRAFTERS[drafter](model), model)
    broken = failing_after(1 if part == "record" else 5, getattr(RecordedRun, part), RuntimeError("gone"))
    monkeypatch.setattr(RecordedRun, part, broken)
    with pytest.warns(UserWarning, match="a recorded run of the trained head ended in RuntimeError: gone; it goes on"):
        found = decoded("triton", DRAFTERS[drafter](model), model)
    assert found.token_ids == expected.token_ids


@torch.inference_mode()
def test_many_rows_run_operation_by_operation(plain_kernels, run_counts):
    """65 blocks of 8 are more tokens than a recorded run takes."""
    pair = Pair(deep_target(), block_head(block_size=8))
    histories = texts(*([3 + row % 50, 4, 5] for row in range(65)))
    assert_alike(*pair.run(histories))
    assert_alike(*pair.run(histories))
    assert not run_counts and pair.recorder._is_open
    assert_alike(*pair.run(histories[:33]))
    assert run_counts["runs"] == 1


def test_rooms():
    """Rows move without new addresses, more of them bring some."""
    rooms = KernelRooms(3, 10)
    assert (rooms.capacity, rooms.num_rows, rooms.room) == (4, 5, 256)
    rooms.keys, rooms.values = ([torch.arange(5.0)[:, None, None, None].repeat(1, 2, 256, 4)] for _ in range(2))
    address = rooms.keys[0].data_ptr()
    rooms.fan_out([2, 0, 2])
    assert rooms.keys[0][:, 0, 0, 0].tolist()[:3] == [2, 0, 2] and rooms.values[0][:, 1, 9, 3].tolist()[:3] == [2, 0, 2]
    assert rooms.keys[0].data_ptr() == address and rooms.version == 0
    rooms.reserve(256)
    assert rooms.version == 0
    rooms.fan_out([1, 0, 2, 0, 1])
    assert rooms.keys[0][:5, 0, 0, 0].tolist() == [0, 2, 2, 2, 0] and (rooms.capacity, rooms.version) == (8, 1)
    rooms.reserve(257)
    assert (rooms.room, rooms.version) == (512, 2) and rooms.keys[0].shape == (9, 2, 512, 4)
    assert rooms.holds(8, 512) and not rooms.holds(9, 1) and not rooms.holds(1, 513)
