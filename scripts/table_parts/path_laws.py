"""Learning the target's laws along the kept paths alone, as if rejected nodes had not been scored."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

import stand
from stand.trees import DraftBatch, DraftTree


def kept_lesson(lesson: stand.Lesson) -> stand.Lesson:
    """The same about the roots and kept paths, as chains."""
    batch = lesson.batch
    nodes = [start + np.append(0, path) for start, path in zip(batch.offsets[:-1], lesson.accepted, strict=True)]
    packed = np.concatenate(nodes)
    return replace(
        lesson,
        batch=DraftBatch.concatenate([DraftTree.chain(batch.token_ids[part]) for part in nodes]),
        accepted=[np.arange(1, len(part), dtype=np.int32) for part in nodes],
        top_ids=lesson.top_ids[packed],
        top_probs=lesson.top_probs[packed],
    )


class PathLawsDrafter(stand.BlendedDrafter):
    """A `BlendedDrafter` that learns nothing of rejected nodes but that they were rejected."""

    def learn(self, lesson: stand.Lesson) -> None:
        kept, scopes = kept_lesson(lesson), lesson.request.problems % self.NUM_SCOPES
        befores = [history[:-1] for history in lesson.request.histories]
        self.lookup.learn_batch(kept.batch, befores, kept.top_ids, kept.top_probs, scopes=scopes)
        self.record(lesson)
