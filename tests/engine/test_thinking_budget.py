"""Thoughts of at most so many tokens: free until then, then a fixed text, then free again."""

import re
from collections import Counter

import numpy as np
import pytest
import torch
from grammar_cases import PROCESSORS, REGEX, text_of
from node_cases import draft_of, grown, scored
from small_law import continuation_law, p_of_continuations
from tiny_models import VOCABULARY_SIZE, tiny_model
from transformers import LogitsProcessor

import stand
from stand.laws.grammars import masks
from stand.laws.processors import ProcessorChain
from stand.plugins.generate import stand_generate
from stand.row import Row
from stand.trees import DraftBatch

PROMPTS = [[5, 9, 30, 4], [7, 8]]
BEGIN, END, LAST = 30, 31, 2  # of thoughts; a token that ends rows
SAMPLED = {"input_ids": PROMPTS, "num_return_sequences": 6, "max_new_tokens": 40, "temperature": 1.0, "seed": 3}
BUDGETS = [
    {"max_tokens": 5, "begin": BEGIN, "end": END},
    {"max_tokens": 5, "begin": None, "end": END},
    {"max_tokens": 0, "begin": BEGIN, "end": END, "forced": [40, 41, END]},
    {"max_tokens": 4, "begin": [30, 30], "end": [31, 32], "forced": [40, 31, 32]},
    {"max_tokens": 3, "begin": None, "end": [31, 31]},
    {"max_tokens": 6, "begin": [30], "end": [30, 31], "forced": [31, 30, 31]},
]

pytestmark = pytest.mark.usefixtures("nothing_compiled")


def ends_with(tokens, mark) -> bool:
    return len(tokens) >= len(mark) and tuple(tokens[-len(mark) :]) == mark


def forced_next(prompt, new_tokens, asked) -> int | None:
    """The only token that may follow, found by reading the whole text from its beginning."""
    budget = stand.ThinkingBudget(**asked)
    thinks, is_over, thought = budget.begin is None, False, 0
    for place in range(1, len(prompt) + len(new_tokens) + 1):
        text, is_new = [*prompt, *new_tokens][:place], place > len(prompt)
        if is_new and thinks:
            thought += 1
            if ends_with(text, budget.end):
                thinks, is_over = False, True
        elif budget.begin is not None and not is_over:
            if ends_with(text, budget.begin):
                thinks = True
            elif ends_with(text, budget.end):  # of a prompt: it may end thoughts, and begin some again
                thinks = False
    return budget.forced[thought - budget.max_tokens] if thinks and thought >= budget.max_tokens else None


def plain_scores(logits, prompt, new_tokens, asked):
    only = forced_next(prompt, new_tokens, asked)
    if only is None:
        return logits
    scores = torch.full_like(logits, -torch.inf)
    scores[only] = logits[only]
    return scores


@pytest.mark.parametrize("asked", BUDGETS)
@pytest.mark.parametrize("prompt", [*PROMPTS, [30, 4, 31], [30, 30, 7, 31, 32], [30, 30], [31, 30], [30], [31]])
def test_scores_at_every_node(prompt, asked):
    """Rows go on, with drafts that begin, end and use up thoughts anywhere."""
    generator = np.random.default_rng(len(prompt) + asked["max_tokens"])
    chain, found = ProcessorChain([stand.ThinkingBudget(**asked)]), Counter()
    chain.grammar.expect(VOCABULARY_SIZE)
    parents = [-1, 0, 1, 2, 3, 1, 5, 0, 7]

    def choose(path):
        only = forced_next(prompt, path, asked)
        return int(generator.choice([30, 31, 32, 9])) if only is None else only

    for _ in range(12):
        row = Row(0, np.array(prompt, dtype=np.int32), 60)
        for step in range(8):
            tokens, paths = grown(row, parents, choose)
            how = {"size": VOCABULARY_SIZE, "generator": generator, "plans": step % 2 == 1}
            logits, scores = scored(chain, row, tokens, parents, **how)
            for node, path in enumerate(paths):
                assert torch.equal(scores[node], plain_scores(logits[node], prompt, path, asked))
                found[forced_next(prompt, path, asked) is None] += 1
            row.extend(tokens[1:4] if generator.random() < 0.5 else tokens[7:8])
        chain.forget(row, is_last=False)
    assert found[True] > 30


