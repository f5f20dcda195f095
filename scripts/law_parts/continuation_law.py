"""The exact law of short continuations of a prompt, cell by cell, and a chi-square test of drawn ones against it.

The law comes from transformers alone: plain forwards of the model, its own temperature and top_p classes, products of
probabilities. The engine has no part in it.
"""

from __future__ import annotations

import copy
import math
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass

import torch
from transformers import (
    DynamicCache,
    LogitsProcessorList,
    PreTrainedModel,
    TemperatureLogitsWarper,
    TopPLogitsWarper,
)

from stand.forward.cache.cache_argument import cache_argument

SMALLEST_CELL = 10  # continuations expected in a cell
BATCH = 64  # prefixes in one forward

Cell = tuple[int, ...]  # a whole continuation, or a prefix after which it is none of the others


@dataclass(frozen=True, slots=True)
class ContinuationLaw:
    """Probabilities of cells that cover every continuation once: likely whole ones, and what leaves them, by place."""

    cells: dict[Cell, float]
    prefixes: frozenset[Cell]  # likely beginnings that are not whole

    def cell_of(self, token_ids: Sequence[int]) -> Cell:
        """The cell of a continuation: itself where it is likely, else its longest likely beginning."""
        prefix = ()
        for token in token_ids:
            longer = (*prefix, token)
            if longer not in self.prefixes and longer not in self.cells:
                break
            prefix = longer
        return prefix


def next_token_laws(logits: torch.Tensor, *, temperature: float, top_p: float) -> torch.Tensor:
    """[M, V] logits -> [M, V] float64 laws by transformers' own classes."""
    warpers = LogitsProcessorList([TemperatureLogitsWarper(float(temperature))] if temperature != 1 else [])
    warpers += [TopPLogitsWarper(top_p)] if top_p < 1 else []
    return torch.softmax(warpers(None, logits.float()).double(), dim=-1)


@torch.inference_mode()
def continuation_law(
    model: PreTrainedModel,
    prompt: Sequence[int],
    *,
    tokens: int,
    smallest: float,
    temperature: float,
    top_p: float,
    ends: Collection[int],
) -> ContinuationLaw:
    """The law of continuations of `tokens` tokens, or shorter ones that end in one of `ends`.

    smallest: beginnings that are less likely than this are not followed.
    """
    cells: dict[Cell, float] = {}
    prefixes: set[Cell] = set()
    open_prefixes: dict[Cell, float] = {(): 1.0}
    for place in range(tokens):
        prefixes.update(open_prefixes)
        longer: dict[Cell, float] = {}
        laws = _laws_after(model, prompt, list(open_prefixes), temperature=temperature, top_p=top_p)
        for (prefix, chance), law in zip(open_prefixes.items(), laws, strict=True):
            kept = torch.nonzero(law * chance >= smallest).flatten().tolist()
            cells[prefix] = chance * max(0.0, 1.0 - float(law[kept].sum()))
            for token in kept:
                ended = token in ends or place == tokens - 1
                (cells if ended else longer)[(*prefix, token)] = chance * float(law[token])
        open_prefixes = longer
    return ContinuationLaw(cells, frozenset(prefixes))


def _laws_after(model, prompt: Sequence[int], prefixes: list[Cell], *, temperature: float, top_p: float):
    """The law of the next token after each of `prefixes`, which are equally long."""
    cache, argument = DynamicCache(config=model.config), cache_argument(model)
    first = model(torch.tensor([list(prompt)]), **{argument: cache}).logits[:, -1]
    for start in range(0, len(prefixes), BATCH):
        part = prefixes[start : start + BATCH]
        logits = first
        if part[0]:
            copies = copy.deepcopy(cache)
            copies.batch_repeat_interleave(len(part))
            logits = model(torch.tensor(part), **{argument: copies}).logits[:, -1]
        yield from next_token_laws(logits, temperature=temperature, top_p=top_p)


def cells_of(drawn: Counter, law: ContinuationLaw) -> Counter:
    """How often each cell came, from how often each continuation did."""
    cells = Counter()
    for token_ids, count in drawn.items():
        cells[law.cell_of(token_ids)] += count
    return cells


@dataclass(frozen=True, slots=True)
class Comparison:
    statistic: float
    degrees_of_freedom: int

    @property
    def p_value(self) -> float:
        """Upper tail of chi-square by Wilson and Hilferty's cube root, good to a few per cent here."""
        if self.degrees_of_freedom == 0:
            return 1.0
        spread = 2 / (9 * self.degrees_of_freedom)
        z = ((self.statistic / self.degrees_of_freedom) ** (1 / 3) - (1 - spread)) / math.sqrt(spread)
        return math.erfc(z / math.sqrt(2)) / 2


def compare(counters: Sequence[Counter], laws: Sequence[ContinuationLaw]) -> Comparison:
    """Chi-square over prompts of how often each cell came; cells that expect fewer than SMALLEST_CELL are one."""
    statistic, freedom = 0.0, 0
    for counter, law in zip(counters, laws, strict=True):
        size = counter.total()
        expected_counts = {cell: chance * size for cell, chance in law.cells.items()}
        pairs = [(counter[cell], count) for cell, count in expected_counts.items() if count >= SMALLEST_CELL]
        rest = size - sum(count for count, _ in pairs), size - sum(expected for _, expected in pairs)
        if rest[1] >= SMALLEST_CELL:
            pairs.append(rest)
        elif pairs:  # too small for itself: it joins the smallest cell
            least = min(range(len(pairs)), key=lambda place: pairs[place][1])
            pairs[least] = pairs[least][0] + rest[0], pairs[least][1] + rest[1]
        statistic += sum((count - expected) ** 2 / expected for count, expected in pairs)
        freedom += max(len(pairs) - 1, 0)
    return Comparison(statistic, freedom)
