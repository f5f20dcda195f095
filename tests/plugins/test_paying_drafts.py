"""How many draft tokens pay, on a clock of the tests': servers whose steps cost what is said, with noise."""

import heapq
from collections.abc import Callable

import numpy as np
import pytest

from stand.drafters.costs.step_cost import StepCost
from stand.plugins.serving.paying_drafts import Limits, PayingDrafts

Cost = Callable[[int, int], float]  # seconds of a step by rows and draft tokens


def bounded_by_memory(num_rows: int, num_drafted: int) -> float:
    """A GPU: more tokens cost little up to a knee."""
    num_tokens = num_rows + num_drafted
    return 1.0 + 0.0005 * num_tokens + max(0, num_tokens - 40) / 40 + (0.03 if num_drafted else 0.0)


def bounded_by_arithmetic(num_rows: int, num_drafted: int) -> float:
    """A CPU: each token costs."""
    return 0.6 + 0.4 * num_rows + 0.5 * num_drafted


def cheap_but_for_the_first(num_rows: int, num_drafted: int) -> float:
    """As if steps with drafts took another way through the engine."""
    return 2.5 if num_drafted else 1.0


class Server:
    """Rows whose drafts are accepted with known chances, under steps of a known cost.

    repeats: share of the rows that repeat themselves in a step. busy: how often a step takes some times as long.
    """

    def __init__(self, cost: Cost, *, num_tokens: int = 4, noise: float = 0.1, busy: float = 0.02, seed: int = 0,
                 repeats: float = 0.5):  # fmt: skip
        self.cost, self.num_tokens, self.noise, self.busy, self.repeats = cost, num_tokens, noise, busy, repeats
        self.rng = np.random.default_rng(seed)
        self.drafts = PayingDrafts(num_tokens)
        self.num_made, self.seconds, self.drafted = 0, 0.0, []

    def run(self, num_rows: int, num_steps: int, *, choose: str = "paying") -> float:
        """Tokens per second of these steps."""
        made, seconds = self.num_made, self.seconds
        for _ in range(num_steps):
            self.step(num_rows, choose)
        return (self.num_made - made) / (self.seconds - seconds)

    def step(self, num_rows: int, choose: str) -> None:
        does_repeat = self.rng.random(num_rows) < self.repeats
        chances = np.where(does_repeat, self.rng.uniform(0.6, 0.97, num_rows), self.rng.uniform(0.0, 0.4, num_rows))
        sizes = self._sizes(chances, choose)
        seconds = self.cost(num_rows, sum(sizes)) * np.exp(self.rng.normal(0.0, self.noise))
        seconds *= 1.0 + (self.rng.exponential(2.0) if self.rng.random() < self.busy else 0.0)
        if choose == "paying":
            self.drafts.record(num_rows, sum(sizes), seconds)
        accepted = np.minimum(sizes, self.rng.geometric(1.0 - chances) - 1)
        self.num_made += num_rows + int(accepted.sum())
        self.seconds += seconds
        self.drafted.append(sum(sizes))

    def _sizes(self, chances: np.ndarray, choose: str) -> list[int]:
        """Draft tokens of each row, as a lookup grows them."""
        if choose in ("none", "all"):
            return [self.num_tokens if choose == "all" else 0] * len(chances)
        limits = self.drafts.limits(len(chances)) if choose == "paying" else self._true_limits(len(chances))
        expected, sizes = float(len(chances)), [0] * len(chances)
        queue = [(-chance, row) for row, chance in enumerate(chances.tolist())]
        heapq.heapify(queue)
        while queue and sum(sizes) < limits.budget:
            path, row = heapq.heappop(queue)
            if -path < expected * limits.rises[sum(sizes)]:
                break
            expected, sizes[row] = expected - path, sizes[row] + 1
            if sizes[row] < self.num_tokens:
                heapq.heappush(queue, (path * chances[row], row))
        return sizes if limits.pays(len(chances), expected - len(chances), sum(sizes)) else [0] * len(chances)

    def _true_limits(self, num_rows: int) -> Limits:
        budget = num_rows * self.num_tokens
        seconds = [self.cost(num_rows, num_drafted) for num_drafted in range(budget + 1)]
        cost = StepCost.measured(range(num_rows, num_rows + budget + 1), seconds, num_rows=num_rows, length=0)
        return Limits(budget, cost.rises(num_rows, budget), np.array(cost.seconds) / cost.seconds[0])


def rates(cost: Cost, num_rows: int, choose: str, *, num_steps: int, settled: int = 0, **settings) -> float:
    """Tokens per second after `settled` steps, over three servers."""
    found = []
    for seed in range(2):
        server = Server(cost, seed=seed, **settings)
        if settled:
            server.run(num_rows, settled, choose=choose)
        found.append(server.run(num_rows, num_steps, choose=choose))
    return float(np.mean(found))


