"""Varied written-out reasoning for generated problems.

Every family knows two ways to work a problem out. `write_reasoning` picks their order, a wording for every step, an
occasional slip that is noticed and corrected, and a recheck. Trajectories of one problem therefore repeat themselves
and each other without being equal, as those of a large reasoning model do.
"""

from __future__ import annotations

import random
import re

from workloads.families.scratch import Scratch
from workloads.problems import FAMILIES, THINK_END, Problem

SHORTEST_REASONING = 130  # in pieces of `count_pieces`; a shorter reasoning is rechecked once more
LONGEST_REASONING = 560


def count_pieces(text: str) -> int:
    """Digits, words and runs of signs in a text: close to its number of tokens."""
    return len(re.findall(r"\d|[A-Za-z]+|[^\sA-Za-z\d]+", text))


def open_reasoning(scratch: Scratch, problem: Problem) -> str:
    """How the reasoning starts: plain, or with the problem said again."""
    start = scratch.pick("Okay.", "Let me think.", "Okay, let me see.", "Alright.", "Let me work this out.")
    if scratch.rng.random() < 0.4:
        echo = scratch.pick("The problem:", "We are asked this:", "The question is this:")
        return f"{start} {echo} {problem.problem}"
    return start


def write_once(problem: Problem, rng: random.Random) -> str:
    """One reasoning: the ways of the family in some order, rechecked until it is long enough."""
    rules, scratch = FAMILIES[problem.family], Scratch(rng)
    lead_with_check = rules.check_may_lead and rng.random() < 0.35
    ways = [rules.check, rules.solve] if lead_with_check else [rules.solve, rules.check]
    answer = problem.answer
    paragraphs = [open_reasoning(scratch, problem), ways[0](scratch, *problem.operands)]
    paragraphs[-1] += " " + scratch.pick(
        f"So the answer should be {answer}.", f"This gives {answer}.", f"So I get {answer}.", f"That makes {answer}."
    )
    turn = 1
    while turn == 1 or count_pieces("\n".join(paragraphs)) < SHORTEST_REASONING or rng.random() < 0.12:
        doubt = scratch.pick(
            "Let me check this.", "Wait, let me double-check.", "Hmm, let me verify that.", "Is this right?"
        )
        again = scratch.pick(
            f"Good, {answer} again.", f"So {answer} is right.", f"Yes, it is {answer}.", f"That confirms {answer}."
        )
        paragraphs.append(f"{doubt} {ways[turn % 2](scratch, *problem.operands)} {again}")
        turn += 1
    paragraphs.append(
        scratch.pick(f"So the answer is {answer}.", f"The final answer is {answer}.", f"I am confident: {answer}.")
    )
    return "\n".join(paragraphs)


def write_reasoning(problem: Problem, rng: random.Random) -> str:
    """A reasoning for the problem of bounded length, ending with `</think>` and the answer line."""
    while True:
        text = write_once(problem, rng)
        if count_pieces(text) <= LONGEST_REASONING:
            return f"{text}\n{THINK_END}\nAnswer: {problem.answer}"
