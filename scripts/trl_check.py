"""Do drafts work under the trainer TRL that is installed here, and what do they bring to its rollouts?

    python scripts/trl_check.py --steps 12
    python -m torch.distributed.run --nproc-per-node 2 scripts/trl_check.py --zero3 --steps 12

Trains the bundled model by TRL's GRPOTrainer, whose every `generate` is drafted (`draft_always`). Each step's rollouts
are drawn once more, by transformers' own `generate` and with the weights of that step, so that times are pairs; the
trainer does not see them. The prompts come back every few steps. At the end the weights must have moved, and greedy
answers by both must be equal. Exits with 1 where something is not as it must be. With --zero3 the ranks share a step's
prompts, and each holds a part of every weight; figures are those of the first rank.
"""

from __future__ import annotations

import argparse
import os
import random
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import measuring.interruption  # noqa: F401  (before what loads slowly)
import torch
from measuring.option_types import positive_integer, positive_number
from measuring.progress import say
from measuring.setup import REASONER
from measuring.text_table import format_table
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationMixin, PreTrainedModel
from workloads.answers import extract_answer
from workloads.problems import draw_problem, held_out_problems, write_prompt

import stand
from stand.forward.devices import is_sharded, number_of_processes
from stand.plugins.generate import draft_always, use_engine

HEADER = ["step", "reward", "tokens per step", "tokens per second, drafted", "transformers' own", "ratio"]
ZERO_3 = {
    "train_batch_size": "auto",
    "train_micro_batch_size_per_gpu": "auto",
    "gradient_accumulation_steps": "auto",
    "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0},  # small weights are shared out, too
    "zero_allow_untested_optimizer": True,
    "zero_force_ds_cpu_optimizer": False,
}


def read_arguments(command_line: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=positive_integer, default=12, help="of training (%(default)s)")
    parser.add_argument("--problems", type=positive_integer, default=8, help="that it is trained on (%(default)s)")
    parser.add_argument("--samples", type=positive_integer, default=8, help="of a problem in a step (%(default)s)")
    parser.add_argument("--together", type=positive_integer, default=2, help="problems in a step (%(default)s)")
    parser.add_argument("--max-new-tokens", type=positive_integer, default=512, help="per sample (%(default)s)")
    parser.add_argument("--learning-rate", type=positive_number, default=1e-5, help="of AdamW (%(default)s)")
    parser.add_argument("--zero3", action="store_true", help="ranks shard the weights by DeepSpeed (they do not)")
    return parser.parse_args(command_line)


def begin_ranks() -> None:
    """DeepSpeed's, also on CPUs, where accelerate would take each rank for the only one."""
    import deepspeed
    from accelerate.state import DistributedType, PartialState

    os.environ["ACCELERATE_USE_DEEPSPEED"] = "true"
    if not torch.cuda.is_available():
        os.environ["DS_ACCELERATOR"] = "cpu"
        PartialState._prepare_backend = lambda *_: ("gloo", DistributedType.MULTI_CPU)
        deepspeed.init_distributed("gloo")


@dataclass(frozen=True)
class Rollouts:
    """Of one step."""

    tokens_per_step: float
    drafted_rate: float  # tokens per second
    plain_rate: float


class Watched:
    """Every `generate` of a model is drafted, and drawn once more by transformers' own."""

    def __init__(self, model: PreTrainedModel):
        self.steps: list[Rollouts] = []
        self._model = model
        engine = stand.wrap(model)
        use_engine(engine)
        draft_always(model)
        self._drafted, model.generate = model.generate, self._both
        self._generate, engine.generate = engine.generate, self._kept

    def _kept(self, *given: object, **named: object) -> object:
        self._output = self._generate(*given, **named)
        return self._output

    def _both(self, *given: object, **named: object) -> torch.Tensor:
        numbers = torch.get_rng_state()
        _, seconds, num_tokens = self._timed(GenerationMixin.generate, self._model, *given, **named)
        torch.set_rng_state(numbers)
        drafted, own_seconds, own_tokens = self._timed(self._drafted, *given, **named)
        rate, own_rate = num_tokens / seconds, own_tokens / own_seconds
        self.steps.append(Rollouts(self._output.stats.mean_acceptance_length, own_rate, rate))
        return drafted

    def _timed(self, generate: object, *given: object, **named: object) -> tuple[torch.Tensor, float, int]:
        """The result, its seconds, and its new tokens without padding."""
        start = time.perf_counter()
        result = generate(*given, **named)
        seconds = time.perf_counter() - start
        width = named["input_ids"].shape[1]
        return result, seconds, int((result[:, width:] != self._model.config.pad_token_id).sum())


