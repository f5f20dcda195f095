"""Processors of grammar libraries: at every node of a draft what decoding without drafts would be given there."""

import re
from pathlib import Path

import numpy as np
import outlines
import pytest
import torch
from grammar_cases import (
    END,
    PROCESSORS,
    REGEX,
    XGrammarProcessor,
    compiled,
    grammar_tokenizer,
    scores_along,
    text_of,
)  # fmt: skip
from node_cases import draft_of
from printed_page import run_page
from scripted_drafter import ScriptedDrafter
from tiny_models import VOCABULARY_SIZE, tiny_model
from transformers import LogitsProcessor

import stand
from stand.laws.grammars import masks as grammar_masks
from stand.laws.grammars import matchers
from stand.laws.grammars.masks import GrammarMasks
from stand.laws.processors import ProcessorChain
from stand.plugins.generate import stand_generate
from stand.row import Row
from stand.trees import DraftBatch

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "grammars.md"
PROMPTS = [[5, 9, 11, 4], [7, 8]]
PARENTS = [-1, 0, 0, 1, 1, 3, 2, 5]  # of the nodes of a draft

pytestmark = pytest.mark.usefixtures("nothing_compiled")


@pytest.fixture(params=PROCESSORS)
def make(request):
    return PROCESSORS[request.param]


def draft_for(row: Row, allowed_after, generator) -> list[int]:
    """Tokens of the nodes of PARENTS: three of four times one that may follow its parent, else any."""
    tokens, paths = [int(row.history[-1])], [row.new_token_ids.tolist()]
    for parent in PARENTS[1:]:
        allowed = allowed_after(paths[parent])
        is_tame = len(allowed) and generator.random() < 0.75
        tokens.append(int(generator.choice(allowed)) if is_tame else int(generator.integers(VOCABULARY_SIZE)))
        paths.append([*paths[parent], tokens[-1]])
    return tokens


def allowed_by(make, prompt):
    """Tokens that may follow a path, none behind one that is no text."""

    def allowed(path):
        for length, token in enumerate(path):
            if token not in after(path[:length]):
                return np.empty(0, dtype=np.int64)
        return after(path)

    def after(path):
        if path and path[-1] == END:
            return np.empty(0, dtype=np.int64)
        return np.flatnonzero(np.isfinite(scores_along(make(), prompt, path, torch.zeros(VOCABULARY_SIZE)).numpy()))

    return allowed


def walked(make, chain, *, num_steps=4, seed=0):
    """Some steps of two rows over drafts of 8 nodes: by node, the chain's scores and those of a new processor, or of
    none where the node is behind no text of the grammar."""
    generator, found = np.random.default_rng(seed), []
    rows = [Row(place, np.array(prompt, dtype=np.int32), 40) for place, prompt in enumerate(PROMPTS)]
    allowed = [allowed_by(make, prompt) for prompt in PROMPTS]
    for _ in range(num_steps):
        tokens = [draft_for(row, allowed[place], generator) for place, row in enumerate(rows)]
        logits = torch.from_numpy(generator.normal(0, 1, (2 * len(PARENTS), VOCABULARY_SIZE))).float()
        scores = chain(logits, DraftBatch.concatenate([draft_of(one, PARENTS) for one in tokens]), rows)
        for place, row in enumerate(rows):
            paths = [row.new_token_ids.tolist()]
            for node, parent in enumerate(PARENTS[1:], start=1):
                paths.append([*paths[parent], tokens[place][node]])
            for node, path in enumerate(paths):
                at = place * len(PARENTS) + node
                is_text = len(allowed[place](path)) > 0
                expected = scores_along(make(), PROMPTS[place], path, logits[at]) if is_text else None
                if END not in path:  # nothing is drawn behind it
                    found.append((scores[at], expected, logits[at]))
            ways = [path for path in paths if len(allowed[place](path))]
            longest = max(ways, key=len)
            row.extend([*longest[len(paths[0]) :], int(generator.choice(allowed[place](longest)))])
            if row.new_token_ids[-1] == END:
                rows[place] = Row(place, np.array(PROMPTS[place], dtype=np.int32), 40)
                chain.forget(row, is_last=False)
    return found