@pytest.mark.parametrize("noise", [pytest.param(0.05, marks=pytest.mark.slow), 0.2])  # less of it is easier
@pytest.mark.parametrize("num_rows", [1, 4, 16])
@pytest.mark.parametrize("cost", [bounded_by_memory, bounded_by_arithmetic, cheap_but_for_the_first])
def test_settled_drafts_are_nearly_the_best(cost, num_rows, noise):
    """Whatever steps cost: drafts where they pay, none where they do not."""
    best = max(rates(cost, num_rows, choose, num_steps=600, noise=noise) for choose in ("none", "true"))
    assert rates(cost, num_rows, "paying", num_steps=600, settled=300, noise=noise) > 0.93 * best


@pytest.mark.parametrize("cost", [bounded_by_memory, bounded_by_arithmetic])
def test_little_is_lost_until_drafts_have_settled(cost):
    for num_rows in (1, 16):
        best = max(rates(cost, num_rows, choose, num_steps=300) for choose in ("none", "true"))
        assert rates(cost, num_rows, "paying", num_steps=300) > 0.88 * best


def test_where_all_drafts_cost_half_the_rate_paying_ones_cost_next_to_nothing():
    plain, every, paying = (
        rates(bounded_by_arithmetic, 16, choose, num_steps=600, settled=300) for choose in ("none", "all", "paying")
    )
    assert every < 0.6 * plain and paying > 0.97 * plain


def test_where_tokens_cost_nothing_as_many_are_drafted_as_the_engine_takes():
    every, paying = (
        rates(lambda rows, drafted: 1.0, 4, choose, num_steps=600, settled=300) for choose in ("all", "paying")
    )
    assert paying > 0.96 * every


def mean_drafted(server: Server, num_rows: int, num_steps: int) -> float:
    server.run(num_rows, num_steps)
    return float(np.mean(server.drafted[-num_steps:]))


def test_a_pause_and_a_slow_moment_move_little():
    """A step that took a thousand times as long, with drafts and without."""
    server = Server(bounded_by_memory)
    before = mean_drafted(server, 4, 400)
    for num_drafted in (0, 16):
        server.drafts.record(4, num_drafted, 1000.0)
        server.run(4, 1)
    assert mean_drafted(server, 4, 100) > 0.9 * before
    server = Server(bounded_by_arithmetic)
    server.run(4, 400)
    server.drafts.record(4, 0, 1000.0)  # as if steps without drafts were dear
    assert mean_drafted(server, 4, 100) < 1.0


def test_changing_numbers_of_rows_are_told_apart():
    """Few rows, for which drafts pay, and many, for which they do not, in turn."""
    server = Server(bounded_by_memory, repeats=0.8)
    for _ in range(20):
        few, many = mean_drafted(server, 2, 20) / 2, mean_drafted(server, 160, 20) / 160
    assert few > 2.0 and many < 0.2
    rates_by_rows = Server(bounded_by_memory)
    plain = Server(bounded_by_memory)
    for num_rows in [*range(1, 17), *range(16, 0, -1)] * 10:  # rows come and go one by one
        rates_by_rows.run(num_rows, 4)
        plain.run(num_rows, 4, choose="none")
    gain = rates_by_rows.num_made / rates_by_rows.seconds / (plain.num_made / plain.seconds)
    assert gain > 1.2


def test_a_load_that_comes_later_is_followed():
    server = Server(bounded_by_arithmetic)
    server.run(4, 400)
    assert mean_drafted(server, 4, 100) < 1.5
    server.cost = bounded_by_memory
    server.run(4, 800)
    assert mean_drafted(server, 4, 100) > 5.0
    server.cost = bounded_by_arithmetic
    server.run(4, 800)
    assert mean_drafted(server, 4, 100) < 1.5


def test_drafts_that_have_stopped_come_back():
    server = Server(lambda rows, drafted: 1.0 + 3.0 * drafted)
    server.run(4, 400)
    assert mean_drafted(server, 4, 100) < 0.5
    server.cost = lambda rows, drafted: 1.0
    server.run(4, 4000)
    assert mean_drafted(server, 4, 100) > 8.0


def test_a_few_steps_have_no_drafts_even_where_all_pay():
    server = Server(lambda rows, drafted: 1.0, repeats=1.0)
    server.run(1, 960)
    assert 15 <= server.drafted[-640:].count(0) <= 40


def test_steps_with_other_rows_say_nothing_about_drafts():
    """Time goes with the rows: fewer rows with drafts take less than more rows without."""
    drafts = PayingDrafts(4)
    before = drafts.limits(16).ratios[-1]
    for _ in range(200):
        drafts.record(16, 0, 1.6)
        drafts.record(9, 36, 0.9)
    assert drafts.limits(16).ratios[-1] == pytest.approx(before)
    for _ in range(100):
        drafts.record(16, 0, 1.6)
        drafts.record(16, 64, 1.6)
    assert 1.0 <= drafts.limits(16).ratios[-1] < 1.2 < before
    assert drafts.limits(128).ratios[-1] < 1.2  # what is known of the nearest number of rows is believed at first
    assert PayingDrafts(4).limits(128).ratios[-1] == pytest.approx(before, rel=0.01)


def test_equal_steps_give_equal_drafts():
    assert Server(bounded_by_memory).run(4, 200) == Server(bounded_by_memory).run(4, 200)
    one, other = Server(bounded_by_memory), Server(bounded_by_memory)
    one.run(4, 200)
    other.run(4, 200)
    assert one.drafted == other.drafted
