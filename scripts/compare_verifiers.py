"""Which verifier, on which drafts? Tokens per step of the bundled model under every rule, on the same trajectories.

    python scripts/compare_verifiers.py                            # everything, into docs/figures/compare_verifiers.*
    python scripts/compare_verifiers.py --parts chains,synthetic --prompts 8 --output /tmp/chains

chains: `token` and `block` on chains of 4, 6 and 8 tokens from the two draft models of scripts/drafters, and from the
  good one with noise on its logits, which gives qualities in between.
shape: every tree rule on a `LookupTree` that fills a fixed shape with children of every kind.
blended: the rules that a `BlendedLookup` admits, on drafts grown under the engine's budget.
own: rules of `blended` again, each along the steps that it takes itself, on more samples of more problems.
synthetic: `token` and `block` on random pairs of laws with a known distance, all drafts enumerated.

All runs of one temperature decode the same tokens: `coupled` drives them, whose output depends on the seed alone. At
every step each rule is asked how many tokens it keeps of the draft on average (verifier_parts/expected_kept.py), so
that rules on one kind of draft are compared without sampling noise. A rule that keeps more then meets the hard places
more often than `coupled` does: `own` is what counts in the end, and needs more samples, since other tokens come out.
On drafts with noise of their own `coupled` keeps what `match` does; on coupled ones its count is taken.

The lookups have read other problems before and go on learning, as in use. A step counts where ROOM tokens are
left, so that limits do not blur the figures. Standard errors are bootstrapped over prompts, gains paired by prompt.
Tables to stdout, JSON and a plot to --output. What the JSON holds already, with the same settings, is not run
anew: give --fresh once the code has changed.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
import tempfile
from dataclasses import asdict
from functools import cache
from pathlib import Path

import measuring.interruption  # noqa: F401  (before what loads slowly)
import torch
import transformers
from measuring.interruption import run_command
from measuring.option_types import count_list, positive_integer
from measuring.output_file import check_same_settings, check_writable, replace_text
from measuring.progress import Progress, say
from verifier_parts.asking_verifier import ArmVerifier
from verifier_parts.drafters import GrowingDrafter, NoisyDrafter, RoomDrafter
from verifier_parts.drafts_and_rules import DRAFT_MODELS, GAMMAS, PARTS, TEMPERATURES, Arm, Size, all_arms, sized
from verifier_parts.synthetic_chains import synthetic_gains
from verifier_parts.verifier_tables import add_estimates, plot, tables
from workloads.problems import held_out_problems, write_prompt

import stand
from stand.trees import BlendedLookup, LookupTree, TreeShape, vocabulary_fingerprint

SCRIPTS = Path(__file__).resolve().parent
ROOM = 12
WARM_UP_SEED = 77  # problems that the lookups have read before


@cache
def load_model(folder: str):
    model = transformers.AutoModelForCausalLM.from_pretrained(SCRIPTS / folder, dtype=torch.float32)
    return model.eval()


@cache
def load_tokenizer():
    return transformers.AutoTokenizer.from_pretrained(SCRIPTS / "reasoner")


@cache
def prompt_texts(count: int, seed: int) -> list[str]:
    return [write_prompt(problem.problem) for problem in held_out_problems(count, seed=seed)]


def lookup_drafter(part: str, size: Size, kind: str, lookup=None) -> stand.FixedShapeDrafter | GrowingDrafter:
    fingerprint = vocabulary_fingerprint(load_tokenizer().get_vocab())
    if part == "shape":
        shape = TreeShape.from_branching(size.branching)
        return stand.FixedShapeDrafter(lookup or LookupTree(fingerprint=fingerprint), shape, kind=kind)
    return GrowingDrafter(lookup or BlendedLookup(fingerprint=fingerprint), budget=0, kind=kind)


def copy_lookup(lookup: LookupTree | BlendedLookup) -> LookupTree | BlendedLookup:
    """The same, through a file: what was learned before counts as learned elsewhere."""
    with tempfile.TemporaryDirectory() as folder:
        lookup.save(Path(folder) / "lookup")
        return type(lookup).load(Path(folder) / "lookup")


@cache
def warm_lookup(part: str, size: Size, temperature: float) -> LookupTree | BlendedLookup:
    """A tree that has read drafts of as many other problems."""
    drafter = lookup_drafter(part, size, "sampled")
    engine = stand.wrap(load_model("reasoner"), load_tokenizer(), verifier="match", drafter=drafter)
    engine.generate(
        prompt_texts(size.prompts, WARM_UP_SEED), num_return_sequences=1, max_new_tokens=size.tokens,
        temperature=temperature, top_k=0, seed=WARM_UP_SEED,
    )  # fmt: skip
    return drafter.lookup


def make_drafter(arm: Arm, size: Size) -> stand.Drafter:
    if arm.part == "chains":
        folder, noise = DRAFT_MODELS[arm.drafts]
        model = load_model(f"drafters/{folder}")
        return NoisyDrafter(model, noise=noise, gamma=arm.gamma, temperature=arm.temperature)
    part = "shape" if arm.part == "shape" else "blended"
    return lookup_drafter(part, size, arm.drafts, copy_lookup(warm_lookup(part, size, arm.temperature)))


def run_arm(arm: Arm, size: Size, seed: int) -> dict[str, object]:
    """Per prompt: steps, and the tokens that every rule gets from them on average."""
    drafter = RoomDrafter(make_drafter(arm, size), ROOM)
    engine = stand.wrap(load_model("reasoner"), load_tokenizer(), verifier=arm.driver, drafter=drafter)
    asking = ArmVerifier(arm, size, drafter)
    engine.verifier = asking
    output = engine.generate(
        prompt_texts(size.prompts, seed), num_return_sequences=size.rows, max_new_tokens=size.tokens,
        temperature=arm.temperature, top_k=0, seed=seed,
    )  # fmt: skip
    checksum = sum(place * token for row in output.token_ids for place, token in enumerate(row, 1)) % 2**31
    return {**asdict(arm), **asking.result(), "output": checksum}


@torch.inference_mode()
def mean_entropy(size: Size, temperature: float, seed: int) -> float:
    """Nats per token of the target's law along its own samples: how much room a ratio rule has."""
    model, tokenizer = load_model("reasoner"), load_tokenizer()
    texts = prompt_texts(size.prompts, seed)
    engine = stand.wrap(model, tokenizer, verifier="match")
    output = engine.generate(
        texts, max_new_tokens=size.tokens, temperature=temperature, top_k=0, seed=seed, draft=False
    )
    entropies = []
    for text, token_ids in zip(texts, output.token_ids, strict=True):
        prompt = tokenizer(text)["input_ids"]
        logits = model(torch.tensor([prompt + token_ids]), use_cache=False).logits[0, len(prompt) - 1 : -1]
        entropies.append(torch.distributions.Categorical(logits=logits.double() / temperature).entropy())
    return float(torch.cat(entropies).mean())


