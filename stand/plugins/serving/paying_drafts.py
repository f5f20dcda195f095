"""How many draft tokens pay in a serving engine, by what its steps have taken.

A token that is accepted with probability p adds p to the tokens of a step, and it makes the step dearer. Drafts grow
while a token adds a larger share to the step's tokens than to its time (`stand.drafters.costs.step_cost`), and are
left out where all of them together do not pay. What steps cost is learned from the steps that run (`FollowedCost`), for
numbers of rows between two powers of two together.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

import numpy as np

from stand.drafters.costs.followed import FollowedCost
from stand.drafters.costs.step_cost import StepCost

DOUBT = 0.3**2  # variance of the log of what a size costs by the size below it, before steps have run
POWER = 0.75  # of its tokens, as which a step's time is expected to rise then
TRY_EVERY = 8  # steps: one of so many drafts by a cost drawn from what is believed
FIRST = 256  # steps in which there are twice as many tries
REST_EVERY = 32  # steps: one of so many has no drafts, for what they cost shows beside such steps alone
DOUBT_EVERY = 2048  # steps: what is known is doubted anew, so that a change is found that nothing hinted at
PROBES = range(8, 64, 16)  # steps after that: one token is drafted for every row, whatever it seems to cost
MOST_KNOWN = 16  # numbers of rows whose limits are kept: they take 12 bytes per row and token each
NEAR_ROWS = 16  # steps are compared whose numbers of rows differ by less than one part of so many


@dataclass(frozen=True, slots=True, eq=False)
class Limits:
    """What one step may draft. budget: the most tokens of all rows. rises: float32[budget], see `BlendedLookup.draft`.
    ratios: float64[budget + 1], the time of a step with so many draft tokens, in times of one without."""

    budget: int
    rises: np.ndarray
    ratios: np.ndarray

    def pays(self, num_rows: int, expected: float, num_drafted: int) -> bool:
        """Do so many draft tokens, of which `expected` are accepted, pay together?"""
        return expected / num_rows + 1.0 >= self.ratios[num_drafted]


class PayingDrafts:
    """Chooses the draft tokens of a step; told of every step with its rows, draft tokens and seconds.

    What is chosen follows from earlier steps and their times, never from what a step will sample.
    """

    def __init__(self, num_tokens: int):
        """num_tokens: the most that a row's draft may have."""
        self._num_tokens = num_tokens
        self._costs: dict[int, FollowedCost] = {}  # by the largest number of rows that they are for
        self._num_plans: dict[int, int] = {}  # by the same, since what they cost was doubted
        self._before = 0, 0  # class and rows of the last step
        self._known: OrderedDict[int, tuple[StepCost, Limits]] = OrderedDict()  # by rows, the latest ones
        self._generator = np.random.default_rng(0)

    def record(self, num_rows: int, num_drafted: int, seconds: float) -> None:
        """A step that read no prompt took so long."""
        size = _size_class(num_rows)
        cost, (last, rows) = self._cost(size), self._before
        if last != size or NEAR_ROWS * abs(rows - num_rows) >= num_rows:
            cost.forget_step()
        cost.record(size + round(num_drafted * size / num_rows), seconds)
        self._before = size, num_rows

    def limits(self, num_rows: int) -> Limits:
        """Of the next step, which has so many rows."""
        size = _size_class(num_rows)
        plan = self._num_plans.get(size, 0)
        self._num_plans[size] = (plan + 1) % DOUBT_EVERY
        if plan == 0 and size in self._costs:
            self._costs[size] = FollowedCost(self._costs[size].cost, doubt=DOUBT)
        if plan in PROBES or (plan + 1) % REST_EVERY == 0:
            budget = num_rows if plan in PROBES else 0
            return Limits(budget, np.zeros(budget, dtype=np.float32), np.ones(budget + 1))
        cost = self._cost(size)
        if (plan + 1) % (TRY_EVERY if plan >= FIRST else TRY_EVERY // 2) == 0:
            return self._limits_of(cost.drawn(self._generator), num_rows)
        known, limits = self._known.get(num_rows, (None, None))
        if known is not cost.cost:
            limits = self._limits_of(cost.cost, num_rows)
            self._known[num_rows] = cost.cost, limits
            if len(self._known) > MOST_KNOWN:
                self._known.popitem(last=False)
        return limits

    def _limits_of(self, cost: StepCost, num_rows: int) -> Limits:
        budget, size = num_rows * self._num_tokens, cost.num_rows
        places = np.arange(budget + 1) * (size / num_rows)  # draft tokens of a step of `size` rows, in proportion
        rises = np.log1p(cost.rises(size, size * self._num_tokens))
        logs = np.interp(places, np.arange(len(rises) + 1), np.append(0.0, np.cumsum(rises, dtype=np.float64)))
        ratios = np.interp(size + places, cost.tokens, cost.seconds) / cost.seconds[0]
        return Limits(budget, np.expm1(np.diff(logs)).astype(np.float32), ratios)

    def _cost(self, size: int) -> FollowedCost:
        """What is known of steps of up to `size` rows; at first as of those whose number of rows is nearest."""
        if size not in self._costs:
            tokens = _sizes(size, self._num_tokens)
            seconds = (np.array(tokens) / size) ** POWER
            if self._costs:
                near = self._costs[min(self._costs, key=lambda other: max(size / other, other / size))].cost
                per_row = np.array(tokens) / size * near.num_rows
                seconds = np.interp(per_row, near.tokens, near.seconds) / near.seconds[0]
            cost = StepCost.measured(tokens, seconds, num_rows=size, length=0)
            self._costs[size] = FollowedCost(cost, doubt=DOUBT)
        return self._costs[size]


def _size_class(num_rows: int) -> int:
    """The power of two at or above `num_rows`."""
    return 1 << (num_rows - 1).bit_length()


def _sizes(num_rows: int, num_tokens: int) -> list[int]:
    """Of steps, ascending: without drafts, with one token for four rows (but one at least), and doubling up to drafts
    of `num_tokens` for all."""
    drafted = [max(1, num_rows // 4)]
    while 2 * drafted[-1] < num_rows * num_tokens:
        drafted.append(2 * drafted[-1])
    return sorted({num_rows, num_rows + num_rows * num_tokens} | {num_rows + size for size in drafted})
