"""The packed arrays of a captured step equal what the eager plan and the batch say; padding does nothing."""

import numpy as np
import pytest
import torch
from drafted_cases import case
from exact import EX2, deterministic, enumerate_drafts, pack, shaped, with_replacement
from gpu_parts.kernel_bench import heap_parents, turns_of

from stand.forward.packed_plan import StepPlan
from stand.gpu.packets.packet import Packet
from stand.gpu.packets.step_size import CLOSE_NUM_TOKENS, MAX_ROW_NODES, NUM_TOKENS, StepSize
from stand.gpu.packets.work_list import Splitting, Tiling, WorkList
from stand.step_compiled import StepArrays, fill_laws, kept_paths, outgrown
from stand.trees import DraftBatch, DraftTree
from stand.verifiers import Verdicts
from stand.verifiers.schedule import packed_parents

PAGE, WIDTH = 64, 64
ROOM = PAGE * WIDTH
SPARE = 10**6
TILINGS = (Tiling(8, Splitting(3)), Tiling(3, Splitting(2, window=100)))  # two kinds of layers
HEAP = heap_parents(20)


def empty_arrays(size):
    num_tokens, num_rows = size.num_tokens, size.num_rows
    names = ("token_ids", "positions", "rotary_positions", "slots", "parents", "depths", "follows", "turns")
    return {
        **{name: np.zeros(num_tokens, dtype=np.int64) for name in names},
        "ancestors": np.zeros((num_tokens, size.num_words), dtype=np.int64),
        "offsets": np.zeros(num_rows + 1, dtype=np.int32),
        "lengths": np.zeros(num_rows, dtype=np.int64),
        "cache_rows": np.zeros(num_rows, dtype=np.int64),
        "pages": np.zeros((num_rows, WIDTH), dtype=np.int32),
        **{f"items_{place}": np.zeros((count, 8), dtype=np.int32) for place, count in enumerate(size.num_items)},
        **{f"partial_starts_{place}": np.zeros(num_tokens + 1, dtype=np.int32) for place in range(len(size.tilings))},
    }


def table_of(num_rows):
    """[R, T] pages in no order, each of one row."""
    return np.random.default_rng(7).permutation(num_rows * WIDTH).astype(np.int32).reshape(num_rows, WIDTH)


def rotary_offsets_of(lengths):
    return -3 * np.arange(len(lengths), dtype=np.int64)


def fill(arrays, batch, lengths, cache_rows, num_rows, ends=ROOM):
    arrays.fill(
        batch.token_ids, batch.parents, batch.depths, batch.offsets, np.asarray(lengths, dtype=np.int64),
        rotary_offsets_of(lengths), np.asarray(cache_rows, dtype=np.int64), table_of(num_rows),
        np.full(num_rows, ends), PAGE, SPARE,
    )  # fmt: skip


def packed(batch, lengths, cache_rows, size):
    out = empty_arrays(size)
    fill(StepArrays(out, size.tilings), batch, lengths, cache_rows, size.num_rows)
    return out


def covering(num_tokens, num_rows):
    return StepSize.covering(num_tokens, num_rows, tilings=TILINGS, room=ROOM)


