"""Shapes: which slots a draft may fill, as parents only, and how to fit one to counts of accepted slots.

A slot is named by its index. The rank of a slot is its position among its siblings, which is the order in which a
draft reveals them: slot of rank 0 takes the first child drawn.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from stand.trees.arguments import int64_array, vector, whole
from stand.trees.parents import NO_PARENT, ROOT, check_parents, depths_and_ranks

# STAND, figure of the optimised tree: slots by depth, without the root. The paper gives these counts alone.
PAPER_SLOTS_BY_DEPTH = (8, 19, 16, 13, 8, 7, 2, 1, 1, 1, 1, 1, 1)
START_NUM_SLOTS = 625
START_DEPTH = 20
# Assumed chance that the child of each rank is the accepted one, for the hand-made shapes. Not measured.
CHANCE_BY_RANK = (0.72, 0.11, 0.05, 0.03, 0.02, 0.015, 0.012, 0.01, 0.008, 0.006)


@dataclass(frozen=True, slots=True, eq=False)
class TreeShape:
    """Slots of a draft: parents[i] < i, parents[0] = NO_PARENT; slot 0 is the pending token.

    Slots are numbered by depth, so that a shape cut at some depth keeps its slots' numbers: `parents` is copied and,
    where it comes in another order, renumbered (ranks stay). Raises ValueError where it is unsound.
    """

    parents: np.ndarray  # [N] int32
    depths: np.ndarray = field(init=False)  # [N] int32, 0 at the root
    ranks: np.ndarray = field(init=False)  # [N] int32, position among the siblings
    num_children: np.ndarray = field(init=False)  # [N] int32

    def __post_init__(self) -> None:
        parents = vector(self.parents, "parents")
        check_parents(parents)
        parents = _by_depth(parents)
        depths, ranks, num_children = depths_and_ranks(parents)
        arrays = {"parents": parents, "depths": depths, "ranks": ranks, "num_children": num_children}
        for name, array in arrays.items():
            array.setflags(write=False)
            object.__setattr__(self, name, array)

    def check(self) -> None:
        """Raise ValueError where an invariant is broken."""
        check_parents(self.parents)
        if np.any(np.diff(self.depths) < 0):
            raise ValueError(
                f"slots must be numbered by depth, got {self.depths.tolist()}; build the shape anew from its parents"
            )

    def __eq__(self, other: object) -> bool:
        return isinstance(other, TreeShape) and np.array_equal(self.parents, other.parents)

    def __hash__(self) -> int:
        return hash(self.parents.tobytes())

    def __str__(self) -> str:
        """The text that `parse` reads."""
        return "parents:" + ",".join(str(parent) for parent in self.parents)

    @property
    def num_nodes(self) -> int:
        """N, the root included."""
        return len(self.parents)

    @property
    def max_depth(self) -> int:
        return int(self.depths[-1])

    def truncated(self, depth: int) -> TreeShape:
        """The slots down to `depth`, with the numbers they have here."""
        if depth < 0:
            raise ValueError(f"depth must not be negative, got {depth}; 0 leaves the root alone")
        return TreeShape(self.parents[self.depths <= depth])

    @classmethod
    def empty(cls) -> TreeShape:
        """The root alone: ordinary decoding."""
        return cls(np.array([NO_PARENT]))

    @classmethod
    def chain(cls, length: int) -> TreeShape:
        """`length` slots below the root, one under the other."""
        if whole(length, "length") < 0:
            raise ValueError(f"length must not be negative, got {length}; 0 leaves the root alone")
        return cls(np.arange(-1, length))

    @classmethod
    def from_branching(cls, branching: Sequence[int]) -> TreeShape:
        """Every slot of depth d has branching[d] children; [2, 1] is two chains of two. Breadth first."""
        if any(whole(number, "branching") < 1 for number in branching):
            raise ValueError(
                f"branching must hold numbers of at least 1, got {list(branching)}; leave out the depths without slots"
            )
        parents = [NO_PARENT]
        level = [ROOT]
        for number in branching:
            first = len(parents)
            parents.extend(slot for slot in level for _ in range(number))
            level = list(range(first, len(parents)))
        return cls(np.array(parents))

    @classmethod
    def paper(cls) -> TreeShape:
        """80 slots with the paper's numbers by depth (STAND).

        Who is whose child is ours, since the paper gives only counts: each depth takes the slots that are likeliest
        under CHANCE_BY_RANK.
        """
        parents, level = [NO_PARENT], [(ROOT, 1.0)]
        for num_slots in PAPER_SLOTS_BY_DEPTH:
            candidates = [
                (-chance * of_rank, parent, rank)
                for parent, chance in level
                for rank, of_rank in enumerate(CHANCE_BY_RANK)
            ]
            chosen = sorted(candidates)[:num_slots]
            level = [(len(parents) + i, -chance) for i, (chance, _, _) in enumerate(chosen)]
            parents.extend(parent for _, parent, _ in chosen)
        return cls(np.array(parents))

    @classmethod
    def start(cls) -> TreeShape:
        """625 slots down to depth 20, the likeliest under CHANCE_BY_RANK: where fitting begins."""
        parents: list[int] = []
        heap = [(-1.0, NO_PARENT, 0, 0)]  # (-chance, parent, rank, depth), the likeliest slot first
        while len(parents) < START_NUM_SLOTS:
            chance, parent, rank, depth = heapq.heappop(heap)
            slot = len(parents)
            parents.append(parent)
            if depth < START_DEPTH:
                heapq.heappush(heap, (chance * CHANCE_BY_RANK[0], slot, 0, depth + 1))
            if depth > 0 and rank + 1 < len(CHANCE_BY_RANK):
                sibling = chance * CHANCE_BY_RANK[rank + 1] / CHANCE_BY_RANK[rank]
                heapq.heappush(heap, (sibling, parent, rank + 1, depth))
        return cls(np.array(parents))

    @classmethod
    def parse(cls, text: str) -> TreeShape:
        """ "paper", "start", "empty", "chain:8", "branching:4,2,1" or "parents:-1,0,0,1"."""
        name, _, numbers = text.partition(":")
        named = {"paper": cls.paper, "start": cls.start, "empty": cls.empty}
        if text in named:
            return named[text]()
        try:
            values = [int(number) for number in numbers.split(",")]
        except ValueError:
            values = []
        if name == "chain" and len(values) == 1:
            return cls.chain(values[0])
        if name == "branching" and values:
            return cls.from_branching(values)
        if name == "parents" and values:
            return cls(np.array(values))
        raise ValueError(
            f"a shape must be paper, start, empty, chain:LENGTH, branching:N,N,... or parents:-1,0,..., got {text!r}; "
            "see TreeShape.parse"
        )


def _by_depth(parents: np.ndarray) -> np.ndarray:
    order = np.argsort(depths_and_ranks(parents)[0], kind="stable")
    new_index = np.empty(len(parents), dtype=np.int32)
    new_index[order] = np.arange(len(parents), dtype=np.int32)
    renumbered = new_index[parents[order]]
    renumbered[ROOT] = NO_PARENT
    return renumbered


def fit_shape(counts: np.ndarray, shape: TreeShape, num_nodes: int) -> TreeShape:
    """The best shape of `num_nodes` slots within `shape`: the largest sum of counts, an optimum.

    counts: int64[N], how often each slot of `shape` was accepted. A slot can stay only if its parent and its earlier
    siblings stay, because ranks are the order in which children are drawn.

    With siblings chained behind first children, what may stay is a connected part of a binary tree that holds the
    root, so a knapsack over its preorder (take the slot, or skip it with all below) finds the optimum in O(N * n).
    Among equally good shapes the one that takes slots early in that preorder wins.

    Raises ValueError unless counts match the shape and 1 <= num_nodes <= N.
    """
    counts = int64_array(counts, "counts")
    if counts.shape != (shape.num_nodes,) or np.any(counts < 0):
        got = f"{counts.min()}" if counts.shape == (shape.num_nodes,) else f"shape {counts.shape}"
        raise ValueError(f"counts must be {shape.num_nodes} numbers >= 0, got {got}; count each slot of the shape")
    if not 1 <= whole(num_nodes, "num_nodes") <= shape.num_nodes:
        raise ValueError(f"num_nodes must be in [1, {shape.num_nodes}], got {num_nodes}; start from a larger shape")
    order, sizes = _binary_preorder(shape.parents)
    best = np.full((len(order) + 1, num_nodes + 1), -1, dtype=np.int64)  # -1: impossible
    best[:, 0] = 0
    takes = np.zeros((len(order), num_nodes + 1), dtype=bool)
    for position in range(len(order) - 1, -1, -1):
        slot = order[position]
        taken = np.where(best[position + 1, :-1] >= 0, best[position + 1, :-1] + counts[slot], -1)
        skipped = best[position + sizes[slot], 1:]
        takes[position, 1:] = (taken >= skipped) & (taken >= 0)
        best[position, 1:] = np.maximum(taken, skipped)
    return _sub_shape(shape, _chosen_slots(order, sizes, takes, num_nodes))


def _binary_preorder(parents: np.ndarray) -> tuple[list[int], np.ndarray]:
    """Slots in preorder of the first-child / next-sibling tree, and the size of each slot's part of it."""
    num_slots = len(parents)
    first_child = np.full(num_slots, -1)
    next_sibling = np.full(num_slots, -1)
    last_child = np.full(num_slots, -1)
    for slot in range(1, num_slots):
        parent = parents[slot]
        if last_child[parent] < 0:
            first_child[parent] = slot
        else:
            next_sibling[last_child[parent]] = slot
        last_child[parent] = slot
    order, stack = [], [ROOT]
    while stack:
        slot = stack.pop()
        order.append(slot)
        stack.extend(int(link[slot]) for link in (next_sibling, first_child) if link[slot] >= 0)
    sizes = np.ones(num_slots, dtype=np.int64)
    for slot in reversed(order):
        sizes[slot] += sum(sizes[link[slot]] for link in (first_child, next_sibling) if link[slot] >= 0)
    return order, sizes


def _chosen_slots(order: list[int], sizes: np.ndarray, takes: np.ndarray, num_nodes: int) -> list[int]:
    chosen, position, wanted = [], 0, num_nodes
    while wanted > 0:
        slot = order[position]
        if takes[position, wanted]:
            chosen.append(slot)
            position, wanted = position + 1, wanted - 1
        else:
            position += int(sizes[slot])
    return sorted(chosen)


def _sub_shape(shape: TreeShape, chosen: list[int]) -> TreeShape:
    new_index = {slot: index for index, slot in enumerate(chosen)}
    return TreeShape(np.array([new_index.get(int(shape.parents[slot]), NO_PARENT) for slot in chosen]))