def test_the_slow_reader_of_texts():
    asked = {"max_tokens": 2, "begin": BEGIN, "end": END, "forced": [40, END]}
    texts = {
        (): None,
        (30,): None,
        (30, 9): None,
        (30, 9, 9): 40,
        (30, 9, 9, 40): 31,
        (30, 9, 9, 40, 31): None,
        (30, 31): None,
        (30, 31, 9, 9, 9): None,
        (30, 31, 30): None,
        (30, 31, 30, 9): None,
        (9, 30, 9, 9): 40,
    }
    assert {text: forced_next([7], list(text), asked) for text in texts} == texts
    assert forced_next([30], [9, 9], asked) == 40 and forced_next([30, 31], [9, 9], asked) is None
    assert forced_next([31, 30], [9, 9], asked) == 40 and forced_next([30, 31], [30, 9, 9], asked) == 40


@pytest.mark.parametrize("verifier", ["match", "traversal"])
@pytest.mark.parametrize("asked", BUDGETS[1:4])
def test_rows_think_no_longer(asked, verifier):
    engine = stand.wrap(tiny_model("qwen2"), verifier=verifier, drafter=stand.BlendedDrafter(budget=24))
    budget = stand.ThinkingBudget(**asked)
    prompts = [[*prompt, *(budget.begin or ())] for prompt in PROMPTS]
    settings = {**SAMPLED, "input_ids": prompts, "logits_processors": budget}
    drafted, num_forced = engine.generate(**settings), 0
    for place, tokens in enumerate(drafted.token_ids):
        prompt = prompts[place // SAMPLED["num_return_sequences"]]
        for count, token in enumerate(tokens):
            only = forced_next(prompt, tokens[:count], asked)
            assert only in (None, token)
            num_forced += only is not None
    assert num_forced > 5 and drafted.stats.num_accepted_draft_tokens > 20
    if verifier == "match":
        assert drafted.token_ids == engine.generate(**settings, draft=False).token_ids
        assert drafted.token_ids != engine.generate(**{**settings, "logits_processors": None}).token_ids


def test_forced_texts_are_drafted_before_they_were_ever_seen():
    """The default drafter plans: where one token alone may follow, it is drafted."""
    forced = [40, 41, 42, 43, 44, 45, END]
    budget = stand.ThinkingBudget(10, begin=None, end=END, forced=forced)
    engine = stand.wrap(tiny_model("qwen2"), drafter=stand.BlendedDrafter(budget=24))
    asked = {"input_ids": PROMPTS[1], "max_new_tokens": 18, "temperature": 1.0, "seed": 3, "logits_processors": budget}
    output = engine.generate(**asked)
    assert output.token_ids[0][10:17] == forced and output.stats.num_steps < 15


def test_continuations_have_their_law():
    """Control: the law of thoughts that are a token longer."""
    model, engine = tiny_model("qwen2"), stand.wrap(tiny_model("qwen2"), drafter=stand.BlendedDrafter(budget=60))
    asked, bias = {"max_tokens": 2, "begin": None, "end": END, "forced": [9, END]}, [[[END], 3.0], [[9], 3.0]]
    settings = {"max_new_tokens": 5, "temperature": 1.0, "top_k": 3, "max_rows": 40, "seed": 4, "sequence_bias": bias}
    output = engine.generate(
        input_ids=PROMPTS[1], num_return_sequences=2000, **settings, logits_processors=stand.ThinkingBudget(**asked)
    )
    counts = Counter(map(tuple, output.token_ids))
    assert output.stats.mean_acceptance_length > 1.2

    def law_of(max_tokens):
        def processed(prefix, logits):
            scores, path = logits[0].clone(), prefix[0, len(PROMPTS[1]) :].tolist()
            for (token,), change in bias:
                scores[token] += change
            scores = plain_scores(scores, PROMPTS[1], path, {**asked, "max_tokens": max_tokens})
            best = scores.topk(3).values[-1]
            scores[scores < best] = -torch.inf
            return scores[None]

        return continuation_law(model, PROMPTS[1], processed, end=LAST, tokens=5)

    assert p_of_continuations(counts, law_of(2)) > 1e-4
    assert p_of_continuations(counts, law_of(3)) < 1e-6


@pytest.mark.parametrize("order", [1, -1])
def test_an_answer_of_a_grammar_behind_it(order):
    budget = stand.ThinkingBudget(7, begin=None, end=END)
    processors = [stand.AfterThoughts(PROCESSORS["xgrammar"](), END), budget][::order]
    engine = stand.wrap(tiny_model("qwen2"), drafter=stand.BlendedDrafter(budget=24))
    asked = {**SAMPLED, "max_new_tokens": 60, "sequence_bias": [[[LAST], -20.0]]}
    output = engine.generate(**asked, logits_processors=processors)
    for text in output.token_ids:
        thoughts = text.index(END)
        assert thoughts <= 7 and re.fullmatch(REGEX, text_of(text[thoughts + 1 :]))


def test_rows_may_be_said_to_think_or_not():
    row = Row(0, np.array([30, 9, 30], dtype=np.int32), 20)
    for is_thinking in (True, False):
        chain = ProcessorChain([stand.ThinkingBudget(0, begin=30, end=END, is_thinking=is_thinking)])
        chain.grammar.expect(VOCABULARY_SIZE)
        assert chain.grammar.is_plannable([row]) == is_thinking


def test_nothing_is_made_while_no_draft_comes_near_the_end(monkeypatch):
    chain, logits = ProcessorChain([stand.ThinkingBudget(9, begin=None, end=END)]), torch.zeros(3, VOCABULARY_SIZE)
    row, batch = Row(0, np.array([3], dtype=np.int32), 20), DraftBatch.concatenate([draft_of([3, 4, 5], [-1, 0, 1])])
    row.extend([3] * 6)
    with monkeypatch.context() as patched:
        patched.setattr(masks.GrammarMasks, "_words", lambda *given: pytest.fail("made"))
        assert chain(logits, batch, [row]) is logits
    row.extend([3])
    assert not torch.equal(chain(logits, batch, [row]), logits)


def test_drafts_are_planned_where_a_text_is_forced():
    chain = ProcessorChain([stand.ThinkingBudget(2, begin=None, end=END)])
    row = Row(0, np.array([3], dtype=np.int32), 20)
    chain.grammar.expect(VOCABULARY_SIZE)
    for is_forced in (False, False, True, False):
        assert chain.grammar.is_plannable([row]) == is_forced
        row.extend([END if is_forced else 9])


def test_by_custom_generate():
    model, prompt = tiny_model("qwen2"), torch.tensor([PROMPTS[1]])
    asked = {"max_new_tokens": 20, "do_sample": False, "logits_processor": [stand.ThinkingBudget(3, begin=None, end=9)]}
    assert model.generate(prompt, **asked, custom_generate=stand_generate)[0, 5] == 9
    with pytest.raises(RuntimeError, match="ThinkingBudget must be given to an engine of stand"):
        model.generate(prompt, **asked)


def test_a_forced_token_that_was_forbidden_or_overruled_is_an_error():
    class Insists(LogitsProcessor):
        def __call__(self, input_ids, scores):
            return scores.index_fill(1, torch.tensor([8]), 90.0)

    engine, budget = stand.wrap(tiny_model("qwen2")), stand.ThinkingBudget(2, begin=None, end=END)
    with pytest.raises(RuntimeError, match="must allow each token of its row, got token 8 after 2 others"):
        engine.generate(input_ids=PROMPTS, max_new_tokens=9, logits_processors=[budget, Insists()])
    with pytest.raises(ValueError, match="must leave a token of finite score behind every text"):
        engine.generate(input_ids=PROMPTS, max_new_tokens=9, suppress_tokens=[END], logits_processors=budget)


def test_what_does_not_fit_is_refused():
    for wrong in (-1, 1.5, None, "9", True):
        with pytest.raises(ValueError, match="max_tokens must be an integer >= 0, got "):
            stand.ThinkingBudget(wrong, begin=None, end=END)
    for wrong in ([], [-1], "<think>", 1.5, True):
        for name in ("begin", "end", "forced"):
            with pytest.raises(ValueError, match=f"{name} must be one token id or several, got .*; write tokenizer"):
                stand.ThinkingBudget(5, **{"begin": None, "end": END, name: wrong})
    for wrong in ([31, 9], [31, 9, 31]):
        with pytest.raises(ValueError, match=r"forced must end with the tokens of end, \[31\], and .* got \[31, 9"):
            stand.ThinkingBudget(5, begin=None, end=END, forced=wrong)
    for begin, end in ((9, 9), ([8, 9], 9), (9, [8, 9])):
        with pytest.raises(ValueError, match="begin and end must tell thoughts from answers, got "):
            stand.ThinkingBudget(5, begin=begin, end=end)
    with pytest.raises(ValueError, match="is_thinking must be True or False, got 1"):
        stand.ThinkingBudget(5, begin=9, end=END, is_thinking=1)
    with pytest.raises(ValueError, match=r"begin, end and forced must be tokens of the model, in \[0, 61\), got "):
        stand.wrap(tiny_model("qwen2")).generate(
            input_ids=PROMPTS, max_new_tokens=9, logits_processors=stand.ThinkingBudget(5, begin=None, end=61)
        )
