"""Drafters on recorded trajectories with laws: what the engine would keep with the rule `match`, without the model.

`match` draws the target's tokens whatever is drafted, so the recorded trajectory is what it would write. Drafters see
the recorded laws along the kept paths. Laws of rejected nodes were not recorded: with a model a drafter learns those
too (`model_tables.py` measures what they give), so replayed tokens per step are a lower bound. Deterministic children
are what `match` is best with; sampled ones are priced by their chance under `traversal`, which keeps more of them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

import stand
from stand.seeds import prompt_word, seed_with_prompt
from stand.trees import DraftBatch
from table_parts.estimates import EstimateCounts
from table_parts.law_recording import LawRecording, Trajectory


@dataclass(slots=True)
class Replayed:
    """What a drafter did: by problem and sample, and its nodes by estimated probability."""

    tokens: list[list[int]] = field(default_factory=list)  # [problems][samples]
    steps: list[list[int]] = field(default_factory=list)
    sizes: list[list[Counter]] = field(default_factory=list)  # [problems][calls]: steps by their tokens of all rows
    nodes: int = 0
    estimates: EstimateCounts = field(default_factory=EstimateCounts)

    def count(self, batch: DraftBatch, accepted: Sequence[np.ndarray]) -> None:
        self.nodes += batch.num_nodes - len(batch)
        self.sizes[-1][-1][batch.num_nodes] += 1
        self.estimates.count(batch, accepted)


@dataclass(slots=True)
class ReplayedRow:
    """One trajectory on its way."""

    number: int
    trajectory: Trajectory
    text: np.ndarray  # prompt and trajectory
    length: int  # committed tokens, prompt included
    start: int
    most: int  # length that the text may have
    steps: int = 0

    @property
    def left(self) -> int:
        return len(self.text) - self.length


def replay(
    recording: LawRecording,
    make_drafter: Callable[[], stand.Drafter],
    *,
    rows: int,
    seed: int = 1,
    is_greedy: bool = False,
) -> Replayed:
    """Every problem with a new drafter; its samples in turn, `rows` together. is_greedy: they were drawn so."""
    result = Replayed()
    for problem, prompt in enumerate(recording.prompts):
        drafter, samples = make_drafter(), recording.of_problem(problem)
        done: list[ReplayedRow] = []
        result.sizes.append([])
        for first in range(0, len(samples), rows):
            result.sizes[-1].append(Counter())
            drafter.learn_prompt(prompt, problem=problem)
            own_seed = seed_with_prompt(seed, prompt)  # of the engine's drafts, from a lookup that was empty
            live = [
                _row(first + place, one, prompt, recording.most_tokens)
                for place, one in enumerate(samples[first : first + rows])
            ]
            done += live
            while live:
                _step(drafter, live, problem, (own_seed, seed), result, is_greedy=is_greedy)
                live = [row for row in live if row.left > 0]
        result.tokens.append([len(row.trajectory.tokens) for row in done])
        result.steps.append([row.steps for row in done])
    return result


def _row(number: int, trajectory: Trajectory, prompt: np.ndarray, most_tokens: int) -> ReplayedRow:
    text, start = np.concatenate([prompt, trajectory.tokens]), len(prompt)
    return ReplayedRow(number, trajectory, text, length=start, start=start, most=start + most_tokens)


def _step(
    drafter: stand.Drafter,
    live: list[ReplayedRow],
    problem: int,
    seeds: tuple[int, int],
    result: Replayed,
    *,
    is_greedy: bool,
) -> None:
    """seeds: of drafts, and of the target's draws."""
    request = stand.DraftRequest(
        histories=[row.text[: row.length] for row in live],
        seed=seeds[0],
        target_seed=seeds[1],
        rows=np.array([row.number for row in live]),
        steps=np.array([row.steps for row in live]),
        problems=np.full(len(live), problem),
        max_depths=np.array([row.most - row.length - 1 for row in live]),
        is_greedy=is_greedy,
        prompt_words=prompt_word(live[0].text[: live[0].start]),  # of all: they are samples of one problem
    )
    batch = drafter.draft(request)
    accepted = [_path(batch, place, row) for place, row in enumerate(live)]
    result.count(batch, accepted)
    top_ids = np.full((batch.num_nodes, drafter.num_candidates), -1, dtype=np.int32)
    top_probs = np.zeros(top_ids.shape, dtype=np.float32)
    next_tokens = np.zeros(len(live), dtype=np.int64)
    for place, (row, path) in enumerate(zip(live, accepted, strict=True)):
        laws = slice(row.length - row.start, row.length - row.start + len(path) + 1)
        nodes = batch.offsets[place] + np.append(0, path)
        top_ids[nodes] = row.trajectory.top_ids[laws, : drafter.num_candidates]
        top_probs[nodes] = row.trajectory.top_probs[laws, : drafter.num_candidates]
        next_tokens[place] = row.text[row.length + len(path)]
        row.length += len(path) + 1
        row.steps += 1
    drafter.learn(stand.Lesson(request, batch, accepted, next_tokens, top_ids, top_probs))


def _path(batch: DraftBatch, place: int, row: ReplayedRow) -> np.ndarray:
    """The drafted nodes that the trajectory follows, row-local."""
    first, end = batch.offsets[place : place + 2]
    parents, tokens = batch.parents[first:end], batch.token_ids[first:end]
    path: list[int] = []
    for token in row.text[row.length : row.length + row.left - 1]:
        below = np.flatnonzero((parents == (path[-1] if path else 0)) & (tokens == token))
        if not len(below):
            break
        path.append(int(below[0]))
    return np.array(path, dtype=np.int32)


class OnPathDrafter(stand.Drafter):
    """Another drafter that is told of kept nodes alone."""

    def __init__(self, drafter: stand.Drafter, lesson_of: Callable[[stand.Lesson], stand.Lesson]) -> None:
        self._drafter, self._lesson_of = drafter, lesson_of
        self.num_candidates = drafter.num_candidates
        self.learn_prompt, self.remembers = drafter.learn_prompt, drafter.remembers

    def draft(self, request: stand.DraftRequest) -> DraftBatch:
        return self._drafter.draft(request)

    def learn(self, lesson: stand.Lesson) -> None:
        self._drafter.learn(self._lesson_of(lesson))
