"""A row's walk through a grammar along drafts, with a grammar of a few lines: also such that no library gives."""

import numpy as np
import pytest
import torch
from node_cases import draft_of

from stand.laws.grammars import masks as grammar_masks
from stand.laws.grammars.masks import GrammarMasks
from stand.laws.grammars.matchers import LibraryMatcher
from stand.laws.node import nodes_of
from stand.row import Row
from stand.trees import DraftBatch

NUM_TOKENS = 20
DEAD, FIRST = 7, 3  # behind DEAD nothing may follow


class Rising(LibraryMatcher):
    """Each token is one to four more than the last one, except that behind DEAD there is none."""

    def __init__(self):
        super().__init__(32)
        self.tokens, self.calls = [FIRST - 1], []

    def write_mask(self, words):
        self.calls.append(tuple(self.tokens))
        allowed = [] if self.tokens[-1] == DEAD else [self.tokens[-1] + step for step in range(1, 5)]
        words[0] = sum(1 << token for token in allowed)

    def takes_any(self, token):
        return False

    def _take(self, token):
        self.tokens.append(token)
        return True

    def _go_back(self, count):
        del self.tokens[len(self.tokens) - count :]


@pytest.fixture
def matcher(monkeypatch):
    matcher = Rising()
    monkeypatch.setattr(grammar_masks, "matcher_for", lambda processor, row, num_tokens: matcher)
    return matcher


def asked(tokens, parents, *, masks=None) -> tuple[GrammarMasks, torch.Tensor, torch.Tensor, list]:
    """(masks, raw scores, scores, nodes) of a draft behind a new row."""
    masks, row = masks or GrammarMasks({0: None}), Row(0, np.array([5, FIRST - 1], dtype=np.int32), 9)
    batch = DraftBatch.concatenate([draft_of([FIRST - 1, *tokens], parents)])
    raw = torch.randn(len(parents), NUM_TOKENS, generator=torch.Generator().manual_seed(0))
    nodes = nodes_of(batch, [row])
    return masks, raw, masks(raw, nodes), nodes


def allowed_at(scores) -> list[int]:
    return torch.nonzero(scores.isfinite()).flatten().tolist()


def test_scores_stay_below_what_is_forbidden_and_behind_dead_ends(matcher):
    """3 -> 7 (dead) -> 8 -> 9; 3 -> 19 (forbidden) -> 4 -> 5; 4."""
    parents = [-1, 0, 1, 2, 3, 1, 5, 6, 0]
    masks, raw, scores, nodes = asked([3, DEAD, 8, 9, 19, 4, 5, 4], parents)
    assert allowed_at(scores[0]) == [3, 4, 5, 6] and allowed_at(scores[1]) == [4, 5, 6, 7]
    assert allowed_at(scores[8]) == [5, 6, 7, 8]
    for node in (2, 3, 4, 5, 6, 7):
        assert torch.equal(scores[node], raw[node])
    told = [str(masks.error_at(node)) for node in nodes]
    assert [text[:28] for text in told[2:5]] == ["a grammar must allow a token"] * 3
    assert all("got token 19 after 1 others" in text for text in told[5:8])
    assert told[0] == told[1] == told[8] == "None"
    assert matcher.tokens == [FIRST - 1]


def test_each_mask_is_asked_for_once_and_the_way_back_is_short(matcher):
    asked([3, 4, 5, 6, 8], [-1, 0, 1, 2, 1, 2])
    assert len(matcher.calls) == len(set(matcher.calls)) == 6


def test_a_dead_end_of_the_row_itself_is_as_one_of_a_draft(matcher):
    matcher.tokens = [DEAD]
    masks, raw, scores, nodes = asked([8], [-1, 0])
    assert torch.equal(scores, raw)
    assert all("a grammar must allow a token" in str(masks.error_at(node)) for node in nodes)


def test_plans_stop_at_dead_ends(matcher):
    masks, row = GrammarMasks({0: None}), Row(0, np.array([5, FIRST - 1], dtype=np.int32), 9)
    masks.expect(NUM_TOKENS)
    batch = DraftBatch.concatenate([draft_of([FIRST - 1, 3, DEAD, 8], [-1, 0, 1, 2])])
    assert len(masks.planned(batch, [row])) == 1 and matcher.tokens == [FIRST - 1]
