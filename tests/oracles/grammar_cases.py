"""Processors of grammar libraries for a tokenizer of the tiny models' size, in which texts have many spellings."""

import json
from collections.abc import Callable
from functools import lru_cache, partial

import outlines
import pytest
import torch
import xgrammar
from outlines.backends.llguidance import LLGuidanceBackend
from outlines.backends.outlines_core import OutlinesCoreBackend
from outlines.backends.xgrammar import XGrammarBackend
from tiny_models import VOCABULARY_SIZE, tiny_model
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast
from xgrammar.contrib.hf import LogitsProcessor as XGrammarProcessor

END = 2
SPECIAL = ["<pad>", "<begin>", "<end>"]
LETTERS = [*"abcdefghijklmnopqrstuvwxyz0123456789.,"]
PAIRS = [
    "ab",
    "bc",
    "ca",
    "aa",
    "bb",
    "cc",
    "ac",
    "ba",
    "cb",
    "a,",
    "b,",
    "c,",
    "abc",
    "bca",
    "cab",
    "aab",
    "bcb",
    "cc,",
]
MERGES = [(piece[:-1], piece[-1]) for piece in PAIRS]
REGEX = r"[abc]{3,9}(,[abc]{2,4}){0,3}"


@lru_cache
def grammar_tokenizer() -> PreTrainedTokenizerFast:
    """61 tokens: single letters, and pieces of two or three of a, b, c and the comma."""
    vocabulary = [*SPECIAL, *LETTERS, *PAIRS]
    vocabulary += [f"<spare{index}>" for index in range(VOCABULARY_SIZE - len(vocabulary))]
    core = Tokenizer(models.BPE({token: index for index, token in enumerate(vocabulary)}, MERGES))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    core.decoder = decoders.ByteLevel()
    core.add_special_tokens([token for token in vocabulary if token.startswith("<")])
    return PreTrainedTokenizerFast(
        tokenizer_object=core, pad_token=SPECIAL[0], bos_token=SPECIAL[1], eos_token=SPECIAL[2]
    )


@lru_cache
def _outlines_model():
    return outlines.from_transformers(tiny_model("qwen2"), grammar_tokenizer())


@lru_cache
def compiled(regex: str = REGEX) -> xgrammar.CompiledGrammar:
    information = xgrammar.TokenizerInfo.from_huggingface(grammar_tokenizer(), vocab_size=VOCABULARY_SIZE)
    return xgrammar.GrammarCompiler(information).compile_regex(regex)


@lru_cache
def _made(backend: type):
    return backend(_outlines_model())


def _of_backend(backend: type, regex: str = REGEX):
    return _made(backend).get_regex_logits_processor(regex)


def xgrammar_processor(regex: str = REGEX) -> XGrammarProcessor:
    return XGrammarProcessor(compiled(regex))


PROCESSORS: dict[str, Callable] = {  # each makes a new one, of REGEX or of another
    "xgrammar": xgrammar_processor,
    "outlines xgrammar": partial(_of_backend, XGrammarBackend),
    "outlines llguidance": partial(_of_backend, LLGuidanceBackend),
    "outlines_core": partial(_of_backend, OutlinesCoreBackend),
}


def text_of(token_ids: list[int]) -> str:
    """Without the end token."""
    return grammar_tokenizer().decode([token for token in token_ids if token != END])


def scores_along(processor, prompt: list[int], path: list[int], logits: torch.Tensor) -> torch.Tensor:
    """[V]: what a new processor makes of `logits` [V] behind prompt and path, asked at every token as in decoding."""
    for length in range(len(path)):
        processor(torch.tensor([[*prompt, *path[:length]]]), torch.zeros(1, len(logits)))
    return processor(torch.tensor([[*prompt, *path]]), logits[None].clone())[0]


def take_patterns(monkeypatch: pytest.MonkeyPatch) -> None:
    """JSON needs quotes, which the tiny tokenizer lacks: the pattern in a schema is what xgrammar compiles."""

    def compile_json_schema(compiler, schema, *, max_whitespace_cnt):
        assert 0 < max_whitespace_cnt < 100
        return compiler.compile_regex(json.loads(schema)["pattern"])

    monkeypatch.setattr(xgrammar.GrammarCompiler, "compile_json_schema", compile_json_schema)
