"""Slow twin of best-first growth: growth.h by its rules, as plain objects, in float32 where C++ has floats.

It draws from `SlowBlend` (reference_blended.py), so it knows no memory bounds; laws from outside are not in it.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from reference_blended import SKIP, Context, SlowBlend, SlowCalibration

from stand.trees.noise import DRAFT, uniforms

F = np.float32
OVERLAP = F(0.25)
LIKELIEST = F(0.1)
FEW = 8
LEAST_UNKNOWN = F(1e-3)
NO_BOUND = 1 << 30


@dataclass
class Node:
    token: int
    row: int
    local: int
    parent: int  # into all nodes, -1 for a root
    depth: int
    rank: int
    path: np.float32
    product: np.float32
    num_children: int = 0
    candidates: Candidates | None = None
    law: list[np.float32] | None = None  # of a sampled node


@dataclass
class Candidates:
    tokens: list[int]
    probabilities: list[np.float32]
    uniforms: list[float]
    weights: list[np.float32]  # that children are drawn by
    taken: list[bool] = field(default_factory=list)


@dataclass(frozen=True)
class Item:
    key: np.float32
    product: np.float32
    token: int
    node: int
    action: str  # reveal, sample or expand

    @property
    def rank(self) -> tuple:
        return self.key, -self.node, -self.token


class Thresholds:
    def __init__(self, kind: str, num_rows: int, budget: int, floor: float):
        rows = F(num_rows)
        company = F(1) - F(1) / rows if kind == "deterministic" else F(0)
        last = F(0.4) * rows / F(max(1, budget))
        self.least = max(F(0.2) * F(floor), min(F(0.03) + F(0.02) * company, last))
        self.lowering = F(0.2) + F(0.2) * company
        self.fineness = F(0.1) + F(0.05) * company
        self.hopeless = F(0.1) * self.least
        self.patience = F(0.5) - F(0.1) * company


class SlowGrowth:
    def __init__(self, blend: SlowBlend, *, num_candidates: int = 10, calibration: SlowCalibration | None = None):
        self.blend, self.num_candidates, self.calibration = blend, num_candidates, calibration

    def draft(
        self, histories, budget, *, seed, rows, steps, kind, floor=0.0, rises=None, max_depths=None, max_nodes=None,
        width=None, scopes=None, masks=None,
    ) -> list[Node]:  # fmt: skip
        """All nodes in the order in which they were revealed, roots included. masks: by row and path, the tokens that
        may follow where it is known."""
        count = len(histories)
        self.histories = [list(map(int, history)) for history in histories]
        self.seed, self.rows, self.steps, self.kind = seed, rows, steps, kind
        self.budget, self.floor, self.width = budget, F(floor), width or NO_BOUND
        self.rises = None if rises is None else np.asarray(rises, np.float32)
        self.max_depths = list(max_depths or [NO_BOUND] * count)
        self.max_nodes = list(max_nodes or [NO_BOUND] * count)
        self.scopes = list(scopes or [0] * count)
        self.masks = masks or {}
        self.nodes: list[Node] = []
        self.sizes, self.expected = [0] * count, F(count)
        together = self.rises is not None or self.width == 1 or sum(self.max_nodes) > budget
        for group in [range(count)] if together else [[row] for row in range(count)]:
            self.room = budget if together else self.max_nodes[group[0]]
            self.thresholds, self.items = Thresholds(kind, len(group), self.room, floor), []
            for row in group:
                self._plant(row)
            self._extend()
        return self.nodes

    def _push(self, item: Item) -> None:
        least = self.thresholds.hopeless
        if item.key >= (least if item.action == "expand" else max(least, self.floor)):
            self.items.append(item)

    def _plant(self, row: int) -> None:
        self.nodes.append(Node(self.histories[row][-1], row, 0, -1, 0, 0, F(1), F(1)))
        self.sizes[row] += 1
        if min(self.max_depths[row], self.max_nodes[row]) > 0 and self.room > 0:
            self._push(Item(F(1), F(1), 0, len(self.nodes) - 1, "expand"))

    def _extend(self) -> None:
        limits = self.thresholds
        while self.room > 0 and self.items:
            item = max(self.items, key=lambda item: item.rank)
            self.items.remove(item)
            while item.key < limits.least:
                limits.least *= limits.lowering
            row = self.nodes[item.node].row
            if self.sizes[row] > self.max_nodes[row]:
                continue
            bar = self._bar()
            if (item.key / limits.patience if item.action == "expand" else item.key) < bar:
                if item.key < limits.patience * bar:
                    break
                continue
            {"expand": self._expand, "sample": self._sample, "reveal": self._reveal}[item.action](item)

    def _bar(self) -> np.float32:
        """The least path probability with which one more node pays."""
        return F(0) if self.rises is None else self.expected * self.rises[self.budget - self.room]

    def _item(self, parent: int, token: int, product: np.float32, action: str) -> Item:
        depth = self.nodes[parent].depth + 1
        key = min(F(1), product) if self.calibration is None else F(self.calibration.corrected(float(product), depth))
        return Item(key, product, token, parent, action)

    def _offer(self, parent: int, token: int, chance: np.float32, action: str) -> None:
        self._push(self._item(parent, token, self.nodes[parent].product * chance, action))

    def _reveal(self, item: Item) -> Node:
        parent = self.nodes[item.node]
        row, depth = parent.row, parent.depth + 1
        local, rank = self.sizes[row], parent.num_children
        node = Node(item.token, row, local, item.node, depth, rank, item.key, item.product)
        self.nodes.append(node)
        self.sizes[row] += 1
        parent.num_children += 1
        self.room -= 1
        self.expected += item.key
        if depth < self.max_depths[row]:
            self._push(Item(self.thresholds.patience * item.key, F(0), 0, len(self.nodes) - 1, "expand"))
        return node

    def _expand(self, item: Item) -> None:
        node = self.nodes[item.node]
        least = max(F(0.1) if self.width == 1 else F(0), self.thresholds.least / node.path)
        best = self._law(item.node, least)
        if self.kind == "deterministic":
            for token, probability in best[: self.width]:
                self._offer(item.node, token, probability, "reveal")
            return
        best = best[: self.num_candidates]
        if not best:
            return
        place = ([self.rows[node.row]], [self.steps[node.row]], [node.local])
        numbers = [float(uniforms(self.seed, DRAFT, *place, slot=slot)[0]) for slot in range(len(best))]
        tokens, probabilities = map(list, zip(*best, strict=True))
        weights = [one * np.sqrt(one) for one in probabilities] if self.kind == "sampled" else probabilities
        node.candidates = Candidates(tokens, probabilities, numbers, weights, [False] * len(best))
        if self.kind == "sampled":
            self._push_sample(item.node)
        else:
            self._expand_mixed(item.node)

    def _expand_mixed(self, index: int) -> None:
        candidates = self.nodes[index].candidates
        drawn = self._sample_tail(index)
        others = [position for position in range(len(candidates.tokens)) if position != drawn]
        for position in others[: self.width - (drawn is not None)]:
            self._offer(index, candidates.tokens[position], candidates.probabilities[position], "reveal")

    def _sample_tail(self, index: int) -> int | None:
        node, worth = self.nodes[index], F(2) * self.thresholds.least
        candidates = node.candidates
        sure, tail = 0, F(0)
        most_sure = min(len(candidates.tokens), self.width - 1)
        while sure < most_sure and node.path * candidates.probabilities[sure] >= worth:
            sure += 1
        for probability in candidates.probabilities[sure:]:
            tail += probability
        item = self._item(index, 0, node.product * OVERLAP * tail, "sample")
        if not OVERLAP * node.path * tail >= worth or item.key < max(self.floor, self._bar()):
            return None
        candidates.taken[:sure] = [True] * sure
        return self._sample(item)

    def _push_sample(self, index: int) -> None:
        candidates, mass, total, shared = self.nodes[index].candidates, F(0), F(0), F(0)
        drawn = zip(candidates.probabilities, candidates.weights, candidates.taken, strict=True)
        for probability, weight, taken in drawn:
            if not taken:
                mass += probability
                total += weight
                shared += weight * probability
        if total > 0:
            self._offer(index, 0, OVERLAP * mass + (F(1) - OVERLAP) * shared / total, "sample")

    def _sample(self, item: Item) -> int:
        node = self.nodes[item.node]
        candidates = node.candidates
        chances = zip(candidates.weights, candidates.taken, strict=True)
        weights = [0.0 if taken else float(weight) for weight, taken in chances]
        times = [-np.log(u) / p if p > 0 else np.inf for p, u in zip(weights, candidates.uniforms, strict=True)]
        winner = int(np.argmin(times))
        law = [F(weight / sum(weights)) for weight in weights]
        candidates.taken[winner] = True
        self._reveal(Item(item.key, item.product, candidates.tokens[winner], item.node, "reveal")).law = law
        if self.kind == "sampled" and node.num_children < self.width:
            self._push_sample(item.node)
        return winner

    def _law(self, index: int, least: np.float32) -> list[tuple[int, np.float32]]:
        """The blended law in descending probability; what could add less than `least` is not asked."""
        row, path, at = self.nodes[index].row, [], index
        while self.nodes[at].parent >= 0:
            path.append(self.nodes[at].token)
            at = self.nodes[at].parent
        found = self.blend.contexts(self.histories[row] + path[::-1])
        cut, carry, pieces = self.thresholds.fineness * least, F(1), []
        for order in [*range(self.blend.depth, 0, -1), SKIP]:
            if carry >= least and isinstance(found.get(order), Context) and found[order].entries:
                carry = self._collect(found[order], row, carry, cut, pieces)
        if 0 in found and carry * LIKELIEST >= least:
            self._collect_empty(found[0], row, carry, cut, pieces)
        law: dict[int, np.float32] = {}
        for token, probability in pieces:
            law[token] = law.get(token, F(0)) + probability
        allowed = self.masks.get((row, tuple(path[::-1])))
        if allowed is not None:
            law = _restricted(law, allowed)
        return sorted(law.items(), key=lambda item: (-item[1], item[0]))

    def _collect(self, context: Context, row: int, carry: np.float32, cut: np.float32, pieces: list) -> np.float32:
        evidence = self.blend.read(context, self.scopes[row])
        odds, escape = np.array(evidence.odds, np.float32), F(evidence.escape)
        sums = np.zeros(32, np.float32)
        sums[: len(odds)] = odds
        for half in (16, 8, 4, 2):  # as vectors are summed up
            sums[:half] += sums[half : 2 * half]
        scale = carry / (sums[0] + sums[1] + escape)
        pieces += [(token, scale * one) for token, one in zip(evidence.tokens, odds, strict=True) if scale * one >= cut]
        return scale * escape

    def _collect_empty(self, context: Context, row: int, carry: np.float32, cut: np.float32, pieces: list) -> None:
        evidence = self.blend.read(context, self.scopes[row])
        total = F(evidence.escape)
        for odds in evidence.odds:
            total += F(odds)
        law = [(token, F(odds) / total) for token, odds in zip(evidence.tokens, evidence.odds, strict=True)]
        for token, probability in sorted(law, key=lambda item: _half_octaves(item[1])):
            if carry * probability < cut:
                break
            pieces.append((token, carry * probability))


def _restricted(law: dict[int, np.float32], allowed: frozenset[int]) -> dict[int, np.float32]:
    """Without the other tokens, which leave what they had to these. Few that may follow share what is left."""
    kept = lost = F(0)
    for token, probability in law.items():
        if token in allowed:
            kept += probability
        else:
            lost += probability
    unknown = max(F(1) - kept - lost, LEAST_UNKNOWN)
    known = {token: probability for token, probability in law.items() if token in allowed}
    if len(known) < len(allowed) <= FEW:
        known |= dict.fromkeys(sorted(allowed - set(known)), unknown / F(len(allowed) - len(known)))
    elif len(allowed) <= FEW:  # nothing else may follow
        unknown = F(0)
    return {token: probability / (kept + unknown) for token, probability in known.items()}


def _half_octaves(probability: np.float32) -> int:
    """Below 1; candidates of the same one stay in their order."""
    return min((127 << 23) - int(probability.view(np.uint32)) >> 22, 31)
