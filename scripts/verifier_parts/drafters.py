"""Drafters for the comparison: with noise, with a budget per row, and watched for the room that rows have."""

from __future__ import annotations

import numpy as np
import torch

import stand
from stand.trees import DraftBatch

NODES_PER_ROW = 8  # of a blended draft: four rows share the default budget of 32


class NoisyDrafter(stand.ModelDrafter):
    """A draft model whose logits get fresh Gaussian noise; the law that it records is the noisy one it draws from."""

    def __init__(self, model, *, noise: float, **settings) -> None:
        super().__init__(model, **settings)
        self.noise = noise
        self._generator = torch.Generator().manual_seed(0)

    def _draw(self, logits, points, *, is_greedy):
        noise = torch.randn(logits.shape, generator=self._generator)
        return super()._draw(logits + self.noise * self.temperature * noise, points, is_greedy=is_greedy)


class GrowingDrafter(stand.BlendedDrafter):
    """NODES_PER_ROW for every live row."""

    def draft(self, request: stand.DraftRequest) -> DraftBatch:
        self.budget = NODES_PER_ROW * len(request.histories)
        return super().draft(request)


class RoomDrafter(stand.Drafter):
    """Passes everything on and notes which rows have room for a whole draft, which is `room` tokens."""

    def __init__(self, drafter: stand.Drafter, room: int) -> None:
        self.drafter, self.room = drafter, room
        self.num_candidates, self.requires_features = drafter.num_candidates, drafter.requires_features
        self.remembers, self.learn_prompt, self.learn = drafter.remembers, drafter.learn_prompt, drafter.learn
        self.has_room = np.zeros(0, dtype=bool)

    def attach(self, model, fingerprint) -> None:
        self.drafter.attach(model, fingerprint)
        self.num_candidates = self.drafter.num_candidates  # a lookup may have been made
        self.feature_layers = self.drafter.feature_layers  # known by now

    def draft(self, request: stand.DraftRequest) -> DraftBatch:
        self.has_room = request.max_depths >= self.room
        return self.drafter.draft(request)

    def follow_prompt(self, token_ids, features) -> None:
        self.drafter.follow_prompt(token_ids, features)

    def follow(self, lesson: stand.Lesson) -> None:
        self.drafter.follow(lesson)
