"""Matchers of grammar libraries that go back: masks are those of one that was never elsewhere."""

from functools import lru_cache, partial
from pathlib import Path

import numpy as np
import outlines
import pytest
import xgrammar
from grammar_cases import PROCESSORS, XGrammarProcessor
from outlines.backends.llguidance import LLGuidanceBackend
from outlines.backends.outlines_core import OutlinesCoreBackend
from tiny_models import VOCABULARY_SIZE
from transformers import AutoModelForCausalLM, AutoTokenizer

from stand.laws.grammars import matchers
from stand.laws.grammars.matchers import GuidanceMatcher
from stand.row import Row

ROOT = Path(__file__).parents[2]
ROW = Row(0, np.array([3], dtype=np.int32), 9)

LARK = {
    "skipped blanks": 'start: e\ne: N | "(" e ")"\nN: /[0-9]/\n%ignore / /\n',
    "stop": 'start: x "." \nx[stop="."]: /(.|\\n)*/\n',
    "stop behind letters": 'start: "?" /[a-z]{2,3}/ x "." \nx[stop="."]: /(.|\\n)*/\n',
    "max_tokens": 'start: x "." \nx[max_tokens=12]: /(.|\\n)*/\n',
    "an end token": "start: /[a-z]{1,3}/ <|end|>\n",
    "one token first": 'start: "?" /[a-z]{1,3}/\n',
}
SCHEMA = """{"type": "object", "properties": {"a": {"type": "array", "items": {"type": "array", "items":
    {"type": "integer"}}}, "b": {"enum": ["up", "down"]}}, "required": ["a", "b"]}"""


@lru_cache
def of_the_bundled_model():
    """Its tokenizer, and processors by name: each makes a new one. Grammars of characters that it has."""
    model = AutoModelForCausalLM.from_pretrained(ROOT / "scripts" / "reasoner")
    tokenizer = AutoTokenizer.from_pretrained(ROOT / "scripts" / "reasoner")
    around, size = outlines.from_transformers(model, tokenizer), model.config.vocab_size
    backends = {kind.__name__: kind(around) for kind in (LLGuidanceBackend, OutlinesCoreBackend)}
    compiler = xgrammar.GrammarCompiler(xgrammar.TokenizerInfo.from_huggingface(tokenizer, vocab_size=size))
    guidance = backends["LLGuidanceBackend"]
    made = {f"{name}, JSON": partial(one.get_json_schema_logits_processor, SCHEMA) for name, one in backends.items()}
    made["xgrammar, JSON"] = partial(XGrammarProcessor, compiler.compile_json_schema(SCHEMA))
    made["xgrammar, any JSON"] = partial(XGrammarProcessor, compiler.compile_builtin_json_grammar())
    for name, grammar in LARK.items():
        made[f"llguidance, {name}"] = partial(guidance.get_cfg_logits_processor, grammar)
    return size, made


BUNDLED = [
    *("LLGuidanceBackend, JSON", "OutlinesCoreBackend, JSON", "xgrammar, JSON", "xgrammar, any JSON"),
    *(f"llguidance, {name}" for name in LARK),
]


def mask_of(matcher) -> np.ndarray:
    words = np.full(matcher.num_words, -1, dtype=np.int32)
    matcher.write_mask(words)
    return words


@pytest.mark.skipif(not (ROOT / "scripts" / "reasoner").is_dir(), reason="needs the source tree")
@pytest.mark.parametrize("name", BUNDLED)
def test_back_from_any_text_a_matcher_is_as_one_that_was_never_there(name):
    """Masks were asked for on the way. (llguidance's own way back leaves others, where blanks are skipped.)"""
    size, made = of_the_bundled_model()
    generator, make = np.random.default_rng(0), made[name]
    for _ in range(4):
        matcher, settled = matchers.matcher_for(make(), ROW, size), []
        for _ in range(5):
            path: list[int] = []
            for _ in range(6):
                count = int(generator.integers(0, len(path) + 1)) if generator.random() < 0.6 else 0
                matcher.go_back(count)
                del path[len(path) - count :]
                allowed = np.flatnonzero(np.unpackbits(mask_of(matcher).view(np.uint8), bitorder="little")[:size])
                for _ in range(2):
                    token = int(generator.choice(allowed))
                    matcher.take(token)
                    path.append(token)
                    words = mask_of(matcher)
                    fresh = matchers.matcher_for(make(), ROW, size)
                    for before in (*settled, *path):
                        fresh.take(before)
                    assert np.array_equal(words, mask_of(fresh))
                    allowed = np.flatnonzero(np.unpackbits(words.view(np.uint8), bitorder="little")[:size])
            settled += path
            matcher.go_back(len(path))
            matcher.follow(path)


