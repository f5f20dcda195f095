"""Grammars that begin where thoughts end: free until then, and a row's answer has the form that was asked for."""

import re
from collections import Counter

import numpy as np
import pytest
import torch
from grammar_cases import END, PROCESSORS, REGEX, XGrammarProcessor, compiled, scores_along, text_of
from node_cases import grown, scored
from small_law import continuation_law, p_of_continuations, small_model
from tiny_models import VOCABULARY_SIZE, tiny_model
from transformers import LogitsProcessor

import stand
from stand.laws.grammars import after_thoughts
from stand.laws.grammars import masks as grammar_masks
from stand.laws.grammars.after_thoughts import ThinkingMatcher
from stand.laws.grammars.marks import last_place
from stand.laws.grammars.matchers import Matcher
from stand.laws.processors import ProcessorChain
from stand.plugins.generate import stand_generate
from stand.row import Row
from stand.trees import DraftBatch

PROMPTS = [[5, 9, 11, 4], [7, 8]]
STOP = 30  # ends thoughts: a letter that no grammar here has
SAMPLED = {"input_ids": PROMPTS, "num_return_sequences": 8, "max_new_tokens": 90, "temperature": 1.0, "seed": 3}

pytestmark = pytest.mark.usefixtures("nothing_compiled")


@pytest.fixture(params=PROCESSORS)
def make(request):
    return PROCESSORS[request.param]


def thoughts_and_answer(tokens, end=(STOP,)) -> tuple[list[int], list[int] | None]:
    """Both without the end of the thoughts; no answer where they do not end."""
    for place in range(len(tokens)):
        if tuple(tokens[place : place + len(end)]) == tuple(end):
            return list(tokens[:place]), list(tokens[place + len(end) :])
    return list(tokens), None


def plain_scores(make, prompt, path, logits, end=(STOP,)):
    """By a new processor that sees the answer alone."""
    thoughts, answer = thoughts_and_answer(path, end)
    return logits if answer is None else scores_along(make(), [*prompt, *thoughts, *end], answer, logits)


@pytest.mark.parametrize("end", [(STOP,), (STOP, STOP), (31, STOP)])
def test_scores_at_every_node_are_the_models_and_then_the_grammars(make, end):
    """Rows go on, with drafts that end their thoughts and begin their answers anywhere."""
    generator = np.random.default_rng(len(end))
    chain, found = ProcessorChain([stand.AfterThoughts(make(), end)], end_ids=[END]), Counter()
    row = Row(0, np.array(PROMPTS[0], dtype=np.int32), 60)
    chain.grammar.expect(VOCABULARY_SIZE)
    parents = [-1, 0, 1, 2, 3, 1, 5, 0, 7]

    def choose(path):
        allowed = plain_scores(make, PROMPTS[0], path, torch.zeros(VOCABULARY_SIZE), end).isfinite()
        choices = [token for token in torch.nonzero(allowed).flatten().tolist() if token != END]
        if thoughts_and_answer(path, end)[1] is None and generator.random() < 0.7:
            choices = [30, 31]
        return int(generator.choice(choices or [END]))

    for step in range(40):
        tokens, paths = grown(row, parents, choose)
        how = {"size": VOCABULARY_SIZE, "generator": generator, "plans": step % 2 == 1}
        logits, scores = scored(chain, row, tokens, parents, **how)
        for node, path in enumerate(paths):
            if END not in path:
                assert torch.equal(scores[node], plain_scores(make, PROMPTS[0], path, logits[node], end))
                found[thoughts_and_answer(path, end)[1] is None] += 1
        row.extend(tokens[1:3] if END not in tokens[1:3] and generator.random() < 0.7 else tokens[7:8])
        if END in row.new_token_ids.tolist():
            chain.forget(row, is_last=False)
            row = Row(0, np.array(PROMPTS[0], dtype=np.int32), 60)
    assert min(found[True], found[False]) > 30


