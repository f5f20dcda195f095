"""How often drafted nodes are kept, against the drafter's own estimates of it: from replays or with the model."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
from measuring.text_table import format_table

import stand
from stand.trees import BlendedLookup, DraftBatch
from stand.verifiers import TargetRows, Verdicts, Verifier, VerifierNoise, get_verifier

NUM_BINS = 10  # of estimated path probabilities
LEAST_NODES = 100  # of a bin that is shown


def _zeros() -> np.ndarray:
    return np.zeros(NUM_BINS)


@dataclass(slots=True)
class EstimateCounts:
    """Nodes by their estimated path probability."""

    drafted: np.ndarray = field(default_factory=_zeros)
    expected: np.ndarray = field(default_factory=_zeros)  # sums of the estimates
    kept: np.ndarray = field(default_factory=_zeros)

    def count(self, batch: DraftBatch, accepted: Sequence[np.ndarray]) -> None:
        """One step; a drafter without estimates leaves no trace."""
        if batch.path_probabilities is None:
            return
        is_kept = np.zeros(batch.num_nodes)
        for start, path in zip(batch.offsets[:-1], accepted, strict=True):
            is_kept[start + path] = 1.0
        nodes = batch.depths > 0
        estimates = batch.path_probabilities[nodes]
        bins = np.minimum((estimates * NUM_BINS).astype(int), NUM_BINS - 1)
        self.expected += np.bincount(bins, estimates, NUM_BINS)
        self.kept += np.bincount(bins, is_kept[nodes], NUM_BINS)
        self.drafted += np.bincount(bins, minlength=NUM_BINS)

    def as_lists(self) -> list[list[float]]:
        return [self.drafted.tolist(), self.expected.tolist(), self.kept.tolist()]


def calibration_table(named: Sequence[tuple[Sequence[str], list[list[float]]]], names: Sequence[str]) -> str:
    """Kept over expected nodes, and estimated and observed share of kept nodes by estimate; a row of `names` and the
    lists of an `EstimateCounts` each."""
    rows = []
    for cells, lists in named:
        drafted, expected, kept = map(np.array, lists)
        means = [
            f"{known / count:.2f}/{seen / count:.2f}" if count >= LEAST_NODES else "-"
            for count, known, seen in zip(drafted, expected, kept, strict=True)
        ]
        rows.append([*cells, f"{kept.sum() / expected.sum():.2f}", *means])
    bins = [f"{place / NUM_BINS:.1f}-" for place in range(NUM_BINS)]
    return f"calibration: estimated/observed by estimate\n{format_table([*names, 'kept/expected', *bins], rows)}"


@dataclass(frozen=True, slots=True)
class CalibrationArm:
    """The model in the loop: drafts of one kind, so many nodes for all rows, and the rule that decides."""

    kind: str
    rule: str
    nodes: int

    @property
    def name(self) -> str:
        return f"{self.kind}, {self.rule}, {self.nodes} nodes"


def calibration_arms() -> Iterator[CalibrationArm]:
    for nodes in (32, 80):
        yield CalibrationArm("deterministic", "match", nodes)
        yield CalibrationArm("sampled", "traversal", nodes)


class WatchedRule(Verifier):
    """A rule that also counts what became of the estimates."""

    name = "watched"

    def __init__(self, rule: str) -> None:
        self._rule, self.counts = get_verifier(rule), EstimateCounts()
        self.requires = self._rule.requires

    def verify(self, batch: DraftBatch, target: TargetRows, noise: VerifierNoise) -> Verdicts:
        verdicts = self._rule.verify(batch, target, noise)
        self.counts.count(batch, verdicts.accepted)
        return verdicts


def run_calibration_arm(
    model, tokenizer, prompts: Sequence[Sequence[int]], arm: CalibrationArm, *, samples: int, **settings
) -> dict[str, object]:
    """Samples of one problem in turn, one row at a time; a lookup starts empty at every problem."""
    watched = WatchedRule(arm.rule)
    for problem, prompt in enumerate(prompts):
        drafter = stand.BlendedDrafter(BlendedLookup(), budget=arm.nodes, kind=arm.kind)
        engine = stand.wrap(model, tokenizer, drafter=drafter, verifier=arm.rule)
        engine.verifier = watched
        for sample in range(samples):
            seed = settings["seed"] + 1000 * problem + sample
            engine.generate(input_ids=[list(prompt)], **{**settings, "seed": seed})
    return {"calibration": watched.counts.as_lists()}
