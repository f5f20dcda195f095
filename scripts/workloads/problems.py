"""Generated problems with integer answers, for the bundled model, and which of them are held out.

Every family draws small operands and states a problem in one of several phrasings. Problems are split by a hash of
family and operands: one in `HELD_OUT_ONE_IN` is held out, whatever its phrasing, and is never trained on. A text reads

    <|problem|>STATEMENT<|think|>REASONING</think>
    Answer: N<|end|>

and a prompt is the part up to and including `<|think|>`; reasoning.py writes the rest.
"""

from __future__ import annotations

import hashlib
import json
import random
from dataclasses import dataclass

from workloads.families.division import COUNT, DIVISOR, FACTORS, MULTIPLE, POWER, REMAINDER
from workloads.families.equations import ANIMALS, EQUATION, STORY
from workloads.families.family import Family
from workloads.families.scratch import Scratch
from workloads.families.sequences import DIGITS, RECURSION, SEQUENCE, SERIES

PROBLEM_TOKEN = "<|problem|>"
THINK_TOKEN = "<|think|>"
THINK_END = "</think>"
END_TOKEN = "<|end|>"
PAD_TOKEN = "<|pad|>"

HELD_OUT_ONE_IN = 12
MOST_FRUITLESS = 5_000  # draws in a row without a new problem: none are left; the smallest family has each once in 60

# The order counts: seeds choose among the families, and held-out problems take them in turn.
FAMILIES: dict[str, Family] = {
    "remainder": REMAINDER,
    "power": POWER,
    "divisor": DIVISOR,
    "multiple": MULTIPLE,
    "equation": EQUATION,
    "digits": DIGITS,
    "sequence": SEQUENCE,
    "series": SERIES,
    "recursion": RECURSION,
    "count": COUNT,
    "factors": FACTORS,
    "story": STORY,
    "animals": ANIMALS,
}


@dataclass(frozen=True, slots=True)
class Problem:
    """One problem: its statement, its integer answer, its family and the operands it was drawn with."""

    problem: str
    answer: int
    family: str
    operands: tuple[int, ...]


def is_held_out(family: str, operands: tuple[int, ...]) -> bool:
    """Whether a problem belongs to the held-out part; depends on family and operands alone."""
    key = json.dumps([family, *operands]).encode()
    return int.from_bytes(hashlib.blake2b(key, digest_size=8).digest(), "big") % HELD_OUT_ONE_IN == 0


def draw_problem(rng: random.Random, *, held_out: bool, family: str | None = None) -> Problem:
    """One problem of the training or held-out part, of the given family or of a random one."""
    if family is None:
        family = rng.choice(list(FAMILIES))
    if family not in FAMILIES:
        raise ValueError(f"family must be one of {', '.join(FAMILIES)}, got {family!r}; choose one of these")
    rules = FAMILIES[family]
    while True:
        operands = rules.draw(rng)
        if is_held_out(family, operands) == held_out:
            statement = rules.state(Scratch(rng), *operands)
            return Problem(statement, rules.answer(*operands), family, operands)


def held_out_problems(count: int, *, seed: int = 0) -> list[Problem]:
    """`count` different held-out problems, the families in turn; the same for the same seed.

    Raises ValueError where a family has too few.
    """
    rng = random.Random(f"held-out {seed}")
    names, found, fruitless = list(FAMILIES), {}, 0
    while len(found) < count:
        family, had = names[len(found) % len(names)], len(found)
        problem = draw_problem(rng, held_out=True, family=family)
        found.setdefault((problem.family, problem.operands), problem)
        fruitless = 0 if len(found) > had else fruitless + 1
        if fruitless == MOST_FRUITLESS:
            raise ValueError(
                f"held-out problems must be as many as there are, the families in turn, got {count}, and "
                f"`{family}` ends before; ask for {had} or fewer"
            )
    return list(found.values())


def write_prompt(statement: str) -> str:
    """The prompt of a statement, as the tokenizer's chat template builds it too."""
    return f"{PROBLEM_TOKEN}{statement}{THINK_TOKEN}"
