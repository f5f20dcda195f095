"""Timings of a step's parts on random data: memory, matrix products, attention, laws and verification.

Every figure comes with its floor: the bytes that must move over the rate of a long read, or the operations over the
rate of a large matrix product, whichever is longer, both measured in the same run. Weights and keys are cold, as in a
step: a run walks over several copies, together several times the GPU's cache.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import ClassVar

import numpy as np
import torch
from torch.nn.functional import scaled_dot_product_attention
from workloads.model_shapes import INITIAL_SPREAD, ModelShape, Product
from workloads.random_draft import random_draft

from gpu_parts.bench_record import Measurement
from stand.forward.attention_shape import HeadSizes
from stand.gpu.kernels.attention import tree_attention
from stand.gpu.kernels.compact import compact
from stand.gpu.kernels.verification.filter import filter_rows
from stand.gpu.kernels.verification.race import race
from stand.gpu.kernels.verification.softmax import softmax_rows
from stand.gpu.kernels.verification.top_tokens import top_tokens
from stand.gpu.kernels.verification.traverse import traverse
from stand.gpu.packets.work_list import Splitting, Tiling, WorkList
from stand.gpu.tuning.attention_tiles import PAGE_SIZE, limits_of, programs_at_once, tile_tokens
from stand.gpu.tuning.device_timer import DeviceTimer
from stand.gpu.tuning.product_tiles import MOST_TOKENS, TILES
from stand.gpu.tuning.products import TOKENS, Products
from stand.laws.sampling import SamplingParams, TargetLaw
from stand.trees import DraftBatch
from stand.verifiers.noise import uniforms_on_device

LOGGER = logging.getLogger("stand")

WORD_BITS = 64


@dataclass(frozen=True, slots=True)
class Extent:
    """How much is measured."""

    token_counts: tuple[int, ...]  # M of the matrix products
    lengths: tuple[int, ...]  # committed keys per row
    trees: tuple[int, ...]  # tokens per row
    batches: tuple[int, ...]  # rows
    cold_bytes: int  # of weights or keys that one run walks over
    read_bytes: int  # of the read that tells the bandwidth
    square: int  # side of the matrix product that tells the arithmetic rate
    repeats: int


FULL = Extent(
    token_counts=(1, 2, 4, 8, 16, 32, 64, 80, 96, 112, 128, 160, 192, 256),
    lengths=(2048, 8192, 16384, 32768),
    trees=(1, 16, 32, 64, 80, 128),
    batches=(1, 4, 16),
    cold_bytes=2**29,
    read_bytes=2**31,
    square=8192,
    repeats=20,
)
SMOKE = Extent(
    token_counts=(1, 4),
    lengths=(70,),
    trees=(1, 4),
    batches=(1, 2),
    cold_bytes=1,
    read_bytes=2**16,
    square=64,
    repeats=1,
)


@dataclass(frozen=True, slots=True)
class Machine:
    """What the floors are computed from, as measured."""

    bytes_per_second: float  # read by a kernel, as a step reads weights; torch's own copy may be slower
    flops_per_second: float  # of a large square matrix product in the model's dtype

    def floor(self, *, nbytes: float, flops: float = 0.0) -> float:
        """Seconds below which no implementation gets."""
        return max(nbytes / self.bytes_per_second, flops / self.flops_per_second)


@dataclass(frozen=True, slots=True)
class Timing:
    """One kernel, or one matrix product, at one size."""

    HEADER: ClassVar = (
        "kernel", "tokens", "rows", "length", "us", "floor us", "% of floor", "torch us", "torch / ours", "max diff",
    )  # fmt: skip

    name: str
    tokens: int
    rows: int
    length: int | None
    seconds: float
    floor: float
    reference: float | None = None  # seconds of the same work without our kernel
    difference: float | None = None  # largest |ours - reference|

    @property
    def percent(self) -> float | None:
        """Of the floor's speed; None where next to nothing has to move."""
        return 100 * self.floor / self.seconds if self.floor > 0 else None

    def cells(self) -> tuple[object, ...]:
        reference = None if self.reference is None else 1e6 * self.reference
        ratio = None if self.reference is None else self.reference / self.seconds
        difference = None if self.difference is None else f"{self.difference:.1e}"
        times = (1e6 * self.seconds, 1e6 * self.floor, self.percent)
        return (self.name, self.tokens, self.rows, self.length, *times, reference, ratio, difference)


