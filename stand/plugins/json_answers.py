"""Answers by a JSON schema, for harnesses whose requests name one: xgrammar's processors, behind a model's thoughts."""

from __future__ import annotations

from stand.engine import Engine
from stand.extra import missing_package
from stand.forward.model import text_config
from stand.laws.grammars.after_thoughts import AfterThoughts

try:
    from xgrammar import GrammarCompiler, TokenizerInfo
    from xgrammar.contrib.hf import LogitsProcessor
except ModuleNotFoundError as error:
    raise missing_package(error, "xgrammar", asker="response_schema", install="xgrammar") from error

MOST_WHITESPACE = 20  # between two parts of an answer: enough for indented JSON, and no model goes on with it forever


class JsonAnswers:
    """Of one engine. Schemas are compiled once each."""

    def __init__(self, engine: Engine, *, thoughts_end: str | None = None):
        """thoughts_end: text that ends thoughts, such as "</think>"; None: answers begin at once.

        Raises ValueError where it is no token of the tokenizer.
        """
        size = text_config(engine.model).vocab_size
        self._compiler = GrammarCompiler(TokenizerInfo.from_huggingface(engine.tokenizer, vocab_size=size))
        self._end: list[int] | None = None
        if thoughts_end is not None:
            self._end = engine.tokenizer.encode(thoughts_end, add_special_tokens=False)
            if not self._end or engine.tokenizer.decode(self._end) != thoughts_end:
                raise ValueError(
                    f"thoughts_end must be text of the tokenizer, got {thoughts_end!r}, which it reads as {self._end}; "
                    "'</think>' is usual"
                )

    def processor(self, schema: str) -> LogitsProcessor | AfterThoughts:
        """schema: JSON. For `logits_processors=` of one call. Raises what xgrammar raises where it cannot follow it."""
        made = LogitsProcessor(self._compiler.compile_json_schema(schema, max_whitespace_cnt=MOST_WHITESPACE))
        return made if self._end is None else AfterThoughts(made, self._end)
