"""Does the door to llama.cpp work with the llama-cpp-python that is installed here, and what does it bring?

    python scripts/llama_cpp_check.py                                         # the bundled model; needs `gguf`, too
    python scripts/llama_cpp_check.py FILE.gguf --tokenizer FOLDER --samples 8

Greedy token ids must be those of llama-cpp-python's own `generate`, with and without drafts; of a file with a 16-bit or
quantised type near-ties may differ, and the number of equal texts is printed. Of the bundled model 16 samples of each
problem must give 85 % right answers. Then samples of every problem are drawn in three ways, which take turns: one by
one by llama-cpp-python, all together without drafts, and with drafts. Exits with 1 where something is not as it must
be.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

import measuring.interruption  # noqa: F401  (before what loads slowly)
from measuring.option_types import positive_integer
from measuring.progress import say
from measuring.setup import BOXED_INSTRUCTION, REASONER, WORD_PROBLEMS, prompt_ids
from measuring.text_table import format_table
from workloads.answers import extract_answer
from workloads.problem_sets import generated_tasks, read_tasks

LEAST_RIGHT = 0.85
ONE_BY_ONE, PLAIN, DRAFTED = ARMS = "llama-cpp-python, one by one", "engine without drafts", "engine"


def read_arguments(command_line: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", help="GGUF file (default: the bundled model, written to a temporary one)")
    parser.add_argument("--tokenizer", help="folder or hub id, for a file that is given (default: the bundled model's)")
    parser.add_argument("--num-problems", type=positive_integer, default=6, help="of each part (%(default)s)")
    parser.add_argument("--samples", type=positive_integer, default=16, help="of each problem (%(default)s)")
    parser.add_argument("--max-new-tokens", type=positive_integer, default=400, help="per sample (%(default)s)")
    parser.add_argument("--num-slots", type=positive_integer, default=8192, help="tokens of the cache (%(default)s)")
    parser.add_argument("--threads", type=positive_integer, default=1, help="of llama.cpp (%(default)s)")
    parser.add_argument("--gpu-layers", type=int, default=0, help="layers on a GPU, -1 for all (%(default)s)")
    arguments = parser.parse_args(command_line)
    if (arguments.model is None) != (arguments.tokenizer is None):
        parser.error("a file and --tokenizer must be given together; leave both out for the bundled model")
    return arguments


class Model:
    """One file, and the engine around it."""

    def __init__(self, arguments: argparse.Namespace, file: str):
        import llama_cpp
        import torch
        from transformers import AutoTokenizer

        from stand.plugins.llama_cpp import wrap

        torch.set_num_threads(arguments.threads)
        self.is_bundled = arguments.model is None
        self.tokenizer = AutoTokenizer.from_pretrained(arguments.tokenizer or REASONER)
        threads = {"n_threads": arguments.threads, "n_threads_batch": arguments.threads}
        self.llm = llama_cpp.Llama(file, n_ctx=2048, n_gpu_layers=arguments.gpu_layers, verbose=False, **threads)
        self.engine = wrap(self.llm, self.tokenizer, num_slots=arguments.num_slots)
        self.most = arguments.max_new_tokens
        self.ends = set(self.engine.model.generation_config.eos_token_id or [self.tokenizer.eos_token_id])
        count = arguments.num_problems
        self.tasks = generated_tasks(count, seed=0) if self.is_bundled else read_tasks(str(WORD_PROBLEMS), count=count)
        instruction = "" if self.is_bundled else BOXED_INSTRUCTION
        self.prompts = [prompt_ids(self.tokenizer, task, instruction) for task in self.tasks]
        self.law = {"temperature": 1.0 if self.is_bundled else 0.6, "top_p": 1.0 if self.is_bundled else 0.95}

    def one_by_one(self, prompt: list[int], temperature: float, *, seed: int = 0) -> list[int]:
        """By llama-cpp-python's own loop, which ends at a whole context."""
        self.llm.set_seed(seed)
        law = {"top_k": 0, "top_p": self.law["top_p"], "min_p": 0.0, "temp": temperature}
        return list(self._until_end(islice(self.llm.generate(prompt, **law), self.most)))

    def _until_end(self, tokens: Iterator[int]) -> Iterator[int]:
        for token in tokens:
            yield token
            if token in self.ends:
                return

    def num_equal(self) -> list[int]:
        """Of greedy texts, by the engine without and with drafts, those that are llama-cpp-python's."""
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
        if arm == ONE_BY_ONE:
            rows = [self.one_by_one(prompt, self.law["temperature"], seed=1 + row) for row in range(count)]
            return time.perf_counter() - start, sum(map(len, rows)), 1.0, rows
        settings = {"num_return_sequences": count, "max_new_tokens": self.most, "seed": problem, **self.law}
        output = self.engine.generate(input_ids=[prompt], draft=arm == DRAFTED, max_rows=4, **settings)
        seconds, length = time.perf_counter() - start, output.stats.mean_acceptance_length
        return seconds, output.stats.num_tokens, length, output.token_ids