def train(model: PreTrainedModel, tokenizer: object, arguments: argparse.Namespace, folder: str) -> list[float]:
    """The mean rewards of the steps."""
    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer

    def is_right(completion_ids: list[list[int]], answer: list[int], **others: object) -> list[float]:
        found = [extract_answer(tokenizer.decode(ids)) for ids in completion_ids]
        return [float(one == wanted) for one, wanted in zip(found, answer, strict=True)]

    rng = random.Random(0)
    problems = [draw_problem(rng, held_out=False) for _ in range(arguments.problems)]
    rows = [{"prompt": write_prompt(one.problem), "answer": one.answer} for one in problems]
    config = GRPOConfig(
        output_dir=folder,
        max_steps=arguments.steps,
        per_device_train_batch_size=arguments.samples * arguments.together // number_of_processes(),
        num_generations=arguments.samples,
        max_completion_length=arguments.max_new_tokens,
        learning_rate=arguments.learning_rate,
        temperature=1.0,
        bf16=False,
        **({"deepspeed": ZERO_3} if arguments.zero3 else {"use_cpu": not torch.cuda.is_available()}),
        report_to=[],
        logging_steps=1,
        disable_tqdm=True,
        save_strategy="no",
        seed=0,
    )
    trainer = GRPOTrainer(
        model=model,
        args=config,
        train_dataset=Dataset.from_list(rows),
        processing_class=tokenizer,
        reward_funcs=is_right,
    )
    trainer.train()
    return [float(line["reward"]) for line in trainer.state.log_history if "reward" in line]


def disagreements(model: PreTrainedModel, tokenizer: object, count: int, most: int) -> int:
    """Held-out prompts whose greedy answers, drafted, are not those of transformers' own `generate`."""
    num_other = 0
    draft_always(model.eval())
    for one in held_out_problems(count):
        given = tokenizer(write_prompt(one.problem), return_tensors="pt").to(model.device)
        settings = {**given, "do_sample": False, "max_new_tokens": most}
        num_other += not torch.equal(model.generate(**settings), GenerationMixin.generate(model, **settings))
    return num_other


def whole(model: PreTrainedModel) -> AbstractContextManager:
    """Within it every rank has all of its weights."""
    if not is_sharded(model):
        return nullcontext()
    import deepspeed

    return deepspeed.zero.GatheredParameters(list(model.parameters()))


def main(command_line: list[str] | None = None) -> int:
    arguments = read_arguments(command_line)
    try:
        import trl
    except ImportError as error:
        say(f"trl_check: needs trl ({error}); pip install trl")
        return 2
    if arguments.zero3:
        begin_ranks()
    os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")
    tokenizer = AutoTokenizer.from_pretrained(REASONER)
    model = AutoModelForCausalLM.from_pretrained(REASONER, dtype=torch.float32)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    watched = Watched(model)
    say(f"trl {trl.__version__}, {arguments.steps} steps")
    with tempfile.TemporaryDirectory() as folder:
        rewards = train(model, tokenizer, arguments, folder)
    num_other = disagreements(model, tokenizer, arguments.problems, arguments.max_new_tokens)
    with whole(model):
        has_moved = any(not torch.equal(value, before[name]) for name, value in model.state_dict().items())
    if os.environ.get("RANK", "0") == "0":
        print(format_table(HEADER, list(lines_of(rewards, watched.steps))))
        print(f"weights moved: {has_moved}; greedy answers that differ: {num_other} of {arguments.problems}")
    return int(num_other > 0 or not has_moved)


def lines_of(rewards: list[float], steps: list[Rollouts]) -> Iterator[list[str]]:
    for number, (reward, step) in enumerate(zip(rewards, steps, strict=True), start=1):
        rates = step.drafted_rate, step.plain_rate
        cells = f"{reward:.2f}", f"{step.tokens_per_step:.2f}", *(f"{rate:.0f}" for rate in rates)
        yield [str(number), *cells, f"{rates[0] / rates[1]:.2f}"]


if __name__ == "__main__":
    sys.exit(main())
