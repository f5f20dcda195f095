"""Slow twin of laws from outside in a blended lookup: what they add to its laws, and how their odds are learned."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from reference_blended import Context, SlowBlend, moved

Law = Sequence[tuple[int, float]]  # tokens and probabilities, likeliest first

BY_SURETY = (0.3, 0.5, 0.7, 0.7, 1.0, 1.0, 2.0, 1.0, 3.0, 1.5, 4.0)
BY_TOP = (2.0, 1.0, 0.7, 0.5, 0.25, 0.1)
UNKNOWN, KNOWN, HEAVIEST = 0, 1, 2


@dataclass
class Reading:
    keys: list[tuple]
    odds: list[float]
    escape_key: tuple
    escape: float

    @property
    def total(self) -> float:
        return sum(self.odds) + self.escape


class SlowOutside:
    """One source beside a `SlowBlend`."""

    def __init__(self, slow: SlowBlend) -> None:
        self.slow = slow
        self.entry: dict[tuple, float] = {}
        self.escape: dict[tuple, float] = {}
        self.trust: dict[tuple, float] = {}
        self.uses: dict[tuple, float] = {}
        self.evidence = 0.0

    @property
    def belief(self) -> float:
        return 1 / (1 + math.exp(-self.evidence))

    def predict(self, path: list[int], law: Law, depth: int, *, scope: int = 0) -> dict[int, float]:
        reading = self.read(path, law, depth)
        found = self.slow.predict(path, scope=scope)
        left = 1 - self.belief + self.belief * reading.escape / reading.total
        blended = {token: value * left for token, value in found.items()}
        for (token, _), odds in zip(law, reading.odds, strict=True):
            blended[token] = blended.get(token, 0.0) + self.belief * odds / reading.total
        return blended

    def compare(self, path: list[int], row: Law, law: Law, depth: int, *, scope: int = 0) -> None:
        """The target's law `row` of a next token against the head's; the contexts learn nothing."""
        reading = self.read(path, law, depth)
        masses = {token: mass for token, mass in row if mass >= 0.1} if self.slow.rate > 0 else {}
        given = {token: self.slow.chance(path, token, scope=scope) for token in masses}
        gained = dict.fromkeys(range(len(law)), 0.0)
        escaped, mass, rate, evidence = 0.0, sum(masses.values()), self.slow.rate, 0.0
        for token, share in masses.items():
            place = next((place for place, (one, _) in enumerate(law) if one == token), None)
            found = 0.0 if place is None else reading.odds[place]
            own = found / (found + reading.escape * given[token])
            escaped += share * (1 - own)
            evidence += share * math.log((found + reading.escape * given[token]) / reading.total / given[token])
            if place is not None:
                gained[place] += share * own
        if mass == 0:
            return
        self.evidence = min(5.0, max(-5.0, self.evidence + evidence))
        step = rate * (escaped - mass * reading.escape / reading.total)
        self.move(self.trust, "trust", reading.escape_key[:1], 1.0, mass, step)
        self.move(self.escape, "escape", reading.escape_key, escape_prior(*reading.escape_key), mass, step)
        for place, key in enumerate(reading.keys):
            step = rate * (gained[place] - mass * reading.odds[place] / reading.total)
            self.move(self.entry, "entry", key, 1.0, mass / len(law), step)

    def read(self, path: list[int], law: Law, depth: int) -> Reading:
        depth = min(depth, 3)
        longest = self.longest(path)
        views = [view_of(longest, token) for token, _ in law]
        keys = [
            (depth, min(place, 1), view, chance_bucket(probability))
            for place, ((_, probability), view) in enumerate(zip(law, views, strict=True))
        ]
        top = sum(law[0][1] >= bound for bound in (0.25, 0.5, 0.8, 0.95, 0.99)) if law else 0
        escape_key = (depth, top, surety_of(longest), views[0] if law else UNKNOWN)
        return Reading(
            keys,
            [probability * self.entry.get(key, 1.0) for (_, probability), key in zip(law, keys, strict=True)],
            escape_key,
            self.trust.get((depth,), 1.0) * self.escape.get(escape_key, escape_prior(*escape_key)),
        )

    def longest(self, path: list[int]) -> Context | None:
        found = self.slow.contexts(path)
        for order in range(self.slow.depth, 0, -1):
            if isinstance(found.get(order), Context) and found[order].entries:
                return found[order]
        return None

    def move(self, table: dict, name: str, key: tuple, start: float, duty: float, step: float) -> None:
        uses = self.uses.get((name, key), 0.0)
        table[key] = moved(table.get(key, start), uses, step)
        self.uses[name, key] = uses + duty


def escape_prior(depth: int, top: int, surety: int, view: int) -> float:
    return BY_SURETY[surety] * BY_TOP[top]


def chance_bucket(probability: float) -> int:
    """Half octaves below 1, linear within an octave."""
    if probability <= 0:
        return 11
    octave = math.floor(-math.log2(min(probability, 1.0)))
    return min(11, 2 * octave + (probability <= 0.75 * 2.0**-octave))


def view_of(longest: Context | None, token: int) -> int:
    entry = longest.find(token) if longest is not None else None
    if entry is None:
        return UNKNOWN
    first = next(one for one in longest.entries if one.weight == max(each.weight for each in longest.entries))
    return HEAVIEST if entry is first else KNOWN


def surety_of(longest: Context | None) -> int:
    if longest is None:
        return 0
    weights = [entry.weight for entry in longest.entries]
    length = sum(longest.order >= least for least in (2, 3, 5, 9))
    return 1 + 2 * length + (10 * max(weights) > 7 * sum(weights))
