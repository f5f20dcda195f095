"""The packed arrays of a captured step equal what the eager plan and the batch say; padding does nothing."""

import numpy as np
import pytest
import torch
from drafted_cases import case
from exact import EX2, deterministic, enumerate_drafts, pack, shaped, with_replacement

from stand.forward.packed_plan import StepPlan
from stand.gpu.packet import Packet
from stand.gpu.packing import kept_paths
from stand.gpu.packing import pack as pack_step
from stand.gpu.step_size import MAX_ROW_NODES, NUM_TOKENS, StepSize
from stand.trees import DraftBatch, DraftTree
from stand.verifiers import Verdicts
from stand.verifiers.schedule import packed_parents

ROOM = 4096


def packed(batch, lengths, cache_rows, size, room=ROOM):
    num_tokens, num_rows = size.num_tokens, size.num_rows
    out = {name: np.full(num_tokens, -7, dtype=np.int64) for name in
           ("token_ids", "positions", "slots", "parents", "firsts", "row_of", "depths", "follows")}  # fmt: skip
    out["ancestors"] = np.full((num_tokens, size.num_words), -7, dtype=np.int64)
    out["offsets"] = np.full(num_rows + 1, -7, dtype=np.int32)
    out["lengths"], out["cache_rows"] = np.full(num_rows, -7, dtype=np.int64), np.full(num_rows, -7, dtype=np.int64)
    pack_step(
        batch.token_ids, batch.parents, batch.depths, batch.offsets, np.asarray(lengths, dtype=np.int64),
        np.asarray(cache_rows, dtype=np.int64), room, **{f"out_{name}": array for name, array in out.items()},
    )  # fmt: skip
    return out


def bits(words, width):
    places = np.arange(width)
    return ((words[:, places // 64] >> (places % 64)) & 1).astype(bool)


@pytest.mark.parametrize("seed", range(3))
def test_arrays_equal_the_eager_plan(seed):
    batch = case(seed, "sampled")[0]
    rows, count = len(batch), batch.num_nodes
    lengths, cache_rows = np.arange(rows) * 37 + 5, np.arange(rows)[::-1].copy()
    out = packed(batch, lengths, cache_rows, StepSize.covering(count, 1, rows + 2, tile_tokens=8))
    plan = StepPlan.for_drafts(batch, lengths)
    assert np.array_equal(out["token_ids"][:count], batch.token_ids)
    assert np.array_equal(out["positions"][:count], plan.position_ids[0])
    row_of = np.repeat(np.arange(rows), np.diff(batch.offsets))
    assert np.array_equal(out["slots"][:count], cache_rows[row_of] * ROOM + plan.cache_slots.numpy())
    assert np.array_equal(bits(out["ancestors"][:count], plan._ancestors.shape[1]), plan._ancestors)
    parents = packed_parents(batch)
    assert np.array_equal(out["parents"][:count], np.where(parents < 0, np.arange(count), parents))
    assert np.array_equal(out["firsts"][:count], batch.offsets[:-1][row_of])
    assert np.array_equal(out["row_of"][:count], row_of)
    assert np.array_equal(out["offsets"], [*batch.offsets, count, count])
    assert np.array_equal(out["lengths"], [*lengths, 0, 0])


def test_padding_writes_to_the_spare_slot_and_sees_nothing():
    batch = DraftBatch.concatenate([DraftTree.chain([3, 4, 5])])
    out = packed(batch, [10], [0], StepSize(8, 16, 2, 8))
    assert set(out["slots"][3:]) == {ROOM - 1}
    assert not out["ancestors"][3:].any()
    assert set(out["row_of"][3:]) == {2}
    assert not out["follows"][3:].any()


def test_only_the_first_of_equal_siblings_is_followed():
    drafts = [draft for _, draft in enumerate_drafts(EX2, shaped(with_replacement, 3))]
    batch = pack(EX2, drafts)
    out = packed(
        batch,
        np.zeros(len(batch)),
        np.arange(len(batch)),
        StepSize.covering(batch.num_nodes, 1, len(batch), tile_tokens=8),
    )
    expected = []
    for row in range(len(batch)):
        draft, seen = batch[row], set()
        for node in range(draft.num_nodes):
            key = (draft.parents[node], draft.token_ids[node])
            expected.append(node > 0 and key not in seen)
            seen.add(key)
    assert out["follows"][: batch.num_nodes].tolist() == [int(value) for value in expected]
    assert not all(expected[1:])


@pytest.mark.parametrize("seed", range(5))
def test_kept_paths_equal_the_verdicts_own(seed):
    batch = case(seed, "sampled")[0]
    stops = np.random.default_rng(seed).integers(batch.offsets[:-1], batch.offsets[1:]).astype(np.int64)
    stops[0] = batch.offsets[0]  # a row that keeps nothing
    expected = Verdicts.stopping_at(stops, stops, batch).accepted
    paths = kept_paths(stops, batch.parents, batch.offsets)
    assert [path.tolist() for path in paths] == [path.tolist() for path in expected]
    assert any(len(path) > 0 for path in paths) and len(paths[0]) == 0


def test_long_rows_use_several_words():
    batch = DraftBatch.concatenate([DraftTree.chain(range(200))])
    size = StepSize.covering(200, 1, 1, tile_tokens=8)
    out = packed(batch, [0], [0], size)
    assert size.num_words == 4
    assert np.array_equal(bits(out["ancestors"][:200], 200), np.tri(200, dtype=bool))


@pytest.mark.parametrize(
    ("count", "length", "size", "match"),
    [
        (9, 0, StepSize(8, 16, 1, 8), "take a larger step size"),
        (MAX_ROW_NODES + 1, 0, StepSize(512, 16, 1, 8), "lower the budget"),
        (4, ROOM - 4, StepSize(8, 16, 1, 8), "grow the cache"),
    ],
)
def test_what_does_not_fit_is_refused(count, length, size, match):
    batch = DraftBatch.concatenate([DraftTree.chain(range(count))])
    with pytest.raises(ValueError, match=match):
        packed(batch, [length], [0], size)


def test_the_last_slot_before_the_spare_one_is_used():
    batch = pack(EX2, [draft for _, draft in enumerate_drafts(EX2, shaped(deterministic, 1))][:1])
    count = batch.num_nodes
    out = packed(batch, [ROOM - 1 - count], [0], StepSize.covering(count, 1, 1, tile_tokens=8))
    assert out["slots"][:count].max() == ROOM - 2


def test_step_sizes_cover_and_refuse():
    for count in (1, 2, 100, 512):
        size = StepSize.covering(count, 100, 4, tile_tokens=8)
        assert size.num_tokens >= count and size.num_tokens in NUM_TOKENS and size.num_items == 128
    with pytest.raises(ValueError, match="backend='sdpa'"):
        StepSize.covering(513, 1, 1, tile_tokens=8)


def test_a_packet_carries_every_field():
    packet = Packet({"a": (np.int64, (3,)), "b": (np.float32, (2, 2)), "c": (np.bool_, (1,))}, torch.device("cpu"))
    packet.host["a"][:] = [1, 2, 3]
    packet.host["b"][:] = [[0.5, 1.5], [2.5, 3.5]]
    assert not packet.device["a"].any()
    packet.upload()
    assert packet.device["a"].tolist() == [1, 2, 3]
    assert packet.device["b"].tolist() == [[0.5, 1.5], [2.5, 3.5]]
    packet.device["c"].fill_(True)
    packet.download()
    assert packet.host["c"][0] and packet.nbytes == 64  # each field aligned to 16 bytes
