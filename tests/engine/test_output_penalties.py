"""Presence and frequency penalties at every node of a draft: of new tokens alone, each as often as it was drawn."""

from collections import Counter

import numpy as np
import pytest
import torch
from node_cases import draft_of, grown
from small_law import continuation_law, p_of_continuations
from tiny_models import VOCABULARY_SIZE, tiny_model
from transformers import LogitsProcessorList
from transformers.generation import logits_process as library

import stand
from stand.laws.processors import ProcessorChain
from stand.plugins.generate import stand_generate
from stand.row import Row
from stand.trees import DraftBatch

PROMPTS = [[5, 9, 11, 4, 9], [7, 8]]
END = 2
SAMPLED = {"input_ids": PROMPTS, "num_return_sequences": 6, "max_new_tokens": 40, "temperature": 0.9, "seed": 3}
BOTH = {"presence": 0.7, "frequency": 0.3}

pytestmark = pytest.mark.usefixtures("nothing_compiled")


def plain_scores(logits: torch.Tensor, new_tokens: list[int], presence: float, frequency: float) -> torch.Tensor:
    """By OpenAI's words, token by token."""
    scores = logits.clone()
    for token, count in Counter(new_tokens).items():
        scores[token] -= np.float32(presence + count * frequency)
    return scores


@pytest.mark.parametrize("asked", [BOTH, {"presence": 1.5}, {"frequency": 0.4}, {"presence": -2.0, "frequency": -0.1}])
def test_scores_at_every_node(asked):
    """Two rows of two requests go on, and draft few tokens, so that paths repeat theirs and their own."""
    generator = np.random.default_rng(3)
    full = {"presence": 0.0, "frequency": 0.0, **asked}
    chain = ProcessorChain([stand.OutputPenalties(**asked)])
    chain.admit(1, [stand.OutputPenalties(**asked)])
    rows = [Row(index, np.array(prompt, dtype=np.int32), 300, request=index) for index, prompt in enumerate(PROMPTS)]
    parents, most = [-1, 0, 1, 2, 1, 4, 0], 0
    for _ in range(30):
        drafts, paths = [], []
        for row in rows:
            tokens, of_row = grown(row, parents, lambda path: int(generator.integers(3, 8)))
            drafts.append(draft_of(tokens, parents))
            paths += of_row
        logits = torch.from_numpy(generator.normal(0, 1, (len(paths), VOCABULARY_SIZE))).float()
        before = logits.clone()
        scores = chain(logits, DraftBatch.concatenate(drafts), rows)
        for node, path in enumerate(paths):
            assert torch.equal(scores[node], plain_scores(logits[node], path, **full))
            most = max(most, *Counter(path).values(), 0) if path else most
        assert torch.equal(logits, before)
        rows[0].extend(generator.integers(3, 61, 4).tolist())
        rows[1].extend(generator.integers(3, 61, 1).tolist())
    assert most > 4


def test_many_distinct_tokens():
    """More than a row has room for at first."""
    row, penalties = Row(0, np.array([3], dtype=np.int32), 300), stand.OutputPenalties(**BOTH)
    chain, tokens = ProcessorChain([penalties]), [*range(200), *range(50, 120)]
    row.extend(tokens)
    logits = torch.zeros(1, 256)
    assert torch.equal(chain(logits, DraftBatch.pending([119]), [row])[0], plain_scores(logits[0], tokens, **BOTH))


@pytest.mark.parametrize("temperature", [0.9, 0.0])
def test_tokens_are_those_of_decoding_without_drafts(temperature):
    engine = stand.wrap(tiny_model("qwen2"), verifier="match", drafter=stand.BlendedDrafter(budget=24))
    asked = {**SAMPLED, "temperature": temperature, "logits_processors": stand.OutputPenalties(**BOTH)}
    plain, drafted = engine.generate(**asked, draft=False), engine.generate(**asked)
    assert drafted.token_ids == plain.token_ids and drafted.stats.num_accepted_draft_tokens > 20
    assert plain.token_ids != engine.generate(**{**asked, "logits_processors": None}).token_ids