def scores_of_some_who_think(make, prompt, path, logits, begin):
    """A row's first new tokens are those of `begin`, or of the grammar."""
    if tuple(path[: len(begin)]) == begin:
        return plain_scores(make, [*prompt, *begin], path[len(begin) :], logits)
    is_opening = path[:1] == [begin[0]]
    scores = torch.full_like(logits, -torch.inf) if is_opening else scores_along(make(), prompt, path, logits).clone()
    if is_opening or not path:
        scores[begin[len(path)]] = logits[begin[len(path)]]
    return scores


@pytest.mark.parametrize("begin", [(31,), (31, 32), (31, 31, 32)])
def test_rows_may_leave_thoughts_out(make, begin):
    generator, found = np.random.default_rng(len(begin)), Counter()
    chain = ProcessorChain([stand.AfterThoughts(make(), STOP, begin=begin)], end_ids=[END])
    chain.grammar.expect(VOCABULARY_SIZE)
    parents = [-1, 0, 1, 2, 3, 1, 5, 0, 7, 8]

    def choose(path):
        allowed = scores_of_some_who_think(make, PROMPTS[0], path, torch.zeros(VOCABULARY_SIZE), begin).isfinite()
        choices = [token for token in torch.nonzero(allowed).flatten().tolist() if token != END]
        if generator.random() < 0.6:
            choices = [token for token in choices if token in (30, 31, 32)] or choices
        return int(generator.choice(choices or [END]))

    for trial in range(30):
        row = Row(0, np.array(PROMPTS[0], dtype=np.int32), 60)
        for step in range(3):
            tokens, paths = grown(row, parents, choose)
            how = {"size": VOCABULARY_SIZE, "generator": generator, "plans": (step + trial) % 2 == 1}
            logits, scores = scored(chain, row, tokens, parents, **how)
            for node, path in enumerate(paths):
                if END not in path:
                    expected = scores_of_some_who_think(make, PROMPTS[0], path, logits[node], begin)
                    assert torch.equal(scores[node], expected)
                    found[path[:1] == [31]] += 1
            kept = [token for token in tokens[1:4] if token != END]
            row.extend(kept)
        chain.forget(row, is_last=False)
    assert min(found[True], found[False]) > 50


@pytest.mark.parametrize("verifier", ["match", "traversal"])
def test_answers_have_the_form(make, verifier):
    engine = stand.wrap(tiny_model("qwen2"), verifier=verifier, drafter=stand.BlendedDrafter(budget=48))
    asked = {**SAMPLED, "logits_processors": [stand.AfterThoughts(make(), STOP)]}
    drafted = engine.generate(**asked)
    answers = 0
    for tokens in drafted.token_ids:
        thoughts, answer = thoughts_and_answer(tokens)
        if answer is not None and tokens[-1] == END:
            assert re.fullmatch(REGEX, text_of(answer))
            answers += 1
    assert answers > 4 and drafted.stats.num_accepted_draft_tokens > 20
    if verifier == "match":
        assert (
            drafted.token_ids == engine.generate(**asked, draft=False).token_ids != engine.generate(**SAMPLED).token_ids
        )


@pytest.mark.parametrize("name", ["xgrammar", "outlines_core"])
def test_continuations_have_the_law_of_plain_decoding(name):
    """Control: the law of a grammar that begins at once."""
    make, model = (lambda: PROCESSORS[name]("[ab]{2}")), tiny_model("qwen2")
    engine = stand.wrap(model, drafter=stand.BlendedDrafter(budget=160))
    bias = {"sequence_bias": [[[STOP], 3.0], [[END], -20.0], [[3], 3.0], [[4], 3.0]]}
    settings = {"max_new_tokens": 4, "temperature": 1.0, "top_k": 3, "max_rows": 40, "seed": 4, **bias}
    processor = stand.AfterThoughts(make(), STOP)
    output = engine.generate(input_ids=PROMPTS[:1], num_return_sequences=2000, logits_processors=processor, **settings)
    counts = Counter(map(tuple, output.token_ids))
    assert output.stats.mean_acceptance_length > 1.2

    def law_of(begins_at_once):
        def processed(prefix, logits):
            path, scores = prefix[0, len(PROMPTS[0]) :].tolist(), logits[0].clone()
            for (token,), change in bias["sequence_bias"]:
                scores[token] += change
            if begins_at_once:
                scores = scores_along(make(), PROMPTS[0], path, scores)
            else:
                scores = plain_scores(make, PROMPTS[0], path, scores)
            scores[scores < scores.topk(3).values[-1]] = -torch.inf
            return scores[None]

        return continuation_law(model, PROMPTS[0], processed, end=END, tokens=4)

    assert p_of_continuations(counts, law_of(False)) > 1e-4
    assert p_of_continuations(counts, law_of(True)) < 1e-6