def test_scores_at_every_node_are_those_of_a_processor_that_decoded_it(make):
    chain = ProcessorChain([make()], end_ids=[END])
    found = walked(make, chain)
    reached = [case for case in found if case[1] is not None]
    assert 20 < len(reached) < len(found) - 5
    assert all(torch.equal(scores, expected) for scores, expected, _ in reached)
    others = [case for case in found if case[1] is None]  # some have the last mask, behind the end of a grammar
    assert any(torch.equal(scores, raw) for scores, _, raw in others)
    assert all(scores.max().isfinite() for scores, _, _ in others)


def test_asked_depth_by_depth_they_are_the_same(make):
    """Behind a processor that keeps a state."""

    class Stateful(LogitsProcessor):
        def __call__(self, input_ids, scores):
            return scores

    chain = ProcessorChain([make(), Stateful()], end_ids=[END])
    found = walked(make, chain)
    assert all(torch.equal(scores, expected) for scores, expected, _ in found if expected is not None)


def test_a_matcher_that_does_not_go_back_is_seen(make, monkeypatch):
    """Negative control."""
    monkeypatch.setattr(grammar_masks, "commonprefix", lambda paths: paths[0])
    with pytest.raises((AssertionError, RuntimeError, KeyError)):
        test_scores_at_every_node_are_those_of_a_processor_that_decoded_it(make)


@pytest.mark.parametrize("verifier", ["match", "coupled"])
def test_tokens_are_those_without_drafts_and_texts_are_of_the_grammar(make, verifier):
    engine = stand.wrap(tiny_model("qwen2"), verifier=verifier, drafter=stand.BlendedDrafter(budget=24))
    asked = {"input_ids": PROMPTS, "num_return_sequences": 6, "max_new_tokens": 40, "temperature": 1.0, "seed": 3}
    engine.generate(input_ids=PROMPTS, max_new_tokens=60, temperature=1.5, seed=1, stop_token_ids=[])  # other texts
    expected = engine.generate(**asked, logits_processors=[make()], draft=False)
    drafted = engine.generate(**asked, logits_processors=[make()])
    assert drafted.token_ids == expected.token_ids != engine.generate(**asked).token_ids
    ended = [tokens for tokens in drafted.token_ids if tokens[-1] == END]
    assert len(ended) == 12 and all(re.fullmatch(REGEX, text_of(tokens)) for tokens in ended)
    assert drafted.stats.num_accepted_draft_tokens > 3


@pytest.mark.parametrize("way", ["engine", "custom_generate"])
def test_greedy_tokens_are_those_of_transformers(make, way):
    model, prompt = tiny_model("qwen2"), torch.tensor([PROMPTS[0]])
    asked = {"do_sample": False, "max_new_tokens": 30}
    expected = model.generate(prompt, logits_processor=[make()], **asked)[0, prompt.shape[1] :].tolist()
    if way == "custom_generate":
        custom = {"custom_generate": stand_generate}
        tokens = model.generate(prompt, logits_processor=[make()], **asked, **custom)[0, prompt.shape[1] :].tolist()
    else:
        tokens = stand.wrap(model).generate(input_ids=prompt, logits_processors=make(), **asked).token_ids[0]
    assert list(tokens) == expected and re.fullmatch(REGEX, text_of(tokens))


@pytest.mark.parametrize("name", ["xgrammar", "outlines xgrammar", "outlines_core"])
def test_where_a_grammar_ends_and_a_row_goes_on_the_last_mask_stays(name):
    """As in transformers; llguidance's processor then warns and allows the end token alone."""
    regex, model, prompt = "(ab|c){2}", tiny_model("qwen2"), torch.tensor([PROMPTS[1]])
    ends = {"eos_token_id": 50, "max_new_tokens": 12, "do_sample": False}  # which no grammar allows
    expected = model.generate(prompt, logits_processor=[PROCESSORS[name](regex)], **ends)[0, 2:].tolist()
    engine = stand.wrap(model, drafter=stand.BlendedDrafter(budget=16))
    ends = {"stop_token_ids": [50], "max_new_tokens": 12}
    for _ in range(2):
        output = engine.generate(input_ids=prompt, logits_processors=PROCESSORS[name](regex), **ends)
        assert list(output.token_ids[0]) == expected and expected.count(END) > 5
    assert output.stats.num_accepted_draft_tokens > 3