def test_requests_of_a_run_count_their_own_tokens():
    """Prompts of two lengths, rows that begin and end at different times: each as in a call of its own."""
    engine = stand.wrap(tiny_model("qwen2"), verifier="match")
    asked = {"seed": 3, "temperature": 0.9, "logits_processors": stand.OutputPenalties(**BOTH)}
    requests = [stand.Request(prompt, num_return_sequences=3, max_new_tokens=9 + 8 * len(prompt)) for prompt in PROMPTS]
    together = {one.row: one.token_ids for one in engine.run(requests, max_rows=2, **asked)}
    alone = {one.row: one.token_ids for one in engine.run(requests, max_rows=1, draft=False, **asked)}
    assert together == alone and len(alone) == 6


@pytest.mark.parametrize("verifier", ["traversal", "rrs"])
def test_continuations_have_their_law(verifier):
    """Controls: penalties of the prompt's tokens too, and each new token once however often it came."""
    model, asked = tiny_model("qwen2"), {"presence": 1.0, "frequency": 2.0}
    settings = {"max_new_tokens": 4, "temperature": 1.0, "top_k": 3, "max_rows": 40, "seed": 4}
    bias = [[[9], 9.0], [[11], 7.0], [[30], 3.5]]
    engine = stand.wrap(model, verifier=verifier, drafter=stand.BlendedDrafter(budget=60))
    output = engine.generate(
        input_ids=PROMPTS[:1], num_return_sequences=2000, sequence_bias=bias, stop_token_ids=[END], **settings,
        logits_processors=stand.OutputPenalties(**asked),
    )  # fmt: skip
    counts = Counter(map(tuple, output.token_ids))
    assert output.stats.mean_acceptance_length > 1.2

    def law_of(first, once):
        def processed(prefix, logits):
            tokens, scores = prefix[0, first:].tolist(), logits[0].clone()
            for (token,), change in bias:
                scores[token] += change
            scores = plain_scores(scores, list(set(tokens)) if once else tokens, **asked)
            scores[scores < scores.topk(3).values[-1]] = -torch.inf
            return scores[None]

        return continuation_law(model, PROMPTS[0], processed, end=END, tokens=4)

    assert p_of_continuations(counts, law_of(len(PROMPTS[0]), False)) > 1e-4
    assert p_of_continuations(counts, law_of(0, False)) < 1e-6
    assert p_of_continuations(counts, law_of(len(PROMPTS[0]), True)) < 1e-6


def test_they_run_in_the_order_of_a_list():
    """Behind a penalty that multiplies, and before the filters."""
    row, batch = Row(0, np.array([3], dtype=np.int32), 9), DraftBatch.pending([4])
    row.extend([4])
    logits = torch.full((1, VOCABULARY_SIZE), 2.0)
    chain = ProcessorChain([library.RepetitionPenaltyLogitsProcessor(2.0), stand.OutputPenalties(presence=0.5)])
    assert chain(logits, batch, [row])[0, 4] == 0.5
    chain = ProcessorChain([stand.OutputPenalties(presence=0.5), library.RepetitionPenaltyLogitsProcessor(2.0)])
    assert chain(logits, batch, [row])[0, 4] == 0.75


def test_by_custom_generate():
    model, prompt = tiny_model("qwen2"), torch.tensor([PROMPTS[0]])
    given = LogitsProcessorList([stand.OutputPenalties(presence=9.0)])
    asked = {"max_new_tokens": 20, "min_new_tokens": 20, "do_sample": False, "logits_processor": given}
    tokens = model.generate(prompt, **asked, custom_generate=stand_generate)[0, len(PROMPTS[0]) :].tolist()
    assert len(set(tokens)) == len(tokens) == 20
    with pytest.raises(RuntimeError, match="OutputPenalties must be given to an engine of stand"):
        model.generate(prompt, **asked)


@pytest.mark.parametrize("wrong", ["0.5", None, float("nan"), float("inf"), 1e5, -1e5, True])
@pytest.mark.parametrize("name", ["presence", "frequency"])
def test_what_is_no_penalty_is_refused(name, wrong):
    with pytest.raises(ValueError, match=f"{name} must be "):
        stand.OutputPenalties(**{name: wrong})
