"""Train the small reasoning model that the repository ships in `scripts/reasoner`.

    python scripts/train_reasoner.py --minutes 80              # train, then write scripts/reasoner
    python scripts/train_reasoner.py --evaluate                # held-out accuracy of scripts/reasoner
    python scripts/train_reasoner.py --draft-model weak        # a draft model, then write scripts/drafters/weak
    python scripts/train_reasoner.py --layout qwen3_5 --output hybrid   # a hybrid: three of four layers keep states

Training data are drawn without end from `workloads/problems.py`; held-out problems never appear. How it trains is in
`training/trainer.py`. A checkpoint is written every few minutes and at the end, and a run continues from it unless
`--fresh` is given.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import defaultdict
from pathlib import Path

import measuring.interruption  # noqa: F401  (before what loads slowly)
import torch
from measuring.option_types import positive_integer, positive_number
from measuring.setup import REASONER
from training.draft_models import SIZES, train_draft_model
from training.tokenizer import LEAST_VOCABULARY
from training.trainer import HEAD_SIZE, LAYOUTS, train
from transformers import AutoModelForCausalLM, AutoTokenizer
from workloads.answers import extract_answer, majority_answer
from workloads.problems import FAMILIES, held_out_problems, write_prompt


def sample_answers(model, tokenizer, statements: list[str], *, samples: int) -> list[list[int | None]]:
    """`samples` answers for every statement, sampled at temperature 1 from the whole distribution."""
    texts = [write_prompt(text) for text in statements]
    prompts = tokenizer(texts, padding=True, return_tensors="pt", padding_side="left")
    output = model.generate(
        **{name: prompts[name] for name in ("input_ids", "attention_mask")},
        do_sample=True,
        temperature=1.0,
        top_k=0,
        top_p=1.0,
        num_return_sequences=samples,
        max_new_tokens=900,
    )
    texts = tokenizer.batch_decode(output[:, prompts["input_ids"].shape[1] :], skip_special_tokens=True)
    answers = [extract_answer(text) for text in texts]
    return [answers[begin : begin + samples] for begin in range(0, len(answers), samples)]


@torch.inference_mode()
def evaluate(arguments: argparse.Namespace) -> dict:
    """Held-out accuracy at temperature 1: mean over single samples and majority vote, per family and in all."""
    torch.manual_seed(arguments.seed)
    folder = arguments.model or arguments.output
    if not (folder / "config.json").exists():
        raise ValueError(f"--model must be a folder of a model, got {folder}; train one, or name another")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    problems = held_out_problems(arguments.problems, seed=arguments.seed)
    single, majority = defaultdict(list), defaultdict(list)
    for begin in range(0, len(problems), 4):
        part = problems[begin : begin + 4]
        drawn = sample_answers(model, tokenizer, [item.problem for item in part], samples=arguments.samples)
        for problem, answers in zip(part, drawn, strict=True):
            single[problem.family].append(sum(value == problem.answer for value in answers) / len(answers))
            majority[problem.family].append(float(majority_answer(answers) == problem.answer))
        print(f"{begin + len(part)} / {len(problems)} problems", file=sys.stderr, flush=True)
    result = {"problems": len(problems), "samples": arguments.samples, "families": {}}
    for family in FAMILIES:
        if single[family]:
            result["families"][family] = {"single": mean(single[family]), "majority": mean(majority[family])}
    result["single"] = mean([value for values in single.values() for value in values])
    result["majority"] = mean([value for values in majority.values() for value in values])
    return result


def mean(values: list[float]) -> float:
    return round(sum(values) / len(values), 4)


def read_arguments(command_line: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=positive_number, help="time budget of the training (80; a draft model's own)")
    parser.add_argument("--steps", type=positive_integer, help="budget in steps instead of minutes")
    parser.add_argument("--processes", type=positive_integer, default=2, help="that train together (%(default)s)")
    parser.add_argument("--rows", type=positive_integer, default=32, help="texts per process and step (%(default)s)")
    parser.add_argument(
        "--layout",
        default="llama",
        choices=sorted(LAYOUTS),
        help="qwen3_5: a hybrid of at least 4 layers (%(default)s)",
    )
    parser.add_argument("--hidden", type=positive_integer, default=256, help="hidden size (%(default)s)")
    parser.add_argument(
        "--intermediate", type=positive_integer, default=704, help="size of the feed-forward (%(default)s)"
    )
    parser.add_argument("--layers", type=positive_integer, default=4, help="decoder layers (%(default)s)")
    parser.add_argument(
        "--vocabulary", type=positive_integer, default=1024, help="tokens of the tokenizer (%(default)s)"
    )
    parser.add_argument(
        "--attention", default="eager", choices=("eager", "sdpa"), help="transformers' implementation (%(default)s)"
    )
    parser.add_argument(
        "--precision", default="bfloat16", choices=("bfloat16", "float32"), help="of the products (%(default)s)"
    )
    parser.add_argument("--learning-rate", type=positive_number, default=3e-3, help="at its largest (%(default)s)")
    parser.add_argument("--save-minutes", type=positive_number, default=5.0, help="between checkpoints (%(default)s)")
    parser.add_argument(
        "--checkpoints",
        type=Path,
        default=Path("reasoner_checkpoints"),
        help="folder that a run goes on from (%(default)s)",
    )
    parser.add_argument("--output", type=Path, default=REASONER, help="folder of the model (default: the bundled one)")
    parser.add_argument("--fresh", action="store_true", help="forget earlier checkpoints")
    parser.add_argument("--seed", type=int, default=0, help="of weights and texts (%(default)s)")
    parser.add_argument("--draft-model", choices=sorted(SIZES), help="train this one of compare_verifiers.py instead")
    parser.add_argument("--evaluate", action="store_true", help="measure held-out accuracy instead")
    parser.add_argument("--model", type=Path, help="folder to evaluate (default: --output)")
    parser.add_argument(
        "--problems", type=positive_integer, default=65, help="held-out problems to evaluate on (%(default)s)"
    )
    parser.add_argument(
        "--samples", type=positive_integer, default=16, help="per problem with --evaluate (%(default)s)"
    )
    options = parser.parse_args(command_line)
    check_together(parser, options)
    return options


def check_together(parser: argparse.ArgumentParser, options: argparse.Namespace) -> None:
    """What no option can see alone."""
    if options.hidden % HEAD_SIZE:
        parser.error(f"--hidden must be a multiple of {HEAD_SIZE}, the size of a head, got {options.hidden}")
    if options.layout == "qwen3_5" and options.layers < 4:
        parser.error(
            f"--layers must be at least 4 for a hybrid, whose fourth layer has attention, got {options.layers}"
        )
    if options.layout != "llama" and options.output == REASONER and not options.evaluate:
        parser.error(f"--output must be given with --layout {options.layout}, got none; the bundled model is a llama")
    if options.vocabulary < LEAST_VOCABULARY:
        parser.error(f"--vocabulary must be at least {LEAST_VOCABULARY}, bytes and specials, got {options.vocabulary}")
    given = [name for name, value in vars(options).items() if value != parser.get_default(name)]
    if not options.evaluate and (idle := [name for name in given if name in ("model", "problems", "samples")]):
        parser.error(f"--{idle[0]} is for --evaluate, got a training; give both, or leave it out")
    if options.draft_model is not None:
        if other := [name for name in given if name not in ("draft_model", "minutes")]:
            named = ", ".join("--" + name.replace("_", "-") for name in other)
            parser.error(f"--draft-model has sizes and a folder of its own, got {named} with it; take --minutes alone")


def run(arguments: argparse.Namespace) -> None:
    if arguments.evaluate:
        print(json.dumps(evaluate(arguments)))
    elif arguments.draft_model is not None:
        train_draft_model(arguments.draft_model, minutes=arguments.minutes)
    else:
        arguments.minutes = 80.0 if arguments.minutes is None else arguments.minutes
        train(arguments)


def main() -> int:
    try:
        run(read_arguments())
    except (ValueError, OSError) as error:
        print(f"train_reasoner: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
