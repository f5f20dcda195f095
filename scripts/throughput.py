"""Tokens per second of N trajectories per problem, with and without drafts, on one model in one process.

    python scripts/throughput.py                                     # bundled model, generated problems
    python scripts/throughput.py --model Qwen/Qwen2.5-7B-Instruct    # AIME 2024 from the hub
    python scripts/throughput.py --model PATH --problems mine.jsonl --trajectories 1,4,16
    python scripts/throughput.py --model smollm2 --problems scripts/workloads/word_problems.jsonl

Three arms draw from the same law with the same prompts and seeds: `generate` is transformers' `model.generate`
(one call of `--rows` rows per problem, enough for its rate), `plain` is this engine without drafts, `drafted` is
this engine. They take turns within every problem, so that a noisy machine disturbs all of them. For every number
of trajectories the lookup tree starts anew (from `--lookup` if given) and is kept from problem to problem, unless
`--lookup-scope problem` is given. Progress goes to stderr, tables to stdout; the last stdout line is one JSON
document with every figure.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import sys
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy
import torch
import transformers
from measuring.text_table import format_table
from measuring.trajectories import ARMS, Drawn, Sampling, draw_with_engine, draw_with_generate
from workloads.problem_sets import AIME_2024, Task, generated_tasks, read_tasks
from workloads.real_models import model_folder

import stand
from stand.drafters.step_cost import CostTable
from stand.trees import BlendedLookup, LookupTree, TreeShape, vocabulary_fingerprint

REASONER = Path(__file__).resolve().parent / "reasoner"
BOXED_INSTRUCTION = "\nPlease reason step by step, and put your final answer within \\boxed{}."
CPU_ROWS = 4  # more rows are bound by arithmetic without drafts already: drafts pay less there, see README
COST_LENGTHS = (256, 2048)  # contexts behind which steps are timed, within max_new_tokens
MOST_TOKENS = 128  # timed in one step on a CPU
SHOWN_DEPTHS = 12  # in the table; the JSON document has all
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True, slots=True)
class Measured:
    """One problem with one number of trajectories: what every arm drew."""

    task: Task
    trajectories: int
    arms: dict[str, Drawn]


def load_model(arguments: argparse.Namespace):
    """(model, tokenizer) on the wanted device, ready for inference."""
    arguments.model = model_folder(arguments.model)
    tokenizer = transformers.AutoTokenizer.from_pretrained(arguments.model)
    model = transformers.AutoModelForCausalLM.from_pretrained(arguments.model, dtype=DTYPES[arguments.dtype])
    return model.to(arguments.device).eval(), tokenizer


def load_tasks(arguments: argparse.Namespace) -> list[Task]:
    if arguments.problems is None:
        return generated_tasks(arguments.num_problems or 6, seed=arguments.seed)
    return read_tasks(arguments.problems, count=arguments.num_problems)


def prompt_ids(tokenizer, task: Task, instruction: str) -> list[int]:
    """Token ids of the chat prompt, or of the plain text for a tokenizer without a chat template."""
    content = task.statement + instruction
    if tokenizer.chat_template is None:
        return tokenizer(content)["input_ids"]
    messages = [{"role": "user", "content": content}]
    return tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)


def new_engine(arguments: argparse.Namespace, model, tokenizer) -> stand.Engine:
    """An engine with an empty lookup tree, or with the one in `--lookup`."""
    lookup = None
    if arguments.lookup is not None:
        fingerprint = vocabulary_fingerprint(tokenizer.get_vocab())
        kind = BlendedLookup if arguments.shape is None else LookupTree
        lookup = kind.load(arguments.lookup, fingerprint=fingerprint)
    if arguments.shape is None:
        settings = {"budget": arguments.budget, "costs": arguments.step_costs, "kind": arguments.draft_kind}
        drafter = stand.BlendedDrafter(lookup, **settings)
    else:
        drafter = stand.FixedShapeDrafter(lookup, arguments.shape, kind=arguments.draft_kind)
    return stand.wrap(model, tokenizer, drafter=drafter, verifier=arguments.verifier)


def step_costs(arguments: argparse.Namespace, model, tokenizer) -> CostTable | None:
    """What steps cost here, from `--costs` or measured now; None with a fixed budget or shape."""
    if arguments.budget is not None or arguments.shape is not None:
        return None
    if arguments.costs is not None and arguments.costs.exists():
        return CostTable.load(arguments.costs)
    engine, rows = stand.wrap(model, tokenizer), min(arguments.rows or max(arguments.trajectories), 64)
    lengths = sorted({min(length, arguments.max_new_tokens) for length in COST_LENGTHS})
    most = max(MOST_TOKENS, 2 * rows) if model.device.type == "cpu" else None
    table = CostTable(tuple(engine.measure_cost(num_rows=rows, length=n, most_tokens=most) for n in lengths))
    if arguments.costs is not None:
        table.save(arguments.costs)
    return table


def sampling_for(arguments: argparse.Namespace, trajectories: int) -> Sampling:
    return Sampling(
        rows=min(arguments.rows or trajectories, trajectories),
        max_new_tokens=arguments.max_new_tokens,
        temperature=arguments.temperature,
        top_k=arguments.top_k,
        top_p=arguments.top_p,
        seed=arguments.seed,
    )


def measure_problem(engine: stand.Engine, prompt: list[int], count: int, sampling: Sampling, *, problem: int):
    """What every arm draws; the order of the arms turns from problem to problem."""
    drawn = {}
    for place in range(len(ARMS)):
        arm = ARMS[(problem + place) % len(ARMS)]
        if arm == "generate":
            drawn[arm] = draw_with_generate(engine, prompt, sampling.rows, sampling, problem=problem)
        else:
            drawn[arm] = draw_with_engine(engine, prompt, count, sampling, problem=problem, draft=arm == "drafted")
    return {arm: drawn[arm] for arm in ARMS}


def measure(arguments: argparse.Namespace, model, tokenizer, tasks: list[Task]) -> tuple[list[Measured], stand.Engine]:
    """All problems with all numbers of trajectories, and the last engine."""
    measured = []
    for trajectories in arguments.trajectories:
        engine, sampling = new_engine(arguments, model, tokenizer), sampling_for(arguments, trajectories)
        for index, task in enumerate(tasks):
            if arguments.lookup_scope == "problem" and index > 0:
                engine = new_engine(arguments, model, tokenizer)
            prompt = prompt_ids(tokenizer, task, arguments.instruction)
            arms = measure_problem(engine, prompt, trajectories, sampling, problem=index)
            measured.append(Measured(task, trajectories, arms))
            rates = ", ".join(f"{arm} {drawn.stats.tokens_per_second:.0f}" for arm, drawn in arms.items())
            report(f"N = {trajectories}, problem {index + 1} of {len(tasks)}: tokens/s {rates}")
    return measured, engine


def warm_up(arguments: argparse.Namespace, model, tokenizer, task: Task) -> None:
    """A short run of every arm on an engine that is thrown away."""
    engine, sampling = new_engine(arguments, model, tokenizer), sampling_for(arguments, max(arguments.trajectories))
    prompt = prompt_ids(tokenizer, task, arguments.instruction)
    short = Sampling(**{**asdict(sampling), "max_new_tokens": min(32, sampling.max_new_tokens)})
    measure_problem(engine, prompt, sampling.rows, short, problem=0)


def report(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def speedup(arms: dict[str, stand.Stats], over: str) -> float | None:
    """Ratio of tokens per second, drafted to another arm."""
    slow = arms[over].tokens_per_second
    return arms["drafted"].tokens_per_second / slow if slow else None


def summary_row(name: str, arms: dict[str, stand.Stats], single: float, majority: float) -> list[object]:
    drafted = arms["drafted"]
    return [
        name,
        drafted.num_tokens,
        drafted.num_steps,
        drafted.mean_acceptance_length,
        *(round(arms[arm].tokens_per_second) for arm in ARMS),
        speedup(arms, "plain"),
        speedup(arms, "generate"),
        single,
        majority,
    ]


HEADER = (
    "problem",
    "tokens",
    "steps",
    "tok/step",
    "generate tok/s",
    "plain tok/s",
    "drafted tok/s",
    "x plain",
    "x generate",
    "single",
    "majority",
)


def median_speedup(measured: list[Measured], over: str) -> float | None:
    """Median over problems of the speed-up: one stall of the machine does not move it."""
    ratios = [speedup({arm: drawn.stats for arm, drawn in item.arms.items()}, over) for item in measured]
    return None if None in ratios else statistics.median(ratios)


def total_stats(measured: list[Measured], arm: str) -> stand.Stats:
    return sum((item.arms[arm].stats for item in measured), stand.Stats())


def total_accuracy(measured: list[Measured], arm: str) -> dict[str, float]:
    """Mean over problems of single-sample accuracy and of the majority vote."""
    drawn = [(item.arms[arm], item.task.answer) for item in measured]
    return {
        "single": sum(each.accuracy(answer) for each, answer in drawn) / len(drawn),
        "majority": sum(each.vote_is_right(answer) for each, answer in drawn) / len(drawn),
    }


def problem_table(measured: list[Measured]) -> str:
    rows = []
    for item in measured:
        drafted, answer = item.arms["drafted"], item.task.answer
        stats = {arm: drawn.stats for arm, drawn in item.arms.items()}
        rows.append(summary_row(item.task.name, stats, drafted.accuracy(answer), float(drafted.vote_is_right(answer))))
    return format_table(HEADER, rows)


def total_table(groups: dict[int, list[Measured]]) -> str:
    rows = []
    for trajectories, measured in groups.items():
        stats = {arm: total_stats(measured, arm) for arm in ARMS}
        row = summary_row(f"all, N = {trajectories}", stats, **total_accuracy(measured, "drafted"))
        rows.append([*row, *(median_speedup(measured, arm) for arm in ("plain", "generate"))])
    return format_table((*HEADER, "median x plain", "median x generate"), rows)


def depth_table(groups: dict[int, list[Measured]]) -> str:
    """Where drafts were accepted and where the time of a step went."""
    rows = []
    for trajectories, measured in groups.items():
        stats = total_stats(measured, "drafted")
        shares = [f"{number / stats.num_steps:.2f}" for number in stats.accepted_by_depth]
        depths = " ".join(shares[:SHOWN_DEPTHS]) + (" ..." if len(shares) > SHOWN_DEPTHS else "")
        overhead = f"{100 * stats.overhead:.0f} %"
        rows.append([f"N = {trajectories}", stats.draft_acceptance_rate, overhead, depths])
    return format_table(("drafted", "acceptance rate", "not forward", "accepted per step, depth 1, 2, ..."), rows)


def as_document(arguments: argparse.Namespace, groups: dict[int, list[Measured]]) -> dict[str, object]:
    """Every figure, setting and version, as plain JSON values."""
    plain = (bool, int, float, str, list, type(None))
    given = {name: value for name, value in vars(arguments).items() if name != "step_costs"}
    return {
        "settings": {name: value if isinstance(value, plain) else str(value) for name, value in given.items()},
        "step_costs": None if arguments.step_costs is None else asdict(arguments.step_costs)["costs"],
        "versions": {
            "stand": stand.__version__,
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "numpy": numpy.__version__,
            "python": platform.python_version(),
        },
        "machine": {
            "processor": platform.machine(),
            "cores": os.cpu_count(),
            "threads": torch.get_num_threads(),
            "gpu": torch.cuda.get_device_name(arguments.device) if "cuda" in str(arguments.device) else None,
        },
        "problems": [problem_document(item) for measured in groups.values() for item in measured],
        "totals": [total_document(trajectories, measured) for trajectories, measured in groups.items()],
    }


def problem_document(item: Measured) -> dict[str, object]:
    stats = {arm: drawn.stats for arm, drawn in item.arms.items()}
    return {
        "name": item.task.name,
        "answer": item.task.answer,
        "trajectories": item.trajectories,
        "speedup_over_plain": speedup(stats, "plain"),
        "speedup_over_generate": speedup(stats, "generate"),
        "arms": {
            arm: {
                **drawn.stats.as_dict(),
                "answers": list(drawn.answers),
                "single": drawn.accuracy(item.task.answer),
                "majority": drawn.vote_is_right(item.task.answer),
            }
            for arm, drawn in item.arms.items()
        },
    }


def total_document(trajectories: int, measured: list[Measured]) -> dict[str, object]:
    stats = {arm: total_stats(measured, arm) for arm in ARMS}
    return {
        "trajectories": trajectories,
        "problems": len(measured),
        "speedup_over_plain": speedup(stats, "plain"),
        "speedup_over_generate": speedup(stats, "generate"),
        "median_speedup_over_plain": median_speedup(measured, "plain"),
        "median_speedup_over_generate": median_speedup(measured, "generate"),
        "arms": {arm: {**stats[arm].as_dict(), **total_accuracy(measured, arm)} for arm in ARMS},
    }


def count_list(text: str) -> list[int]:
    """Numbers of trajectories, as 1,4,8,16."""
    try:
        counts = [int(part) for part in text.split(",")]
    except ValueError:
        counts = []
    if not counts or min(counts) < 1:
        raise argparse.ArgumentTypeError(f"must be integers >= 1 with commas between, as 1,4,8,16; got {text!r}")
    return counts


def positive_integer(text: str) -> int:
    return count_list(text)[0]


def read_arguments(command_line: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", default=str(REASONER), help="folder, hub id or short name (default: bundled model)")
    parser.add_argument("--problems", help="jsonl file or hub dataset with fields problem, answer")
    parser.add_argument("--num-problems", type=positive_integer, help="use the first so many problems only")
    parser.add_argument("--trajectories", type=count_list, default=[1, 4, 8, 16], metavar="N,N,...")
    parser.add_argument("--rows", type=int, help="rows decoded together, 0 for all (default: 4 on a CPU, else all)")
    parser.add_argument("--max-new-tokens", type=positive_integer)
    parser.add_argument("--temperature", type=float)
    parser.add_argument("--top-k", type=int)
    parser.add_argument("--top-p", type=float)
    parser.add_argument("--instruction", help="text appended to every problem")
    parser.add_argument("--verifier", default="traversal")
    parser.add_argument(
        "--budget",
        type=int,
        help="fixed draft nodes of all rows of a step together (default: what pays, by timed steps)",
    )
    parser.add_argument(
        "--costs", type=Path, help="file of step costs, so that runs repeat; measured and written if it does not exist"
    )
    parser.add_argument(
        "--shape", type=TreeShape.parse, help="fixed drafts by STAND's rule: paper, chain:8, branching:4,2,1 ..."
    )
    parser.add_argument("--draft-kind", choices=("sampled", "mixed", "deterministic"), default="sampled")
    parser.add_argument("--lookup", type=Path, help="start from this lookup tree")
    parser.add_argument("--save-lookup", type=Path, help="write the lookup tree of the last number of trajectories")
    parser.add_argument("--lookup-scope", choices=("run", "problem"), default="run", help="when it starts anew")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--threads", type=positive_integer, help="CPU threads (default: 1 for the bundled model)")
    parser.add_argument("--dtype", choices=tuple(DTYPES), help="default: float32 on a CPU, else bfloat16")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args(command_line)
    fill_defaults(arguments)
    return arguments


def fill_defaults(arguments: argparse.Namespace) -> None:
    """Defaults that depend on the model (bundled or real) and on the device."""
    is_bundled = Path(arguments.model).resolve() == REASONER
    on_cpu = arguments.device == "cpu"
    by_situation = {
        "problems": None if is_bundled else AIME_2024,
        "rows": CPU_ROWS if on_cpu else 0,
        "max_new_tokens": 1024 if is_bundled else 8192,
        "temperature": 1.0 if is_bundled else 0.6,
        "top_p": None if is_bundled else 0.95,
        "instruction": "" if is_bundled else BOXED_INSTRUCTION,
        "threads": 1 if is_bundled else torch.get_num_threads(),  # its matrices are too small for more
        "dtype": "float32" if on_cpu else "bfloat16",
    }
    for name, value in by_situation.items():
        if getattr(arguments, name) is None:
            setattr(arguments, name, value)


def check_save_path(path: Path | None) -> None:
    if path is not None and not path.absolute().parent.is_dir():
        raise ValueError(f"--save-lookup must name a file in an existing folder, got {path}; make the folder first")


def run(arguments: argparse.Namespace) -> None:
    check_save_path(arguments.save_lookup)
    torch.set_num_threads(arguments.threads)
    tasks = load_tasks(arguments)
    model, tokenizer = load_model(arguments)
    arguments.step_costs = step_costs(arguments, model, tokenizer)
    report(f"{arguments.model}, {len(tasks)} problems, rows {arguments.rows or 'all'}, warming up")
    warm_up(arguments, model, tokenizer, tasks[0])
    measured, engine = measure(arguments, model, tokenizer, tasks)
    if arguments.save_lookup is not None:
        engine.lookup.save(arguments.save_lookup)
        report(f"wrote {arguments.save_lookup}")
    groups: dict[int, list[Measured]] = {}
    for item in measured:
        groups.setdefault(item.trajectories, []).append(item)
    for trajectories, items in groups.items():
        print(f"N = {trajectories} trajectories\n{problem_table(items)}\n")
    print(f"{total_table(groups)}\n\n{depth_table(groups)}\n")
    print(json.dumps(as_document(arguments, groups)))


def main() -> int:
    arguments = read_arguments()
    try:
        run(arguments)
    except (ValueError, OSError) as error:
        report(f"throughput: {error}")
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
