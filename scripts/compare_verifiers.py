"""Which verifier, on which drafts? Tokens per step of the bundled model under every rule, on equal prompts and seeds.

    python scripts/compare_verifiers.py                          # both parts, into docs/compare_verifiers.*
    python scripts/compare_verifiers.py --parts chains --prompts 8

chains: `token` and `block` on chains of 4, 6 and 8 tokens from the two draft models of scripts/drafters.
lookup: every tree rule on the lookup tree, whose children are sampled, mixed or deterministic. The tree has read other
problems before and goes on learning, as in use; every rule starts from the same copy.

A step counts where the row could have taken the whole draft, so that neither ends nor limits blur the figures. Standard
errors are bootstrapped over prompts; gains are paired by prompt. Tables to stdout, JSON and a plot beside --output.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import platform
import sys
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path

import numpy as np
import torch
import transformers
from problems import held_out_problems, write_prompt
from text_table import format_table

import stand
from stand.trees import LookupTree, TreeShape, vocabulary_fingerprint

SCRIPTS = Path(__file__).resolve().parent
DRAFTS, GAMMAS, TEMPERATURES = ("good", "weak"), (4, 6, 8), (0.2, 0.6, 1.0)
ANY_RULES = ("traversal", "match", "coupled", "rrs")
RULES_BY_KIND = {
    "sampled": (*ANY_RULES, "ranked_traversal", "ot_traversal"),
    "mixed": ANY_RULES,  # ranked and transport traversal decide as traversal where one child alone is drawn
    "deterministic": ("traversal", "match", "coupled"),  # rrs decides as traversal where none is
}
REFERENCE = ("sampled", "traversal")  # what gains on the lookup tree are told against
STYLES = {"good": "-", "weak": ":"}
RESAMPLES = 2000
WARM_UP_SEED = 77  # problems that the lookup tree has read before


@dataclass(frozen=True, slots=True)
class Arm:
    """One rule on one kind of draft at one temperature. `drafts` is a draft model or a kind of children."""

    part: str  # "chains" or "lookup"
    drafts: str
    verifier: str
    temperature: float
    gamma: int  # depth of the draft


@dataclass(frozen=True, slots=True)
class Size:
    prompts: int
    rows: int  # samples per prompt
    tokens: int  # new tokens per sample at most
    branching: tuple[int, ...]  # shape of the lookup tree's drafts


class Recorder:
    """A drafter that notes, per row, the steps in which the whole draft could have been kept and what they gave."""

    def __init__(self, drafter: stand.Drafter, depth: int, num_rows: int) -> None:
        self.drafter = drafter
        self.depth = depth
        self.row_size = drafter.row_size
        self.steps = np.zeros(num_rows, dtype=np.int64)
        self.tokens = np.zeros(num_rows, dtype=np.int64)
        self._begun: dict[int, int] = {}  # row: length of its history when its counted step began

    def draft(self, histories, *, rows, max_depths, **others):
        for row, history, room in zip(rows.tolist(), histories, max_depths.tolist(), strict=True):
            if row in self._begun:
                self.steps[row] += 1
                self.tokens[row] += len(history) - self._begun.pop(row)
            if room > self.depth:
                self._begun[row] = len(history)
        return self.drafter.draft(histories, rows=rows, max_depths=max_depths, **others)

    def learn_prompt(self, token_ids, **others) -> None:
        self.drafter.learn_prompt(token_ids, **others)

    def learn(self, *arguments, **others) -> None:
        self.drafter.learn(*arguments, **others)


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


@cache
def warm_lookup(size: Size, temperature: float) -> LookupTree:
    """A tree that has read drafts of as many other problems; the same in every process."""
    engine = stand.wrap(load_model("reasoner"), load_tokenizer(), verifier="match", drafter=lookup_drafter(size))
    engine.generate(
        prompt_texts(size.prompts, WARM_UP_SEED), num_return_sequences=1, max_new_tokens=size.tokens,
        temperature=temperature, seed=WARM_UP_SEED,
    )  # fmt: skip
    return engine.lookup


def lookup_drafter(size: Size, lookup: LookupTree | None = None, kind: str = "sampled") -> stand.LookupDrafter:
    lookup = lookup or LookupTree(fingerprint=vocabulary_fingerprint(load_tokenizer().get_vocab()))
    return stand.LookupDrafter(lookup, TreeShape.from_branching(size.branching), kind=kind)


def make_drafter(arm: Arm, size: Size) -> stand.Drafter:
    if arm.part == "chains":
        model = load_model(f"drafters/{arm.drafts}")
        return stand.ModelDrafter(model, gamma=arm.gamma, temperature=arm.temperature)
    return lookup_drafter(size, warm_lookup(size, arm.temperature).copy(), arm.drafts)


def run_arm(arm: Arm, size: Size, seed: int) -> dict[str, object]:
    """Per prompt how many tokens came in how many steps."""
    torch.set_num_threads(1)
    recorder = Recorder(make_drafter(arm, size), arm.gamma, size.prompts * size.rows)
    engine = stand.wrap(load_model("reasoner"), load_tokenizer(), verifier=arm.verifier, drafter=recorder)
    output = engine.generate(
        prompt_texts(size.prompts, seed), num_return_sequences=size.rows, max_new_tokens=size.tokens,
        temperature=arm.temperature, seed=seed,
    )  # fmt: skip
    per_prompt = (size.prompts, size.rows)
    is_chain = arm.part == "chains" and arm.verifier == "token"
    return {
        **asdict(arm),
        "tokens": recorder.tokens.reshape(per_prompt).sum(axis=1).tolist(),
        "steps": recorder.steps.reshape(per_prompt).sum(axis=1).tolist(),
        "alpha": stand.estimate_alpha(output.stats, arm.gamma) if is_chain else None,
        "verify_share": output.stats.seconds["verify"] / sum(output.stats.seconds.values()),
    }


@torch.inference_mode()
def mean_entropy(size: Size, temperature: float, seed: int) -> float:
    """Nats per token of the target's law along its own samples: how much room a ratio rule has."""
    torch.set_num_threads(1)
    model, tokenizer = load_model("reasoner"), load_tokenizer()
    texts = prompt_texts(size.prompts, seed)
    engine = stand.wrap(model, tokenizer, verifier="match")
    output = engine.generate(texts, max_new_tokens=size.tokens, temperature=temperature, seed=seed, draft=False)
    entropies = []
    for text, token_ids in zip(texts, output.token_ids, strict=True):
        prompt = tokenizer(text)["input_ids"]
        logits = model(torch.tensor([prompt + token_ids]), use_cache=False).logits[0, len(prompt) - 1 : -1]
        entropies.append(torch.distributions.Categorical(logits=logits.double() / temperature).entropy())
    return float(torch.cat(entropies).mean())