def bits(words, width):
    places = np.arange(width)
    return ((words[:, places // 64] >> (places % 64)) & 1).astype(bool)


@pytest.mark.parametrize("seed", range(3))
def test_arrays_equal_the_eager_plan(seed):
    batch = case(seed, "sampled")[0]
    rows, count = len(batch), batch.num_nodes
    lengths, cache_rows = np.arange(rows) * 37 + 5, np.arange(rows)[::-1].copy()
    out = packed(batch, lengths, cache_rows, covering(count, rows + 2))
    plan = StepPlan.for_drafts(batch, lengths)
    assert np.array_equal(out["token_ids"][:count], batch.token_ids)
    assert np.array_equal(out["positions"][:count], plan.position_ids[0])
    turned = StepPlan.for_drafts(batch, lengths, rotary_offsets=rotary_offsets_of(lengths))
    assert np.array_equal(out["rotary_positions"][:count], turned.position_ids[0])
    assert not out["rotary_positions"][count:].any()
    row_of = np.repeat(np.arange(rows), np.diff(batch.offsets))
    slots, table = plan.cache_slots.numpy(), table_of(rows + 2)
    pages = table[cache_rows[row_of], slots // PAGE]
    assert np.array_equal(out["slots"][:count], pages * PAGE + slots % PAGE)
    for row, end in zip(cache_rows, lengths + np.diff(batch.offsets), strict=True):
        used = -(-end // PAGE)
        assert np.array_equal(out["pages"][row, :used], table[row, :used]) and not out["pages"][row, used:].any()
    assert np.array_equal(bits(out["ancestors"][:count], plan.ancestors.shape[1]), plan.ancestors)
    parents = packed_parents(batch)
    assert np.array_equal(out["parents"][:count], np.where(parents < 0, np.arange(count), parents))
    assert np.array_equal(out["offsets"], [*batch.offsets, count, count])
    assert np.array_equal(out["lengths"], [*lengths, 0, 0])


def test_padding_writes_to_the_spare_slot_and_sees_nothing():
    batch = DraftBatch.concatenate([DraftTree.chain([3, 4, 5])])
    out = packed(batch, [10], [0], StepSize(8, 2, TILINGS, (16, 16)))
    assert set(out["slots"][3:]) == {SPARE}
    assert not out["ancestors"][3:].any()
    assert not out["follows"][3:].any()


def test_only_the_first_of_equal_siblings_is_followed():
    drafts = [draft for _, draft in enumerate_drafts(EX2, shaped(with_replacement, 3))]
    batch = pack(EX2, drafts)
    out = packed(
        batch,
        np.zeros(len(batch)),
        np.arange(len(batch)),
        covering(batch.num_nodes, len(batch)),
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


def turns_in(words):
    """Per turn the nodes that its bytes name; the last word says how many turns there are."""
    return [[int(node) for node in word.tobytes() if node] for word in words[: int(words[-1])]]


def some_parents(kind, generator):
    count = int(generator.integers(1, MAX_ROW_NODES + 1))
    above = {
        "chain": lambda node: node - 1,
        "star": lambda node: 0,
        "any": lambda node: int(generator.integers(0, node)),
        "deep": lambda node: max(0, node - int(generator.integers(1, 9))),
    }[kind]
    return np.array([-1, *map(above, range(1, count))], dtype=np.int32)


@pytest.mark.parametrize("kind", ["chain", "star", "any", "deep"])
def test_a_turn_needs_only_what_earlier_ones_have_settled(kind):
    """Parents and earlier siblings come first, every node once, as early as that allows; 255 is a node too."""
    generator = np.random.default_rng(11)
    for parents in [*(some_parents(kind, generator) for _ in range(20)), np.array([-1], dtype=np.int32)]:
        words = packed(draft_of(parents), [0], [0], covering(len(parents), 1))["turns"][: len(parents)]
        turns = turns_in(words)
        assert sorted(sum(turns, [])) == list(range(1, len(parents))) and all(len(turn) <= 8 for turn in turns)
        turn_of = {node: number for number, turn in enumerate(turns) for node in turn}
        for node in range(1, len(parents)):
            needed = [parents[node], *(one for one in range(1, node) if parents[one] == parents[node])]
            assert all(turn_of.get(one, -1) < turn_of[node] for one in needed)
        assert np.array_equal(words, turns_of(parents))
        assert not kind == "chain" or len(turns) == len(parents) - 1


def draft_of(parents):
    support = np.zeros((len(parents), 1), dtype=np.int32)
    tokens = np.arange(len(parents), dtype=np.int32)
    return DraftBatch.concatenate([DraftTree(tokens, parents, support, support.astype(np.float32))])


def test_the_turns_of_every_row_lie_at_its_nodes():
    batch = DraftBatch.concatenate([DraftTree.chain(range(5)), DraftTree.pending(3), draft_of(HEAP)[0]])
    out = packed(batch, [7] * 3, np.arange(3), covering(batch.num_nodes + 1, 3))
    expected = np.concatenate([turns_of(batch[row].parents) for row in range(3)])
    assert np.array_equal(out["turns"][: batch.num_nodes], expected)
    assert not out["turns"][batch.num_nodes :].any() and out["turns"][4] == 4


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
    size = covering(200, 1)
    out = packed(batch, [0], [0], size)
    assert size.num_words == 4
    assert np.array_equal(bits(out["ancestors"][:200], 200), np.tri(200, dtype=bool))


@pytest.mark.parametrize(
    ("count", "length", "size", "match"),
    [
        (9, 0, StepSize(8, 1, TILINGS, (16, 16)), "take a larger step size"),
        (MAX_ROW_NODES + 1, 0, StepSize(512, 1, TILINGS, (16, 16)), "lower the budget"),
        (4, ROOM - 3, StepSize(8, 1, TILINGS, (16, 16)), "take further pages first"),
    ],
)
def test_what_does_not_fit_is_refused(count, length, size, match):
    batch = DraftBatch.concatenate([DraftTree.chain(range(count))])
    with pytest.raises(ValueError, match=match):
        packed(batch, [length], [0], size)


def test_the_last_slot_of_the_last_page_is_used():
    batch = pack(EX2, [draft for _, draft in enumerate_drafts(EX2, shaped(deterministic, 1))][:1])
    count = batch.num_nodes
    out = packed(batch, [ROOM - count], [0], covering(count, 1))
    assert out["slots"][count - 1] == table_of(1)[0, -1] * PAGE + PAGE - 1


def test_a_table_of_another_shape_is_refused():
    batch, size = DraftBatch.concatenate([DraftTree.chain([3])]), StepSize(8, 1, TILINGS, (16, 16))
    arrays = StepArrays(empty_arrays(size), size.tilings)
    with pytest.raises(ValueError, match="record the step anew"):
        fill(arrays, batch, [0], [0], 2)


def test_rows_that_outgrow_their_pages_are_found():
    lengths, places = np.array([60, 10, 128], dtype=np.int64), np.array([2, 0, 1], dtype=np.int64)
    offsets, ends = np.array([0, 5, 6, 7], dtype=np.int32), np.array([11, 128, 64], dtype=np.int64)
    assert outgrown(lengths, offsets, places, ends) == [0, 2]


def test_every_kind_of_layers_has_its_work_list():
    batch = case(1, "sampled")[0]
    lengths, cache_rows = np.arange(len(batch)) * 90 + 70, np.arange(len(batch))
    out = packed(batch, lengths, cache_rows, covering(batch.num_nodes, len(batch)))
    for place, tiling in enumerate(TILINGS):
        work = WorkList.build(batch.offsets, lengths, cache_rows, tiling)
        assert np.array_equal(out[f"items_{place}"][: len(work.items)], work.items)
        assert not out[f"items_{place}"][len(work.items) :].any()
        assert np.array_equal(out[f"partial_starts_{place}"][: len(work.partial_starts)], work.partial_starts)


def test_step_sizes_cover_and_refuse():
    for count in (1, 2, 100, 512):
        size = covering(count, 4)
        assert size.num_tokens >= count and size.num_tokens in NUM_TOKENS
        assert size.num_items == tuple(tiling.most_items(size.num_tokens, 4, ROOM) for tiling in TILINGS)
    with pytest.raises(ValueError, match="backend='sdpa'"):
        covering(513, 1)


def test_a_step_after_a_larger_one_equals_a_first_step():
    size = covering(90, 6)
    used = empty_arrays(size)
    arrays = StepArrays(used, size.tilings)
    for seed in (2, 0, 1, 0):
        batch = case(seed, "sampled")[0]
        lengths, rows = np.arange(len(batch)) * 90 + 5 * seed, np.arange(len(batch))
        fill(arrays, batch, lengths, rows, 6)
        fresh = packed(batch, lengths, rows, size)
        assert all(np.array_equal(used[name], fresh[name]) for name in used if name != "pages")
        for row, end in enumerate(lengths + np.diff(batch.offsets)):  # what is behind is never read
            assert np.array_equal(used["pages"][row, : -(-end // PAGE)], fresh["pages"][row, : -(-end // PAGE)])
        assert used["items_0"].any() and used["items_1"].any()


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


def test_packets_lie_on_the_host_whatever_the_default_device_is():
    with torch.device("meta"):
        packet = Packet({"numbers": (np.int32, (3,))}, torch.device("cpu"))
    packet.host["numbers"][:] = 7
    packet.upload()
    assert packet.device["numbers"].tolist() == [7, 7, 7]


def test_sizes_of_mixtures_lie_closer():
    """Padding is at most a third, where padded tokens read experts of their own."""
    assert set(NUM_TOKENS) < set(CLOSE_NUM_TOKENS) and CLOSE_NUM_TOKENS == tuple(sorted(CLOSE_NUM_TOKENS))
    for count in range(1, 513):
        tilings = {"tilings": TILINGS, "room": ROOM}
        size = StepSize.covering(count, 4, **tilings, sizes=CLOSE_NUM_TOKENS).num_tokens
        assert count <= size <= StepSize.covering(count, 4, **tilings).num_tokens
        assert size - count <= max(count / 2 - 1, 0)


def test_laws_that_are_narrower_than_their_room_leave_padding_without_mass():
    """Whatever an earlier step has left there: no token, and no mass beside it."""
    ids, law = np.full((6, 5), 9, dtype=np.int32), np.full((6, 5), 0.9, dtype=np.float32)
    given = np.arange(12, dtype=np.int32).reshape(4, 3), np.linspace(0.1, 0.4, 12, dtype=np.float32).reshape(4, 3)
    fill_laws(*given, ids, law)
    assert np.array_equal(ids[:4, :3], given[0]) and np.array_equal(law[:4, :3], given[1])
    assert np.all(ids[:4, 3:] == -1) and np.all(ids[4:] == -1) and not law[:4, 3:].any()


@pytest.mark.parametrize(
    ("num_tokens", "num_rows", "tiles"), [(35, 3, 5), (16, 1, 1), (17, 1, 2), (3, 5, 3), (80, 4, 8)]
)
def test_as_many_items_as_rows_can_need_and_no_more(num_tokens, num_rows, tiles):
    """One token in every row but one needs the most tiles; each is one item where keys are not split."""
    rows = min(num_tokens, num_rows)
    worst = -(-(num_tokens - rows + 1) // 16) + rows - 1
    assert worst == tiles and Tiling(16, Splitting(1)).most_items(num_tokens, num_rows, 64) == tiles
