"""What a run on a model starts from: the options that choose model, problems and sampling, and what they load."""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
import transformers
from workloads.problem_sets import AIME_2024, Task, generated_tasks, read_tasks
from workloads.real_models import MODELS, model_folder

from measuring.option_types import positive_integer
from measuring.trajectories import Sampling

REASONER = Path(__file__).resolve().parents[1] / "reasoner"
WORD_PROBLEMS = Path(__file__).resolve().parents[1] / "workloads" / "word_problems.jsonl"  # for small models
BOXED_INSTRUCTION = "\nPlease reason step by step, and put your final answer within \\boxed{}."
CPU_ROWS = 4  # more rows are bound by arithmetic without drafts already: drafts pay less there, see docs/throughput.md
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def add_options(parser: argparse.ArgumentParser) -> None:
    """Model, problems, sampling and device; `fill_defaults` completes what depends on them."""
    parser.add_argument("--model", default=str(REASONER), help="folder, hub id or short name (default: bundled model)")
    parser.add_argument("--problems", help="jsonl file or hub dataset: problem, answer (default: by model)")
    parser.add_argument("--num-problems", type=positive_integer, help="the first so many problems only")
    parser.add_argument("--rows", type=int, help="rows decoded at a time, 0 for all (default: 4 on a CPU, else all)")
    parser.add_argument(
        "--max-new-tokens",
        type=positive_integer,
        help="per trajectory (default: 1024 for the bundled model, else 8192)",
    )
    parser.add_argument("--temperature", type=float, help="default: 1 for the bundled model, else 0.6")
    parser.add_argument("--top-k", type=int, help="default: none")
    parser.add_argument("--top-p", type=float, help="default: none for the bundled model, else 0.95")
    parser.add_argument("--instruction", help="text appended to every problem")
    parser.add_argument(
        "--device",
        default="cuda" if torch.cuda.is_available() else "cpu",
        help="of torch (default: cuda where there is one, else cpu)",
    )
    parser.add_argument("--threads", type=positive_integer, help="CPU threads (default: 1 for the bundled model)")
    parser.add_argument("--dtype", choices=tuple(DTYPES), help="default: float32 on a CPU, else bfloat16")
    parser.add_argument(
        "--seed", type=int, default=0, help="of the draws, and of the bundled model's problems (%(default)s)"
    )


def fill_defaults(arguments: argparse.Namespace) -> None:
    """Defaults that depend on the model (bundled or real) and on the device."""
    is_bundled = Path(arguments.model).resolve() == REASONER
    on_cpu = arguments.device == "cpu"
    by_situation = {
        "problems": None if is_bundled else str(WORD_PROBLEMS) if arguments.model in MODELS else AIME_2024,
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


def load_model(arguments: argparse.Namespace):
    """(model, tokenizer) on the wanted device, ready for inference."""
    folder = model_folder(arguments.model)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=DTYPES[arguments.dtype])
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


def sampling_for(arguments: argparse.Namespace, trajectories: int) -> Sampling:
    return Sampling(
        rows=min(arguments.rows or trajectories, trajectories),
        max_new_tokens=arguments.max_new_tokens,
        temperature=arguments.temperature,
        top_k=arguments.top_k,
        top_p=arguments.top_p,
        seed=arguments.seed,
    )
