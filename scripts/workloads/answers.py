"""The answer of a written-out solution, and the majority vote over several."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Hashable, Sequence

NUMBER = r"([-+]?\d[\d,]*)"
BOXED = re.compile(r"\\boxed\{\s*(?:\\text\{)?\s*" + NUMBER + r"\s*\}")
BRACES = re.compile(r"\\boxed\{|[{}]")
WHOLE = r"(?![./]?\d)"  # 12.5 does not state 12
STATED = re.compile(r"answer\s*(?:is)?\s*[:=]?\s*\**\s*\$?\s*" + NUMBER + WHOLE, re.IGNORECASE)
THINK_END = "</think>"
MOST_DIGITS = 1000  # a loop of digits is no answer, and Python reads no number of more than 4300


def extract_answer(text: str) -> int | None:
    """The last `\\boxed{N}`, else the last "Answer: N", looked for after the reasoning if it was closed.

    A text without either has no answer (None); so has one whose last number is a loop of digits, and one whose
    reasoning was opened by the prompt and never closed, unless it states an answer anyway.
    """
    _, closed, conclusion = text.rpartition(THINK_END)
    for part in (conclusion, text) if closed else (text,):
        for pattern in (BOXED, STATED):
            found = pattern.findall(part)
            if found:
                digits = found[-1].replace(",", "")
                return int(digits) if len(digits) <= MOST_DIGITS else None
    return None


def boxed_text(text: str) -> str | None:
    """What the last `\\boxed{...}` holds, braces within it included; None without one that is closed."""
    open_at: list[int | None] = []  # by brace that is not closed: where a box's text begins
    start, end = -1, None
    for brace in BRACES.finditer(text):
        if brace.group() != "}":
            open_at.append(brace.end() if len(brace.group()) > 1 else None)
        elif open_at and (begun := open_at.pop()) is not None and begun > start:
            start, end = begun, brace.start()
    return None if end is None else text[start:end]


def majority_answer(answers: Sequence[int | None]) -> int | None:
    """The most frequent answer, ties to the one found first; samples without an answer do not vote."""
    votes = Counter(answer for answer in answers if answer is not None)
    return max(votes, key=votes.__getitem__) if votes else None


def is_decided(answers: Sequence[Hashable], num_missing: int) -> bool:
    """Whether the majority is that of these answers, whatever the missing ones are: one of them is ahead by more."""
    votes = Counter(answer for answer in answers if answer is not None).most_common(2)
    leading, second = [count for _, count in [*votes, (None, 0), (None, 0)][:2]]
    return leading - second > num_missing
