"""What train_eagle.py and train_streams.py have in common: options, generations, training, evaluation."""

from __future__ import annotations

import argparse
import json
import random
import sys
from collections.abc import Callable
from pathlib import Path

import torch
from long_runs.trajectory_run import digest_of
from measuring.option_types import named, positive_integer, positive_number
from measuring.output_file import check_replaceable, check_writable
from measuring.progress import say
from measuring.setup import (
    DRAFTERS,
    REASONER,
    add_options,
    fill_defaults,
    load_model,
    load_tasks,
    load_trained,
    prompt_ids,
)
from safetensors import SafetensorError, safe_open
from workloads.problem_sets import Task, read_tasks
from workloads.problems import draw_problem

import stand
from stand.drafters.heads.trained_part import WEIGHT_FILE
from training.checkpoint import ANEW, SETTINGS, claim, forget_checkpoints
from training.generations import frequent_tokens, write_generations
from training.head_training import Recipe, describe, train_head

FILES = ("generations.jsonl", "held_out.jsonl", "state.pt", "state.new", SETTINGS)  # of checkpoints
FIXED = ("problems", "num_problems", "instruction", "max_new_tokens", "dtype", "seed")  # what decides held-out texts
FIXED_IN_TRAINING = ("temperature", "learning_rate", "streams", "layers", "rank")
FIXED_IN_TRAINING += ("head_kind", "block_size", "layers_read", "mask_token_id")
HELD_OUT_ONE_IN = 8  # problems of a file; the bundled model's generated ones have a split of their own


def prompt_source(arguments: argparse.Namespace, tokenizer, *, held_out: bool) -> Callable[[random.Random], list[int]]:
    """Draws a prompt of the training part, or of the held-out part."""
    if arguments.problems is None:

        def draw_task(rng: random.Random) -> Task:
            item = draw_problem(rng, held_out=held_out)
            return Task(item.family, item.problem, item.answer)

    else:
        known = read_tasks(arguments.problems, count=arguments.num_problems)
        tasks = list({task.statement: task for task in known}.values())  # one that comes twice is in one part
        part = [task for place, task in enumerate(tasks) if (place % HELD_OUT_ONE_IN == 0) == held_out]
        if not part:
            raise ValueError(
                f"--problems must hold 2 different problems or more, as one in {HELD_OUT_ONE_IN} is held out, got 1"
            )

        def draw_task(rng: random.Random) -> Task:
            return rng.choice(part)

    return lambda rng: prompt_ids(tokenizer, draw_task(rng), arguments.instruction)


def generate(arguments: argparse.Namespace, model, tokenizer, *, held_out: bool):
    """The target's own generations, for training at --temperature, held out by greedy decoding."""
    name = "held_out.jsonl" if held_out else "generations.jsonl"
    return write_generations(
        stand.wrap(model, tokenizer),
        arguments.checkpoints / name,
        prompt_source(arguments, tokenizer, held_out=held_out),
        num_tokens=arguments.held_out_tokens if held_out else arguments.tokens,
        rows=arguments.rows,
        max_new_tokens=arguments.max_new_tokens,
        temperature=0.0 if held_out else arguments.temperature,
        seed=arguments.seed,
    )


def fixed_settings(recipe: Recipe, arguments: argparse.Namespace, tasks: list[Task]) -> dict[str, object]:
    """What a folder for checkpoints belongs to, as JSON holds it; of an evaluation what decides held-out texts."""
    model = Path(arguments.model)
    found = {"kind": recipe.name, "model": str(model.resolve()) if model.is_dir() else arguments.model}
    found |= {name: getattr(arguments, name) for name in FIXED}
    if arguments.problems is not None:
        found["problems_digest"] = digest_of(tasks)
    if not arguments.evaluate:
        found |= {name: getattr(arguments, name) for name in FIXED_IN_TRAINING if hasattr(arguments, name)}
    return found


