"""One try and what came of it: honoured, refused by name, refused bluntly, or wrong."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

HONOURED, REFUSED, BLUNT, WRONG = VERDICTS = ("honoured", "refused by name", "refused bluntly", "wrong")
EITHER = frozenset({HONOURED, REFUSED, BLUNT})  # of a core's call: a type's own message will do
HONOURED_ONLY = frozenset({HONOURED})
REFUSED_ONLY = frozenset({REFUSED})
BY_NAME = re.compile(r"\bgot\b.*;", re.DOTALL)  # rule, got, remedy


@dataclass(frozen=True, slots=True)
class Trial:
    """`run` does it, and raises where what was taken did not come out sound (an `Unsound`)."""

    kind: str
    name: str  # with the seed enough to do it again
    run: Callable[[], object]
    allowed: frozenset[str]


@dataclass(frozen=True, slots=True)
class Outcome:
    verdict: str
    detail: str = ""  # of what is wrong


class Unsound(Exception):
    """Something was taken, and what came of it is not as it must be."""


def judge(trial: Trial) -> Outcome:
    """Run the trial. An exception that is no ValueError, no TypeError and no class of this library is wrong, whatever
    is allowed."""
    try:
        trial.run()
    except Exception as error:
        said = f"{type(error).__name__}: {error}"
        is_refusal = isinstance(error, (ValueError, TypeError)) or type(error).__module__.startswith("stand.")
        if not is_refusal:
            return Outcome(WRONG, f"raised {said}")
        verdict = REFUSED if BY_NAME.search(str(error)) else BLUNT
    else:
        verdict, said = HONOURED, "taken without a word"
    return Outcome(verdict) if verdict in trial.allowed else Outcome(WRONG, said)