def is_exact(model: Model) -> bool:
    plain, drafted = model.num_equal()
    total = len(model.prompts)
    print(f"greedy texts that equal llama-cpp-python's: {plain} of {total} without drafts, {drafted} with")
    return not model.is_bundled or plain == drafted == total


def compare(model: Model, count: int) -> bool:
    """The arms in turn, problem by problem; whether enough of the bundled model's answers are right."""
    warm = {"num_return_sequences": count, "max_new_tokens": 8, "max_rows": 4, "temperature": 1.0}
    model.engine.generate(input_ids=[model.prompts[0]], **warm)  # times steps
    model.engine.lookup.clear()
    drawn = {arm: [] for arm in ARMS}
    right = 0
    for problem, task in enumerate(model.tasks):
        for arm in ARMS:
            seconds, num_tokens, length, rows = model.draw(arm, problem, count)
            drawn[arm].append((num_tokens / seconds, length))
            if arm == DRAFTED:
                right += sum(extract_answer(text) == task.answer for text in model.tokenizer.batch_decode(rows))
    lines = []
    for arm in ARMS:
        rates, lengths = zip(*drawn[arm], strict=True)
        ratios = [rate / own for rate, (own, _) in zip(rates, drawn[PLAIN], strict=True)]
        cells = statistics.median(rates), statistics.median(ratios), statistics.median(lengths)
        lines.append([arm, *(f"{cell:.2f}" for cell in cells)])
    print(format_table(["arm", "tokens per second", "against the engine without drafts", "tokens per step"], lines))
    print(f"right answers: {right} of {count * len(model.tasks)}")
    return not model.is_bundled or right >= LEAST_RIGHT * count * len(model.tasks)


def main(command_line: list[str] | None = None) -> int:
    arguments = read_arguments(command_line)
    try:
        import gguf  # noqa: F401
        import llama_cpp
    except ImportError as error:
        say(f"llama_cpp_check: needs llama-cpp-python and gguf ({error}); pip install llama-cpp-python gguf")
        return 2
    with tempfile.TemporaryDirectory() as folder:
        model = Model(arguments, arguments.model or bundled_file(Path(folder)))
    say(f"llama-cpp-python {llama_cpp.__version__}, {model.engine.backend}")
    is_right = is_exact(model)
    is_right = compare(model, arguments.samples) and is_right
    print("as it must be" if is_right else "NOT as it must be")
    return 0 if is_right else 1


def bundled_file(folder: Path) -> str:
    import torch
    from transformers import AutoModelForCausalLM
    from workloads.gguf_writing import write_gguf

    write_gguf(AutoModelForCausalLM.from_pretrained(REASONER, dtype=torch.float32), folder / "reasoner.gguf")
    return str(folder / "reasoner.gguf")


if __name__ == "__main__":
    sys.exit(main())
