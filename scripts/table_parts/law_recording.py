"""Trajectories with the target's best tokens at every position: drawn once, replayed under many drafters."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

import stand
from stand.trees import DraftBatch, DraftTree

NUM_TOP = 32  # entries of every law that are kept


@dataclass(frozen=True, slots=True, eq=False)
class Trajectory:
    """One sample. top_ids[i], top_probs[i]: the law that tokens[i] was drawn from, best first."""

    problem: int
    tokens: np.ndarray  # [L] int32
    top_ids: np.ndarray  # [L, NUM_TOP] int32
    top_probs: np.ndarray  # [L, NUM_TOP] float32


@dataclass(frozen=True, slots=True, eq=False)
class LawRecording:
    """The samples of some problems under one sampling setting."""

    prompts: list[np.ndarray]  # by problem, int32
    trajectories: list[Trajectory]  # by problem, then by sample
    most_tokens: int  # new tokens that a trajectory may have

    def of_problem(self, problem: int) -> list[Trajectory]:
        return [one for one in self.trajectories if one.problem == problem]

    def save(self, path: Path) -> None:
        parts = {"most_tokens": np.array(self.most_tokens)}
        parts |= {f"prompt {place}": prompt for place, prompt in enumerate(self.prompts)}
        for place, one in enumerate(self.trajectories):
            parts[f"problem {place}"] = np.array(one.problem)
            parts |= {f"{name} {place}": getattr(one, name) for name in ("tokens", "top_ids", "top_probs")}
        path.parent.mkdir(parents=True, exist_ok=True)
        unfinished = path.with_name(path.name + ".part")
        with unfinished.open("wb") as file:
            np.savez_compressed(file, **parts)
        unfinished.replace(path)

    @classmethod
    def load(cls, path: Path) -> LawRecording:
        with np.load(path) as parts:
            count = sum(name.startswith("problem ") for name in parts.files)
            return cls(
                [parts[f"prompt {place}"] for place in range(len([n for n in parts.files if n.startswith("prompt ")]))],
                [
                    Trajectory(
                        int(parts[f"problem {place}"]),
                        *(parts[f"{name} {place}"] for name in ("tokens", "top_ids", "top_probs")),
                    )
                    for place in range(count)
                ],
                int(parts["most_tokens"]),
            )


class WatchingDrafter(stand.Drafter):
    """Drafts nothing and notes every row's laws."""

    num_candidates = NUM_TOP

    def __init__(self) -> None:
        self.laws: dict[int, list[tuple[np.ndarray, np.ndarray]]] = {}

    def draft(self, request: stand.DraftRequest) -> DraftBatch:
        return DraftBatch.concatenate([DraftTree.pending(int(history[-1])) for history in request.histories])

    def learn(self, lesson: stand.Lesson) -> None:
        for place, row in enumerate(lesson.request.rows.tolist()):
            self.laws.setdefault(row, []).append((lesson.top_ids[place], lesson.top_probs[place]))


def record(
    model, tokenizer, prompts: Sequence[Sequence[int]], samples: int, *, max_new_tokens: int, **settings: object
) -> LawRecording:
    """`samples` of every prompt, all rows in one batch; settings: those of `generate`."""
    drafter = WatchingDrafter()
    engine = stand.wrap(model, tokenizer, drafter=drafter, verifier="match")
    settings |= {"num_return_sequences": samples, "max_new_tokens": max_new_tokens}
    output = engine.generate(input_ids=[list(prompt) for prompt in prompts], **settings)
    trajectories = []
    for row, token_ids in enumerate(output.token_ids):
        ids, probs = (np.array(part) for part in zip(*drafter.laws[row], strict=True))
        trajectories.append(Trajectory(row // samples, np.array(token_ids, dtype=np.int32), ids, probs))
    return LawRecording([np.array(prompt, dtype=np.int32) for prompt in prompts], trajectories, max_new_tokens)
