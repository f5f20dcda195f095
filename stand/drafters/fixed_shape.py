"""STAND's drafter: the longest-match lookup fills a fixed shape."""

from __future__ import annotations

import numpy as np
from transformers import PreTrainedModel

from stand.drafters.drafter import DraftRequest, Lesson, LookupDrafter, check_kind, settle_vocabulary, teach_two_ways
from stand.trees import DraftBatch, LookupTree, TreeShape
from stand.trees.kinds import SHAPED_KINDS


class FixedShapeDrafter(LookupDrafter):
    """STAND (arXiv 2506.04708): an adaptive n-gram lookup fills a fixed shape by Gumbel-Top-K.

    lookup: what was learned before; None: an empty `LookupTree` of the model's vocabulary.
    shape: the slots that a draft may fill; None: `TreeShape.paper()`.
    kind: "sampled", "mixed" or "deterministic" children; "coupled" ones share the target's noise (for the rules
    `coupled` and `match`); "independent" ones are drawn with replacement (for `specinfer` and `spectr`).
    """

    rows_apart = True

    def __init__(self, lookup: LookupTree | None = None, shape: TreeShape | None = None, *, kind: str = "sampled"):
        if lookup is not None and not isinstance(lookup, LookupTree):
            remedy = "load a file with stand.LookupTree.load(path), or give a BlendedLookup to stand.BlendedDrafter"
            raise ValueError(f"lookup must be a LookupTree, got {type(lookup).__name__}; {remedy}")
        if shape is not None and not isinstance(shape, TreeShape):
            raise ValueError(f"shape must be a TreeShape, got {shape!r}; TreeShape.paper() is the paper's")
        check_kind(kind, SHAPED_KINDS, "a fixed shape")
        self.lookup = lookup
        self.shape = TreeShape.paper() if shape is None else shape
        self.kind = kind
        self._shallow: dict[int, TreeShape] = {}

    def attach(self, model: PreTrainedModel, fingerprint: bytes) -> None:
        if self.lookup is None:
            self.lookup = LookupTree(fingerprint=fingerprint)
        settle_vocabulary(self.lookup, fingerprint)

    def typical_draft(self) -> DraftBatch:
        lookup = LookupTree(num_candidates=self.lookup.num_candidates)
        tokens = teach_two_ways(lookup)
        row = np.zeros(1, dtype=np.int64)
        return lookup.draft([tokens], self.shape, seed=0, rows=row, steps=row, kind=self.kind)

    def most_nodes(self, num_rows: int) -> int:
        return num_rows * (self.shape.num_nodes - 1)

    def draft(self, request: DraftRequest) -> DraftBatch:
        is_given = request.is_greedy and self.kind != "independent"  # rules for independent siblings take no others
        kind = "deterministic" if is_given else self.kind
        return self.lookup.draft(
            request.histories,
            [self._up_to(int(depth)) for depth in request.max_depths],
            seed=request.target_seed if kind == "coupled" else request.seed,
            rows=request.noise_keys,
            steps=request.steps,
            kind=kind,
        )

    def learn_prompt(self, token_ids: np.ndarray, *, problem: int) -> None:
        self.lookup.learn(token_ids[:1], token_ids[1:])

    def learn(self, lesson: Lesson) -> None:
        befores = [history[:-1] for history in lesson.request.histories]
        self.lookup.learn_batch(lesson.batch, befores, lesson.top_ids, lesson.top_probs)

    def _up_to(self, depth: int) -> TreeShape:
        """The shape without slots below `depth`: known before anything is drawn, so drafts stay adapted."""
        if depth >= self.shape.max_depth:
            return self.shape
        if depth not in self._shallow:
            self._shallow[depth] = self.shape.truncated(depth)
        return self._shallow[depth]