def test_llguidance_allows_its_end_token_alone_after_the_end():
    output = stand.wrap(tiny_model("qwen2")).generate(
        input_ids=PROMPTS, logits_processors=PROCESSORS["outlines llguidance"]("(ab|c){2}"), max_new_tokens=12,
        stop_token_ids=[50],
    )  # fmt: skip
    assert all(tokens[-5:] == [END] * 5 for tokens in map(list, output.token_ids))


def test_a_processor_may_serve_many_calls_but_not_go_on_with_a_text_of_others(make):
    engine, processor = stand.wrap(tiny_model("qwen2")), make()
    asked = {"input_ids": PROMPTS, "max_new_tokens": 20}
    first, second = (engine.generate(**asked, logits_processors=processor, draft=False) for _ in range(2))
    assert first.token_ids == second.token_ids
    processor(torch.tensor([PROMPTS[0]]), torch.zeros(1, VOCABULARY_SIZE))
    with pytest.raises(ValueError, match=r"must be new, got one of .*LogitsProcessor that has begun a text; make one"):
        engine.generate(**asked, logits_processors=processor)


def test_a_processor_of_several_grammars_has_one_for_each_row():
    engine, regexes = stand.wrap(tiny_model("qwen2")), ["[ab]{4,6}", "[c]{4,6}"]
    processor = XGrammarProcessor([compiled(regex) for regex in regexes])
    output = engine.generate(input_ids=PROMPTS, max_new_tokens=20, logits_processors=processor)
    for regex, tokens in zip(regexes, output.token_ids, strict=True):
        assert re.fullmatch(regex, text_of(tokens))
    for prompts in (PROMPTS[:1], PROMPTS * 2):
        wanted = f"must have one for each row, got 2 for {len(prompts)} rows; give it one for all rows, or as many"
        with pytest.raises(ValueError, match=wanted):
            engine.generate(input_ids=prompts, max_new_tokens=20, logits_processors=processor)
    run = engine.run(PROMPTS * 2, max_new_tokens=20, logits_processors=processor)
    with pytest.raises(ValueError, match="must have one for each row, got 2 and row 2; give it one for all rows"):
        list(run)


class Insists(LogitsProcessor):
    """Brings a forbidden token back."""

    def __call__(self, input_ids, scores):
        scores = scores.clone()
        scores[:, 40] = 90.0
        return scores


def test_a_forbidden_token_in_a_row_is_an_error():
    with pytest.raises(RuntimeError, match="must allow each token of its row, got token 40 after 0 others"):
        stand.wrap(tiny_model("qwen2")).generate(
            input_ids=PROMPTS, max_new_tokens=20, logits_processors=[PROCESSORS["xgrammar"]("c{5}"), Insists()]
        )


@pytest.mark.parametrize(("width", "allows_beyond"), [(2, True), (1, True), (1, False)])
def test_masks_are_applied_bit_by_bit(width, allows_beyond):
    generator = np.random.default_rng(0)
    words = generator.integers(-(2**31), 2**31, (3, width)).astype(np.int32)
    scores = torch.from_numpy(generator.normal(0, 1, (3, 61))).float()
    words[2] = -1  # all bits: what is beyond stays, too
    masked = grammar_masks._masked(scores, words, allows_beyond=allows_beyond)
    assert torch.equal(masked[2], scores[2])
    for line in range(2):
        for token in range(61):
            is_told = token < 32 * width
            is_allowed = matchers.allows(words[line], token) if is_told else allows_beyond
            assert masked[line, token] == (scores[line, token] if is_allowed else -torch.inf)


def test_bits_on_a_device_are_those_on_the_host(monkeypatch):
    octets = np.random.default_rng(1).integers(0, 256, (5, 12)).astype(np.uint8)
    on_host = grammar_masks._bits(octets, torch.device("cpu"))
    monkeypatch.setattr(grammar_masks, "uploaded", lambda array, device: torch.from_numpy(array))
    monkeypatch.setattr(torch, "arange", lambda end, dtype, device, make=torch.arange: make(end, dtype=dtype))
    assert torch.equal(grammar_masks._bits(octets, torch.device("cuda")), on_host)


class Own(LogitsProcessor):
    """A caller's own, around a matcher; asks what the libraries' processors ask."""

    def __init__(self, inner):
        self.inner, self.library = inner, outlines

    def __call__(self, input_ids, scores):
        return self.inner(input_ids, scores)


