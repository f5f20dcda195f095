"""Frequencies of continuations against the exact law, rule by rule, and a lossy rule that must be refused."""

from __future__ import annotations

import argparse
import math
from collections import Counter
from collections.abc import Iterator

from measuring.progress import Progress, say

import stand
from law_parts.continuation_law import ContinuationLaw, cells_of, compare
from law_parts.continuations import continuations, fixed_prompts, law_of
from law_parts.engines import new_engine, trained_part
from law_parts.kept_counts import KeptCounts

CONTROL = "typical"  # a lossy rule, which the test must refuse


def arms_of(options: argparse.Namespace) -> Iterator[tuple[str, str, int]]:
    """(verifier, kind, continuations per prompt): plain sampling, those asked for, the control."""
    rows = math.ceil(options.continuations / options.prompts)
    for verifier in options.verifiers:
        for kind in options.kinds:
            yield verifier, kind, rows
    yield CONTROL, "sampled", math.ceil(rows / 4)
    if not options.no_plain:
        yield "match", "none", rows


def check_law(model, tokenizer, options: argparse.Namespace) -> dict:
    law, part = {"temperature": options.temperature, "top_p": options.top_p}, trained_part(model, options)
    prompts = fixed_prompts(stand.wrap(model, tokenizer, verifier="match"), options.prompts, law)
    conditions = {**law, "model": options.model, "tokens": options.tokens, "continuations": options.continuations}
    if options.sample != 1:
        conditions["sample"] = options.sample
    if options.drafter != "lookup":
        conditions |= {"drafter": options.drafter, "head": str(options.head)}
    kept = KeptCounts(options.kept, {**conditions, "prompts": prompts})
    arms = list(arms_of(options))
    laws: dict[tuple[int, int], ContinuationLaw] = {}
    results, progress = [], Progress(sum(rows for _, _, rows in arms) * len(prompts))
    for verifier, kind, rows in arms:
        engine, lines = None, []
        for place, prompt in enumerate(prompts):
            laws[place, rows] = laws.get((place, rows)) or law_of(model, prompt, law, tokens=options.tokens, rows=rows)
            line = kept.get([verifier, kind], place)
            if line is None:
                arm = {"verifier": verifier, "kind": kind, "drafter": options.drafter, "head": part}
                engine = engine or new_engine(model, tokenizer, prompts, law, **arm)
                seed = 10**8 * (options.sample - 1) + (1 if kind == "none" else 2) * 10**6 + 1000 * place
                drawn, stats = continuations(
                    engine, prompt, rows, law, tokens=options.tokens, seed=seed, draft=kind != "none"
                )
                line = kept.add([verifier, kind], place, cells_of(drawn, laws[place, rows]), stats)
            lines.append(line)
            progress.add(rows, f"{verifier}, {kind}, prompt {place + 1} of {len(prompts)}")
        results.append(law_result(verifier, kind, lines, [laws[place, rows] for place in range(len(prompts))], options))
    return {"check": "law", "tokens": options.tokens, **law, "level": options.level, "arms": results}


def law_result(verifier: str, kind: str, lines: list[dict], laws: list[ContinuationLaw], options) -> dict:
    """The test of one arm, and whether it ended as it should."""
    counters = [Counter({tuple(cell): count for cell, count in line["cells"]}) for line in lines]
    found = compare(counters, laws)
    lossless = stand.verifiers.get_verifier(verifier, allow_lossy=True).lossless
    length = sum(line["tokens"] for line in lines) / sum(line["steps"] for line in lines)
    say(f"{verifier:18} {kind:14} chi2 {found.statistic:9.1f} on {found.degrees_of_freedom:5}  "
        f"p {found.p_value:9.2g}  tokens/step {length:.2f}")  # fmt: skip
    return {
        "verifier": verifier,
        "kind": kind,
        "continuations": sum(counter.total() for counter in counters),
        "tokens_per_step": length,
        "statistic": found.statistic,
        "degrees_of_freedom": found.degrees_of_freedom,
        "p_value": found.p_value,
        "as_it_should": (found.p_value >= options.level) == lossless,
    }
