"""An engine around a model that another library runs, beside the library's own generation."""

from __future__ import annotations

import argparse
import statistics
import time
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Iterator
from itertools import islice

from transformers import PreTrainedTokenizerBase
from workloads.answers import extract_answer
from workloads.problem_sets import generated_tasks, read_tasks

import stand
from measuring.option_types import positive_integer
from measuring.setup import BOXED_INSTRUCTION, WORD_PROBLEMS, prompt_ids
from measuring.text_table import format_table

LEAST_RIGHT = 0.85
PLAIN, DRAFTED = "engine without drafts", "engine"


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--num-problems", type=positive_integer, default=6, help="of each part (%(default)s)")
    parser.add_argument("--samples", type=positive_integer, default=16, help="of each problem (%(default)s)")
    parser.add_argument("--max-new-tokens", type=positive_integer, default=400, help="per sample (%(default)s)")


class BesideLibrary(ABC):
    """One model, the library's generation and the engine, on the same problems.

    Of the bundled model greedy texts must be equal, and most answers right; of others near-ties may differ.
    """

    library: str  # its name

    def __init__(
        self,
        engine: stand.Engine,
        tokenizer: PreTrainedTokenizerBase,
        arguments: argparse.Namespace,
        *,
        end_ids: Collection[int],
        is_bundled: bool,
    ):
        self.engine = engine
        self.tokenizer = tokenizer
        self.is_bundled = is_bundled
        self.most = arguments.max_new_tokens
        self.ends = set(end_ids)
        count = arguments.num_problems
        self.tasks = generated_tasks(count, seed=0) if is_bundled else read_tasks(str(WORD_PROBLEMS), count=count)
        instruction = "" if is_bundled else BOXED_INSTRUCTION
        self.prompts = [prompt_ids(tokenizer, task, instruction) for task in self.tasks]
        self.law = {"temperature": 1.0 if is_bundled else 0.6, "top_p": 1.0 if is_bundled else 0.95}

    @property
    def arms(self) -> tuple[str, str, str]:
        return f"{self.library}, one by one", PLAIN, DRAFTED

    @abstractmethod
    def own_tokens(self, prompt: list[int], temperature: float, seed: int) -> Iterable[int]:
        """By the library's own loop; 0 is greedy. They may go on behind an end token."""

    def one_by_one(self, prompt: list[int], temperature: float, *, seed: int = 0) -> list[int]:
        return list(self._until_end(islice(self.own_tokens(prompt, temperature, seed), self.most)))

    def _until_end(self, tokens: Iterable[int]) -> Iterator[int]:
        for token in tokens:
            yield token
            if token in self.ends:
                return

    def num_equal(self) -> list[int]:
        """Of greedy texts, by the engine without and with drafts, those that are the library's."""
        own = [self.one_by_one(prompt, 0.0) for prompt in self.prompts]
        counts = []
        for draft in (False, True):
            output = self.engine.generate(
                input_ids=self.prompts, do_sample=False, max_new_tokens=self.most, draft=draft, max_rows=4
            )
            counts.append(sum(left == right for left, right in zip(own, output.token_ids, strict=True)))
        return counts

    def draw(self, arm: str, problem: int, count: int) -> tuple[float, int, float, list[list[int]]]:
        """Seconds, tokens, tokens per step and row, and the samples."""
        prompt, start = self.prompts[problem], time.perf_counter()
        if arm not in (PLAIN, DRAFTED):
            rows = [self.one_by_one(prompt, self.law["temperature"], seed=1 + row) for row in range(count)]
            return time.perf_counter() - start, sum(map(len, rows)), 1.0, rows
        settings = {"num_return_sequences": count, "max_new_tokens": self.most, "seed": problem, **self.law}
        output = self.engine.generate(input_ids=[prompt], draft=arm == DRAFTED, max_rows=4, **settings)
        seconds, length = time.perf_counter() - start, output.stats.mean_acceptance_length
        return seconds, output.stats.num_tokens, length, output.token_ids


def is_exact(model: BesideLibrary) -> bool:
    plain, drafted = model.num_equal()
    total = len(model.prompts)
    print(f"greedy texts that equal {model.library}'s: {plain} of {total} without drafts, {drafted} with")
    return not model.is_bundled or plain == drafted == total


def compare(model: BesideLibrary, count: int) -> bool:
    """The arms in turn, problem by problem; whether enough of the bundled model's answers are right."""
    warm = {"num_return_sequences": count, "max_new_tokens": 8, "max_rows": 4, "temperature": 1.0}
    model.engine.generate(input_ids=[model.prompts[0]], **warm)  # times steps
    model.engine.lookup.clear()
    drawn = {arm: [] for arm in model.arms}
    right = 0
    for problem, task in enumerate(model.tasks):
        for arm in model.arms:
            seconds, num_tokens, length, rows = model.draw(arm, problem, count)
            drawn[arm].append((num_tokens / seconds, length))
            if arm == DRAFTED:
                right += sum(extract_answer(text) == task.answer for text in model.tokenizer.batch_decode(rows))
    lines = []
    for arm in model.arms:
        rates, lengths = zip(*drawn[arm], strict=True)
        ratios = [rate / own for rate, (own, _) in zip(rates, drawn[PLAIN], strict=True)]
        cells = statistics.median(rates), statistics.median(ratios), statistics.median(lengths)
        lines.append([arm, *(f"{cell:.2f}" for cell in cells)])
    print(format_table(["arm", "tokens per second", "against the engine without drafts", "tokens per step"], lines))
    print(f"right answers: {right} of {count * len(model.tasks)}")
    return not model.is_bundled or right >= LEAST_RIGHT * count * len(model.tasks)


def judged(model: BesideLibrary, count: int) -> int:
    """The exit status: 1 where something is not as it must be."""
    is_right = is_exact(model)
    is_right = compare(model, count) and is_right
    print("as it must be" if is_right else "NOT as it must be")
    return 0 if is_right else 1
