"""A drafter that learns what was committed, and nothing of what the target said about it."""

from __future__ import annotations

import numpy as np

import stand

CONTEXT = 32  # tokens before a run that it is learned with; deeper than the lookup's contexts


class TokenDrafter(stand.BlendedDrafter):
    """A `BlendedDrafter` that counts tokens instead of learning laws."""

    def learn(self, lesson: stand.Lesson) -> None:
        request, batch = lesson.request, lesson.batch
        for row, history in enumerate(request.histories):
            tokens = batch.token_ids[batch.offsets[row] + lesson.accepted[row]]
            run = np.append(tokens, lesson.next_tokens[row]).astype(np.int32)
            self.lookup.learn(history[-CONTEXT:], run, scope=int(request.problems[row]) % self.NUM_SCOPES)
        self.record(lesson)
