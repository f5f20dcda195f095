"""How many tokens a step may hold before it costs more: measured once per model shape and device, kept as JSON.

Up to the knee a step waits for memory, and further draft nodes are nearly free. The budget of all rows' drafts together
should lie there; the longer the context, the earlier attention ends it.
"""

from __future__ import annotations

import json
import re
from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

RATIOS = (1.05, 1.10, 1.25)  # step time over that of one token


@dataclass(frozen=True, slots=True)
class KneeTable:
    """Milliseconds of a step's matrix products by tokens, and of its attention by context length and tokens."""

    model: str
    device: str
    dtype: str
    products: Mapping[int, float]  # tokens -> ms, all layers and the output head
    attention: Mapping[int, Mapping[int, float]]  # length -> tokens of one row -> ms, all layers

    def step(self, tokens: int, length: int) -> float:
        """Milliseconds of one row's step, between measured points on a straight line. Raises ValueError outside."""
        return interpolated(self.products, tokens) + interpolated(self.attention[length], tokens)

    def knee(self, length: int, ratio: float) -> int:
        """The most tokens, of those timed, that cost at most `ratio` times one token at this context length."""
        least = self.step(1, length) * ratio
        timed = [tokens for tokens in sorted(self.products) if tokens <= max(self.attention[length])]
        return max(tokens for tokens in timed if tokens == 1 or self.step(tokens, length) <= least)

    def as_document(self) -> dict[str, object]:
        knees = {length: {str(ratio): self.knee(length, ratio) for ratio in RATIOS} for length in self.attention}
        return {**asdict(self), "knee": knees}

    def save(self, folder: Path) -> Path:
        """Write `<model>--<device>.json`; the folder is made."""
        folder.mkdir(parents=True, exist_ok=True)
        path = table_path(folder, self.model, self.device)
        path.write_text(json.dumps(self.as_document(), indent=1) + "\n", encoding="utf-8")
        return path

    @classmethod
    def load(cls, path: Path) -> KneeTable:
        """Raises ValueError where the file is not such a table."""
        try:
            document = json.loads(path.read_text(encoding="utf-8"))
            products = with_integer_keys(document["products"])
            attention = {int(length): with_integer_keys(times) for length, times in document["attention"].items()}
            return cls(document["model"], document["device"], document["dtype"], products, attention)
        except (KeyError, TypeError, AttributeError, ValueError) as error:
            raise ValueError(f"{path} must hold a table of step times, got {error!r}; measure it again") from error


def table_path(folder: Path, model: str, device: str) -> Path:
    return folder / f"{slug(model)}--{slug(device)}.json"


def slug(name: str) -> str:
    return re.sub(r"[^a-z0-9.]+", "-", name.lower()).strip("-")


def with_integer_keys(times: Mapping[str, float]) -> dict[int, float]:
    return {int(tokens): float(milliseconds) for tokens, milliseconds in times.items()}


def interpolated(times: Mapping[int, float], tokens: int) -> float:
    """On the line between the two timed numbers of tokens around `tokens`."""
    timed = sorted(times)
    if not timed[0] <= tokens <= timed[-1]:
        raise ValueError(f"tokens must be in the timed range [{timed[0]}, {timed[-1]}], got {tokens}; time more")
    above = min(bisect_right(timed, tokens), len(timed) - 1)
    low, high = timed[max(above - 1, 0)], timed[above]
    share = (tokens - low) / (high - low) if high > low else 0.0
    return times[low] + share * (times[high] - times[low])