def run(recipe: Recipe, arguments: argparse.Namespace) -> dict:
    """Train and write the head, or evaluate the one at --output; the facts of it."""
    torch.set_num_threads(arguments.threads)
    torch.manual_seed(arguments.seed)
    tasks = load_tasks(arguments)
    model, tokenizer = load_model(arguments)
    if recipe.check is not None and not arguments.evaluate:
        recipe.check(model, arguments)
    if arguments.fresh:
        forget_checkpoints(arguments.checkpoints, FILES)
    remedy = "give those, or name another --checkpoints" if arguments.evaluate else ANEW
    claim(arguments.checkpoints, fixed_settings(recipe, arguments, tasks), FILES, remedy=remedy)
    facts: dict[str, object] = {}
    if not arguments.evaluate:
        generations = generate(arguments, model, tokenizer, held_out=False)
        head = recipe.make(model, arguments, generations).train()
        progress = train_head(
            recipe, head, model, generations, arguments.checkpoints, minutes=arguments.minutes, steps=arguments.steps,
            tokens_per_batch=arguments.tokens_per_batch, learning_rate=arguments.learning_rate,
            save_minutes=arguments.save_minutes, seed=arguments.seed,
        )  # fmt: skip
        if arguments.vocabulary_size < model.config.vocab_size:
            head.restrict(frequent_tokens(generations, arguments.vocabulary_size))
        check_finite(head)
        head.save(arguments.output)
        facts = {
            "target": Path(arguments.model).name,
            "parameters": sum(parameter.numel() for parameter in head.parameters()),
            "generated_tokens": sum(len(one.token_ids) - one.prompt_length for one in generations),
            "temperature": arguments.temperature,
            "steps": progress["step"],
            "tokens": progress["tokens"],
            "minutes": round(progress["seconds"] / 60, 1),
            "learning_rate": arguments.learning_rate,
            "vocabulary_size": len(head.vocabulary) if head.vocabulary is not None else model.config.vocab_size,
            "seed": arguments.seed,
        }
    head = load_trained(recipe.load, model, arguments.output, option="--output", model=arguments.model)
    head.config._attn_implementation = "sdpa"
    say(f"evaluating on greedy texts to held-out problems, of {arguments.held_out_tokens} tokens")
    held_out = generate(arguments, model, tokenizer, held_out=True)
    facts["held_out_agreement"] = recipe.agreement(head, model, held_out)
    if not arguments.evaluate:
        describe(arguments.output, facts)
    return facts


def check_finite(head: torch.nn.Module) -> None:
    """Raise ValueError after a training that has diverged, before it replaces what an earlier one has written."""
    lost = [name for name, weights in head.named_parameters() if not weights.isfinite().all()]
    if lost:
        raise ValueError(
            f"trained weights must be finite, got others in {', '.join(lost)}; begin anew (--fresh) with a lower "
            "--learning-rate"
        )


def run_command(recipe: Recipe, read_arguments: Callable[[], argparse.Namespace]) -> int:
    """The facts of a run as JSON on stdout; the exit status."""
    try:
        print(json.dumps(run(recipe, read_arguments())))
    except (ValueError, OSError) as error:
        print(f"train_{recipe.name}: {error}", file=sys.stderr)
        return 2
    return 0


