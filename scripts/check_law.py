"""Is what the engine writes distributed like plain sampling? An end-to-end check, apart from the exact tests.

Usage: python scripts/check_law.py law    [--verifiers traversal,match] [--kinds sampled,mixed] [--continuations 20000]
       python scripts/check_law.py tokens [--verifiers match,coupled] [--prompts 50] [--rows 16] [--tokens 256]

`law`: continuations of fixed prompts (held-out problems, cut at various places of a written-out solution) at
temperature 1, drafted by a lookup tree that was warmed up on the same prompts and is then frozen, against as many
without drafts and with other seeds. Per prompt the frequencies of whole continuations are compared by a two-sample
chi-square test; rare ones count as one cell. One statistic over all prompts, one p-value per verifier and draft kind.
The lossy rule `typical` is run too: a test that does not refuse it is blind.

`tokens`: with `match` and `coupled` the token ids must equal those of plain sampling with the same seed (float32). A
packed forward rounds differently from a plain one, so a draw that falls within 1e-5 of the border between two tokens
may go either way; such rows are counted apart (seen: one in 168,000 tokens).

Last line: JSON. Exit status 1 where a p-value is below --level (default 1e-4: that is the false-alarm rate per test),
tokens differ, or the lossy rule passes.
"""

from __future__ import annotations

import argparse
import json
import math
import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from measuring.progress import say
from measuring.setup import REASONER
from transformers import AutoModelForCausalLM, AutoTokenizer
from workloads.problems import held_out_problems, write_prompt

import stand
from stand.verifiers import VerifierNoise

LONGEST_CUT = 6  # tokens of a solution that a prompt may hold
ROWS_PER_CALL = 500
PROMPTS_PER_CALL = 10
ROUNDING = 1e-5  # of a law in float32
WHOLE_LAW = {"temperature": 1.0, "top_k": 0}  # the softmax; transformers keeps 50 tokens where top_k is not given
SMALLEST_CELL = 10  # continuations expected in a cell of one arm


@dataclass(frozen=True, slots=True)
class Comparison:
    statistic: float
    degrees_of_freedom: int

    @property
    def p_value(self) -> float:
        """Upper tail of chi-square by Wilson and Hilferty's cube root, good to a few per cent here."""
        if self.degrees_of_freedom == 0:
            return 1.0
        spread = 2 / (9 * self.degrees_of_freedom)
        z = ((self.statistic / self.degrees_of_freedom) ** (1 / 3) - (1 - spread)) / math.sqrt(spread)
        return math.erfc(z / math.sqrt(2)) / 2


def compare(first: Sequence[Counter], second: Sequence[Counter]) -> Comparison:
    """Two-sample chi-square over prompts; cell i of both arms is expected to hold SMALLEST_CELL at least."""
    statistic, freedom = 0.0, 0
    for one, two in zip(first, second, strict=True):
        sizes = (one.total(), two.total())
        cells = [key for key in one | two if (one[key] + two[key]) * min(sizes) / sum(sizes) >= SMALLEST_CELL]
        counts = [(one[key], two[key]) for key in cells]
        rest = (sizes[0] - sum(count[0] for count in counts), sizes[1] - sum(count[1] for count in counts))
        counts += [rest] if sum(rest) * min(sizes) / sum(sizes) >= SMALLEST_CELL else []
        freedom += max(len(counts) - 1, 0)
        for pair in counts:
            for count, size in zip(pair, sizes, strict=True):
                expected = sum(pair) * size / sum(sizes)
                statistic += (count - expected) ** 2 / expected
    return Comparison(statistic, freedom)