@pytest.mark.parametrize("name", ["xgrammar", "outlines xgrammar", "outlines_core"])
def test_a_callers_own_processor_may_hold_one(name):
    """Every node has a copy with a fork of the matcher."""
    engine = stand.wrap(tiny_model("qwen2"), verifier="match")
    asked = {"input_ids": PROMPTS, "num_return_sequences": 3, "max_new_tokens": 30, "temperature": 0.8, "seed": 5}
    expected = engine.generate(**asked, logits_processors=PROCESSORS[name]())
    assert expected.token_ids == engine.generate(**asked, logits_processors=Own(PROCESSORS[name]())).token_ids
    assert expected.stats.num_accepted_draft_tokens > 0


def test_a_callers_own_processor_around_llguidance_is_refused():
    """Copies of its matchers may share what they know."""
    with pytest.raises(ValueError, match="must be copyable.*got Own with TypeError: cannot pickle 'builtins.LL"):
        stand.wrap(tiny_model("qwen2")).generate(
            input_ids=PROMPTS, max_new_tokens=4, logits_processors=Own(PROCESSORS["outlines llguidance"]())
        )


def test_rows_that_end_leave_no_matcher():
    chain = ProcessorChain([PROCESSORS["xgrammar"]()])
    masks = chain._runners[0]
    assert isinstance(masks, GrammarMasks)
    row = Row(0, np.array(PROMPTS[0], dtype=np.int32), 8)
    chain(torch.zeros(1, VOCABULARY_SIZE), DraftBatch.concatenate([draft_of([4], [-1])]), [row])
    assert list(masks._of_row) == [0]
    chain.forget(row, is_last=True)
    assert not masks._of_row and not masks.by_request


def test_outlines_runs_on_the_engine():
    model = outlines.from_transformers(tiny_model("qwen2"), grammar_tokenizer())
    asked = {"max_new_tokens": 30, "do_sample": False}
    custom = {"custom_generate": stand_generate}
    kind = outlines.types.regex(REGEX)
    assert model("abcab", kind, **asked, **custom) == model("abcab", kind, **asked)


def test_libraries_are_known_by_the_names_of_their_classes():
    for name, make in PROCESSORS.items():
        processor = make()
        assert matchers.has_matcher(processor), name
        assert not matchers.has_matcher(Own(processor))


@pytest.mark.long
@pytest.mark.skipif(not PAGE.is_file(), reason="needs the source tree, docs included")
def test_the_page_runs_as_printed(tmp_path, monkeypatch, capsys):
    """Its blocks one after the other, in a folder with the bundled model alone; fewer steps timed."""
    namespace = run_page(PAGE, tmp_path, monkeypatch)
    answer, thoughts, digits = capsys.readouterr().out.strip().splitlines()
    assert re.fullmatch(r"\d+ characters of thoughts at most", thoughts)
    assert all("</think>" in text[:200] for text in namespace["short"].texts)
    assert re.fullmatch(r"Answer: \d{1,3}", answer) and re.fullmatch(r"\d{1,3}", digits)
    whole = r"(.|\n)*</think>\nAnswer: [0-9]{1,3}"
    assert all(re.fullmatch(whole, text) for text in namespace["output"].texts)


def scripted(*tokens: int) -> ScriptedDrafter:
    return ScriptedDrafter(tokens, list(map(len, PROMPTS)))


def drafting(text: str) -> ScriptedDrafter:
    return scripted(*grammar_tokenizer()(text)["input_ids"])


GREEDY = {"input_ids": PROMPTS, "max_new_tokens": 30, "temperature": 0.0}


def drafted_and_plain(text: str, new_processors, **settings) -> list[list[list[int]]]:
    """Tokens with drafts of `text`, and without."""
    engine = stand.wrap(tiny_model("qwen2"), drafter=drafting(text))
    return [
        [list(tokens) for tokens in engine.generate(
            **GREEDY, **settings, draft=draft, logits_processors=new_processors()
        ).token_ids]
        for draft in (True, False)
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("regex", "text", "settings"),
    [("(y|x{8})", "y", {"min_new_tokens": 5}), ("(qr|zw){2}", "qrqr", {"suppress_tokens": [19, 20]})],
)
def test_a_dead_end_that_no_row_comes_to_ends_no_call(make, regex, text, settings):
    """A draft comes there: behind a token that is allowed and not drawn, or that another processor forbids."""
    assert grammar_tokenizer()("qr")["input_ids"] == [19, 20]
    drafted, plain = drafted_and_plain(text, lambda: [make(regex)], **settings)
    assert drafted == plain and all(len(tokens) > 4 for tokens in plain)