def run_all(arms: list[Arm], settings: dict, output: Path) -> list[dict[str, object]]:
    """Every arm in turn, kept in the JSON file `output` as it comes; progress to stderr."""
    known = known_results(settings, output)
    size = Size(**{key: settings[key] for key in Size.__dataclass_fields__})
    new = [arm for arm in arms if repr(arm) not in known]
    say(f"{len(arms)} arms, {len(arms) - len(new)} of them in {output} already; the first one warms the lookups up")
    progress, synthetic = Progress(len(new)), earlier_synthetic(output)
    for arm in new:
        result = {**run_arm(arm, sized(arm, size), settings["seed"] + arm.seed), "arm": repr(arm)}
        known[repr(arm)] = result
        document = {"settings": settings, "synthetic": synthetic, "arms": list(known.values())}
        replace_text(output, json.dumps(document))
        means = {rule: round(sum(tokens) / sum(result["steps"]), 3) for rule, tokens in result["tokens"].items()}
        progress.add(1, f"{arm.part} {arm.drafts} T {arm.temperature} gamma {arm.gamma}: {means}")
    return [known[repr(arm)] for arm in all_arms(list(PARTS)) if repr(arm) in known]


def earlier_synthetic(output: Path) -> list[dict[str, object]]:
    """The synthetic pairs of an earlier run, which no other part changes."""
    return json.loads(output.read_text(encoding="utf-8")).get("synthetic", []) if output.exists() else []


def known_results(settings: dict, output: Path) -> dict[str, dict[str, object]]:
    """What an earlier run left in `output`, by arm. Raises ValueError where its settings were others."""
    if not output.exists():
        return {}
    document, remedy = earlier_document(output), "keep them, name another --output, or begin anew with --fresh"
    check_same_settings(output, document["settings"], json.loads(json.dumps(settings)), remedy=remedy)
    return {result["arm"]: result for result in document["arms"]}


