"""Tokens with drafts against those of plain sampling with the same seed."""

from __future__ import annotations

import argparse
import math

import numpy as np
import torch
from measuring.progress import Progress, say

import stand
from law_parts.continuation_law import next_token_laws
from law_parts.continuations import problem_prompts, settings
from stand.seeds import prompt_word
from stand.verifiers import VerifierNoise

PROMPTS_PER_CALL = 10
ROUNDING = 1e-5  # of a law in float32


def is_near_border(
    model,
    prompt: list[int],
    one: list[int],
    two: list[int],
    *,
    law: dict[str, float],
    verifier: str,
    row: int,
    seed: int,
) -> bool:
    """Whether rounding explains the first difference of two rows: both tokens win if the noise moves by ROUNDING.

    It never explains that one row ends where the other goes on.
    """
    place = next((place for place, pair in enumerate(zip(one, two, strict=False)) if pair[0] != pair[1]), None)
    if place is None:
        return False
    keyed = (np.array([row]), np.array([place]), np.array([len(prompt) + place]))
    noise = VerifierNoise(seed, *keyed, prompt_words=prompt_word(np.array(prompt)))
    with torch.inference_mode():
        logits = model(input_ids=torch.tensor([prompt + one[:place]]), use_cache=False).logits[:, -1]
    chances = next_token_laws(logits, **law)[0]
    if verifier == "match":
        draw = float(noise.target(np.array([0]), 0)[0])
        reached = torch.searchsorted(
            chances.cumsum(dim=-1), torch.tensor([draw - ROUNDING, draw + ROUNDING]), right=True
        )
        return bool(reached[0] <= min(one[place], two[place]) and max(one[place], two[place]) <= reached[1])
    exponentials = noise.exponentials(np.array([0]), 0, vocabulary_size=len(chances), device=chances.device)[0]
    races = chances / exponentials
    return float(min(races[one[place]], races[two[place]]) / races.max()) > 1.0 - ROUNDING


def check_tokens(model, tokenizer, options: argparse.Namespace) -> dict:
    law = {"temperature": options.temperature, "top_p": options.top_p}
    how = {"num_return_sequences": options.rows, "max_new_tokens": options.tokens, **settings(law), "seed": 5}
    prompts = problem_prompts(tokenizer, options.prompts, seed=1)
    results, progress = [], Progress(len(options.verifiers) * math.ceil(len(prompts) / PROMPTS_PER_CALL))
    for verifier in options.verifiers:
        engine = stand.wrap(model, tokenizer, verifier=verifier, drafter=stand.BlendedDrafter(budget=options.budget))
        different, near, compared, steps = 0, 0, 0, 0
        for start in range(0, len(prompts), PROMPTS_PER_CALL):
            part = prompts[start : start + PROMPTS_PER_CALL]
            plain = engine.generate(input_ids=part, **how, draft=False)
            drafted = engine.generate(input_ids=part, **how)
            pairs = list(zip(plain.token_ids, drafted.token_ids, strict=True))
            for row, (one, two) in enumerate(pairs):
                if one != two:
                    prompt = part[row // options.rows]
                    excuse = {"law": law, "verifier": verifier, "row": row, "seed": how["seed"]}
                    is_near = is_near_border(model, prompt, one, two, **excuse)
                    near += is_near
                    different += not is_near
            compared += sum(len(one) for one, _ in pairs)
            steps += drafted.stats.num_steps
            progress.add(1, f"{verifier}, {start + len(part)} of {len(prompts)} prompts")
        result = {
            "verifier": verifier,
            "rows": len(prompts) * options.rows,
            "tokens": compared,
            "different_rows": different,
            "near_border_rows": near,
        }
        results.append({**result, "tokens_per_step": compared / steps, "as_it_should": different == 0})
        say(f"{verifier:10} {compared} tokens, {different} rows differ, {near} more by a draw on a border")
    return {"check": "tokens", **law, "arms": results}