class Told:
    """A matcher of llguidance with something to say, or nothing."""

    def __init__(self, error=""):
        self.error = error

    def is_error(self):
        return bool(self.error)

    def get_error(self):
        return self.error


def test_what_llguidance_says_is_told_of_where_it_stands():
    matcher = object.__new__(GuidanceMatcher)
    matcher._line = [Told("an earlier one"), Told("too many items\nand more")]
    assert matcher._error() == " (too many items)"
    matcher._line[0] = Told()
    with pytest.raises(ValueError, match=r"one that llguidance can follow, got \(too many items\); mend"):
        matcher._check()
    matcher._line.append(Told())
    assert matcher._error() == ""


@pytest.mark.skipif(not (ROOT / "scripts" / "reasoner").is_dir(), reason="needs the source tree")
@pytest.mark.parametrize("name", [f"llguidance, {name}" for name in LARK])
def test_where_llguidance_does_not_go_back_all_tokens_are_taken_anew(name):
    size, made = of_the_bundled_model()
    matcher = matchers.matcher_for(made[name](), ROW, size)
    assert matcher.goes_back_quickly == (name.partition(", ")[2].split()[0] not in ("stop", "max_tokens"))


def test_a_grammar_of_characters_that_no_token_has_is_told():
    matcher = matchers.matcher_for(PROCESSORS["outlines llguidance"]("\u2603+"), ROW, VOCABULARY_SIZE)
    with pytest.raises(ValueError, match="a grammar must be one that llguidance can follow, got "):
        mask_of(matcher)


@pytest.mark.skipif(not (ROOT / "scripts" / "reasoner").is_dir(), reason="needs the source tree")
@pytest.mark.parametrize("name", BUNDLED)
def test_a_token_that_is_not_taken_changes_nothing(name):
    size, made = of_the_bundled_model()
    matcher, count = matchers.matcher_for(made[name](), ROW, size), 0
    for _ in range(4):
        bits = np.unpackbits(mask_of(matcher).view(np.uint8), bitorder="little")[:size]
        forbidden = [token for token in np.flatnonzero(bits == 0).tolist() if not matcher.takes_any(token)]
        if forbidden:
            with pytest.raises(RuntimeError, match="a grammar must allow each token of its row"):
                matcher.take(forbidden[0])
            count += 1
        assert np.array_equal(np.unpackbits(mask_of(matcher).view(np.uint8), bitorder="little")[:size], bits)
        allowed = np.flatnonzero(bits)
        matcher.take(int(allowed[len(allowed) // 2]))
    assert count > 0


@pytest.mark.skipif(not (ROOT / "scripts" / "reasoner").is_dir(), reason="needs the source tree")
@pytest.mark.parametrize("name", ["llguidance, stop", "llguidance, max_tokens", "llguidance, an end token"])
def test_llguidances_own_way_back_is_seen(name, monkeypatch):
    """Negative control. (That blanks are skipped is seen with vocabularies of large models alone: see the LOG.)"""
    monkeypatch.setattr(GuidanceMatcher, "_take", lambda self, token: self._line[-1].consume_token(token))
    monkeypatch.setattr(GuidanceMatcher, "_go_back", lambda self, count: self._line[-1].rollback(count))
    with pytest.raises((AssertionError, RuntimeError, ValueError)):
        test_back_from_any_text_a_matcher_is_as_one_that_was_never_there(name)
