"""The arms of the comparison: kinds of drafts at a temperature, and the rules that are asked about them."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, replace

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


def sized(arm: Arm, size: Size) -> Size:
    """Chains need one sample per prompt only: what they are compared on hardly varies."""
    return replace(size, rows={"chains": 1, "own": size.own_rows}.get(arm.part, size.rows))


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