@pytest.mark.parametrize("name", ["outlines llguidance", "outlines_core"])
def test_thoughts_have_their_law_beside_answers(name):
    """A model with more tokens than the grammar's tokenizer may think those, too, whoever answers meanwhile."""
    asked = {**SAMPLED, "max_new_tokens": 60, "sequence_bias": [[[STOP], 2.0]]}
    asked["logits_processors"] = stand.AfterThoughts(PROCESSORS[name](), STOP)

    def tokens(**settings):
        engine = stand.wrap(small_model(128), verifier="match", drafter=stand.BlendedDrafter(budget=24))
        return engine.generate(**asked, **settings).token_ids

    alone = tokens(draft=False, max_rows=1)
    assert any(max(thoughts_and_answer(row)[0], default=0) >= VOCABULARY_SIZE for row in alone)
    assert tokens(draft=False) == tokens() == tokens(max_rows=1) == alone


def test_an_error_counts_all_tokens_of_a_row():
    class Insists(LogitsProcessor):
        def __call__(self, input_ids, scores):
            scores = scores.clone()
            scores[:, STOP] = 90.0
            return scores

    processors = [stand.AfterThoughts(PROCESSORS["xgrammar"](), [STOP, STOP]), Insists()]
    with pytest.raises(RuntimeError, match="must allow each token of its row, got token 30 after 2 others"):
        stand.wrap(tiny_model("qwen2")).generate(input_ids=PROMPTS, max_new_tokens=20, logits_processors=processors)


def test_nothing_is_asked_of_a_grammar_while_rows_think(make, monkeypatch):
    chain, row = ProcessorChain([stand.AfterThoughts(make(), STOP)]), Row(0, np.array(PROMPTS[0], dtype=np.int32), 9)
    logits, batch = torch.zeros(1, VOCABULARY_SIZE), DraftBatch.pending([4])
    chain.grammar.expect(VOCABULARY_SIZE)
    assert not chain.grammar.is_plannable([row])
    with monkeypatch.context() as patched:
        patched.setattr(grammar_masks, "_bits", lambda *given, **more: pytest.fail("masked"))
        assert torch.equal(chain(logits, batch, [row]), logits)
    row.extend([STOP])
    assert chain.grammar.is_plannable([row])
    assert not chain(logits, batch, [row]).isfinite().all()


def test_by_custom_generate(make):
    model, prompt = tiny_model("qwen2"), torch.tensor([PROMPTS[1]])
    processor = stand.AfterThoughts(make(), STOP)
    asked = {"max_new_tokens": 40, "do_sample": False, "sequence_bias": [[[STOP], 30.0]]}
    tokens = model.generate(prompt, logits_processor=[processor], **asked, custom_generate=stand_generate)
    thoughts, answer = thoughts_and_answer(tokens[0, 2:].tolist())
    assert not thoughts and re.fullmatch(REGEX, text_of(answer))
    with pytest.raises(RuntimeError, match="AfterThoughts must be given to an engine of stand"):
        model.generate(prompt, logits_processor=[processor], **asked)


def test_several_grammars_are_one_for_each_row():
    engine, regexes = stand.wrap(tiny_model("qwen2")), ["[ab]{4,6}", "[c]{4,6}"]
    processor = stand.AfterThoughts(XGrammarProcessor([compiled(regex) for regex in regexes]), STOP)
    asked = {"max_new_tokens": 20, "logits_processors": processor, "sequence_bias": [[[STOP], 30.0]]}
    output = engine.generate(input_ids=PROMPTS, **asked)
    for regex, tokens in zip(regexes, output.token_ids, strict=True):
        assert re.fullmatch(regex, text_of(thoughts_and_answer(tokens)[1]))
    with pytest.raises(ValueError, match="must have one for each row, got 2 for 4 rows"):
        engine.generate(input_ids=PROMPTS * 2, **asked)


