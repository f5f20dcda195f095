"""What steps cost, learned from the steps that run anyway."""

from __future__ import annotations

import math

import numpy as np

from stand.drafters.costs.step_cost import StepCost

LARGEST_DOUBT = 0.15**2  # variance of the log by which a step rises from a size to the next, of a filed table
DRIFT = 0.002  # how far such a rise wanders in a step
NOISE = 0.1  # of the log of a step's time, before any was seen
NOISE_RATE = 0.01  # of what a surprise says about the noise
TAILS = 4.0  # degrees of freedom: a surprise twice as large as expected counts half
STEPS_BETWEEN = 16  # the followed table that drafts see changes once in so many steps


class FollowedCost:
    """A step cost that follows the times of running steps, in its ratios, which alone decide about drafts.

    Each step is compared with the one before: what made both longer, such as a load that slows all work, says nothing.
    The log of the ratio of their times is a noisy sum of the rises between the sizes that lie between them, which a
    Kalman filter learns: fast while they are doubtful, by less and less as steps agree. Each rise begins as it was
    filed and drifts. A surprise that the noise does not explain counts less the larger it is: a busy moment moves
    little.
    """

    def __init__(self, cost: StepCost, *, doubt: float = LARGEST_DOUBT) -> None:
        """cost: as far as it is known. doubt: variance of each rise, in logs, at the start and at most."""
        self.cost = cost  # what drafts see
        self._largest_doubt = doubt
        self._rises = np.diff(np.log(np.array(cost.seconds)))  # [sizes - 1], from each size to the next, in logs
        self._covariance = np.diag(np.full(len(self._rises), doubt))  # of the errors in them
        self._doubts = np.einsum("ii->i", self._covariance)  # a view of its diagonal
        self._noise = 2 * NOISE**2  # variance of the log of two steps' ratio
        self._passed: dict[int, np.ndarray] = {}  # by a step's tokens, shares of the rises that lie below it
        self._before: tuple[np.ndarray, float] | None = None  # the last step's, and the log of its time
        self._num_steps = 0

    def record(self, num_tokens: int, seconds: float) -> None:
        """A step of so many tokens took so long; larger ones than the largest size count as that."""
        passed = self._passed.get(num_tokens)
        if passed is None:
            place = np.interp(num_tokens, self.cost.tokens, np.arange(len(self.cost.tokens)))
            passed = self._passed[num_tokens] = np.clip(place - np.arange(len(self._rises)), 0.0, 1.0)
        time = math.log(max(seconds, 1e-9))
        if self._before is not None:
            self._learn(passed - self._before[0], time - self._before[1])
        self._before = passed, time
        self._num_steps += 1
        if self._num_steps % STEPS_BETWEEN == 0:
            self.cost = self._cost_of(self._rises)

    def forget_step(self) -> None:
        """The next step is not compared with the last one: something else has changed between them."""
        self._before = None

    def drawn(self, generator: np.random.Generator) -> StepCost:
        """A cost that may be the true one, drawn by what is believed: sizes in doubt look cheap now and then."""
        return self._cost_of(generator.multivariate_normal(self._rises, self._covariance, check_valid="ignore"))

    def _cost_of(self, rises: np.ndarray) -> StepCost:
        times = self.cost.seconds[0] * np.exp(np.append(0.0, np.cumsum(rises)))
        return StepCost.measured(self.cost.tokens, times, num_rows=self.cost.num_rows, length=self.cost.length)

    def _learn(self, apart: np.ndarray, change: float) -> None:
        """Two steps that lie `apart` rises from each other differed by `change`, in logs."""
        shared = self._covariance @ apart
        variance = float(apart @ shared) + self._noise
        surprise = change - float(apart @ self._rises)
        gain = shared / (variance + surprise**2 / TAILS)
        self._rises += surprise * gain
        self._covariance -= gain[:, None] * shared
        self._doubts += np.minimum(DRIFT**2, self._largest_doubt - self._doubts)
        self._noise += NOISE_RATE * (min(surprise**2, TAILS * self._noise) - self._noise)
