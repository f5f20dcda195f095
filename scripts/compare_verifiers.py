"""Which verifier, on which drafts? Tokens per step of the bundled model under every rule, on the same trajectories.

    python scripts/compare_verifiers.py                            # everything, into docs/compare_verifiers.*
    python scripts/compare_verifiers.py --parts chains,synthetic --prompts 8 --output /tmp/chains

chains: `token` and `block` on chains of 4, 6 and 8 tokens from the two draft models of scripts/drafters, and from the
  good one with noise on its logits, which gives qualities in between.
shape: every tree rule on a `LookupTree` that fills a fixed shape with children of every kind.
blended: the rules that a `BlendedLookup` admits, on drafts grown under the engine's budget.
own: rules of `blended` again, each along the steps that it takes itself, on more samples of more problems.
synthetic: `token` and `block` on random pairs of laws with a known distance, all drafts enumerated.

All runs of one temperature decode the same tokens: `coupled` drives them, whose output depends on the seed alone. At
every step each rule is asked how many tokens it keeps of the draft on average (expected_kept.py), so that rules on one
kind of draft are compared without sampling noise. A rule that keeps more then meets the hard places more often than
`coupled` does: `own` is what counts in the end, and needs more samples, since other tokens come out. On drafts with
noise of their own `coupled` keeps what `match` does; on coupled ones its count is taken.

The lookup trees have read other problems before and go on learning, as in use. A step counts where ROOM tokens are
left, so that limits do not blur the figures. Standard errors are bootstrapped over prompts, gains paired by prompt.
Tables to stdout, JSON and a plot beside --output. What the JSON holds already, with the same settings, is not run
anew: give --fresh once the code has changed.
"""

from __future__ import annotations

import argparse
import itertools
import json
import platform
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from functools import cache
from pathlib import Path

import numpy as np
import torch
import transformers
from measuring.expected_kept import expected_kept
from measuring.verifier_tables import add_estimates, plot, tables
from workloads.problems import held_out_problems, write_prompt
from workloads.synthetic_chains import synthetic_gains

import stand
from stand.trees import BlendedLookup, DraftBatch, LookupTree, TreeShape, vocabulary_fingerprint
from stand.verifiers import TargetRows, Verdicts, Verifier, VerifierNoise, get_verifier

SCRIPTS = Path(__file__).resolve().parent
PARTS = ("chains", "shape", "blended", "own", "synthetic")
GAMMAS = (4, 6, 8)
TEMPERATURES = (0.2, 0.6, 1.0, 2.0)  # at 2 alone the bundled model is uncertain: 0.8 nats per token
DRAFT_MODELS = {"good": ("good", 0.0), "good+1": ("good", 1.0), "good+2": ("good", 2.0), "good+3": ("good", 3.0),
                "weak": ("weak", 0.0)}  # fmt: skip
SHAPE_RULES = {
    "sampled": ("traversal", "match", "rrs", "ranked_traversal", "ot_traversal"),
    "mixed": ("traversal", "match", "rrs"),  # ranked and transport traversal decide as traversal here
    "deterministic": ("traversal", "match"),
    "independent": ("traversal", "match", "specinfer", "spectr"),
    "coupled": ("coupled", "match"),
}
BLENDED_RULES = {kind: SHAPE_RULES[kind][:3] for kind in ("sampled", "mixed", "deterministic")}
OWN_RULES = {"sampled": ("traversal", "match"), "mixed": ("traversal", "match"), "deterministic": ("match",)}
OWN_SEEDS = 2
NODES_PER_ROW = 8  # of a blended draft: four rows share the default budget of 32
ROOM = 12
WARM_UP_SEED = 77  # problems that the lookup trees have read before


@dataclass(frozen=True, slots=True)
class Arm:
    """One kind of draft at one temperature, and the rules that are asked about it. `drafts`: a model or a kind."""

    part: str
    drafts: str
    temperature: float
    gamma: int  # depth of chains, 0 for trees
    rules: tuple[str, ...]
    driver: str = "coupled"
    seed: int = 0  # added to the run's: other problems, other noise


@dataclass(frozen=True, slots=True)
class Size:
    prompts: int
    rows: int  # samples per prompt
    tokens: int  # new tokens per sample at most
    branching: tuple[int, ...]  # the fixed shape
    own_rows: int  # samples per prompt where rules take steps of their own


