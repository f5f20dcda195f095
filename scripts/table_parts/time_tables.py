"""The wall-clock of drafters with the model in the loop: one row at a time, arms in turn within every sample."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from measuring.text_table import format_table
from measuring.trajectories import derived_seed

import stand
from stand.trees import TreeShape

PROMPT_LOOKUP = 8  # tokens that `generate` copies at a time
PLAIN = "no drafts"  # what the other arms are told against


@dataclass(frozen=True, slots=True)
class TimeArm:
    """One way of drawing a sample. `make` gives its drafter; without one transformers' `generate` draws."""

    name: str
    make: Callable[[], stand.Drafter] | None = None
    rule: str = "match"
    prompt_lookup: int | None = None


def time_arms() -> Iterator[TimeArm]:
    """All but two arms decide by `match`: they write the tokens that are written without drafts."""
    yield TimeArm(PLAIN, lambda: stand.BlendedDrafter(budget=0))
    yield TimeArm("generate")
    yield TimeArm(f"generate, prompt lookup {PROMPT_LOOKUP}", prompt_lookup=PROMPT_LOOKUP)
    yield TimeArm("prompt lookup 8", stand.PromptLookupDrafter)
    yield TimeArm("ours, by cost, traversal", stand.BlendedDrafter, rule="traversal")
    yield TimeArm("ours, by cost, match", lambda: stand.BlendedDrafter(kind="deterministic"))
    yield TimeArm("ours, 8 nodes, match", lambda: stand.BlendedDrafter(budget=8, kind="deterministic"))
    yield TimeArm("STAND's rule, traversal", stand.FixedShapeDrafter, rule="traversal")
    yield TimeArm("STAND's rule, match", stand.FixedShapeDrafter)
    yield TimeArm("token recycling", lambda: stand.TokenRecyclingDrafter(TreeShape.paper()))


class Sampler:
    """One arm on one problem: its drafter starts empty and learns from sample to sample."""

    def __init__(self, arm: TimeArm, model, tokenizer, prompt: Sequence[int]) -> None:
        self.arm, self.prompt, self.model = arm, list(prompt), model
        self.engine = None
        if arm.make is not None:
            self.engine = stand.wrap(model, tokenizer, drafter=arm.make(), verifier=arm.rule)

    def draw(self, seed: int, **settings) -> tuple[list[int], int]:
        """(new tokens, steps) of one more sample."""
        if self.engine is None:
            return self._generate(seed, **settings)
        drafts = self.arm.name != PLAIN
        output = self.engine.generate(input_ids=self.prompt, seed=seed, draft=drafts, do_sample=True, **settings)
        return output.token_ids[0], output.stats.num_steps

    @torch.inference_mode()
    def _generate(self, seed: int, **settings) -> tuple[list[int], int]:
        input_ids = torch.tensor([self.prompt])
        torch.manual_seed(seed)
        copied = {} if self.arm.prompt_lookup is None else {"prompt_lookup_num_tokens": self.arm.prompt_lookup}
        with counted_forwards(self.model) as count:
            output = self.model.generate(
                input_ids=input_ids, attention_mask=torch.ones_like(input_ids), do_sample=True, **copied, **settings
            )
        return output[0, len(self.prompt) :].tolist(), count[0]


@contextmanager
def counted_forwards(model) -> Iterator[list[int]]:
    """A list of one number: how often the model was called within."""
    count = [0]

    def add(*_: object) -> None:
        count[0] += 1

    handle = model.register_forward_pre_hook(add)
    try:
        yield count
    finally:
        handle.remove()


def time_problem(
    model, tokenizer, prompt: Sequence[int], *, samples: int, problem: int, seed: int, **settings
) -> dict[str, dict[str, list[float]]]:
    """By arm: tokens, steps, wall-clock and processor seconds of every sample. Another arm begins every sample.

    Every arm draws a few tokens of another seed first, with a drafter that is thrown away: steps are timed then.
    """
    arms = list(time_arms())
    for arm in arms:
        Sampler(arm, model, tokenizer, prompt).draw(seed, **{**settings, "max_new_tokens": 8})
    samplers = [Sampler(arm, model, tokenizer, prompt) for arm in arms]
    found = {arm.name: {"tokens": [], "steps": [], "wall": [], "cpu": []} for arm in arms}
    for sample in range(samples):
        first = sample * len(arms) // samples
        for sampler in samplers[first:] + samplers[:first]:
            wall, cpu = time.perf_counter(), time.process_time()
            token_ids, steps = sampler.draw(derived_seed(seed, problem, sample), **settings)
            spent = {"wall": time.perf_counter() - wall, "cpu": time.process_time() - cpu}
            for name, value in {"tokens": len(token_ids), "steps": steps, **spent}.items():
                found[sampler.arm.name][name].append(value)
    return found


def time_table(results: dict[str, list[dict]]) -> str:
    """`results`: by setting, of every problem what `time_problem` found. Medians over problems."""
    rows = []
    for setting, problems in results.items():
        for name in problems[0]:
            kept = statistics.median(sum(one[name]["tokens"]) / sum(one[name]["steps"]) for one in problems)
            rates = {
                clock: [(per_second(one, name, clock), per_second(one, PLAIN, clock)) for one in problems]
                for clock in ("wall", "cpu")
            }
            speeds = [f"{statistics.median(rate for rate, _ in pairs):.1f}" for pairs in rates.values()]
            ratios = [f"{statistics.median(rate / plain for rate, plain in pairs):.2f}" for pairs in rates.values()]
            rows.append([setting, name, f"{kept:.2f}", *speeds, *ratios])
    header = ["setting", "arm", "tokens per step", "tokens/s", "tokens per CPU s", "wall: x no drafts", "CPU: x"]
    return f"time, medians over problems\n{format_table(header, rows)}"


def per_second(found: dict[str, dict], name: str, clock: str) -> float:
    """Tokens of one problem's samples per second of a clock."""
    return sum(found[name]["tokens"]) / sum(found[name][clock])
