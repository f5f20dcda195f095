"""Packed trees behind committed keys for the attention kernel, and explicit softmax in float64 over them."""

from dataclasses import dataclass

import numpy as np
import torch

from stand.forward.attention_shape import HeadSizes
from stand.gpu.kernels.attention import tree_attention
from stand.gpu.packets.work_list import Splitting, Tiling, WorkList
from stand.gpu.tuning.attention_tiles import tile_tokens

SPLIT = 64
MANY = 10**6  # items per row: every split is as short as allowed


@dataclass
class Case:
    """Packed trees behind committed keys, with everything the kernel is given."""

    query: torch.Tensor  # [M, H, D]
    keys: torch.Tensor  # [R, Hkv, S, D]
    values: torch.Tensor  # [R, Hkv, S, E]
    sees: list[np.ndarray]  # per row [n, n] bool
    lengths: np.ndarray  # [B]
    cache_rows: np.ndarray  # [B]
    offsets: np.ndarray  # [B + 1]
    ancestors: torch.Tensor  # [M, W]
    positions: torch.Tensor  # [M]
    is_latent: bool = False  # query [M, H, D + E]


def random_parents(generator: np.random.Generator, count: int) -> np.ndarray:
    return np.array([-1, *(int(generator.integers(0, node)) for node in range(1, count))])


def tree_matrix(parents: np.ndarray) -> np.ndarray:
    """[n, n] bool: node sees itself and its ancestors."""
    sees = np.eye(len(parents), dtype=bool)
    for node, parent in enumerate(parents):
        if parent >= 0:
            sees[node] |= sees[parent]
    return sees


def bit_words(sees: list[np.ndarray], num_tokens: int) -> torch.Tensor:
    """[M, W] int64, as few words as the largest tree needs."""
    width = -(-max(len(one) for one in sees) // 64)
    words = np.zeros((num_tokens, width), dtype=np.uint64)
    first = 0
    for one in sees:
        for node, seen in np.argwhere(one):
            words[first + node, seen // 64] |= np.uint64(1) << np.uint64(seen % 64)
        first += len(one)
    return torch.from_numpy(words.view(np.int64))


def make_case(
    counts, lengths, *, heads=2, groups=2, size=64, value_size=None, dtype=torch.float32, seed=0, padding=0,
    chains=False, room=None, is_latent=False,
) -> Case:  # fmt: skip
    generator = np.random.default_rng(seed)
    torch.manual_seed(seed)
    parents = [np.arange(count) - 1 if chains else random_parents(generator, count) for count in counts]
    sees = [tree_matrix(one) for one in parents]
    depths = np.concatenate([one.sum(axis=1) - 1 for one in sees])
    offsets = np.concatenate([[0], np.cumsum(counts)])
    num_tokens = int(offsets[-1]) + padding
    lengths = np.asarray(lengths)
    positions = np.zeros(num_tokens, dtype=np.int64)
    positions[: offsets[-1]] = np.repeat(lengths, counts) + depths
    shape = (len(counts) + 2, heads // groups, room or int((lengths + np.asarray(counts)).max()) + 3, size)
    return Case(
        query=torch.randn(num_tokens, heads, size + (value_size if is_latent else 0)).to(dtype),
        keys=torch.randn(shape).to(dtype),
        values=torch.randn(*shape[:3], value_size or size).to(dtype),
        sees=sees,
        lengths=lengths,
        cache_rows=generator.permutation(shape[0])[: len(counts)],
        offsets=offsets,
        ancestors=bit_words(sees, num_tokens),
        positions=torch.from_numpy(positions),
        is_latent=is_latent,
    )


def sizes_of(case: Case) -> HeadSizes:
    return HeadSizes(case.keys.shape[3], case.values.shape[3], case.is_latent)


def run(
    case: Case, *, tile=None, split_length=SPLIT, row_items=MANY, spare_items=5, order=None, pages=None,
    has_room=True, is_cut=True, **options,
) -> torch.Tensor:  # fmt: skip
    """The kernel on a padded work list with scratch full of NaN, so that nothing unwritten can be read unnoticed.

    order: of the items, a permutation's seed or -1 for backwards; pages: the table, where a row's keys are not one
    piece; has_room: for partial results; is_cut: whether the list begins where a window does.
    """
    (num_tokens, heads, query_size), sizes = case.query.shape, sizes_of(case)
    groups = heads // case.keys.shape[1]
    tile = tile or tile_tokens(int(np.diff(case.offsets).max()), groups, sizes, case.query.dtype)
    tiling = Tiling(tile, Splitting(row_items, split_length, options.get("window", 0) if is_cut else 0))
    work = WorkList.build(case.offsets, case.lengths, case.cache_rows, tiling)
    items, count = np.zeros((len(work.items) + spare_items, 8), dtype=np.int32), len(work.items)
    shuffled = slice(None, None, order) if order in (None, -1) else np.random.default_rng(order).permutation(count)
    items[:count] = work.items[shuffled]
    starts = np.full(num_tokens + 1, work.partial_starts[-1], dtype=np.int32)
    starts[: len(work.partial_starts)] = work.partial_starts
    room = int(starts[-1]) if has_room else 0
    mixed = tree_attention(
        case.query,
        case.keys,
        case.values,
        torch.arange(len(case.keys), dtype=torch.int32)[:, None] if pages is None else pages,
        case.ancestors,
        case.positions,
        torch.from_numpy(items),
        torch.from_numpy(starts),
        torch.full((room, heads, sizes.mixed), float("nan")),
        torch.full((room, heads), float("nan")),
        options.pop("scale", query_size**-0.5),
        tile,
        **options,
        is_latent=case.is_latent,
    )
    return mixed


def expected(case: Case, *, scale=None, window=0, softcap=0.0, sinks=None) -> torch.Tensor:
    """[M, H, E] float64: one explicit softmax per token and head over exactly the slots that it sees."""
    num_tokens, heads, size = case.query.shape
    groups = heads // case.keys.shape[1]
    whole = torch.cat((case.keys, case.values), dim=-1) if case.is_latent else case.keys
    taken = case.keys if case.is_latent else case.values
    result = torch.zeros(num_tokens, heads, taken.shape[3], dtype=torch.float64)
    positions = case.positions.numpy()
    for row, (length, first, end) in enumerate(zip(case.lengths, case.offsets, case.offsets[1:], strict=False)):
        for token in range(first, end):
            slots = [slot for slot in range(length) if not window or slot > positions[token] - window]
            for node in np.flatnonzero(case.sees[row][token - first]):
                if not window or positions[first + node] > positions[token] - window:
                    slots.append(length + node)
            keys = whole[case.cache_rows[row]][:, slots].double().repeat_interleave(groups, dim=0)
            values = taken[case.cache_rows[row]][:, slots].double().repeat_interleave(groups, dim=0)
            scores = torch.einsum("hd,hsd->hs", case.query[token].double(), keys) * (scale or size**-0.5)
            if softcap:
                scores = torch.tanh(scores / softcap) * softcap
            if sinks is not None:
                scores = torch.cat([scores, sinks.double()[:, None]], dim=1)
            weights = torch.softmax(scores, dim=1)[:, : len(slots)]
            result[token] = torch.einsum("hs,hse->he", weights, values)
    return result


def difference(case: Case, **options) -> float:
    own = {key: options.pop(key) for key in ("tile", "split_length", "row_items", "is_cut") if key in options}
    return float((run(case, **own, **options).double() - expected(case, **options)).abs().max())