def fixed_prompts(engine: stand.Engine, count: int, *, seed: int = 0) -> list[list[int]]:
    """Token ids of `count` held-out problems, each with the first tokens of a solution by the model itself."""
    cuts = random.Random(f"cuts {seed}")
    texts = [write_prompt(problem.problem) for problem in held_out_problems(count, seed=seed)]
    solutions = engine.generate(texts, max_new_tokens=LONGEST_CUT, **WHOLE_LAW, seed=seed, draft=False).token_ids
    prompts = [engine.tokenizer(text)["input_ids"] for text in texts]
    return [
        prompt + solution[: cuts.randrange(LONGEST_CUT)] for prompt, solution in zip(prompts, solutions, strict=True)
    ]


def continuations(
    engine: stand.Engine, prompts: Sequence[Sequence[int]], rows: int, *, tokens: int, seed: int, draft: bool
) -> tuple[list[Counter], float]:
    """(per prompt how often each continuation came, mean tokens per step); the drafter is left as it is."""
    counters, steps, emitted = [Counter() for _ in prompts], 0, 0
    for place, prompt in enumerate(prompts):
        for start in range(0, rows, ROWS_PER_CALL):
            output = engine.generate(
                input_ids=[prompt],
                num_return_sequences=min(ROWS_PER_CALL, rows - start),
                max_new_tokens=tokens,
                **WHOLE_LAW,
                seed=seed + 1000 * place + start // ROWS_PER_CALL,
                draft=draft,
                learn=False,
            )
            counters[place].update(map(tuple, output.token_ids))
            steps += output.stats.num_steps
            emitted += output.stats.num_tokens
    return counters, emitted / steps


def warmed_up(model, tokenizer, prompts: Sequence[Sequence[int]], *, verifier: str, kind: str) -> stand.Engine:
    """An engine whose lookup tree has seen 64 continuations of every prompt."""
    drafter = stand.BlendedDrafter(budget=4 * ROWS_PER_CALL, kind=kind)
    rule = stand.verifiers.get_verifier(verifier, allow_lossy=True)
    engine = stand.wrap(model, tokenizer, drafter=drafter, verifier=rule)
    engine.generate(input_ids=prompts, num_return_sequences=64, max_new_tokens=12, **WHOLE_LAW, seed=999)
    return engine


def check_law(model, tokenizer, options: argparse.Namespace) -> dict:
    plain = stand.wrap(model, tokenizer, verifier="match")
    prompts = fixed_prompts(plain, options.prompts)
    rows = math.ceil(options.continuations / len(prompts))
    say(f"drawing {rows * len(prompts)} continuations without drafts, then as many per arm")
    expected, _ = continuations(plain, prompts, rows, tokens=options.tokens, seed=10**6, draft=False)
    arms = [(verifier, kind) for verifier in options.verifiers for kind in options.kinds] + [("typical", "sampled")]
    results = []
    for verifier, kind in arms:
        engine = warmed_up(model, tokenizer, prompts, verifier=verifier, kind=kind)
        seen, length = continuations(engine, prompts, rows, tokens=options.tokens, seed=2 * 10**6, draft=True)
        found = compare(seen, expected)
        lossless = stand.verifiers.get_verifier(verifier, allow_lossy=True).lossless
        result = {
            "verifier": verifier,
            "kind": kind,
            "continuations": rows * len(prompts),
            "tokens_per_step": length,
            "statistic": found.statistic,
            "degrees_of_freedom": found.degrees_of_freedom,
            "p_value": found.p_value,
            "as_it_should": (found.p_value >= options.level) == lossless,
        }
        say(f"{verifier:18} {kind:14} chi2 {found.statistic:9.1f} on {found.degrees_of_freedom:5}  "
            f"p {found.p_value:9.2g}  tokens/step {length:.2f}")  # fmt: skip
        results.append(result)
    return {"check": "law", "tokens": options.tokens, "level": options.level, "arms": results}


