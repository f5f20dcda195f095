"""What a run on a model starts from: the options that choose model, problems and sampling, and what they load."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import torch
import transformers
from transformers import PreTrainedModel
from workloads.problem_sets import AIME_2024, Task, generated_tasks, read_tasks
from workloads.real_models import MODELS, model_folder

from measuring.option_types import device_name, number_from_zero, positive_integer, share, whole_number
from measuring.trajectories import Sampling
from stand.drafters.heads.trained_part import TrainedPart
from stand.forward.long_factors import served_positions

REASONER = Path(__file__).resolve().parents[1] / "reasoner"
DRAFTERS = REASONER.with_name("drafters")  # what drafts for it: draft models, an EAGLE head, streams
WORD_PROBLEMS = Path(__file__).resolve().parents[1] / "workloads" / "word_problems.jsonl"  # for small models
BOXED_INSTRUCTION = "\nPlease reason step by step, and put your final answer within \\boxed{}."
MOST_NEW_TOKENS = 8192  # where none are given, of a model whose context holds as many
CPU_ROWS = 4  # more rows are bound by arithmetic without drafts already: drafts pay less there, see docs/throughput.md
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def add_options(parser: argparse.ArgumentParser, refused: tuple[str, ...] = ()) -> None:
    """Model, problems, sampling and device; `fill_defaults` completes what depends on them.

    refused: options of sampling that the command refuses by name, so that its help does not list them.
    """

    def told(option: str, text: str) -> str:
        return argparse.SUPPRESS if option in refused else text

    parser.add_argument("--model", default=str(REASONER), help="folder, hub id or short name (default: bundled model)")
    parser.add_argument("--problems", help="jsonl file or hub dataset: problem, answer (default: by model)")
    parser.add_argument("--num-problems", type=positive_integer, help="the first so many problems only")
    parser.add_argument(
        "--rows", type=whole_number, help="rows decoded at a time, 0 for all (default: 4 on a CPU, else all)"
    )
    parser.add_argument(
        "--max-new-tokens",
        type=positive_integer,
        help="per trajectory (default: 1024 for the bundled model, else 8192 or what the model's context leaves)",
    )
    told_heat = told("--temperature", "default: 1 for the bundled model, else 0.6")
    parser.add_argument("--temperature", type=number_from_zero, help=told_heat)
    parser.add_argument("--top-k", type=whole_number, help=told("--top-k", "default: none"))
    told_share = told("--top-p", "default: none for the bundled model, else 0.95")
    parser.add_argument("--top-p", type=share, help=told_share)
    parser.add_argument(
        "--instruction",
        help="appended to every problem (default: none; other models than the bundled one are asked to box the answer)",
    )
    parser.add_argument(
        "--device",
        type=device_name,
        default="cuda" if torch.cuda.is_available() else "cpu",
        help="of torch (default: cuda where there is one, else cpu)",
    )
    parser.add_argument(
        "--threads", type=positive_integer, help="CPU threads (default: 1 for the bundled model, else torch's)"
    )
    parser.add_argument("--dtype", choices=tuple(DTYPES), help="default: float32 on a CPU, else bfloat16")
    parser.add_argument(
        "--seed", type=int, default=0, help="of the draws, and of the bundled model's problems (%(default)s)"
    )


def fill_defaults(arguments: argparse.Namespace) -> None:
    """Defaults that depend on the model (bundled or real) and on the device; `load_tasks` settles max_new_tokens."""
    is_bundled = Path(arguments.model).resolve() == REASONER
    on_cpu = arguments.device == "cpu"
    by_situation = {
        "problems": None if is_bundled else str(WORD_PROBLEMS) if arguments.model in MODELS else AIME_2024,
        "rows": CPU_ROWS if on_cpu else 0,
        "max_new_tokens": 1024 if is_bundled else None,
        "temperature": 1.0 if is_bundled else 0.6,
        "top_p": None if is_bundled else 0.95,
        "instruction": "" if is_bundled else BOXED_INSTRUCTION,
        "threads": 1 if is_bundled else torch.get_num_threads(),  # its matrices are too small for more
        "dtype": "float32" if on_cpu else "bfloat16",
    }
    for name, value in by_situation.items():
        if getattr(arguments, name) is None:
            setattr(arguments, name, value)


def from_model(name: str, kind: type, **options):
    """`kind.from_pretrained` of what `--model` names. Raises ValueError for a path that names no folder, and for what
    cannot be loaded."""
    rule = f"--model must be an existing folder, a hub id or one of {', '.join(MODELS)}, got {name!r}"
    if name.startswith(("/", "./", "../", "~")) and not Path(name).is_dir():
        raise ValueError(rule)
    folder = model_folder(name)
    try:
        return kind.from_pretrained(folder, **options)
    except (OSError, ValueError) as error:
        raise ValueError(f"{rule}, from which no {kind.__name__} can be loaded: {error}") from error


def load_trained(
    load: Callable[[PreTrainedModel, Path], TrainedPart],
    target: PreTrainedModel,
    path: Path,
    *,
    option: str,
    model: str,
    remedy: str = "name that",
) -> TrainedPart:
    """What `option` names, by `load` of its kind. Raises ValueError where it was not trained for `model`."""
    try:
        return load(target, path)
    except (ValueError, OSError) as error:
        raise ValueError(
            f"{option} must name what was trained for --model {model}, got {path}; {remedy}: {error}"
        ) from error


def load_model(arguments: argparse.Namespace):
    """(model, tokenizer) on the wanted device, ready for inference."""
    tokenizer = from_model(arguments.model, transformers.AutoTokenizer)
    model = from_model(arguments.model, transformers.AutoModelForCausalLM, dtype=DTYPES[arguments.dtype])
    return model.to(arguments.device).eval(), tokenizer


def load_tasks(arguments: argparse.Namespace) -> list[Task]:
    """The problems. Their longest prompt settles `max_new_tokens`, or has to fit beside those that were given.

    Of the model only configuration and tokenizer are read, and before the problems. Raises ValueError and OSError.
    """
    kinds = transformers.AutoConfig, transformers.AutoTokenizer
    config, tokenizer = (from_model(arguments.model, kind) for kind in kinds)
    if arguments.problems is None:
        tasks = generated_tasks(arguments.num_problems or 6, seed=arguments.seed)
    else:
        tasks = read_tasks(arguments.problems, count=arguments.num_problems)
    longest = max(len(prompt_ids(tokenizer, task, arguments.instruction)) for task in tasks)
    arguments.max_new_tokens = fitting_length(
        arguments.max_new_tokens, longest, served_positions(SimpleNamespace(config=config))
    )
    return tasks


def fitting_length(given: int | None, longest: int, context: int | None) -> int:
    """New tokens per trajectory: those given, else as many as usual or as fit. Raises ValueError where none fit.

    longest: tokens of the longest prompt; context: None where the model has no limit.
    """
    if context is None:
        return given or MOST_NEW_TOKENS
    name = f"the model's context of {context} tokens"
    if longest >= context:
        raise ValueError(f"prompts must be shorter than {name}, got one of {longest}; leave that problem out")
    if given is not None and given > context - longest:
        raise ValueError(
            f"--max-new-tokens must fit into {name} behind the longest prompt, which has {longest}, got {given}; "
            f"give at most {context - longest}"
        )
    return given or min(MOST_NEW_TOKENS, context - longest)


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
