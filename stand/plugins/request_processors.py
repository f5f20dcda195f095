"""What requests to servers and harnesses ask of laws beside settings: penalties, thinking budgets, JSON by a schema."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
from transformers import LogitsProcessor

from stand.extra import missing_package
from stand.forward.model import text_config
from stand.laws.grammars.after_thoughts import AfterThoughts
from stand.laws.grammars.marks import last_place
from stand.laws.grammars.thinking_budget import ThinkingBudget
from stand.laws.output_penalties import OutputPenalties

if TYPE_CHECKING:
    from xgrammar import GrammarCompiler

    from stand.engine import Engine

MOST_WHITESPACE = 20  # between two parts of an answer: enough for indented JSON, and no model goes on with it forever
TAIL = 32  # tokens of a prompt, with which it may begin or end thoughts
AROUND = ("\n{}\n", ".{}\n\n", "a {} b", "a{}b")  # texts in which marks of thoughts must keep their tokens


@dataclass(frozen=True, slots=True)
class AskedOfLaws:
    """By one request. schema: JSON, of its answer; calls: in its place, xgrammar's structural tag as JSON. presence,
    frequency: as `OutputPenalties`; thinking_tokens: as `ThinkingBudget`, None for any number. is_thinking: whether the
    model thinks behind the prompt; None: its first new tokens tell."""

    schema: str | None = None
    calls: str | None = None
    presence: float = 0.0
    frequency: float = 0.0
    thinking_tokens: int | None = None
    is_thinking: bool | None = False

    @property
    def is_anything(self) -> bool:
        return self.has_form or self.thinking_tokens is not None or self.presence != 0 or self.frequency != 0

    @property
    def has_form(self) -> bool:
        return self.schema is not None or self.calls is not None


class RequestProcessors:
    """Of one engine. Schemas are compiled once each."""

    def __init__(self, engine: Engine, *, thoughts_begin: str | None = None, thoughts_end: str | None = None):
        """thoughts_begin, thoughts_end: texts such as "<think>" and "</think>"; without an end no thoughts are known,
        without a beginning a model thinks from its first token on unless the prompt ends thoughts at once.

        Raises ValueError for texts whose tokens are not the same everywhere, and for a beginning without an end.
        """
        self._engine, self._compiler = engine, None
        self._begins, self._ends = thoughts_begin, thoughts_end
        if thoughts_begin is not None and thoughts_end is None:
            raise ValueError(f"thoughts_begin needs thoughts_end, got {thoughts_begin!r} alone; give both")
        self._begin = None if thoughts_begin is None else self._mark(thoughts_begin, "thoughts_begin", "<think>")
        self._end = None if thoughts_end is None else self._mark(thoughts_end, "thoughts_end", "</think>")

    def arguments(
        self, prompt: Sequence[int], asked: AskedOfLaws, *, made: Callable[[AskedOfLaws], list] | None = None
    ) -> dict[str, object]:
        """Of `OpenRuns.submit`, for a request. made: in the place of `made`.

        Raises ValueError for a budget of thoughts that nobody could tell from answers."""
        if asked.thinking_tokens is not None and self._end is None:
            raise ValueError(
                f"a thinking budget needs to know how thoughts end, got {asked.thinking_tokens} tokens alone; start "
                'with thoughts_end="</think>", or what the model writes there'
            )
        asked = self._behind(prompt, asked)
        return {"processors": partial(made or self.made, asked), "of_processors": asked} if asked.is_anything else {}

    def made(self, asked: AskedOfLaws) -> list[LogitsProcessor]:
        """For `logits_processors=` of one call. Raises ValueError for what does not fit, ImportError where a schema
        needs xgrammar, and what xgrammar raises where it cannot follow the schema."""
        made: list[LogitsProcessor] = []
        begin = self._begin if asked.is_thinking is None else None
        if asked.presence or asked.frequency:
            made.append(OutputPenalties(presence=asked.presence, frequency=asked.frequency))
        if asked.has_form:
            grammar = self._grammar(asked)
            made.append(grammar if asked.is_thinking is False else AfterThoughts(grammar, self._end, begin=begin))
        if asked.thinking_tokens is not None:
            is_thinking = bool(asked.is_thinking)
            budget = ThinkingBudget(asked.thinking_tokens, begin=begin, end=self._end, is_thinking=is_thinking)
            made.append(budget)
        return made

    def _behind(self, prompt: Sequence[int], asked: AskedOfLaws) -> AskedOfLaws:
        """The same, with what the prompt's end says of thoughts, where that matters."""
        if self._end is None or (not asked.has_form and asked.thinking_tokens is None):
            return asked
        try:
            text = self._engine.tokenizer.decode(prompt[-TAIL:]).rstrip()
        except (OverflowError, ValueError, TypeError):  # no token ids, which the engine will say
            text = ""
        if text.endswith(self._ends):
            return replace(asked, thinking_tokens=None)
        is_told = self._begins is None or text.endswith(self._begins)
        return replace(asked, is_thinking=True if is_told else None)

    def _grammar(self, asked: AskedOfLaws) -> LogitsProcessor:
        try:
            from xgrammar.contrib.hf import LogitsProcessor as GrammarProcessor
        except ModuleNotFoundError as error:
            raise missing_package(error, "xgrammar", asker="response_schema", install="xgrammar") from error
        self._compiler = self._compiler or _compiler(self._engine)
        if asked.calls is not None:
            return GrammarProcessor(self._compiler.compile_structural_tag(asked.calls))
        return GrammarProcessor(self._compiler.compile_json_schema(asked.schema, max_whitespace_cnt=MOST_WHITESPACE))

    def _mark(self, text: str, name: str, example: str) -> tuple[int, ...]:
        """Its tokens."""
        encode = partial(self._engine.tokenizer.encode, add_special_tokens=False)
        tokens = tuple(encode(text))
        beside = [encode(around.format(text)) for around in AROUND]
        is_text = bool(tokens) and self._engine.tokenizer.decode(tokens) == text
        if not is_text or not all(last_place(tokens, np.array(found)) for found in beside):
            raise ValueError(
                f"{name} must be text that always has the same tokens, got {text!r}, which the tokenizer reads as "
                f"{list(tokens)} by itself; {example!r} is usual"
            )
        return tokens


def _compiler(engine: Engine) -> GrammarCompiler:
    from xgrammar import GrammarCompiler, TokenizerInfo

    size = text_config(engine.model).vocab_size
    return GrammarCompiler(TokenizerInfo.from_huggingface(engine.tokenizer, vocab_size=size))