def all_arms(parts: list[str], depth: int) -> list[Arm]:
    arms = []
    if "chains" in parts:
        arms += [
            Arm("chains", drafts, verifier, temperature, gamma)
            for drafts in DRAFTS
            for temperature in TEMPERATURES
            for gamma in GAMMAS
            for verifier in ("token", "block")
        ]
    if "lookup" in parts:
        arms += [
            Arm("lookup", kind, verifier, temperature, depth)
            for temperature in TEMPERATURES
            for kind, rules in RULES_BY_KIND.items()
            for verifier in rules
        ]
    return arms


def run_all(arms: list[Arm], size: Size, *, seed: int, processes: int) -> list[dict[str, object]]:
    """Every arm, `processes` at a time; progress to stderr."""
    results = []
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(processes, mp_context=context) as pool:
        waiting = [pool.submit(run_arm, arm, size, seed) for arm in arms]
        for number, future in enumerate(waiting, 1):
            result = future.result()
            results.append({**result, **estimate(result)})
            print(f"{number}/{len(arms)} {result['part']} {result['drafts']} {result['verifier']} gamma "
                  f"{result['gamma']} T {result['temperature']}: {results[-1]['tokens_per_step']:.3f}",
                  file=sys.stderr, flush=True)  # fmt: skip
    return results