def test_a_dead_end_that_a_row_comes_to_is_told():
    engine = stand.wrap(tiny_model("qwen2"), drafter=drafting("y"))
    for draft in (True, False):
        with pytest.raises(ValueError, match="finite score"):
            engine.generate(**GREEDY, logits_processors=PROCESSORS["xgrammar"]("y"), min_new_tokens=5, draft=draft)


class Clamp(LogitsProcessor):
    """Makes what is forbidden improbable."""

    def __call__(self, input_ids, scores):
        return scores.clamp(min=-1e4)


@pytest.mark.parametrize("text", ["ccx", "xcc", "ccccc"])
def test_a_forbidden_token_that_is_only_drafted_ends_no_call(make, text):
    drafted, plain = drafted_and_plain(text, lambda: [make("c{5}"), Clamp()])
    assert drafted == plain and all(text_of(tokens) == "ccccc" for tokens in plain)


def test_a_text_beyond_the_grammar_is_told_in_the_step_in_which_its_row_ends():
    """Its last tokens would be drawn without a mask: behind a token that comes back, and in the same step."""
    processors = [PROCESSORS["xgrammar"]("c{5}"), Insists()]
    engine = stand.wrap(tiny_model("qwen2"), drafter=drafting(grammar_tokenizer().decode([40]) * 2))
    with pytest.raises(RuntimeError, match="must allow each token of its row, got token 40 after 0 others"):
        engine.generate(**{**GREEDY, "max_new_tokens": 2}, logits_processors=processors)
    engine.generate(**{**GREEDY, "max_new_tokens": 1}, logits_processors=processors)  # nothing is drawn behind it


def test_a_grammar_that_cannot_be_read_is_told():
    processor = PROCESSORS["outlines llguidance"]()
    processor.grammar = 'start: "a" <nope> "b"\n'
    with pytest.raises(ValueError, match=r"must be one that llguidance can follow, got .*; mend the grammar"):
        stand.wrap(tiny_model("qwen2")).generate(**GREEDY, logits_processors=processor)


@pytest.mark.parametrize("name", ["xgrammar", "outlines xgrammar", "outlines llguidance"])
def test_a_dead_end_of_the_grammar_itself_is_none_where_no_row_comes(name):
    """No token of the vocabulary goes on behind "y"."""
    drafted, plain = drafted_and_plain("y", lambda: [PROCESSORS[name]("(y!|x{8})")])
    assert drafted == plain and all(text_of(tokens) == "xxxxxxxx" for tokens in plain)


class After(LogitsProcessor):
    """Goes on behind the end with a token that no grammar allows there."""

    def __call__(self, input_ids, scores):
        scores = scores.clone()
        scores[(input_ids == END).any(dim=1), 40] = 90.0
        return scores


def test_behind_the_end_of_a_grammar_any_token_may_come(make):
    ids = grammar_tokenizer()("cccc")["input_ids"]
    engine = stand.wrap(tiny_model("qwen2"), drafter=scripted(*ids, END, *[40] * 6))
    asked = {**GREEDY, "max_new_tokens": 9, "stop_token_ids": [50]}
    found = [
        engine.generate(**asked, draft=draft, logits_processors=[make("c{4}"), After()]).token_ids
        for draft in (True, False)
    ]
    assert found[0] == found[1] and all(tokens[-1] == 40 for tokens in found[1])


def test_a_token_that_is_allowed_and_then_refused_ends_no_call_where_it_is_only_drafted():
    """A limit of all tokens: llguidance's mask knows nothing of it."""

    def processors():
        limited = PROCESSORS["outlines llguidance"]()
        limited.grammar = '{"grammars": [{"lark_grammar": "start: /[a-c]*/"}], "max_tokens": 5}'
        return [limited, Ends()]

    drafted, plain = drafted_and_plain("c" * 8, processors)
    assert drafted == plain


class Ends(LogitsProcessor):
    """With the sixth new token."""

    def __call__(self, input_ids, scores):
        scores = scores.clone()
        scores[:, END] += 90.0 * (input_ids.shape[1] >= len(PROMPTS[1]) + 5)
        return scores
