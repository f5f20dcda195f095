"""Is what the engine writes distributed like plain sampling? An end-to-end check, apart from the exact tests.

    python scripts/check_law.py law    [--verifiers traversal,match] [--kinds sampled,mixed] [--continuations 20000]
    python scripts/check_law.py tokens [--verifiers match,coupled] [--prompts 50] [--rows 16] [--tokens 256]
    python scripts/check_law.py law --model smollm2 --verifiers traversal --tokens 8 --kept counts.jsonl
    python scripts/check_law.py law --drafter blended --verifiers traversal      # the lookup and the shipped head

`law`: continuations of fixed prompts (held-out problems, cut at various places of a written-out solution), drafted by
a lookup that was warmed up on the same prompts and is then frozen, and as many without drafts. The law of plain
sampling is worked out exactly, by forwards of the model and products of probabilities (measuring/continuation_law.py).
Per prompt the frequencies of whole continuations, and of places where they leave the likely ones, are compared with
it by chi-square; rare cells count as one. One statistic over all prompts, one p-value per verifier and draft kind.
--drafter blended adds the laws of an EAGLE-1 head to the lookup's, eagle drafts by the head alone (sampled), streams
and streams-blended are the same with streams (Speculative Streaming), neighbours adds the laws of `NeighbourLaws`.
The lossy rule `typical` is run too, on a quarter of the continuations: a test that does not refuse it is blind.

`tokens`: with `match` and `coupled` the token ids must equal those of plain sampling with the same seed (float32).
Without the engine's CPU kernels a packed forward rounds differently from a plain one, so a draw that falls within 1e-5
of the border between two tokens may go either way; such rows are counted apart (seen: one in 168,000 tokens). With them
the bits are equal.

The bundled model draws at temperature 1 without filters, other models at 0.8 with top_p 0.95, from the word problems
of scripts/workloads. --kept FILE keeps the counts of every finished arm and prompt, and a run with the same settings
goes on from there.

Last line: JSON. Exit status 1 where a p-value is below --level (default 1e-4: that is the false-alarm rate per test) or
tokens differ; 2 where the lossy rule alone passes, as it does with few continuations, and for options that are refused.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

import measuring.interruption  # noqa: F401  (before what loads slowly)
import numpy as np
import torch
from measuring.continuation_law import (
    SMALLEST_CELL,
    ContinuationLaw,
    cells_of,
    compare,
    continuation_law,
    next_token_laws,
)
from measuring.interruption import run_command
from measuring.option_types import positive_integer, positive_number, probability, share, whole_number
from measuring.output_file import JsonLines, check_writable
from measuring.progress import Progress, say
from measuring.setup import (
    BOXED_INSTRUCTION,
    DRAFTERS,
    REASONER,
    WORD_PROBLEMS,
    from_model,
    load_trained,
    prompt_ids,
)
from measuring.trajectories import REPEATING
from transformers import AutoModelForCausalLM, AutoTokenizer
from workloads.problem_sets import generated_tasks, read_tasks
from workloads.problems import write_prompt

import stand
from stand.drafters.eagle.head import EagleHead
from stand.drafters.streams.weights import Streams
from stand.drafters.trained_part import TrainedPart
from stand.seeds import prompt_word
from stand.trees.sampling import KINDS
from stand.verifiers import VerifierNoise

CONTROL = "typical"  # a lossy rule, which the test must refuse
OWN = {  # defaults of the options that one check alone has
    "law": {
        "kinds": None, "drafter": "lookup", "head": None, "continuations": 20_000, "sample": 1, "no_plain": False,
        "level": 1e-4, "kept": None,
    },
    "tokens": {"rows": 16, "budget": 32},
}  # fmt: skip
DRAFTER_NAMES = ("lookup", "blended", "eagle", "streams", "streams-blended", "neighbours")
HEADLESS = ("lookup", "neighbours")
LONGEST_CUT = 6  # tokens of a solution that a prompt may hold
MOST_ROWS = 500  # of a call
MOST_SCORES = 20_000_000  # probabilities of a call's step; they decide how many rows it has
NODES_PER_ROW = 3
PROMPTS_PER_CALL = 10
ROUNDING = 1e-5  # of a law in float32
WHOLE_LAW = {"temperature": 1.0, "top_p": 1.0}  # the softmax


def fixed_prompts(engine: stand.Engine, count: int, law: dict[str, float], *, seed: int = 0) -> list[list[int]]:
    """Token ids of `count` held-out problems, each with the first tokens of a solution by the model itself."""
    cuts = random.Random(f"cuts {seed}")
    prompts = problem_prompts(engine.tokenizer, count, seed=seed)
    drawn = engine.generate(input_ids=prompts, max_new_tokens=LONGEST_CUT, **settings(law), seed=seed, draft=False)
    return [
        prompt + solution[: cuts.randrange(LONGEST_CUT)]
        for prompt, solution in zip(prompts, drawn.token_ids, strict=True)
    ]


def problem_prompts(tokenizer, count: int, *, seed: int) -> list[list[int]]:
    """Of the bundled model's own problems, or of the word problems for a model with a chat template."""
    if is_bundled(tokenizer):
        return [tokenizer(write_prompt(task.statement))["input_ids"] for task in generated_tasks(count, seed=seed)]
    tasks = read_tasks(str(WORD_PROBLEMS), count=count)
    return [prompt_ids(tokenizer, task, BOXED_INSTRUCTION) for task in tasks]


