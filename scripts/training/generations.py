"""A target's own generations, on disk: what a head for it learns from."""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from measuring.progress import Progress, say

import stand


@dataclass(frozen=True, slots=True)
class Generation:
    """Tokens of a prompt and what the target wrote after it."""

    token_ids: list[int]
    prompt_length: int


def read_generations(path: Path) -> list[Generation]:
    """All generations of a file, a last line that a kill cut short left out; none where there is no file."""
    if not path.exists():
        return []
    whole = path.read_text(encoding="utf-8").rpartition("\n")[0]
    return [Generation(**json.loads(line)) for line in whole.splitlines()]


def frequent_tokens(generations: list[Generation], most: int) -> list[int]:
    """At most so many tokens, the most frequent ones of all texts, prompts included."""
    counts = Counter(token for one in generations for token in one.token_ids)
    return [token for token, _ in counts.most_common(most)]


def write_generations(
    engine: stand.Engine,
    path: Path,
    draw_prompt: Callable[[random.Random], list[int]],
    *,
    num_tokens: int,
    rows: int,
    max_new_tokens: int,
    temperature: float,
    seed: int,
) -> list[Generation]:
    """Generations of at least `num_tokens` new tokens in all; goes on with what `path` holds already."""
    held = read_generations(path)
    if path.exists():
        path.write_text("".join(_line(generation) for generation in held), encoding="utf-8")
    progress = Progress(num_tokens, sum(len(one.token_ids) - one.prompt_length for one in held))
    while progress.done < num_tokens:
        batch = f"{seed} {len(held)}"
        rng = random.Random(f"generations {batch}")
        prompts = [draw_prompt(rng) for _ in range(rows)]
        output = engine.generate(
            input_ids=prompts, max_new_tokens=max_new_tokens, seed=rng.getrandbits(62), **law(temperature)
        )
        fresh = [
            Generation([*prompt, *tokens], len(prompt))
            for prompt, tokens in zip(prompts, output.token_ids, strict=True)
        ]  # fmt: skip
        with path.open("a", encoding="utf-8") as file:
            file.writelines(map(_line, fresh))
        held += fresh
        progress.add(output.stats.num_tokens, f"{len(held)} generations")
    say(f"{len(held)} generations in {path}")
    return held


def law(temperature: float) -> dict[str, object]:
    """Settings of a call that samples at `temperature` from the whole law, or is greedy at 0; without the penalty
    of the model's own generation config."""
    sampling = {"do_sample": False} if temperature == 0 else {"temperature": temperature, "top_k": 0, "top_p": 1.0}
    return {**sampling, "repetition_penalty": 1.0}


def shuffled_batches(generations: list[Generation], *, tokens_per_batch: int, seed: str) -> Iterator[list[Generation]]:
    """One pass in random order, in batches of similar length whose padded tokens are at most `tokens_per_batch`."""
    rng = random.Random(seed)
    order = sorted(generations, key=lambda one: (len(one.token_ids), rng.random()))
    batches, batch = [], []
    for one in order:  # ascending, so the newest is the longest
        if batch and (len(batch) + 1) * len(one.token_ids) > tokens_per_batch:
            batches.append(batch)
            batch = []
        batch.append(one)
    batches.append(batch)
    rng.shuffle(batches)
    yield from batches


def _line(generation: Generation) -> str:
    return json.dumps({"token_ids": generation.token_ids, "prompt_length": generation.prompt_length}) + "\n"