class KernelBench:
    """Measures one model shape on one device."""

    def __init__(self, shape: ModelShape, extent: Extent, *, device: torch.device, dtype: torch.dtype):
        self.shape, self.extent, self.device, self.dtype = shape, extent, device, dtype
        self.timer = DeviceTimer(device, repeats=extent.repeats)
        self.element = torch.finfo(dtype).bits // 8
        self.machine = self._machine()

    def _machine(self) -> Machine:
        words = self._random(self.extent.read_bytes // self.element).view(torch.int32)
        read = self.timer.seconds(lambda: words.amax())
        left, right = (self._random(self.extent.square, self.extent.square) for _ in range(2))
        multiplied = self.timer.seconds(lambda: torch.mm(left, right))
        return Machine(words.nbytes / read, 2 * self.extent.square**3 / multiplied)

    def _random(self, *sizes: int, spread: float = INITIAL_SPREAD) -> torch.Tensor:
        return torch.empty(sizes, dtype=self.dtype, device=self.device).normal_(0.0, spread)

    def _copies(self, nbytes: int, most: int) -> int:
        return min(max(-(-self.extent.cold_bytes // nbytes), 1), most)

    def products(self) -> Iterator[Measurement]:
        """Every matrix product of a layer and the output head, by tokens; seconds are those of one product."""
        for product in self.shape.products():
            yield Measurement(f"products, {product.name}", partial(self._product, product))

    def _product(self, product: Product) -> Iterator[Timing]:
        nbytes = product.inputs * product.outputs * self.element
        weights = [self._random(product.outputs, product.inputs) for _ in range(self._copies(nbytes, product.count))]
        for tokens in self.extent.token_counts:
            states = self._random(tokens, product.inputs)
            seconds = self.timer.seconds(lambda states=states: [torch.mm(states, weight.t()) for weight in weights])
            moved = nbytes + tokens * (product.inputs + product.outputs) * self.element
            floor = self.machine.floor(nbytes=moved, flops=2 * tokens * product.inputs * product.outputs)
            timing = Timing(product.name, tokens, 1, None, seconds / len(weights), floor)
            yield timing
            yield from self._tiled_products(states, weights, timing)

    def _tiled_products(
        self, states: torch.Tensor, weights: Sequence[torch.Tensor], reference: Timing
    ) -> Iterator[Timing]:
        """The same by every tile of the few-token product, where it takes so many tokens."""
        expected = torch.mm(states, weights[0].t()).float()
        for number, tile in enumerate(TILES if len(states) <= MOST_TOKENS else ()):
            products = Products({tuple(weights[0].shape): (number,) * len(TOKENS)}, self.device)
            difference = (products(states, weights[0], None).float() - expected).abs().max().item()
            seconds = self.timer.seconds(
                lambda products=products: [products(states, weight, None) for weight in weights]
            )  # fmt: skip
            name = f"{reference.name}, tile {tile.rows} x {tile.depth}"
            yield replace(
                reference, name=name, seconds=seconds / len(weights), reference=reference.seconds, difference=difference
            )  # fmt: skip

    def attention(self) -> Iterator[Measurement]:
        """Tree attention of one layer, by context length, rows and tokens per row, beside masked attention."""
        for length in self.extent.lengths:
            for rows in self.extent.batches:
                label = f"attention, {rows} rows, length {length}"
                yield Measurement(label, partial(self._attentions, length, rows))

    def _attentions(self, length: int, rows: int) -> Iterator[Timing]:
        return (timing for tree in self.extent.trees for timing in self._attention(length, rows, tree))

    def _attention(self, length: int, rows: int, tree: int) -> list[Timing]:
        """Over rooms, beside masked attention; and over pages in no order, beside rooms."""
        shape, room = self.shape, -(-(length + tree) // PAGE_SIZE) * PAGE_SIZE
        nbytes = 2 * rows * room * shape.key_heads * shape.head_size * self.element
        layers = [
            self._random(2, rows, shape.key_heads, room, shape.head_size, spread=1.0)
            for _ in range(self._copies(nbytes, shape.attention_layers))
        ]
        query = self._random(rows * tree, shape.heads, shape.head_size, spread=1.0)
        ours = self._kernel_attention(query, length, rows, tree)
        masked = self._masked_attention(query, length, rows, tree)
        one_page = torch.arange(rows, dtype=torch.int32, device=self.device)[:, None]
        table = torch.randperm(rows * room // PAGE_SIZE, device=self.device).view(rows, -1).to(torch.int32)
        seconds = self.timer.seconds(lambda: [ours(layer, one_page) for layer in layers])
        reference = difference = None
        try:
            reference = self.timer.seconds(lambda: [masked(layer) for layer in layers]) / len(layers)
            difference = (ours(layers[0], one_page).float() - masked(layers[0]).float()).abs().max().item()
        except torch.OutOfMemoryError:  # a dense mask and its scores need room that the kernel does not
            torch.cuda.empty_cache()
        keys = rows * (length + tree)
        moved = self.element * (2 * keys * shape.key_heads * shape.head_size + 2 * query.numel())
        flops = shape.attention_flops() / shape.attention_layers * tree * keys
        floor = self.machine.floor(nbytes=moved, flops=flops)
        rooms = Timing("attention", tree, rows, length, seconds / len(layers), floor, reference, difference)
        pools = [layer.view(2, -1, shape.key_heads, PAGE_SIZE, shape.head_size) for layer in layers]
        pages = self.timer.seconds(lambda: [ours(pool, table) for pool in pools]) / len(layers)
        return [rooms, Timing("attention in pages", tree, rows, length, pages, floor, rooms.seconds)]

    def _kernel_attention(
        self, query: torch.Tensor, length: int, rows: int, tree: int
    ) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor]:
        shape, num_tokens = self.shape, rows * tree
        limits = limits_of(self.device)
        sizes = HeadSizes.alike(shape.head_size)
        tile = tile_tokens(tree, shape.groups, sizes, self.dtype, limits=limits)
        programs = programs_at_once(tile * shape.groups, sizes, self.dtype, limits=limits)
        splitting = Splitting.filling(self.device, key_heads=shape.key_heads, num_rows=rows, programs=programs)
        offsets = np.arange(0, num_tokens + 1, tree)
        work = WorkList.build(offsets, np.full(rows, length), np.arange(rows), Tiling(tile, splitting))
        is_split = len(work.items) and int(work.items[:, 7].max()) > 0
        num_partials = int(work.partial_starts[-1]) if is_split else 0
        partials = torch.empty(num_partials, *query.shape[1:], device=self.device)
        log_sums = torch.empty(num_partials, shape.heads, device=self.device)
        parents = heap_parents(tree)
        step = [
            torch.from_numpy(array).to(self.device)
            for array in (
                np.tile(ancestor_words(parents), (rows, 1)),
                length + np.tile(depths_of(parents), rows),
                work.items,
                work.partial_starts,
            )
        ]
        scale = shape.head_size**-0.5
        return lambda layer, pages: tree_attention(
            query, layer[0], layer[1], pages, *step, partials, log_sums, scale, tile
        )

    def _masked_attention(
        self, query: torch.Tensor, length: int, rows: int, tree: int
    ) -> Callable[[torch.Tensor], torch.Tensor]:
        """As `stand.forward.tree_attention` does: heads of one key head folded into the query axis, one dense mask."""
        shape = self.shape
        words = ancestor_words(heap_parents(tree))
        seen = (words[:, np.arange(tree) // WORD_BITS] >> (np.arange(tree) % WORD_BITS)) & 1
        mask = torch.zeros(rows, 1, shape.groups, tree, length + tree, dtype=self.dtype, device=self.device)
        mask[..., length:].masked_fill_(torch.from_numpy(seen == 0).to(self.device), float("-inf"))
        mask = mask.flatten(2, 3)
        heads = query.view(rows, tree, shape.heads, shape.head_size).transpose(1, 2)
        folded = heads.reshape(rows, shape.key_heads, shape.groups * tree, shape.head_size)

        def attend(layer: torch.Tensor) -> torch.Tensor:
            keys, values = layer[:, :, :, : length + tree]
            mixed = scaled_dot_product_attention(folded, keys, values, attn_mask=mask)
            mixed = mixed.reshape(rows, shape.heads, tree, shape.head_size).transpose(1, 2)
            return mixed.reshape(rows * tree, shape.heads, shape.head_size)

        return attend

    def laws(self) -> Iterator[Measurement]:
        """From logits to the kept path, by tokens of all rows together; beside torch's operations where there are."""
        for rows in self.extent.batches:
            tokens = max(self.extent.trees) // rows * rows
            yield Measurement(f"laws, {rows} rows", partial(self._laws, tokens, rows))

    def _laws(self, tokens: int, rows: int) -> Iterator[Timing]:
        vocabulary = self.shape.vocabulary
        logits = self._random(tokens, vocabulary, spread=3.0)
        laws = torch.empty(tokens, vocabulary, device=self.device)
        logit_bytes, law_bytes = logits.numel() * self.element, laws.numel() * 4

        def timing(name, ours, nbytes, reference=None) -> Timing:
            floor = self.machine.floor(nbytes=nbytes)
            return Timing(name, tokens, rows, None, self.timer.seconds(ours), floor, self._reference(reference))

        filtered = TargetLaw(SamplingParams(temperature=0.6, top_p=0.95))

        def refill() -> None:  # filtered laws are cheap to filter again, so they are made anew
            softmax_rows(laws, logits, 0.6)
            filter_rows(laws, 0, 0.95, 0.0)

        yield timing(
            "softmax, top_p", refill, logit_bytes + law_bytes,
            lambda: laws.copy_(torch.softmax(filtered.warp(logits.float()), dim=1)),
        )  # fmt: skip
        yield timing(
            "softmax", lambda: softmax_rows(laws, logits, 0.6), logit_bytes + law_bytes,
            lambda: laws.copy_(torch.softmax(logits.float() / 0.6, dim=1)),
        )  # fmt: skip
        count = min(10, vocabulary)
        yield timing("top rows", lambda: top_tokens(laws, count), law_bytes, lambda: torch.topk(laws, count, dim=1))
        keys = torch.arange(tokens, device=self.device)
        yield timing("race", lambda: race(laws, keys), law_bytes, self._torch_race(laws))
        walk = self._traversal(laws, rows)
        yield timing("traverse", walk, 0)
        yield timing("compact", *self._compaction(rows))

    def _reference(self, work: Callable[[], object] | None) -> float | None:
        """Seconds of the same work by torch; None where there is none, or torch cannot capture it."""
        try:
            return None if work is None else self.timer.seconds(work)
        except Exception as error:  # our own figure is worth having
            LOGGER.warning("no reference: %r", error)
            return None

    def _torch_race(self, laws: torch.Tensor) -> Callable[[], torch.Tensor]:
        """By whole tensors; the noise is made beforehand here, although a step would have to make it."""
        noise = -uniforms_on_device(list(range(len(laws))), laws.shape[1], device=self.device).log()
        return lambda: (laws.double() / noise).argmax(dim=1)

    def _traversal(self, laws: torch.Tensor, rows: int) -> Callable[[], object]:
        generator = np.random.default_rng(0)
        parents = heap_parents(len(laws) // rows)
        batch = DraftBatch.concatenate([random_draft(parents, laws.shape[1], generator) for _ in range(rows)])
        arrays = (batch.token_ids, batch.parents, batch.offsets, batch.support_ids, batch.law)
        numbers = (*arrays, generator.random(len(laws)), *walk_order(parents, rows))
        step = [torch.from_numpy(array).to(self.device) for array in numbers]
        return lambda: traverse(laws, *step)

    def _compaction(self, rows: int) -> tuple[Callable[[], object], int]:
        """Four nodes of every row move, in all layers; (work, bytes moved)."""
        shape = self.shape
        storage = self._random(shape.attention_layers, 2, rows, shape.key_heads, 2 * WORD_BITS, shape.head_size)
        path = torch.tensor([[2, 5, 11, 23]] * rows, device=self.device)
        place, lengths = torch.arange(rows, device=self.device), torch.full((rows,), 9, device=self.device)
        moved = 2 * path.numel() * shape.cache_elements() * self.element
        pages = torch.arange(rows, dtype=torch.int32, device=self.device)[:, None]
        return (lambda: compact(storage, pages, place, lengths, path)), moved


def heap_parents(num_nodes: int) -> np.ndarray:
    """[N] int32: a binary heap, the root's parent is -1."""
    return np.maximum((np.arange(num_nodes) - 1) // 2, -1).astype(np.int32)


def depths_of(parents: np.ndarray) -> np.ndarray:
    """[N] int64."""
    depths = np.zeros(len(parents), dtype=np.int64)
    for node in range(1, len(parents)):
        depths[node] = depths[parents[node]] + 1
    return depths


def ancestor_words(parents: Sequence[int]) -> np.ndarray:
    """[N, W] int64: bit j % 64 of word j // 64 is set where node j is an ancestor or the node itself."""
    words = np.zeros((len(parents), -(-len(parents) // WORD_BITS)), dtype=np.uint64)
    for node, parent in enumerate(parents):
        if parent >= 0:
            words[node] = words[parent]
        words[node, node // WORD_BITS] |= np.uint64(1) << np.uint64(node % WORD_BITS)
    return words.view(np.int64)


def turns_of(parents: Sequence[int]) -> np.ndarray:
    """[N] int64: the nodes below the root in turns, as in `StepPacket`."""
    rounds, youngest = [0] * len(parents), list(range(len(parents)))
    for node, parent in list(enumerate(parents))[1:]:
        rounds[node] = rounds[youngest[parent]] + 1
        youngest[parent] = node
    alike = [np.flatnonzero(np.equal(rounds, number)) for number in range(1, max(rounds) + 1)]
    turns = [nodes[start : start + 8].tolist() for nodes in alike for start in range(0, len(nodes), 8)]
    words = [int.from_bytes(bytes(turn), "little") for turn in turns]
    return np.array([*words, *[0] * (len(parents) - len(words) - 1), len(words)], dtype=np.uint64).view(np.int64)


def walk_order(parents: Sequence[int], num_rows: int) -> tuple[np.ndarray, np.ndarray]:
    """(turns [M], ancestors [M, W]) of rows that all have these parents, as traversal takes them."""
    return np.tile(turns_of(parents), num_rows), np.tile(ancestor_words(parents), (num_rows, 1))
