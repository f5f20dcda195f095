"""Prompts that begin alike: chunks that another prompt has computed are copied, to the bit, and no token changes."""

import numpy as np
import pytest
import torch
from recurrent_models import recurrent_model
from tiny_models import tiny_model

import stand
from stand.scheduling import prompt_keys
from stand.scheduling.prompt_keys import Prefilled, common_chunks

CHUNK = 8
SHARED = [5, 9, 11, 4, 5, 9, 7, 3, 2, 6, 12, 13, 4, 4, 8, 30, 31, 5, 6]  # two chunks and three tokens
PROMPTS = [[*SHARED, *tail] for tail in ([7, 7], [8, 30, 31], [], [7, 7, 9, 9, 9, 1, 2, 3])] + [SHARED[1:], [3]]


@pytest.fixture(autouse=True)
def short_chunks(monkeypatch):
    monkeypatch.setattr("stand.forward.model.PROMPT_CHUNK", CHUNK)
    monkeypatch.setattr(prompt_keys, "PROMPT_CHUNK", CHUNK)


def decoded(model=None, drafter=None, **settings):
    """By row, under a rule whose tokens do not follow from when other rows enter."""
    drafter = drafter or stand.BlendedDrafter(budget=12)
    engine = stand.wrap(model or tiny_model("qwen2"), drafter=drafter, verifier="match", fuse=False)
    asked = {"max_new_tokens": 12, "temperature": 0.9, "seed": 3, "num_return_sequences": 2} | settings
    run = engine.run(PROMPTS, **asked)
    found = {one.row: one.token_ids for one in run}
    return found, run.stats


def without_copies(monkeypatch):
    monkeypatch.setattr(prompt_keys, "common_chunks", lambda source, target: 0)


@pytest.mark.parametrize("max_rows", [1, 3, 99])
@pytest.mark.parametrize("family", ["qwen2", "gemma2", "gpt_oss"])
def test_no_token_changes(monkeypatch, family, max_rows):
    found, stats = decoded(tiny_model(family), max_rows=max_rows)
    assert stats.num_copied_prompt_tokens == 3 * 2 * CHUNK  # of the second, third and fourth prompt
    assert stats.num_prompt_tokens == sum(map(len, PROMPTS)) and stats.as_dict()["num_copied_prompt_tokens"] == 48
    without_copies(monkeypatch)
    wanted, stats = decoded(tiny_model(family), max_rows=max_rows)
    assert found == wanted and stats.num_copied_prompt_tokens == 0


def keys_of_all(monkeypatch) -> list[list[torch.Tensor]]:
    """Of every prompt, when it is complete."""
    kept, count = [], prompt_keys.PromptKeys._count

    def noting(keys, row):
        prompt = keys._prompts[prompt_keys.beginning(row)].keys
        kept.append([states[:, :, : row.num_cached].clone() for states in (*prompt.keys, *prompt.values)])
        count(keys, row)

    with monkeypatch.context() as patch:
        patch.setattr(prompt_keys.PromptKeys, "_count", noting)
        decoded()
    return kept


def test_keys_are_the_same_to_the_bit(monkeypatch):
    copied = keys_of_all(monkeypatch)
    without_copies(monkeypatch)
    computed = keys_of_all(monkeypatch)
    assert len(copied) == len(computed) == len(PROMPTS)
    for ours, theirs in zip(copied, computed, strict=True):
        assert all(torch.equal(one, other) for one, other in zip(ours, theirs, strict=True))


def test_a_wrong_beginning_changes_tokens(monkeypatch):
    """Control: another prompt's keys for a prompt that does not begin with them."""
    wanted, _ = decoded()
    monkeypatch.setattr(
        prompt_keys, "common_chunks", lambda source, target: int(source.done >= CHUNK < len(target.token_ids))
    )
    found, _ = decoded()
    assert found != wanted and found[0] == wanted[0]


class Recorder(stand.Drafter):
    """Notes the features of prompts."""

    requires_features = True

    def __init__(self):
        self.prompts = {}

    def follow_prompt(self, token_ids, features):
        self.prompts[tuple(token_ids.tolist())] = features.clone()

    def draft(self, request):
        return stand.trees.DraftBatch.pending([history[-1] for history in request.histories])


def test_hidden_states_come_along(monkeypatch):
    copied, computed = Recorder(), Recorder()
    _, stats = decoded(drafter=copied)
    assert stats.num_copied_prompt_tokens == 48
    without_copies(monkeypatch)
    decoded(drafter=computed)
    assert copied.prompts.keys() == computed.prompts.keys() and len(copied.prompts) == len(PROMPTS)
    assert all(torch.equal(features, computed.prompts[prompt]) for prompt, features in copied.prompts.items())


def test_models_with_recurrent_states_compute_every_prompt():
    _, stats = decoded(recurrent_model("qwen3_5"))
    assert stats.num_copied_prompt_tokens == 0


def prompt_of(token_ids: list[int], done: int) -> Prefilled:
    return Prefilled(None, np.array(token_ids, dtype=np.int32), done)


@pytest.mark.parametrize(
    ("source", "done", "target", "chunks"),
    [
        (SHARED, 19, [*SHARED, 1], 2),
        (SHARED, 19, SHARED[:17], 2),
        (SHARED, 19, SHARED[:16], 1),  # its own last chunk is computed
        (SHARED, 15, [*SHARED, 1], 1),
        (SHARED, -1, [*SHARED, 1], 0),
        (SHARED, 19, [1, *SHARED], 0),
        (SHARED, 19, [*SHARED[:15], 1, *SHARED[16:]], 1),
        (SHARED, 19, [*SHARED[:7], 1, *SHARED[8:]], 0),
        (SHARED, 19, [], 0),
    ],
)
def test_whole_chunks_of_what_is_common(source, done, target, chunks):
    assert common_chunks(prompt_of(source, done), prompt_of(target, -1)) == chunks
