"""Drafts that know what a grammar forbids: fewer nodes are lost, and the law stays."""

from collections import Counter

import numpy as np
import pytest
import torch
from grammar_cases import END, PROCESSORS, scores_along
from node_cases import draft_of
from small_law import continuation_law, p_of_continuations, small_model
from tiny_models import VOCABULARY_SIZE, tiny_model

import stand
from stand.call import Call
from stand.laws.grammars import masks as grammar_masks
from stand.laws.grammars.masks import GrammarMasks
from stand.laws.processors import ProcessorChain
from stand.row import Row
from stand.trees import DraftBatch

PROMPTS = [[5, 9, 11, 4], [7, 8]]
SAMPLED = {"input_ids": PROMPTS, "num_return_sequences": 6, "max_new_tokens": 40, "temperature": 1.0, "seed": 3}

pytestmark = pytest.mark.usefixtures("nothing_compiled")


@pytest.fixture(params=PROCESSORS)
def make(request):
    return PROCESSORS[request.param]


class Watched(stand.BlendedDrafter):
    """Keeps what it drafted, and for which rows."""

    def __init__(self, **settings):
        super().__init__(**settings)
        self.drafts: list[tuple[list[np.ndarray], DraftBatch]] = []

    def draft(self, request):
        batch = super().draft(request)
        self.drafts.append(([np.array(history) for history in request.histories], batch))
        return batch


def forbidden_nodes(make, drafter: Watched) -> tuple[int, int]:
    """Of all drafted nodes, those at or below a token that the grammar forbids; and all of them."""
    prompt_of = {tuple(prompt): prompt for prompt in PROMPTS}
    allowed: dict[tuple[int, ...], set[int]] = {}  # by text

    def after(prompt, text):
        if text not in allowed:
            scores = scores_along(make(), prompt, list(text), torch.zeros(VOCABULARY_SIZE))
            allowed[text] = set(torch.nonzero(scores.isfinite()).flatten().tolist())
        return allowed[text]

    lost = total = 0
    for histories, batch in drafter.drafts:
        for history, draft in zip(histories, batch, strict=True):
            prompt = next(one for key, one in prompt_of.items() if tuple(history[: len(key)]) == key)
            paths = [tuple(history[len(prompt) :].tolist())]
            is_text = [True]
            for token, parent in zip(draft.token_ids[1:].tolist(), draft.parents[1:].tolist(), strict=True):
                paths.append((*paths[parent], token))
                may = is_text[parent] and END not in paths[parent] and token in after(prompt, paths[parent])
                is_text.append(may)
            lost, total = lost + len(is_text) - sum(is_text), total + len(is_text) - 1
    return lost, total


def test_few_drafted_nodes_are_lost(make, monkeypatch):
    """Without masks, as control, most are: the lookup has learned other texts, too."""
    shares, steps = [], []
    for is_masked in (True, False):
        if not is_masked:
            monkeypatch.setattr(Call, "_planner", lambda *given: None)
        drafter = Watched(budget=24)
        engine = stand.wrap(tiny_model("qwen2"), drafter=drafter)
        engine.generate(**SAMPLED)  # free texts
        drafter.drafts.clear()
        output = engine.generate(**SAMPLED, logits_processors=[make()])
        lost, total = forbidden_nodes(make, drafter)
        shares.append(lost / total)
        steps.append(output.stats.mean_acceptance_length)
    assert shares[0] < 0.3 < 0.5 < shares[1]
    assert steps[0] > 1.05 * steps[1]


def test_a_single_node_knows_the_grammar_too(make):
    drafter = Watched(budget=1)
    engine, one = stand.wrap(tiny_model("qwen2"), drafter=drafter), {**SAMPLED, "num_return_sequences": 1}
    engine.generate(**SAMPLED)
    drafter.drafts.clear()
    for seed in range(6):
        engine.generate(**{**one, "input_ids": PROMPTS[:1], "seed": seed}, logits_processors=[make()])
    lost, total = forbidden_nodes(make, drafter)
    assert lost == 0 < total


@pytest.mark.parametrize(
    ("name", "kind"),
    [("xgrammar", "sampled"), ("xgrammar", "mixed"), ("xgrammar", "deterministic"), ("outlines llguidance", "sampled")],
)
def test_continuations_have_the_law_of_plain_decoding(name, kind):
    """Control: the law of another prompt."""
    regex, model = "[ab]{2,3}", tiny_model("qwen2")
    engine = stand.wrap(model, drafter=stand.BlendedDrafter(budget=160, kind=kind))
    settings = {"max_new_tokens": 5, "temperature": 1.0, "top_k": 0, "max_rows": 40, "seed": 4}
    output = engine.generate(
        input_ids=PROMPTS[:1], num_return_sequences=2000, logits_processors=PROCESSORS[name](regex), **settings
    )
    counts = Counter(map(tuple, output.token_ids))
    assert output.stats.mean_acceptance_length > 1.5

    def law_of(prompt):
        def processed(prefix, logits):
            path = prefix[0, len(prompt) :].tolist()
            return scores_along(PROCESSORS[name](regex), prompt, path, logits[0])[None]

        return continuation_law(model, prompt, processed, end=END, tokens=5)

    assert p_of_continuations(counts, law_of(PROMPTS[0])) > 1e-4
    assert p_of_continuations(counts, law_of(PROMPTS[1])) < 1e-6


