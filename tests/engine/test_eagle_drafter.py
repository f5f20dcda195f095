"""EAGLE's drafts: recorded laws against a slow twin, what calls and rows may do, and settings."""

import numpy as np
import pytest
import torch
from plain_eagle import plain_features, plain_logits, random_head
from tiny_models import VOCABULARY_SIZE, tiny_model

import stand
from stand.drafters.eagle.growth import PAPER_SHAPE
from stand.trees import DraftBatch, TreeShape

PROMPTS = [[5, 9, 11, 4, 5, 9], [7, 8], [8, 30, 31, 32, 33, 34, 35, 36, 37, 30, 31, 32], [3]]
TARGETS = ("llama", "qwen2")


class CheckedDrafter(stand.EagleDrafter):
    """Compares every recorded law with a plain forward over the node's whole context."""

    num_checked = 0

    def draft(self, request) -> DraftBatch:
        batch = super().draft(request)
        batch.check()
        for row, history in enumerate(request.histories):
            self._check_row(batch[row], history.tolist(), int(request.max_depths[row]))
        return batch

    def _check_row(self, draft, history: list[int], max_depth: int) -> None:
        paths, taken = {0: []}, {}
        for node in range(1, draft.num_nodes):
            parent = int(draft.parents[node])
            paths[node] = [*paths[parent], int(draft.token_ids[node])]
            assert len(paths[node]) <= min(max_depth, self.rounds)
            logits = plain_logits(self.head, self._model, history, paths[parent]) / self.temperature
            best = np.argsort(-logits)[: self.law_size]
            law = np.exp(logits - logits.max()) * np.isin(np.arange(len(logits)), best)
            law[taken.setdefault(parent, [])] = 0.0
            taken[parent].append(int(draft.token_ids[node]))
            recorded = np.zeros(VOCABULARY_SIZE)
            support = draft.support_ids[parent]
            recorded[support[support >= 0]] = draft.law[node][support >= 0]
            np.testing.assert_allclose(recorded, law / law.sum(), atol=1e-4)
            self.num_checked += 1

    def attach(self, model, fingerprint):
        super().attach(model, fingerprint)
        self._model = model


def checked(target: str, **settings) -> CheckedDrafter:
    return CheckedDrafter(random_head(tiny_model(target), scale=1.5), num_candidates=7, temperature=1.3, **settings)


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("settings", [{"budget": 14, "rounds": 4}, {"shape": TreeShape.parse("branching:2,2,1")}])
def test_recorded_laws_are_the_heads_own_whatever_happens_to_the_rows(target, settings):
    """Rejections, rows that end and move, equal rows, a second call, a prompt of one token."""
    drafter = checked(target, **settings)
    engine = stand.wrap(tiny_model(target), drafter=drafter)
    ends = list(range(0, VOCABULARY_SIZE, 9))  # rows end at different steps
    for prompts in (PROMPTS, PROMPTS[:1] * 2):
        output = engine.generate(
            input_ids=prompts, num_return_sequences=2, max_new_tokens=9, temperature=1.0, top_k=0, seed=2,
            stop_token_ids=ends,
        )  # fmt: skip
        assert len({len(tokens) for tokens in output.token_ids}) > 1
    assert drafter.num_checked > 200