def test_what_does_not_fit_is_refused(make):
    processor = make()
    others = (stand.AfterThoughts(processor, STOP), stand.ThinkingBudget(3, begin=None, end=STOP))
    for wrong in (LogitsProcessor(), *others, None):
        with pytest.raises(ValueError, match="AfterThoughts needs a grammar library's processor, got "):
            stand.AfterThoughts(wrong, STOP)
    for end in ([], [-1]):
        with pytest.raises(ValueError, match="end must be one token id or several, got "):
            stand.AfterThoughts(processor, end)
    for end in ("</think>", [1.5], True, None, 5.0, {5, 6}, b"ab"):
        with pytest.raises(ValueError, match="end must"):
            stand.AfterThoughts(processor, end)
    for end in (np.int64(5), np.array([5]), torch.tensor([5]), (5,)):
        assert stand.AfterThoughts(processor, end).end == (5,)
    assert stand.AfterThoughts(processor, 0).end == (0,)
    beyond = stand.AfterThoughts(processor, VOCABULARY_SIZE)
    with pytest.raises(ValueError, match=r"end and begin must be tokens of the model, in \[0, 61\), got \[61\]"):
        stand.wrap(tiny_model("qwen2")).generate(input_ids=PROMPTS, max_new_tokens=9, logits_processors=beyond)
    later = stand.AfterThoughts(processor, STOP)
    processor(torch.tensor([PROMPTS[0]]), torch.zeros(1, VOCABULARY_SIZE))
    with pytest.raises(ValueError, match="must be new, got one of .*LogitsProcessor that has begun a text; make one"):
        stand.wrap(tiny_model("qwen2")).generate(input_ids=PROMPTS, max_new_tokens=9, logits_processors=later)


class Told(Matcher):
    """Of 64 tokens: allows token 9, and any where it is told so."""

    num_words = 2
    num_taken = 0
    any_comes = False

    def take(self, token: int) -> None: ...

    def go_back(self, count: int) -> None: ...

    def follow(self, tokens) -> None: ...

    def write_mask(self, words: np.ndarray) -> None:
        words[:] = 1 << 9, 0

    def takes_any(self, token: int) -> bool:
        return self.any_comes


@pytest.mark.parametrize("any_comes", [False, True])
def test_any_token_comes_in_thoughts_and_where_the_grammar_says_so(any_comes):
    answer = Told()
    answer.any_comes = any_comes
    matcher = ThinkingMatcher(answer, (5,), begin=(7, 8))
    assert not matcher.takes_any(7) and matcher.takes_any(9) == any_comes
    matcher.follow([7])
    assert not matcher.takes_any(8)
    matcher.follow([8])
    assert matcher.takes_any(7) and matcher.takes_any(5)
    matcher.follow([5])
    assert matcher.takes_any(7) == matcher.takes_any(9) == any_comes


@pytest.mark.parametrize(("begin", "allows_beyond"), [(63, False), (64, True), (64, False), (99, False)])
def test_what_begins_thoughts_is_known_to_the_grammar(make, monkeypatch, begin, allows_beyond):
    answer = Told()
    answer.allows_beyond = allows_beyond
    monkeypatch.setattr(after_thoughts, "matcher_for", lambda processor, row, num_tokens: answer)
    thinking = stand.AfterThoughts(make(), 5, begin=begin)
    if begin < 64 or allows_beyond:
        assert thinking.new_matcher(None, 100).num_words == 2
    else:
        with pytest.raises(ValueError, match=f"begin must be tokens that the grammar's tokenizer has, got .{begin}.;"):
            thinking.new_matcher(None, 100)


@pytest.mark.parametrize(
    ("mark", "place"), [((5,), 4), ((9, 9), 2), ((9, 9, 6), 3), ((6, 5, 1), 5), ((7,), 0), ((1, 5), 0), ((9,) * 9, 0)]
)
def test_where_a_mark_ends_for_the_last_time(mark, place):
    assert last_place(mark, np.array([9, 9, 6, 5, 1])) == place