def resampled(result: dict[str, object]) -> np.ndarray:
    """[1 + RESAMPLES] tokens per step: of all prompts, then of prompts drawn with replacement (always the same)."""
    counts = np.array([result["tokens"], result["steps"]], dtype=np.float64)
    num_prompts = counts.shape[1]
    drawn = np.random.default_rng(0).integers(0, num_prompts, (RESAMPLES, num_prompts))
    totals = counts[:, np.vstack([np.arange(num_prompts), drawn])].sum(axis=2)
    return totals[0] / totals[1]


def estimate(result: dict[str, object]) -> dict[str, float]:
    """Tokens per step and its standard error."""
    rates = resampled(result)
    return {"tokens_per_step": float(rates[0]), "standard_error": float(rates[1:].std())}


def gain(result: dict[str, object], over: dict[str, object]) -> tuple[float, float]:
    """(per cent more tokens per step, standard error), paired by prompt."""
    ratios = 100 * (resampled(result) / resampled(over) - 1)
    return float(ratios[0]), float(ratios[1:].std())


def chain_gains(results: list[dict[str, object]]) -> list[dict[str, object]]:
    """What `block` gains over `token`, per draft model, temperature and gamma."""
    found = {(one["drafts"], one["temperature"], one["gamma"], one["verifier"]): one for one in results}
    gains = []
    for drafts, temperature, gamma, verifier in found:
        if verifier == "block":
            token, block = (found[drafts, temperature, gamma, rule] for rule in ("token", "block"))
            percent, error = gain(block, token)
            gains.append({
                "drafts": drafts, "temperature": temperature, "gamma": gamma, "alpha": token["alpha"],
                "token": token["tokens_per_step"], "token_error": token["standard_error"],
                "block": block["tokens_per_step"], "block_error": block["standard_error"],
                "gain": percent, "gain_error": error,
            })  # fmt: skip
    return gains


def lookup_gains(results: list[dict[str, object]]) -> list[dict[str, object]]:
    """What every kind and rule gains over REFERENCE at the same temperature."""
    found = {(one["temperature"], one["drafts"], one["verifier"]): one for one in results}
    gains = []
    for (temperature, kind, verifier), one in found.items():
        percent, error = gain(one, found[(temperature, *REFERENCE)])
        gains.append({
            "temperature": temperature, "kind": kind, "verifier": verifier, "tokens_per_step": one["tokens_per_step"],
            "standard_error": one["standard_error"], "gain": percent, "gain_error": error,
            "verify_share": one["verify_share"],
        })  # fmt: skip
    return gains


def with_error(value: float, error: float, sign: str = "") -> str:
    return f"{value:{sign}.2f} ± {error:.2f}"


def chain_table(gains: list[dict[str, object]]) -> str:
    header = ("draft", "T", "gamma", "alpha", "token", "block", "block gains %")
    rows = [
        (one["drafts"], str(one["temperature"]), one["gamma"], one["alpha"],
         with_error(one["token"], one["token_error"]), with_error(one["block"], one["block_error"]),
         with_error(one["gain"], one["gain_error"], "+"))
        for one in gains
    ]  # fmt: skip
    return format_table(header, rows)


def lookup_table(gains: list[dict[str, object]]) -> str:
    header = ("kind", "rule", "T", "tokens per step", f"% over {'+'.join(REFERENCE)}")
    rows = [
        (one["kind"], one["verifier"], str(one["temperature"]),
         with_error(one["tokens_per_step"], one["standard_error"]), with_error(one["gain"], one["gain_error"], "+"))
        for one in gains
    ]  # fmt: skip
    return format_table(header, rows)


