"""Slow twin of the blended lookup: the same rules as plain objects, without memory bounds and without drafting."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

ONE = 4096
SKIP = 13  # "order" of the context that is the token before the newest; 0: the empty context
MAX_ENTRIES = {0: 64, 1: 32, 2: 16, SKIP: 16}
UNSEEN = 1e-5
SOFT = 0.05
SLOW = 0.1
RECENT_STAMPS = 8

ENTRY = -2.32
ENTRY_ORDER = (-0.1, 0.0, 0.04, -0.03, -0.21, -0.21, -0.22, -0.13, -0.07, -0.24)
ENTRY_WEIGHT = (0.0, 0.44, 0.47, 0.6, 0.85, 0.95, 1.12, 1.37, 1.5, 2.51, 3.04, 3.49, 3.88, 4.31, 4.74, 5.22)
ENTRY_AGE = (0.0, -0.12, -0.89)
ENTRY_RANK = (0.0, 0.74, 0.27)
ESCAPE = 0.76
ESCAPE_ORDER = (1.58, 0.0, 0.81, 1.06, 1.06, 1.21, 1.32, 1.43, 0.98, 0.23)
ESCAPE_SIZE = (0.0, 0.73, 0.67, 0.59, 0.56, 0.88)
ESCAPE_VISITS = (0.0, -0.42, -0.52, -0.3, -0.18, -0.06, 0.05, 0.02)
ESCAPE_SHARE = (0.0, -0.6, -0.92, -1.05)
ESCAPE_AGE = (0.0, -0.1, 0.2)


@dataclass
class Entry:
    token: int
    weight: int = 0
    stamp: int = 0
    scope: int = 0
    child: Context | None = None


@dataclass
class Context:
    order: int
    entries: list[Entry] = field(default_factory=list)  # latest first
    visits: int = 0

    def find(self, token: int) -> Entry | None:
        return next((entry for entry in self.entries if entry.token == token), None)


@dataclass
class Evidence:
    """What a context says: the keys of its odds, and the odds."""

    tokens: list[int]
    entry_keys: list[tuple]
    escape_key: tuple
    odds: list[float]
    escape: float

    @property
    def total(self) -> float:
        return sum(self.odds) + self.escape


class SlowBlend:
    def __init__(self, *, depth=12, fade=0.95, rate=0.05):
        self.depth, self.fade, self.rate = depth, fade, rate
        self.roots: dict[int, Context] = {}
        self.skips: dict[int, Context] = {}
        self.empty: Context | None = None
        self.entry_odds: dict[tuple, float] = {}
        self.escape_odds: dict[tuple, float] = {}
        self.uses: dict[tuple[bool, tuple], float] = {}  # of either table's odds
        self.now = 0

    def contexts(self, tokens: list[int]) -> dict[int, Context | Entry]:
        """By order, the context that ends with `tokens`, or the entry under which it could be made."""
        found: dict[int, Context | Entry] = {}
        for order in range(1, min(self.depth, len(tokens)) + 1):
            path = tokens[len(tokens) - order :]
            context, entry = self.roots.get(path[0]), None
            for token in path[1:]:
                entry = context.find(token) if isinstance(context, Context) else None
                context = entry.child if entry else None
            if context is not None or entry is not None:
                found[order] = context if context is not None else entry
        if len(tokens) > 1 and tokens[-2] in self.skips:
            found[SKIP] = self.skips[tokens[-2]]
        if self.empty is not None:
            found[0] = self.empty
        return found

    def chain(self, num_tokens: int) -> list[int]:
        """Orders from the longest down: where one fails the next is asked."""
        return [*range(min(self.depth, num_tokens), 0, -1), *([SKIP] if num_tokens > 1 else []), 0]

    def evidence(self, found: dict[int, Context | Entry], scope: int) -> list[Evidence]:
        """What is known, from the end of the chain up."""
        orders = [order for order in self.chain(self.depth + 1) if order in found]
        contexts = [found[order] for order in reversed(orders)]
        return [self.read(one, scope) for one in contexts if isinstance(one, Context) and one.entries]

    def predict(self, tokens: list[int], *, scope: int = 0) -> dict[int, float]:
        law: dict[int, float] = {}
        for evidence in self.evidence(self.contexts(tokens), scope):
            law = {token: value * evidence.escape / evidence.total for token, value in law.items()}
            for token, odds in zip(evidence.tokens, evidence.odds, strict=True):
                law[token] = law.get(token, 0.0) + odds / evidence.total
        return law

    def chance(self, tokens: list[int], token: int, *, scope: int = 0) -> float:
        probability = UNSEEN
        for evidence in self.evidence(self.contexts(tokens), scope):
            own = dict(zip(evidence.tokens, evidence.odds, strict=True)).get(token, 0.0)
            probability = (own + evidence.escape * probability) / evidence.total
        return probability

    def learn(self, history: list[int], tokens: list[int], *, scope: int = 0) -> None:
        path = list(history)
        for token in tokens:
            found = self.contexts(path)
            if self.rate > 0:
                self.train(found, token, scope, 1.0)
            is_soft = False
            for order in self.chain(len(path)):
                context = self.make(found.get(order), order, path)
                if context is None:
                    continue
                was_known = context.find(token) is not None
                self.add_entry(context, token)
                self.fade_weights(context, is_soft)
                self.observe(context, token, SOFT if is_soft and was_known else 1.0, scope)
                is_soft |= was_known
            self.now += 1
            path.append(token)

    def learn_row(self, path: list[int], row: list[tuple[int, float]], *, scope: int = 0) -> None:
        found = self.contexts(path)
        for token, mass in row:
            if self.rate > 0 and mass >= 0.1:
                self.train(found, token, scope, mass)
        is_soft = False
        for order in self.chain(len(path)):
            context = self.make(found.get(order), order, path)
            if context is None:
                continue
            self.fade_weights(context, is_soft)
            known = 0.0
            for token, mass in reversed(row):
                was_known = context.find(token) is not None
                if mass * ONE < 1 or (not was_known and mass < 1 / 64):
                    continue
                self.add_entry(context, token)
                self.observe(context, token, mass * (SOFT if is_soft and was_known else 1.0), scope)
                known += mass if was_known else 0.0
            is_soft |= known >= 0.5
        self.now += 1

    def make(self, context: Context | Entry | None, order: int, path: list[int]) -> Context | None:
        if order == 0:
            self.empty = self.empty or Context(0)
            return self.empty
        if order == SKIP:
            return self.skips.setdefault(path[-2], Context(SKIP))
        if order == 1:
            return self.roots.setdefault(path[-1], Context(1))
        if isinstance(context, Entry):
            context.child = Context(order)
            return context.child
        return context

    def add_entry(self, context: Context, token: int) -> None:
        if context.find(token) is not None:
            return
        if len(context.entries) == MAX_ENTRIES.get(context.order, 8):
            lightest = min(reversed(context.entries), key=lambda entry: entry.weight)
            place = next(i for i, entry in enumerate(context.entries) if entry is lightest)
            context.entries[place] = Entry(token)
        else:
            context.entries.append(Entry(token))

    def fade_weights(self, context: Context, is_soft: bool) -> None:
        speed = (SLOW if context.order == 0 else 1) * (SOFT if is_soft else 1)
        factor = 1 - speed * (1 - self.fade)
        for entry in context.entries:
            entry.weight = entry.weight * int(65536 * factor) >> 16
        context.visits = min(255, context.visits + 1)

    def observe(self, context: Context, token: int, mass: float, scope: int) -> None:
        entry = context.find(token)
        entry.weight = min(65535, entry.weight + int(mass * ONE))
        entry.stamp, entry.scope = self.now >> 4, scope
        place = next(i for i, one in enumerate(context.entries) if one is entry)
        context.entries.insert(0, context.entries.pop(place))

    def age(self, entry: Entry, scope: int) -> int:
        if entry.scope != scope:
            return 2
        return 0 if (self.now >> 4) - entry.stamp < RECENT_STAMPS else 1

    def read(self, context: Context, scope: int) -> Evidence:
        entries = context.entries
        heaviest, total = max(entry.weight for entry in entries), sum(entry.weight for entry in entries)
        entry_keys = []
        for place, entry in enumerate(entries):
            rank = 0 if place else 2 if entry.weight >= heaviest else 1
            entry_keys.append((context.order, weight_bucket(entry.weight), self.age(entry, scope), rank))
        share = 3 if heaviest > 0.95 * total else 2 if heaviest > 0.7 * total else 1 if heaviest > 0.4 * total else 0
        sizes = sum(len(entries) >= least for least in (2, 3, 4, 8, 16))
        visits = sum(context.visits >= least for least in (2, 3, 4, 6, 10, 24, 64))
        escape_key = (context.order, sizes, visits, share, self.age(entries[0], scope))
        return Evidence(
            tokens=[entry.token for entry in entries],
            entry_keys=entry_keys,
            escape_key=escape_key,
            odds=[self.entry_odds.get(key) or entry_prior(*key) for key in entry_keys],
            escape=self.escape_odds.get(escape_key) or escape_prior(*escape_key),
        )

    def train(self, found: dict[int, Context | Entry], token: int, scope: int, mass: float) -> None:
        probability, levels = UNSEEN, []
        known = self.evidence({order: one for order, one in found.items() if order != 0}, scope)
        if not any(token in evidence.tokens for evidence in known):  # else the empty context is spared
            known = self.evidence(found, scope)
        for evidence in known:
            own = dict(zip(evidence.tokens, evidence.odds, strict=True)).get(token, 0.0)
            joint = own + evidence.escape * probability
            levels.append((evidence, own / joint))
            probability = joint / evidence.total
        duty = mass
        for evidence, own in reversed(levels):
            if self.rate * duty <= 1e-4:
                break
            total, rate, share = evidence.total, self.rate * duty, duty / len(evidence.tokens)
            step = rate * (1 - own - evidence.escape / total)
            self.move(self.escape_odds, evidence.escape_key, evidence.escape, duty, step)
            for name, key in zip(evidence.tokens, evidence.entry_keys, strict=True):
                odds = self.entry_odds.get(key) or entry_prior(*key)
                step = rate * ((own if name == token else 0.0) - odds / total)
                self.move(self.entry_odds, key, odds, share, step)
            duty *= 1 - own

    def move(self, table: dict[tuple, float], key: tuple, odds: float, duty: float, step: float) -> None:
        uses = self.uses.get((table is self.entry_odds, key), 0.0)
        table[key] = moved(odds, uses, step)
        self.uses[table is self.entry_odds, key] = uses + duty


class SlowCalibration:
    """Factors for products of estimates, by depth and probability."""

    def __init__(self):
        self.factors = [[1.0] * 33 for _ in range(6)]
        self.weights = [[0.0] * 33 for _ in range(6)]

    @staticmethod
    def place(product: float, depth: int) -> tuple[int, int, float]:
        mantissa, exponent = math.frexp(max(product, 2.0**-8))
        position = min(32.0, 4 * (exponent + 7) + 8 * (mantissa - 0.5))
        knot = min(31, int(position))
        return [0, 0, 1, 2, 3, 3, 4, 4, 4][depth] if depth < 9 else 5, knot, position - knot

    def corrected(self, product: float, depth: int) -> float:
        row, knot, share = self.place(product, depth)
        return min(1.0, product * ((1 - share) * self.factors[row][knot] + share * self.factors[row][knot + 1]))

    def products(self, depths, path_probabilities) -> list[float]:
        """What was corrected to these probabilities: found by halving."""
        found = []
        for depth, path in zip(depths.tolist(), path_probabilities.tolist(), strict=True):
            low, high = 0.0, 1.0
            for _ in range(40):
                middle = (low + high) / 2
                low, high = (middle, high) if depth and self.corrected(middle, depth) < path else (low, middle)
            found.append(high)
        return found

    def train(self, product: float, depth: int, came_true: bool) -> None:
        row, knot, share = self.place(product, depth)
        factors, weights = self.factors[row], self.weights[row]
        error = came_true - product * ((1 - share) * factors[knot] + share * factors[knot + 1])
        for at, part in ((knot, 1 - share), (knot + 1, share)):
            weights[at] = min(100.0, weights[at] + part * product)
            factors[at] = min(3.0, max(0.2, factors[at] + part * error / (weights[at] + 20.0)))


def moved(odds: float, uses: float, step: float) -> float:
    """Odds after a step that is longer while they are young."""
    return min(1e4, max(1e-4, odds * max(0.25, 1 + (1 + 3 * 10 / (10 + uses)) * step)))


def weight_bucket(weight: int) -> int:
    if weight < ONE // 16:
        return 0
    octave = weight.bit_length() - 1
    return 2 * (octave - 8) + (weight >> (octave - 1) & 1)


def order_index(order: int) -> int:
    return 9 if order == SKIP else min(order, 8)


def entry_prior(order: int, weight: int, age: int, rank: int) -> float:
    return math.exp(ENTRY + ENTRY_ORDER[order_index(order)] + ENTRY_WEIGHT[weight] + ENTRY_AGE[age] + ENTRY_RANK[rank])


def escape_prior(order: int, sizes: int, visits: int, share: int, age: int) -> float:
    return math.exp(
        ESCAPE
        + ESCAPE_ORDER[order_index(order)]
        + ESCAPE_SIZE[sizes]
        + ESCAPE_VISITS[visits]
        + ESCAPE_SHARE[share]
        + ESCAPE_AGE[age]
    )
