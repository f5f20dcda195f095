"""What a benchmark run has measured so far: kept in a file as it grows, so that an abrupt end loses nothing."""

from __future__ import annotations

import json
import os
import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import ClassVar, Protocol


class Figure(Protocol):
    """A dataclass that is one line of a table."""

    HEADER: ClassVar[tuple[str, ...]]

    def cells(self) -> tuple[object, ...]:
        """One per column of the header."""


@dataclass(frozen=True, slots=True)
class Measurement:
    """Something to be measured when its turn comes. `obstacle` says why it cannot be."""

    label: str
    work: Callable[[], Iterable[Figure]]
    obstacle: str | None = None


class Budget:
    """Wall-clock minutes; a measurement that has begun is finished.

    started: `time.time()` from which they count; None: now.
    """

    def __init__(self, minutes: float, *, started: float | None = None):
        if not minutes > 0:
            raise ValueError(f"minutes must be above 0, got {minutes}; a run needs time for one measurement at least")
        self.minutes = minutes
        self._start = time.monotonic() - (0.0 if started is None else time.time() - started)

    @property
    def spent(self) -> float:
        """Minutes."""
        return (time.monotonic() - self._start) / 60

    @property
    def is_spent(self) -> bool:
        return self.spent >= self.minutes


class BenchRecord:
    """A JSON document: settings, and one result per model shape with figures by part, what was left out and failed."""

    def __init__(self, settings: dict[str, object], path: Path | None):
        self.document: dict[str, object] = {**settings, "results": []}
        self._path = path

    def begin(self, shape: dict[str, object]) -> None:
        """What follows belongs to this model shape."""
        self._result = {"shape": shape, "parts": {}, "seconds": {}, "left_out": [], "failed": []}
        self.document["results"].append(self._result)
        self.save()

    def note(self, name: str, value: object) -> None:
        """A fact about the shape's result."""
        self._result[name] = value
        self.save()

    def merge(self, result: dict[str, object]) -> None:
        """Take over what another record has measured of the same shape."""
        for name, value in result.items():
            if name == "parts":
                for part, figures in value.items():
                    self._result["parts"].setdefault(part, []).extend(figures)
            elif name == "seconds":
                self._result["seconds"] |= value
            elif name in ("left_out", "failed"):
                self._result[name] += value
            else:
                self._result[name] = value
        self.save()

    def run(
        self,
        part: str,
        measurements: Iterable[Measurement],
        budget: Budget,
        *,
        announce: Callable[[str], None] = lambda label: None,
    ) -> Iterator[list[Figure]]:
        """Figures of every measurement that begins in time and gives some; `announce` is told its label before.

        A failure is kept with its traceback. It takes neither the other measurements with it nor the figures before it.
        """
        kept = self._result["parts"].setdefault(part, [])
        self.save()
        for measurement in self._named(part, measurements):
            if measurement.obstacle is not None or budget.is_spent:
                self.leave_out(measurement.label, measurement.obstacle or f"{budget.minutes:g} minutes were over")
                continue
            announce(measurement.label)
            start, figures = time.monotonic(), []
            try:
                for figure in measurement.work():
                    figures.append(figure)
                    kept.append(as_document(figure))
            except Exception as error:  # whatever it is, other figures are worth having
                self.fail(measurement.label, error)
                if not figures:
                    continue
            self._result["seconds"][measurement.label] = time.monotonic() - start
            self.save()
            yield figures

    def _named(self, part: str, measurements: Iterable[Measurement]) -> Iterator[Measurement]:
        """Measurements as they are named; a failure to name the next one ends the part."""
        try:
            yield from measurements
        except Exception as error:
            self.fail(part, error)

    def leave_out(self, label: str, reason: str) -> None:
        self._result["left_out"].append({"measurement": label, "reason": reason})
        self.save()

    def fail(self, label: str, error: Exception) -> None:
        trace = "".join(traceback.format_exception(error))
        self._result["failed"].append({"measurement": label, "error": repr(error), "traceback": trace})
        self.save()

    def figures(self, part: str) -> list[dict[str, object]]:
        """Those of the running shape, as they are in the document."""
        return self._result["parts"].get(part, [])

    @property
    def notes(self) -> dict[str, object]:
        """The running shape's result, whose facts are its entries."""
        return self._result

    @property
    def left_out(self) -> list[dict[str, str]]:
        return self._result["left_out"]

    @property
    def failed(self) -> list[dict[str, str]]:
        return self._result["failed"]

    def save(self) -> None:
        """Whole or not at all: the file is replaced by a complete one."""
        if self._path is None:
            return
        self._path.parent.mkdir(parents=True, exist_ok=True)
        unfinished = self._path.with_name(self._path.name + ".part")
        unfinished.write_text(json.dumps(self.document, indent=1) + "\n", encoding="utf-8")
        os.replace(unfinished, self._path)


def as_document(figure: Figure) -> dict[str, object]:
    """Fields and computed properties."""
    computed = {name for kind in type(figure).__mro__ for name, value in vars(kind).items() if type(value) is property}
    return {**asdict(figure), **{name: getattr(figure, name) for name in sorted(computed)}}
