"""Counts of finished arms, from which a run goes on."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

from measuring.output_file import JsonLines

import stand


class KeptCounts:
    """Cells counted so far, by arm and prompt, in a file of JSON lines; without a file nothing is kept."""

    def __init__(self, path: Path | None, conditions: dict[str, object]) -> None:
        self._lines, self._conditions = JsonLines(path, "--kept", goes_on=True), conditions
        self._known = self._lines.earlier

    def get(self, arm: list[str], place: int) -> dict | None:
        wanted = {"conditions": self._conditions, "arm": arm, "prompt": place}
        return next((line for line in self._known if {**line, **wanted} == line), None)

    def add(self, arm: list[str], place: int, cells: Counter, stats: stand.Stats) -> dict:
        line = {
            "conditions": self._conditions,
            "arm": arm,
            "prompt": place,
            "cells": [[list(cell), count] for cell, count in cells.items()],
            "steps": stats.num_steps,
            "tokens": stats.num_tokens,
        }
        self._lines.add(line)
        return line