def is_bundled(tokenizer) -> bool:
    return Path(tokenizer.name_or_path).resolve() == REASONER


def settings(law: dict[str, float]) -> dict[str, object]:
    """Arguments of `generate` that mean this law; transformers keeps 50 tokens where top_k is not given."""
    return {**law, "top_k": 0}


def rows_per_call(model) -> int:
    return max(1, min(MOST_ROWS, MOST_SCORES // ((NODES_PER_ROW + 1) * model.config.vocab_size)))


def continuations(
    engine: stand.Engine,
    prompt: Sequence[int],
    rows: int,
    law: dict[str, float],
    *,
    tokens: int,
    seed: int,
    draft: bool,
) -> tuple[Counter, stand.Stats]:
    """How often each continuation came; the drafter is left as it is."""
    counter, stats, most = Counter(), stand.Stats(), rows_per_call(engine.model)
    for start in range(0, rows, most):
        output = engine.generate(
            input_ids=[list(prompt)],
            num_return_sequences=min(most, rows - start),
            max_new_tokens=tokens,
            **settings(law),
            seed=seed + start // most,
            draft=draft,
            learn=False,
        )
        counter.update(map(tuple, output.token_ids))
        stats += output.stats
    return counter, stats


def shipped_head(drafter: str) -> Path:
    return DRAFTERS / ("streams" if drafter.startswith("streams") else "eagle")


def trained_part(model, options: argparse.Namespace) -> TrainedPart | None:
    """What the drafter needs beside the lookup. Raises ValueError where --head names another model's, or none."""
    if options.drafter in HEADLESS:
        return None
    kind = Streams if options.drafter.startswith("streams") else EagleHead
    return load_trained(kind.load, model, options.head, option="--head", model=options.model)


def new_drafter(
    model, law: dict[str, float], *, kind: str, drafter: str, head: TrainedPart | Path | None
) -> stand.Drafter:
    budget, temperature = NODES_PER_ROW * rows_per_call(model), law["temperature"]
    if drafter == "eagle":
        return stand.EagleDrafter(head, budget=budget, temperature=temperature)
    if drafter == "streams":
        return stand.StreamingDrafter(head, budget=budget, temperature=temperature)
    makers = {"blended": stand.EagleLaws, "streams-blended": stand.StreamLaws}
    source = makers[drafter](head, temperature=temperature) if drafter in makers else None
    source = stand.NeighbourLaws() if drafter == "neighbours" else source
    return stand.BlendedDrafter(budget=budget, kind=kind, source=source)


def warmed_up(
    model, tokenizer, prompts: Sequence[Sequence[int]], law: dict[str, float], *, verifier: str, drafter: stand.Drafter
) -> stand.Engine:
    """An engine whose drafter has seen 64 continuations of every prompt."""
    rule = stand.verifiers.get_verifier(verifier, allow_lossy=True)
    engine = stand.wrap(model, tokenizer, drafter=drafter, verifier=rule)
    for prompt in prompts:
        engine.generate(input_ids=[prompt], num_return_sequences=64, max_new_tokens=12, **settings(law), seed=999)
    return engine


def new_engine(
    model,
    tokenizer,
    prompts,
    law,
    *,
    verifier: str,
    kind: str,
    drafter: str = "lookup",
    head: TrainedPart | Path | None = None,
) -> stand.Engine:
    """What draws the continuations of one arm; kind "none" is the arm without drafts."""
    if kind == "none":
        return stand.wrap(model, tokenizer, verifier=verifier)
    drafts = new_drafter(model, law, kind=kind, drafter=drafter, head=head or shipped_head(drafter))
    return warmed_up(model, tokenizer, prompts, law, verifier=verifier, drafter=drafts)


def law_of(model, prompt: Sequence[int], law: dict[str, float], *, tokens: int, rows: int) -> ContinuationLaw:
    """The exact law of plain sampling, in cells that `rows` continuations can test."""
    ends = np.atleast_1d(model.generation_config.eos_token_id).tolist()
    return continuation_law(model, prompt, tokens=tokens, smallest=SMALLEST_CELL / rows, **law, ends=ends)


class KeptCounts:
    """Cells counted so far, by arm and prompt, in a file of JSON lines; without a file nothing is kept."""

    def __init__(self, path: Path | None, conditions: dict[str, object]) -> None:
        self._lines, self._conditions = JsonLines(path, "--kept", goes_on=True), conditions
        self._known = self._lines.earlier

    def get(self, arm: list[str], place: int) -> dict | None:
        wanted = {"conditions": self._conditions, "arm": arm, "prompt": place}
        return next((line for line in self._known if {**line, **wanted} == line), None)

    def add(self, arm: list[str], place: int, cells: Counter, stats: stand.Stats) -> dict:
        line = {
            "conditions": self._conditions,
            "arm": arm,
            "prompt": place,
            "cells": [[list(cell), count] for cell, count in cells.items()],
            "steps": stats.num_steps,
            "tokens": stats.num_tokens,
        }
        self._lines.add(line)
        return line


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
    """Whether rounding explains the first difference of two rows: both tokens win if the noise moves by ROUNDING."""
    place = next(place for place, pair in enumerate(zip(one, two, strict=False)) if pair[0] != pair[1])
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


def names(text: str) -> list[str]:
    return text.split(",")


def options_of_both(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "check",
        choices=("law", "tokens"),
        help="law: frequencies against the exact law; tokens: equal tokens with equal seeds",
    )
    parser.add_argument(
        "--verifiers", type=names, help="rules (default: traversal,match of `law`, match,coupled of `tokens`)"
    )
    parser.add_argument(
        "--prompts",
        type=positive_integer,
        help="fixed prompts (default: 10 of `law`, 50 of `tokens`, 12 of another model)",
    )
    parser.add_argument("--tokens", type=positive_integer, help="new tokens (default: 4 of `law`, 256 of `tokens`)")
    parser.add_argument(
        "--temperature", type=positive_number, help="of the draws (default: 1, other models than the bundled one 0.8)"
    )
    parser.add_argument("--top-p", type=share, help="of the draws (default: none, other models 0.95)")
    parser.add_argument(
        "--threads", type=positive_integer, default=torch.get_num_threads(), help="CPU threads (default: torch's)"
    )
    parser.add_argument("--model", default=str(REASONER), help="folder, hub id or short name (default: bundled model)")


def options_of_one(parser: argparse.ArgumentParser) -> None:
    """Those that one check alone has; `OWN` names their defaults."""
    parser.add_argument("--kinds", type=names, help="draft kinds for `law` (default: sampled,mixed)")
    parser.add_argument("--drafter", choices=DRAFTER_NAMES, help="of `law` (default: lookup)")
    parser.add_argument("--head", type=Path, help="EAGLE-1 head or streams (default: those shipped)")
    parser.add_argument(
        "--continuations", type=positive_integer, help="of one arm of `law`, all prompts together (default: 20000)"
    )
    parser.add_argument("--sample", type=positive_integer, help="2, 3, ...: other seeds of `law`, for a further test")
    parser.add_argument(
        "--no-plain", action="store_true", default=None, help="leave the arm of `law` without drafts out"
    )
    parser.add_argument("--level", type=probability, help="p-values of `law` below it are refused (default: 1e-4)")
    parser.add_argument("--kept", type=Path, help="file of finished counts of `law`, read and added to")
    parser.add_argument("--rows", type=positive_integer, help="rows per prompt in `tokens` (default: 16)")
    parser.add_argument(
        "--budget", type=whole_number, help="draft nodes of all rows together in `tokens` (default: 32)"
    )


def fill_own(parser: argparse.ArgumentParser, options: argparse.Namespace) -> None:
    """Refuse what the chosen check, or drafter, would ignore; then its defaults."""
    for check, own in OWN.items():
        for name, value in own.items():
            if getattr(options, name) is None:
                setattr(options, name, value)
            elif check != options.check:
                parser.error(f"--{name.replace('_', '-')} has no effect on `{options.check}`, but on `{check}`")
    if options.drafter in ("eagle", "streams"):
        if options.kinds not in (None, ["sampled"]):
            parser.error(f"--kinds must be sampled with --drafter {options.drafter}, got {','.join(options.kinds)}")
        options.kinds = ["sampled"]
    if options.drafter in HEADLESS and options.head is not None:
        parser.error("--head has no effect without a --drafter that has one, such as blended; give both")
    options.kinds = options.kinds or ["sampled", "mixed"]
    options.head = options.head or shipped_head(options.drafter)


def arguments(command_line: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options_of_both(parser)
    options_of_one(parser)
    options = parser.parse_args(command_line)
    fill_own(parser, options)
    is_law, bundled = options.check == "law", Path(options.model).resolve() == REASONER
    options.verifiers = options.verifiers or (["traversal", "match"] if is_law else list(REPEATING))
    known = stand.verifiers.verifier_names() if is_law else REPEATING
    for option, given, allowed in (("--verifiers", options.verifiers, known), ("--kinds", options.kinds, KINDS)):
        if unknown := [name for name in given if name not in allowed]:
            parser.error(f"{option} of `{options.check}` must be among {', '.join(allowed)}, got {', '.join(unknown)}")
    options.prompts = options.prompts or (10 if is_law else 50 if bundled else 12)
    options.tokens = options.tokens or (4 if is_law else 256)
    if options.temperature is None:
        options.temperature = 1.0 if bundled else 0.8
    if options.top_p is None:
        options.top_p = 1.0 if bundled else 0.95
    return options


def run(options: argparse.Namespace) -> bool:
    """Whether all is as it should be. Raises ValueError where that is not known, since the control has passed."""
    torch.set_num_threads(options.threads)
    check_writable(options.kept, "--kept")
    model = from_model(options.model, AutoModelForCausalLM, dtype=torch.float32).eval()
    tokenizer = from_model(options.model, AutoTokenizer)
    result = (check_law if options.check == "law" else check_tokens)(model, tokenizer, options)
    print(json.dumps({**result, "model": options.model, "torch": torch.__version__}))
    few = [arm["verifier"] for arm in result["arms"] if arm.get("degrees_of_freedom") == 0]
    if few:
        raise ValueError(
            f"continuations must fill at least two cells, got one of {', '.join(few)}: nothing was tested; raise "
            f"--continuations ({options.continuations})"
        )
    wrong = [arm["verifier"] for arm in result["arms"] if not arm["as_it_should"]]
    if wrong and set(wrong) <= {CONTROL}:
        raise ValueError(
            f"the lossy rule {CONTROL} must be refused, got a p-value of at least --level: the test is blind; raise "
            f"--continuations ({options.continuations})"
        )
    return not wrong


def main(command_line: Sequence[str] | None = None) -> int:
    options, results = arguments(command_line), []
    status = run_command("check_law", lambda interruption: results.append(run(options)))
    return status or int(not results[0])


if __name__ == "__main__":
    sys.exit(main())
