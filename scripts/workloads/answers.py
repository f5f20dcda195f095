"""The integer answer of a written-out solution, and the majority vote over several."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence

NUMBER = r"([-+]?\d[\d,]*)"
BOXED = re.compile(r"\\boxed\{\s*(?:\\text\{)?\s*" + NUMBER + r"\s*\}")
STATED = re.compile(r"answer\s*(?:is)?\s*[:=]?\s*\**\s*\$?\s*" + NUMBER, re.IGNORECASE)
THINK_END = "</think>"


def extract_answer(text: str) -> int | None:
    """The last `\\boxed{N}`, else the last "Answer: N", looked for after the reasoning if it was closed.

    A text without either has no answer (None); so has one whose reasoning was opened by the prompt and never
    closed, unless it states an answer anyway.
    """
    _, closed, conclusion = text.rpartition(THINK_END)
    for part in (conclusion, text) if closed else (text,):
        for pattern in (BOXED, STATED):
            found = pattern.findall(part)
            if found:
                return int(found[-1].replace(",", ""))
    return None


def majority_answer(answers: Sequence[int | None]) -> int | None:
    """The most frequent answer, ties to the one found first; samples without an answer do not vote."""
    votes = Counter(answer for answer in answers if answer is not None)
    return max(votes, key=votes.__getitem__) if votes else None
