"""How often a source of laws is asked in a step: as long as one more run pays."""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np

from stand.drafters.drafter import DraftRequest
from stand.drafters.law_source import Planner
from stand.trees import DraftBatch, OutsideLaws

FADE = 1 / 16  # weight of the newest step in a mean
FIRST_TRIES = 16  # so often a run is made before it is judged, and before the one after it is tried
RETRY = 32  # steps after which a run that does not pay is made again


# (run 0, 1, ..., the draft planned by what is known before it) -> all laws that are known then, or None where there is
# nothing to ask for. Run 0 asks at the pending tokens and needs no plan.
Ask = Callable[[int, DraftBatch | None], OutsideLaws | None]


class FadingMean:
    """A mean in which the newest value weighs at least FADE, so that old values fade."""

    def __init__(self) -> None:
        self.value, self.count = 0.0, 0

    def add(self, value: float) -> None:
        self.count += 1
        self.value += (value - self.value) * max(1 / self.count, FADE)


class PayingRuns:
    """Run 0, 1, ... of a step pays where it makes the expected tokens grow by a larger share than the step's time.

    What a run adds to the expected tokens is the mean over earlier steps, of the planned drafts before it and after it;
    what it costs is the mean of its times as shares of a step without runs. Both follow from earlier steps alone, so
    drafts stay adapted, and from calls that teach alone (`DraftRequest.is_learning`), whose random numbers no other
    call has.
    `share` stands for the times where drafts must not depend on a clock.
    """

    def __init__(self, share: float, *, most: int) -> None:
        """share: of a step without runs, what one run is estimated to cost; most: runs per step."""
        self.most = most
        self._share = share
        self._gains = [FadingMean() for _ in range(most)]
        self._seconds = [FadingMean() for _ in range(most)]
        self._left_out = [0] * most  # steps since the run was made
        self._step = FadingMean()  # seconds of forward and verdict

    def laws(self, request: DraftRequest, plan: Planner, ask: Ask) -> OutsideLaws | None:
        """Those of as many runs as pay; None where there is none."""
        laws, planned, run = None, plan(None), 0
        while self.pays_for(request, run):
            begun = time.perf_counter()
            more = ask(run, planned)
            if more is None:
                break
            before, laws, planned = planned, more, plan(more)
            if request.is_learning:
                self.record_run(run, time.perf_counter() - begun)
                self.record_gain(run, expected_tokens(before), expected_tokens(planned))
            run += 1
        if request.is_learning:
            self.end_step(run)
        return laws

    def pays(self, run: int, *, is_seeded: bool, is_learning: bool = True) -> bool:
        """Whether this run of a step is to be made, all before it having been made.

        is_seeded: nothing that differs from run to run may matter. is_learning: else nothing is judged anew, so what
        did not pay is not made again.
        """
        if run >= self.most or (run > 0 and not self._is_worth_it(run - 1, is_seeded)):
            return False
        is_tried = self._gains[run].count < FIRST_TRIES or is_learning and self._left_out[run] >= RETRY
        return is_tried or self._is_worth_it(run, is_seeded)

    def pays_for(self, request: DraftRequest, run: int = 0) -> bool:
        """The same in a step of this request."""
        return self.pays(run, is_seeded=request.is_seeded, is_learning=request.is_learning)

    def record_step(self, seconds: float) -> None:
        """The target's forward and the verdict took so long."""
        self._step.add(seconds)

    def record_run(self, run: int, seconds: float) -> None:
        """The run took so long."""
        self._seconds[run].add(seconds)

    def record_gain(self, run: int, before: float, after: float) -> None:
        """It took the expected tokens of a step from `before` to `after`."""
        self._gains[run].add(after / before - 1)

    def end_step(self, num_runs: int) -> None:
        """So many runs were made in this step."""
        for run in range(self.most):
            self._left_out[run] = 0 if run < num_runs else self._left_out[run] + 1

    def _is_worth_it(self, run: int, is_seeded: bool) -> bool:
        spent = sum(self._cost(earlier, is_seeded) for earlier in range(run))
        gain = self._gains[run]
        return gain.count >= FIRST_TRIES and gain.value > self._cost(run, is_seeded) / (1 + spent)

    def _cost(self, run: int, is_seeded: bool) -> float:
        """Of one run, in steps without runs."""
        if is_seeded or not self._step.value:
            return self._share
        return self._seconds[run].value / self._step.value


def laws_of_runs(most: int, plan: Planner, ask: Ask) -> OutsideLaws | None:
    """Those of `most` runs, or of fewer where there is nothing more to ask for."""
    laws = None
    for run in range(most):
        more = ask(run, plan(laws) if run else None)
        if more is None:
            break
        laws = more
    return laws


def expected_tokens(planned: DraftBatch) -> float:
    """What a planned draft is estimated to keep, all rows together."""
    kept = np.array(planned.path_probabilities, dtype=np.float64)
    kept[planned.offsets[:-1]] = 1.0  # the token after the path
    return float(kept.sum())
