"""Do drafts work under the trainer TRL that is installed here, and what do they bring to its rollouts?

    python scripts/trl_check.py --steps 12

Trains the bundled model by TRL's GRPOTrainer, whose every `generate` is drafted (`draft_always`). Each step's rollouts
are drawn once more, by transformers' own `generate` and with the weights of that step, so that times are pairs; the
trainer does not see them. The prompts come back every few steps. At the end the weights must have moved, and greedy
answers by both must be equal. Exits with 1 where something is not as it must be.
"""

from __future__ import annotations

import argparse
import os
import random
import sys
import tempfile
import time
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
from stand.plugins.generate import draft_always, use_engine


def read_arguments(command_line: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=positive_integer, default=12, help="of training (%(default)s)")
    parser.add_argument("--problems", type=positive_integer, default=8, help="that it is trained on (%(default)s)")
    parser.add_argument("--samples", type=positive_integer, default=8, help="of a problem in a step (%(default)s)")
    parser.add_argument("--together", type=positive_integer, default=2, help="problems in a step (%(default)s)")
    parser.add_argument("--max-new-tokens", type=positive_integer, default=512, help="per sample (%(default)s)")
    parser.add_argument("--learning-rate", type=positive_number, default=1e-5, help="of AdamW (%(default)s)")
    return parser.parse_args(command_line)


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
        per_device_train_batch_size=arguments.samples * arguments.together,
        num_generations=arguments.samples,
        max_completion_length=arguments.max_new_tokens,
        learning_rate=arguments.learning_rate,
        temperature=1.0,
        bf16=False,
        use_cpu=not torch.cuda.is_available(),
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


def main(command_line: list[str] | None = None) -> int:
    arguments = read_arguments(command_line)
    try:
        import trl
    except ImportError as error:
        say(f"trl_check: needs trl ({error}); pip install trl")
        return 2
    os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")
    tokenizer = AutoTokenizer.from_pretrained(REASONER)
    model = AutoModelForCausalLM.from_pretrained(REASONER, dtype=torch.float32)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    watched = Watched(model)
    say(f"trl {trl.__version__}, {arguments.steps} steps")
    with tempfile.TemporaryDirectory() as folder:
        rewards = train(model, tokenizer, arguments, folder)
    header = ["step", "reward", "tokens per step", "tokens per second, drafted", "transformers' own", "ratio"]
    lines = []
    for number, (reward, step) in enumerate(zip(rewards, watched.steps, strict=True), start=1):
        rates = step.drafted_rate, step.plain_rate
        cells = f"{reward:.2f}", f"{step.tokens_per_step:.2f}", *(f"{rate:.0f}" for rate in rates)
        lines.append([str(number), *cells, f"{rates[0] / rates[1]:.2f}"])
    print(format_table(header, lines))
    num_other = disagreements(model, tokenizer, arguments.problems, arguments.max_new_tokens)
    has_moved = any(not torch.equal(value, before[name]) for name, value in model.state_dict().items())
    print(f"weights moved: {has_moved}; greedy answers that differ: {num_other} of {arguments.problems}")
    return int(num_other > 0 or not has_moved)


if __name__ == "__main__":
    sys.exit(main())