def earlier_document(output: Path) -> dict[str, object]:
    """Raises ValueError where `output` holds something else than this command writes."""
    try:
        document = json.loads(output.read_text(encoding="utf-8"))
        if isinstance(document, dict) and {"settings", "arms"} <= set(document):
            return document
        error = "no settings and arms"
    except ValueError as reason:
        error = str(reason)
    raise ValueError(f"--output must name a file of this command, got {output} ({error}); name another")


def different_outputs(results: list[dict[str, object]]) -> int:
    """Runs driven by `coupled` that did not decode the same tokens as the first of their temperature; 0 is expected."""
    first: dict[tuple, object] = {}
    keys = [(result["part"] == "chains", result["temperature"]) for result in results]
    shared = [result["driver"] == "coupled" for result in results]
    for key, result, counts in zip(keys, results, shared, strict=True):
        if counts:
            first.setdefault(key, result["output"])
    return sum(
        counts and result["output"] != first[key] for key, result, counts in zip(keys, results, shared, strict=True)
    )


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--parts",
        type=lambda text: text.split(","),
        default=list(PARTS),
        help="which comparisons, with commas between (default: all)",
    )
    parser.add_argument("--prompts", type=positive_integer, default=24, help="held-out problems (%(default)s)")
    parser.add_argument("--rows", type=positive_integer, default=2, help="samples per problem (%(default)s)")
    parser.add_argument("--tokens", type=positive_integer, default=128, help="new tokens per sample (%(default)s)")
    parser.add_argument(
        "--branching",
        type=lambda text: tuple(count_list(text)),
        default=(3, 2, 1, 1),
        help="children by depth of the fixed shape (default: 3,2,1,1)",
    )
    parser.add_argument(
        "--own-rows",
        type=positive_integer,
        default=8,
        help="samples per problem along a rule's own steps (%(default)s)",
    )
    parser.add_argument(
        "--worlds", type=positive_integer, default=20, help="random pairs of laws per distance (%(default)s)"
    )
    parser.add_argument("--seed", type=int, default=0, help="of draws and drafts (%(default)s)")
    parser.add_argument("--fresh", action="store_true", help="forget what the JSON of --output holds")
    parser.add_argument(
        "--output",
        type=Path,
        default=SCRIPTS.parent / "docs" / "figures" / "compare_verifiers",
        help="path of the .json and .png files, without ending (default: docs/figures/compare_verifiers)",
    )
    options = parser.parse_args()
    if options.tokens <= ROOM:
        parser.error(f"--tokens must be above {ROOM}: steps count where so many are to come, got {options.tokens}")
    if options.worlds < 2:
        parser.error("--worlds must be at least 2, since their spread is told, got 1")
    if unknown := set(options.parts) - set(PARTS):
        parser.error(f"--parts must be among {', '.join(PARTS)}, got {', '.join(sorted(unknown))}")
    try:
        for suffix in (".json", ".png"):
            check_writable(options.output.with_suffix(suffix), "--output")
    except ValueError as error:
        parser.error(str(error))
    return options


def main() -> int:
    options = arguments()
    return run_command("compare_verifiers", lambda interruption: run(options))


def run(options: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    size = Size(options.prompts, options.rows, options.tokens, options.branching, options.own_rows)
    settings, output = {**asdict(size), "seed": options.seed}, options.output.with_suffix(".json")
    if options.fresh:
        output.unlink(missing_ok=True)
    results = [add_estimates(result) for result in run_all(list(all_arms(options.parts)), settings, output)]
    say("measuring the target's entropy" + (" and the synthetic pairs" if "synthetic" in options.parts else ""))
    synthetic = synthetic_gains(options.worlds, GAMMAS) if "synthetic" in options.parts else earlier_synthetic(output)
    document = {
        "settings": settings,
        "versions": {"stand": stand.__version__, "torch": torch.__version__, "python": platform.python_version()},
        "target_entropy_nats": {str(heat): mean_entropy(size, heat, options.seed) for heat in TEMPERATURES},
        "different_outputs": different_outputs(results),
        "synthetic": synthetic,
        "arms": results,
    }
    replace_text(output, json.dumps(document) + "\n")
    print(tables(document))
    plot(options.output.with_suffix(".png"), document)


if __name__ == "__main__":
    sys.exit(main())