def is_near_border(
    model, prompt: list[int], one: list[int], two: list[int], *, verifier: str, row: int, seed: int
) -> bool:
    """Whether rounding explains the first difference of two rows: both tokens win if the noise moves by ROUNDING."""
    place = next(place for place, pair in enumerate(zip(one, two, strict=False)) if pair[0] != pair[1])
    noise = VerifierNoise(seed, np.array([row]), np.array([place]), np.array([len(prompt) + place]))
    with torch.inference_mode():
        logits = model(input_ids=torch.tensor([prompt + one[:place]]), use_cache=False).logits[0, -1]
    law = torch.softmax(logits.double(), dim=-1)
    if verifier == "match":
        draw = float(noise.target(np.array([0]), 0)[0])
        reached = torch.searchsorted(law.cumsum(dim=-1), torch.tensor([draw - ROUNDING, draw + ROUNDING]), right=True)
        return bool(reached[0] <= min(one[place], two[place]) and max(one[place], two[place]) <= reached[1])
    races = law / noise.exponentials(np.array([0]), 0, vocabulary_size=len(law), device=law.device)[0]
    return float(min(races[one[place]], races[two[place]]) / races.max()) > 1.0 - ROUNDING


def check_tokens(model, tokenizer, options: argparse.Namespace) -> dict:
    settings = {"num_return_sequences": options.rows, "max_new_tokens": options.tokens, **WHOLE_LAW, "seed": 5}
    texts = [write_prompt(problem.problem) for problem in held_out_problems(options.prompts, seed=1)]
    results = []
    for verifier in options.verifiers:
        engine = stand.wrap(model, tokenizer, verifier=verifier)
        different, near, compared, steps = 0, 0, 0, 0
        for start in range(0, len(texts), PROMPTS_PER_CALL):
            part = texts[start : start + PROMPTS_PER_CALL]
            plain = engine.generate(part, **settings, draft=False)
            drafted = engine.generate(part, **settings)
            pairs = list(zip(plain.token_ids, drafted.token_ids, strict=True))
            for row, (one, two) in enumerate(pairs):
                if one != two:
                    prompt = tokenizer(part[row // options.rows])["input_ids"]
                    is_near = is_near_border(model, prompt, one, two, verifier=verifier, row=row, seed=settings["seed"])
                    near += is_near
                    different += not is_near
            compared += sum(len(one) for one, _ in pairs)
            steps += drafted.stats.num_steps
        result = {
            "verifier": verifier,
            "rows": len(texts) * options.rows,
            "tokens": compared,
            "different_rows": different,
            "near_border_rows": near,
        }
        results.append({**result, "tokens_per_step": compared / steps, "as_it_should": different == 0})
        say(f"{verifier:10} {compared} tokens, {different} rows differ, {near} more by a draw on a border")
    return {"check": "tokens", "arms": results}


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("check", choices=("law", "tokens"))
    parser.add_argument("--verifiers", type=lambda text: text.split(","))
    parser.add_argument("--kinds", type=lambda text: text.split(","), default=["sampled", "mixed"])
    parser.add_argument("--continuations", type=int, default=20_000)
    parser.add_argument("--prompts", type=int)
    parser.add_argument("--rows", type=int, default=16)
    parser.add_argument("--tokens", type=int)
    parser.add_argument("--level", type=float, default=1e-4)
    parser.add_argument("--model", default=str(REASONER))
    options = parser.parse_args()
    is_law = options.check == "law"
    options.verifiers = options.verifiers or (["traversal", "match"] if is_law else ["match", "coupled"])
    options.prompts = options.prompts or (10 if is_law else 50)
    options.tokens = options.tokens or (4 if is_law else 256)
    return options


def main() -> None:
    options = arguments()
    model = AutoModelForCausalLM.from_pretrained(options.model, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(options.model)
    result = (check_law if options.check == "law" else check_tokens)(model, tokenizer, options)
    print(json.dumps({**result, "model": options.model, "torch": torch.__version__}))
    raise SystemExit(0 if all(arm["as_it_should"] for arm in result["arms"]) else 1)


if __name__ == "__main__":
    main()