class NoisyDrafter(stand.ModelDrafter):
    """A draft model whose logits get fresh Gaussian noise; the law that it records is the noisy one it draws from."""

    def __init__(self, model, *, noise: float, **settings) -> None:
        super().__init__(model, **settings)
        self.noise = noise
        self._generator = torch.Generator().manual_seed(0)

    def _draw(self, logits, points, *, is_greedy):
        noise = torch.randn(logits.shape, generator=self._generator)
        return super()._draw(logits + self.noise * self.temperature * noise, points, is_greedy=is_greedy)


class GrowingDrafter(stand.BlendedDrafter):
    """NODES_PER_ROW for every live row."""

    def draft(self, request: stand.DraftRequest) -> DraftBatch:
        self.budget = NODES_PER_ROW * len(request.histories)
        return super().draft(request)


class RoomDrafter(stand.Drafter):
    """Passes everything on and notes which rows have room for a whole draft."""

    def __init__(self, drafter: stand.Drafter) -> None:
        self.drafter = drafter
        self.num_candidates = drafter.num_candidates
        self.has_room = np.zeros(0, dtype=bool)

    def draft(self, request: stand.DraftRequest) -> DraftBatch:
        self.has_room = request.max_depths >= ROOM
        return self.drafter.draft(request)

    def learn_prompt(self, token_ids, *, problem) -> None:
        self.drafter.learn_prompt(token_ids, problem=problem)

    def learn(self, lesson: stand.Lesson) -> None:
        self.drafter.learn(lesson)


class AskingVerifier(Verifier):
    """Decides as `driver` and asks every rule what it keeps on average."""

    name = "asking"

    def __init__(self, arm: Arm, size: Size, drafter: RoomDrafter) -> None:
        self.driver = get_verifier(arm.driver)
        self.requires = self.driver.requires
        self.arm, self.size, self.drafter = arm, size, drafter
        self.steps = np.zeros(size.prompts)
        self.kept = {rule: np.zeros(size.prompts) for rule in arm.rules}
        self.nodes = 0
        self.first = np.zeros(2)  # drafted first tokens, and how many `token` keeps of them
        self.refused = np.zeros(2)  # chance that `token` refuses a token, and of that where p < q / 10

    def verify(self, batch: DraftBatch, target: TargetRows, noise: VerifierNoise) -> Verdicts:
        verdicts = self.driver.verify(batch, target, noise)
        counted = np.flatnonzero(self.drafter.has_room)
        prompts = noise.rows[counted] // self.size.rows
        np.add.at(self.steps, prompts, 1.0)
        self.nodes += int(batch.sizes[counted].sum()) - len(counted)
        for rule, kept in self.kept.items():
            if rule == "coupled":
                means = verdicts.num_accepted.astype(np.float64)
            else:
                means = expected_kept(get_verifier(rule), batch, target)
            np.add.at(kept, prompts, means[counted])
        if self.arm.part == "chains":
            self._watch_refusals(batch, target, counted)
        return verdicts

    def _watch_refusals(self, batch: DraftBatch, target: TargetRows, counted: np.ndarray) -> None:
        """Along every chain: where `token` refuses, and whether the target would have had the token at all."""
        thresholds, _, _ = get_verifier("token").thresholds(batch, target)
        for row in counted.tolist():
            reached = 1.0
            for place, chance in enumerate(thresholds[batch.offsets[row] + 1 : batch.offsets[row + 1]].tolist()):
                if place == 0:
                    self.first += (1.0, chance)
                self.refused += (reached * (1.0 - chance), reached * (1.0 - chance) * (chance < 0.1))
                reached *= chance

    def result(self) -> dict[str, object]:
        totals = {rule: (kept + self.steps).tolist() for rule, kept in self.kept.items()}
        answer: dict[str, object] = {"steps": self.steps.tolist(), "tokens": totals}
        answer["nodes_per_step"] = self.nodes / self.steps.sum()
        if self.arm.part == "chains":
            answer["alpha"] = self.first[1] / self.first[0]
            answer["hopeless"] = self.refused[1] / self.refused[0]
        return answer


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
    drafter = RoomDrafter(make_drafter(arm, size))
    engine = stand.wrap(load_model("reasoner"), load_tokenizer(), verifier=arm.driver, drafter=drafter)
    asking = AskingVerifier(arm, size, drafter)
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