def options_of(recipe: Recipe, description: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter, conflict_handler="resolve"
    )
    add_options(parser, refused=("--top-k", "--top-p"))
    parser.add_argument("--rows", type=positive_integer, default=32, help="rows decoded at a time (%(default)s)")
    parser.add_argument(
        "--minutes",
        type=positive_number,
        default=20.0,
        help="time budget of the training, without generations (%(default)s)",
    )
    parser.add_argument("--steps", type=positive_integer, help="budget in steps instead of minutes")
    parser.add_argument(
        "--tokens", type=positive_integer, default=150_000, help="generated tokens to learn from (%(default)s)"
    )
    parser.add_argument(
        "--held-out-tokens", type=positive_integer, default=8_000, help="greedy tokens to evaluate on (%(default)s)"
    )
    parser.add_argument(
        "--vocabulary-size",
        type=positive_integer,
        default=8192,
        help="the most frequent tokens alone are guessed (%(default)s)",
    )
    parser.add_argument(
        "--tokens-per-batch", type=positive_integer, default=4_000, help="tokens of a step (%(default)s)"
    )
    parser.add_argument("--learning-rate", type=positive_number, default=1e-3, help="at its largest (%(default)s)")
    parser.add_argument("--save-minutes", type=positive_number, default=2.0, help="between checkpoints (%(default)s)")
    parser.add_argument(
        "--checkpoints",
        type=Path,
        help=f"folder that a run goes on from (default: {recipe.name}_checkpoints_MODEL)",
    )
    parser.add_argument(
        "--output",
        type=Path,
        default=DRAFTERS / recipe.name,
        help="folder of what was trained (default: the bundled one)",
    )
    parser.add_argument("--fresh", action="store_true", help="forget earlier generations and checkpoints")
    parser.add_argument(
        "--evaluate", action="store_true", help=f"evaluate the {recipe.name} at --output, train nothing"
    )
    return parser


def completed(recipe: Recipe, parser: argparse.ArgumentParser, command_line: list[str] | None) -> argparse.Namespace:
    """The parsed options, with the defaults that depend on the model."""
    arguments = parser.parse_args(command_line)
    if arguments.top_k is not None or arguments.top_p is not None:
        parser.error("--top-k and --top-p have no effect here: texts to learn from come from the whole law; leave them")
    if arguments.checkpoints is None:
        arguments.checkpoints = Path(f"{recipe.name}_checkpoints_{Path(arguments.model).name}")
    shipped, is_bundled = DRAFTERS / recipe.name, Path(arguments.model).resolve() == REASONER
    if arguments.output == shipped and not is_bundled:
        parser.error(
            f"--output must be given for another model than the bundled one; scripts/drafters/{recipe.name} is its own"
        )
    if arguments.evaluate and arguments.fresh:
        parser.error("--fresh would remove what a training has made, got --evaluate with it; leave one out")
    if arguments.evaluate and not arguments.output.is_dir():
        parser.error(f"--evaluate needs a trained folder at --output, got {arguments.output}; train it first")
    if arguments.dtype == "float16" and not arguments.evaluate:
        parser.error(
            "--dtype must be float32 or bfloat16 for a training, got float16, in which squares of gradients vanish; "
            "weights that were trained in either serve a float16 model, too"
        )
    if arguments.num_problems is not None and arguments.problems is None and is_bundled:
        parser.error("--num-problems needs --problems; the bundled model's are made up, as many as are wanted")
    try:
        check_folders(recipe, arguments)
    except ValueError as error:
        parser.error(str(error))
    fill_defaults(arguments)
    return arguments


def check_folders(recipe: Recipe, arguments: argparse.Namespace) -> None:
    """Raise ValueError where a training could not write its folders, or would replace what is not its own."""
    if arguments.checkpoints.exists() and not arguments.checkpoints.is_dir():
        raise ValueError(f"--checkpoints must name a folder, got the file {arguments.checkpoints}; name another")
    if not arguments.evaluate:
        check_writable(arguments.output.absolute().parent / f".{arguments.output.name}", "--output")
        with named("--output"):
            kind = f"trained weights of the kind {recipe.name}"
            check_replaceable(arguments.output, kind, lambda folder: is_own(recipe, folder))


def is_own(recipe: Recipe, folder: Path) -> bool:
    """Whether the folder holds weights of this kind, as `train_*.py` writes them, and nothing else."""
    if not {path.name for path in folder.iterdir()} <= recipe.files:
        return False
    try:
        with safe_open(folder / WEIGHT_FILE, "pt") as file:
            return recipe.tensor in file.keys()
    except (OSError, SafetensorError):
        return False
