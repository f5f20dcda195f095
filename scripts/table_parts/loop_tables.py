"""The tables that need the model in the loop: rules on the same drafts, and what a lookup learns from."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from measuring.text_table import format_table
from verifier_parts.asking_verifier import AskingVerifier
from verifier_parts.drafters import RoomDrafter
from verifier_parts.verifier_tables import estimate, gain, resampled, with_error

import stand
from stand.drafters.eagle.feature_head import FeatureHead
from stand.trees import BlendedLookup, LookupTree, TreeShape
from table_parts.path_laws import PathLawsDrafter
from table_parts.token_drafter import TokenDrafter

NODES_PER_ROW = 8
ROOM = 10  # a step counts where a row has room for so many tokens
CHAIN = 8
HEAD_CANDIDATES = 64  # of its laws, the most that are recorded
RULES = {
    "sampled": ("traversal", "match", "rrs"),
    "mixed": ("traversal", "match", "rrs"),
    "deterministic": ("match",),
    "chains": ("token", "block", "match"),
}
HEAD_CHAINS = "head's chains"  # of an EAGLE head
LEARNERS = {"all nodes' laws": stand.BlendedDrafter, "kept paths' laws": PathLawsDrafter, "tokens": TokenDrafter}


@dataclass(frozen=True, slots=True)
class LoopArm:
    """One drafter in the loop, and the rules that are asked about its drafts; the first one decides in `loop`."""

    name: str
    rules: tuple[str, ...]
    kind: str = "sampled"
    head: FeatureHead | Path | None = None  # or where its checkpoint lies
    temperature: float = 1.0  # of the head's laws
    learner: type[stand.BlendedDrafter] = field(default=stand.BlendedDrafter, compare=False)


def loop_arms(part: str, *, head: Path | None = None, temperature: float = 1.0) -> Iterator[LoopArm]:
    """head: of a trained head, whose chains are compared too; temperature: the target's."""
    if part == "rules":
        for kind, rules in RULES.items():
            yield LoopArm(kind, rules, kind)
        if head is not None:
            yield LoopArm(HEAD_CHAINS, RULES["chains"], "chains", head=head, temperature=temperature)
    else:
        for name, learner in LEARNERS.items():
            yield LoopArm(name, ("match",), learner=learner)


def run_loop_arm(
    model, tokenizer, prompts: Sequence[Sequence[int]], arm: LoopArm, *, samples: int, **settings
) -> dict[str, object]:
    """Per problem: steps, and the tokens that every rule gets from them on average. One lookup learns from all."""
    if arm.head is not None:
        shape, law = TreeShape.chain(CHAIN), {"temperature": arm.temperature, "num_candidates": HEAD_CANDIDATES}
        drafter = stand.EagleDrafter(arm.head, shape=shape, **law)
    elif arm.kind == "chains":
        drafter = stand.FixedShapeDrafter(LookupTree(), TreeShape.chain(CHAIN))
    else:
        budget = NODES_PER_ROW * samples * len(prompts)
        drafter = arm.learner(BlendedLookup(), budget=budget, kind=arm.kind)
    watched = RoomDrafter(drafter, ROOM)
    engine = stand.wrap(model, tokenizer, drafter=watched, verifier="match")
    asking = AskingVerifier("match", arm.rules, watched, prompts=len(prompts), rows=samples)
    engine.verifier = asking
    engine.generate(input_ids=[list(prompt) for prompt in prompts], num_return_sequences=samples, **settings)
    return asking.result()


def loop_tables(part: str, results: dict[tuple[str, LoopArm], dict]) -> str:
    """Tokens per step, and per cent more than a reference on the same problems."""
    rows = []
    for (setting, arm), result in results.items():
        reference = next(one for (where, _), one in results.items() if where == setting)
        for rule, tokens in result["tokens"].items():
            cells = [with_error(*estimate(resampled(result["steps"], tokens)))]
            if arm.kind == "chains":
                cells.append(with_error(*gain(result, rule, result, "token"), "+"))
            else:
                cells.append(with_error(*gain(result, rule, reference, next(iter(reference["tokens"]))), "+"))
            rows.append([setting, arm.name, rule, *cells])
    return f"{part}\n{format_table(['setting', 'draft', 'rule', 'tokens per step', '% over the first'], rows)}"
