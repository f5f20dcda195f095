"""The walk of a drafter along one recording, and what is counted on the way."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from measuring.cpu_time import timed
from workloads.recordings import Recording

from replay_parts.drafters import Guess, ReplayDrafter, accepted_path

NUM_BINS = 10
DEEPEST = 32


@dataclass(slots=True)
class Tally:
    """What one replay counts."""

    tokens: dict[int, int] = field(default_factory=dict)  # by sample number
    steps: dict[int, int] = field(default_factory=dict)
    draft_us: list[float] = field(default_factory=list)
    learn_us: float = 0.0
    num_learned: int = 0
    num_held: int = 0  # of these, since all was forgotten the last time
    num_nodes: int = 0
    num_drafts: int = 0  # with at least one node
    accepted: np.ndarray = field(default_factory=lambda: np.zeros(DEEPEST, np.int64))  # by depth
    expected: np.ndarray = field(default_factory=lambda: np.zeros(NUM_BINS))  # sums of path probabilities, by bin
    reached: np.ndarray = field(default_factory=lambda: np.zeros(NUM_BINS))
    in_bin: np.ndarray = field(default_factory=lambda: np.zeros(NUM_BINS, np.int64))


def replay_one(drafter: ReplayDrafter, recording: Recording, budget: int, tally: Tally) -> None:
    stream = np.concatenate([recording.prompt, recording.tokens]).astype(np.int32)
    end = len(recording.prompt) + 1
    drafter.start(recording.problem, recording.prompt)
    learn(drafter, stream[:end], end, tally)
    num_steps = 0
    while end < len(stream):
        took, draft = timed(drafter.draft, stream[:end], budget)
        tally.draft_us.append(took)
        guess = drafter.guess(draft)
        path = accepted_path(guess, stream[end:])
        count(guess, path, tally, at_end=end + len(path) >= len(stream))
        num_new = min(len(path) + 1, len(stream) - end)
        end += num_new
        learn(drafter, stream[:end], num_new, tally)
        num_steps += 1
    tally.learn_us += timed(drafter.finish)[0]
    tally.tokens[recording.sample] = tally.tokens.get(recording.sample, 0) + len(recording.tokens) - 1
    tally.steps[recording.sample] = tally.steps.get(recording.sample, 0) + num_steps


def learn(drafter: ReplayDrafter, history: np.ndarray, num_new: int, tally: Tally) -> None:
    tally.learn_us += timed(drafter.learn, history, num_new)[0]
    tally.num_learned += num_new
    tally.num_held += num_new


def count(guess: Guess, path: list[int], tally: Tally, *, at_end: bool) -> None:
    tokens, _, chances = guess
    tally.num_nodes += len(tokens)
    tally.num_drafts += len(tokens) > 0
    tally.accepted[: min(len(path), DEEPEST)] += 1
    if chances is None or at_end:  # nothing is known after the recording's end
        return
    bins = np.minimum(NUM_BINS - 1, (chances * NUM_BINS).astype(np.int64))
    tally.expected += np.bincount(bins, weights=chances, minlength=NUM_BINS)
    tally.in_bin += np.bincount(bins, minlength=NUM_BINS)
    tally.reached += np.bincount(bins[path], minlength=NUM_BINS)
