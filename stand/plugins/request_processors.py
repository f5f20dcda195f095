"""What requests to servers and harnesses ask of laws beside settings: penalties, thinking budgets, JSON by a schema."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from transformers import LogitsProcessor

from stand.extra import missing_package
from stand.forward.model import text_config
from stand.laws.grammars.after_thoughts import AfterThoughts
from stand.laws.grammars.thinking_budget import ThinkingBudget
from stand.laws.output_penalties import OutputPenalties

if TYPE_CHECKING:
    from xgrammar import GrammarCompiler

    from stand.engine import Engine

MOST_WHITESPACE = 20  # between two parts of an answer: enough for indented JSON, and no model goes on with it forever
TAIL = 32  # tokens of a prompt, with which it may switch thoughts off


@dataclass(frozen=True, slots=True)
class AskedOfLaws:
    """By one request. schema: JSON, of its answer; presence, frequency: as `OutputPenalties`; thinking_tokens: as
    `ThinkingBudget`, None for any number."""

    schema: str | None = None
    presence: float = 0.0
    frequency: float = 0.0
    thinking_tokens: int | None = None
    is_thinking: bool = True  # the prompt lets the model think first

    @property
    def is_anything(self) -> bool:
        return self.schema is not None or self.thinking_tokens is not None or self.presence != 0 or self.frequency != 0


class RequestProcessors:
    """Of one engine. Schemas are compiled once each."""

    def __init__(self, engine: Engine, *, thoughts_begin: str | None = None, thoughts_end: str | None = None):
        """thoughts_begin, thoughts_end: texts such as "<think>" and "</think>"; without an end no thoughts are known,
        without a beginning a model thinks from its first token on unless the prompt ends thoughts at once.

        Raises ValueError where they are no tokens of the tokenizer.
        """
        self._engine, self._compiler = engine, None
        self._text, self._begin, self._end = thoughts_end, None, None
        if thoughts_begin is not None:
            self._begin = self._mark(thoughts_begin, "thoughts_begin", "<think>")
        if thoughts_end is not None:
            self._end = self._mark(thoughts_end, "thoughts_end", "</think>")

    def is_thinking(self, prompt: Sequence[int]) -> bool:
        """Whether a model may think behind this prompt: not where it ends with the end of thoughts."""
        if self._text is None:
            return False
        return not self._engine.tokenizer.decode(prompt[-TAIL:]).rstrip().endswith(self._text)

    def made(self, asked: AskedOfLaws) -> list[LogitsProcessor]:
        """For `logits_processors=` of one call. Raises ValueError for what does not fit, ImportError where a schema
        needs xgrammar, and what xgrammar raises where it cannot follow the schema."""
        made: list[LogitsProcessor] = []
        if asked.presence or asked.frequency:
            made.append(OutputPenalties(presence=asked.presence, frequency=asked.frequency))
        if asked.schema is not None:
            made.append(self._grammar(asked.schema, is_thinking=asked.is_thinking))
        if asked.thinking_tokens is not None and (asked.is_thinking or self._begin is not None):
            made.append(ThinkingBudget(asked.thinking_tokens, begin=self._begin, end=self._end))
        return made

    def check(self, asked: AskedOfLaws) -> None:
        """Raises ValueError for a budget of thoughts that nobody could tell from answers."""
        if asked.thinking_tokens is not None and self._end is None:
            raise ValueError(
                f"a thinking budget needs to know how thoughts end, got {asked.thinking_tokens} tokens alone; start "
                'with thoughts_end="</think>", or what the model writes there'
            )

    def _grammar(self, schema: str, *, is_thinking: bool) -> LogitsProcessor:
        try:
            from xgrammar.contrib.hf import LogitsProcessor as GrammarProcessor
        except ModuleNotFoundError as error:
            raise missing_package(error, "xgrammar", asker="response_schema", install="xgrammar") from error
        self._compiler = self._compiler or _compiler(self._engine)
        made = GrammarProcessor(self._compiler.compile_json_schema(schema, max_whitespace_cnt=MOST_WHITESPACE))
        return AfterThoughts(made, self._end) if is_thinking and self._end is not None else made

    def _mark(self, text: str, name: str, example: str) -> list[int]:
        tokenizer = self._engine.tokenizer
        tokens = tokenizer.encode(text, add_special_tokens=False)
        if not tokens or tokenizer.decode(tokens) != text:
            raise ValueError(
                f"{name} must be text of the tokenizer, got {text!r}, which it reads as {tokens}; {example!r} is usual"
            )
        return tokens


def _compiler(engine: Engine) -> GrammarCompiler:
    from xgrammar import GrammarCompiler, TokenizerInfo

    size = text_config(engine.model).vocab_size
    return GrammarCompiler(TokenizerInfo.from_huggingface(engine.tokenizer, vocab_size=size))