def plot(path: Path, chains: list[dict[str, object]], lookup: list[dict[str, object]]) -> None:
    """Left: what block gains on chains. Right: tokens per step on the lookup tree."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(11, 4.2), width_ratios=(1, 1.6))
    for drafts in DRAFTS:
        for place, temperature in enumerate(TEMPERATURES):
            line = [one for one in chains if (one["drafts"], one["temperature"]) == (drafts, temperature)]
            left.errorbar([one["gamma"] for one in line], [one["gain"] for one in line],
                          [one["gain_error"] for one in line], capsize=2, color=f"C{place}",
                          linestyle=STYLES[drafts], label=f"{drafts}, T = {temperature}")  # fmt: skip
    left.axhline(0, color="grey", linewidth=0.6)
    left.set(xlabel="gamma", xticks=GAMMAS, ylabel="block over token, %", title="chains from a draft model")
    left.legend(fontsize=7)
    pairs = [(kind, rule) for kind, rules in RULES_BY_KIND.items() for rule in rules]
    for place, temperature in enumerate(TEMPERATURES):
        points = {(one["kind"], one["verifier"]): one for one in lookup if one["temperature"] == temperature}
        drawn = [(x, points[pair]) for x, pair in enumerate(pairs) if pair in points]
        right.errorbar([x for x, _ in drawn], [one["tokens_per_step"] for _, one in drawn],
                       [one["standard_error"] for _, one in drawn], fmt="o", capsize=2, color=f"C{place}",
                       label=f"T = {temperature}")  # fmt: skip
    right.set_xticks(range(len(pairs)), [f"{kind} {rule}" for kind, rule in pairs], rotation=60, ha="right", fontsize=7)
    right.set(ylabel="tokens per step", title="lookup tree")
    right.legend(fontsize=7)
    figure.tight_layout()
    figure.savefig(path, dpi=80)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", type=lambda text: text.split(","), default=["chains", "lookup"])
    parser.add_argument("--prompts", type=int, default=24)
    parser.add_argument("--rows", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--branching", type=lambda text: tuple(map(int, text.split(","))), default=(3, 2, 1, 1))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--output", type=Path, default=SCRIPTS.parent / "docs" / "compare_verifiers")
    return parser.parse_args()


def write_results(output: Path, size: Size, seed: int, results: list[dict[str, object]]) -> str:
    """JSON, tables and plot beside `output`; returns the tables."""
    chains = chain_gains([one for one in results if one["part"] == "chains"])
    lookup = lookup_gains([one for one in results if one["part"] == "lookup"])
    document = {
        "settings": {**asdict(size), "seed": seed},
        "versions": {"stand": stand.__version__, "torch": torch.__version__, "python": platform.python_version()},
        "target_entropy_nats": {str(heat): mean_entropy(size, heat, seed) for heat in TEMPERATURES},
        "chains": chains,
        "lookup": lookup,
        "arms": results,
    }
    output.with_suffix(".json").write_text(json.dumps(document) + "\n", encoding="utf-8")
    tables = "\n\n".join(make(gains) for make, gains in ((chain_table, chains), (lookup_table, lookup)) if gains)
    output.with_suffix(".txt").write_text(tables + "\n", encoding="utf-8")
    plot(output.with_suffix(".png"), chains, lookup)
    return tables


def main() -> None:
    options = arguments()
    os.environ["OMP_NUM_THREADS"] = "1"  # read by the processes that are about to start
    size = Size(options.prompts, options.rows, options.tokens, options.branching)
    arms = all_arms(options.parts, len(size.branching))
    results = run_all(arms, size, seed=options.seed, processes=options.processes)
    print(write_results(options.output, size, options.seed, results))


if __name__ == "__main__":
    main()
