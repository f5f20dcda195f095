"""Options that nothing of what was chosen reads."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Set


def refuse_idle(
    parser: argparse.ArgumentParser, options: argparse.Namespace, choice: str, readers: Mapping[str, Set[str]]
) -> None:
    """End the command with an error where an option has another value than its default and none of its `readers`, by
    the option's name, is among the values of `--choice`."""
    for name, wanted in readers.items():
        if getattr(options, name) != parser.get_default(name) and not wanted & set(getattr(options, choice)):
            parser.error(
                f"--{name.replace('_', '-')} has no effect without one of {', '.join(sorted(wanted))} in --{choice}; "
                "leave it out"
            )