def all_arms(parts: list[str]) -> Iterator[Arm]:
    if "chains" in parts:
        for temperature, drafts, gamma in itertools.product(TEMPERATURES, DRAFT_MODELS, GAMMAS):
            yield Arm("chains", drafts, temperature, gamma, ("token", "block"))
    for temperature in TEMPERATURES:
        if "shape" in parts:
            for kind, rules in SHAPE_RULES.items():
                yield Arm("shape", kind, temperature, 0, rules)
        if "blended" in parts:
            for kind, rules in BLENDED_RULES.items():
                yield Arm("blended", kind, temperature, 0, rules)
        if "own" in parts:
            for kind, rules in OWN_RULES.items():
                for rule, more in itertools.product(rules, range(OWN_SEEDS)):
                    yield Arm("own", kind, temperature, 0, (rule,), driver=rule, seed=more)


def run_all(arms: list[Arm], settings: dict, output: Path) -> list[dict[str, object]]:
    """Every arm in turn, kept in the JSON file `output` as it comes; progress to stderr."""
    known = known_results(settings, output)
    start, seed = time.monotonic(), settings["seed"]
    size = Size(**{key: settings[key] for key in Size.__dataclass_fields__})
    for number, arm in enumerate(arms, 1):
        if repr(arm) not in known:
            known[repr(arm)] = {**run_arm(arm, sized(arm, size), seed + arm.seed), "arm": repr(arm)}
            output.write_text(json.dumps({"settings": settings, "arms": list(known.values())}), encoding="utf-8")
        result = known[repr(arm)]
        means = {rule: round(sum(tokens) / sum(result["steps"]), 3) for rule, tokens in result["tokens"].items()}
        print(f"{number}/{len(arms)} {arm.part} {arm.drafts} T {arm.temperature} gamma {arm.gamma}: {means}, "
              f"{time.monotonic() - start:.0f} s", file=sys.stderr, flush=True)  # fmt: skip
    return [known[repr(arm)] for arm in all_arms(list(PARTS)) if repr(arm) in known]


def known_results(settings: dict, output: Path) -> dict[str, dict[str, object]]:
    """What an earlier run with the same settings left in `output`, by arm."""
    if not output.exists():
        return {}
    document = json.loads(output.read_text(encoding="utf-8"))
    if document["settings"] != json.loads(json.dumps(settings)):
        return {}
    return {result["arm"]: result for result in document["arms"]}


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


def sized(arm: Arm, size: Size) -> Size:
    """Chains need one sample per prompt only: what they are compared on hardly varies."""
    return replace(size, rows={"chains": 1, "own": size.own_rows}.get(arm.part, size.rows))


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", type=lambda text: text.split(","), default=list(PARTS))
    parser.add_argument("--prompts", type=int, default=24)
    parser.add_argument("--rows", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--branching", type=lambda text: tuple(map(int, text.split(","))), default=(3, 2, 1, 1))
    parser.add_argument("--own-rows", type=int, default=8)
    parser.add_argument("--worlds", type=int, default=20, help="random pairs of laws per distance")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--fresh", action="store_true", help="forget what the JSON beside --output holds")
    parser.add_argument("--output", type=Path, default=SCRIPTS.parent / "docs" / "compare_verifiers")
    options = parser.parse_args()
    if unknown := set(options.parts) - set(PARTS):
        parser.error(f"--parts must be among {', '.join(PARTS)}, got {', '.join(sorted(unknown))}")
    return options


def main() -> None:
    options = arguments()
    torch.set_num_threads(1)
    size = Size(options.prompts, options.rows, options.tokens, options.branching, options.own_rows)
    settings, output = {**asdict(size), "seed": options.seed}, options.output.with_suffix(".json")
    if options.fresh:
        output.unlink(missing_ok=True)
    results = [add_estimates(result) for result in run_all(list(all_arms(options.parts)), settings, output)]
    document = {
        "settings": settings,
        "versions": {"stand": stand.__version__, "torch": torch.__version__, "python": platform.python_version()},
        "target_entropy_nats": {str(heat): mean_entropy(size, heat, options.seed) for heat in TEMPERATURES},
        "different_outputs": different_outputs(results),
        "synthetic": synthetic_gains(options.worlds, GAMMAS) if "synthetic" in options.parts else [],
        "arms": results,
    }
    output.write_text(json.dumps(document) + "\n", encoding="utf-8")
    print(tables(document))
    plot(options.output.with_suffix(".png"), document)


if __name__ == "__main__":
    main()
