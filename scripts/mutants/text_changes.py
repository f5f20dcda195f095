"""Changes of C++ and Cython source as text: what both languages write alike."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping

OPERATORS = {
    "<=": ["<", ">"],
    ">=": [">", "<"],
    "<": ["<=", ">="],
    ">": [">=", "<="],
    "==": ["!="],
    "!=": ["=="],
    "+": ["-"],
    "-": ["+"],
    "*": ["/"],
    "/": ["*"],
    "+=": ["-="],
    "-=": ["+="],
    "*=": ["/="],
}
LineChanges = Callable[[str], Iterator[tuple[str, str]]]  # of one line of code: what, changed code


def changed_sources(
    lines: list[str], numbers: Iterable[int], line_changes: LineChanges, *, comment: str
) -> Iterator[tuple[int, str, str]]:
    """(line, what, changed source), one place of the lines `numbers` at a time; `comment`: what begins one."""
    for number in numbers:
        place = lines[number].find(comment)
        code, rest = (lines[number], "") if place < 0 else (lines[number][:place], lines[number][place:])
        for what, changed in line_changes(code):
            yield number + 1, what, with_line(lines, number, changed + rest)


def with_line(lines: list[str], number: int, changed: str) -> str:
    """The source with another line in the place of one."""
    return "".join([*lines[:number], changed, *lines[number + 1 :]])


def replaced(code: str, match: re.Match, new: str) -> tuple[str, str]:
    return f"{match[0]} -> {new}", code[: match.start()] + new + code[match.end() :]


def operator_changes(
    code: str, operator: re.Pattern[str], operators: Mapping[str, list[str]]
) -> Iterator[tuple[str, str]]:
    for match in operator.finditer(code):
        for new in operators[match[0]]:
            yield replaced(code, match, new)


def one_argument(code: str, cap: re.Match) -> Iterator[tuple[str, str]]:
    """Each argument of a cap or floor in the place of its call, which closes on the line."""
    for place, kept in enumerate(arguments(code, cap.end())):
        rest = code[closing(code, cap.end()) + 1 :]
        yield f"{cap[1]} -> its argument {place + 1}", code[: cap.start()] + kept + rest


def closing(code: str, start: int) -> int | None:
    """Where the bracket that was opened just before `start` closes; None if that is on another line."""
    depth = 1
    for place in range(start, len(code)):
        depth += (code[place] in "([") - (code[place] in ")]")
        if depth == 0:
            return place
    return None


def arguments(code: str, start: int) -> list[str]:
    """The arguments of the call that was opened just before `start` and closes on its line."""
    parts, depth = [""], 0
    for character in code[start : closing(code, start)]:
        depth += (character in "([") - (character in ")]")
        if character == "," and depth == 0:
            parts.append("")
        else:
            parts[-1] += character
    return [f"({part.strip()})" for part in parts]