def test_a_mask_is_asked_for_once(monkeypatch, make):
    """Those at planned nodes serve the forward, too."""
    asked, real = Counter(), grammar_masks._Walk._write

    def write(walk, words, path):
        asked[id(walk), walk.matcher._num_settled, path] += 1
        real(walk, words, path)

    monkeypatch.setattr(grammar_masks._Walk, "_write", write)
    engine = stand.wrap(tiny_model("qwen2"), drafter=stand.BlendedDrafter(budget=24))
    engine.generate(**SAMPLED, logits_processors=[make()])
    assert len(asked) > 50 and set(asked.values()) == {1}


def new_row() -> Row:
    return Row(0, np.array(PROMPTS[0], dtype=np.int32), 40)


def test_a_tokenizer_may_have_more_tokens_than_the_model(make, monkeypatch):
    """Those that the model lacks are not drafted, few though the grammar allows. Control: masks that are not cut."""
    asked = {**SAMPLED, "logits_processors": [make("(ab|bc|ca){2,20}")], "stop_token_ids": []}

    def drafted():
        return stand.wrap(small_model(50), drafter=stand.BlendedDrafter(budget=24), verifier="match").generate(**asked)

    expected = stand.wrap(small_model(50), verifier="match").generate(**asked, draft=False)
    assert drafted().token_ids == expected.token_ids
    monkeypatch.setattr(grammar_masks, "_within", lambda words, num_tokens: words)
    with pytest.raises(ValueError, match=r"drafted tokens must be in \[0, 50\)"):
        drafted()


def test_masks_within_a_vocabulary():
    words = np.full((2, 3), -1, np.int32)
    for num_tokens in (96, 95, 65, 64, 63, 33, 32, 1):
        cut = grammar_masks._within(words, num_tokens)
        bits = np.unpackbits(cut.view(np.uint8), axis=1, bitorder="little")
        assert bits.sum(axis=1).tolist() == [num_tokens] * 2 and cut.flags.c_contiguous
    assert (words == -1).all() and grammar_masks._within(words, 200) is words


def test_a_grammar_that_goes_back_slowly_is_not_asked_for_plans(monkeypatch):
    def is_plannable():
        chain = ProcessorChain([PROCESSORS["outlines llguidance"]()])
        return chain.grammar.is_plannable([new_row()])

    assert is_plannable()
    monkeypatch.setattr("stand.laws.grammars.matchers.GuidanceMatcher._can_be_copied", lambda self: False)
    assert not is_plannable()


def test_a_plan_changes_no_scores(make):
    """Masks that are known are those that are asked for."""
    generator, row = np.random.default_rng(3), new_row()
    for tokens in generator.integers(3, VOCABULARY_SIZE, (20, 6)).tolist():
        batch = DraftBatch.concatenate([draft_of([4, *tokens], [-1, 0, 1, 2, 1, 0, 5])])
        logits = torch.from_numpy(generator.normal(0, 1, (7, VOCABULARY_SIZE))).float()
        both = [ProcessorChain([make()], end_ids=[END]) for _ in range(2)]
        both[0].grammar.expect(VOCABULARY_SIZE)
        both[0].grammar.planned(batch, [row])
        assert torch.equal(*(chain(logits, batch, [row]) for chain in both))


def test_drafts_without_nodes_ask_no_grammar(monkeypatch, make):
    monkeypatch.setattr(GrammarMasks, "planned", lambda *given: pytest.fail("asked"))
    engine = stand.wrap(tiny_model("qwen2"), drafter=stand.BlendedDrafter(budget=0))
    assert engine.generate(**SAMPLED, logits_processors=[make()]).stats.mean_acceptance_length == 1.0


def test_calls_without_a_grammar_have_no_masks():
    engine = stand.wrap(tiny_model("qwen2"), drafter=Watched(budget=4))
    real, seen = Watched.draft, []
    engine.drafter.draft = lambda request: seen.append(request.masks_at) or real(engine.drafter, request)
    engine.generate(**SAMPLED)
    assert seen and all(one is None for one in seen)
