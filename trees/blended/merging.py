"""One lookup of several files: each context knows what it knew in any of them."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from functools import reduce
from pathlib import Path
from typing import Any

import numpy as np

from stand.trees.blended.file import read_blended_lookup, write_blended_lookup
from stand.trees.checked_file import LookupFileError
from stand.trees.lookups import MOST_ENTRIES, NUM_ODDS, BlendedLookup

PATHS = (str, os.PathLike)
LARGEST_WEIGHT = np.iinfo(np.uint16).max
MOST_VISITS = np.iinfo(np.uint8).max
SETTINGS = ("depth", "fade", "rate", "num_candidates", "fingerprint")
ROOM = 1.25  # of a cap over what the lookups took apart: merged contexts lie otherwise in memory
EMPTY_CONTEXT = -1  # its place among the roots, which are numbered from 0
OF_CONTEXTS, OF_ENTRIES = ("sizes", "visits"), ("tokens", "weights", "has_child")

Entry = tuple[int, int, "int | None"]  # token, weight, and the context one token longer


def merge_lookups(
    paths: Iterable[str | os.PathLike], path: str | os.PathLike, *, max_bytes: int | None = None
) -> BlendedLookup:
    """Merge saved `BlendedLookup`s into the file `path`, which may be one of them; returns what it holds, loaded.

    Where several files know a context, the weights of equal tokens are added, and its tokens are ordered as they were,
    with the first file's before the others'. Learned odds are averaged. max_bytes: the memory cap of the result; None:
    the largest cap of the files, or more where they need it together.

    Raises LookupFileError where a file is damaged, and where not all of the result fits under the cap; ValueError for
    no files, for files of several vocabularies or settings, and for a bad cap; OSError.
    """
    is_list = isinstance(paths, Iterable) and not isinstance(paths, PATHS)
    paths, given = list(paths) if is_list else [], paths
    if not paths or not all(isinstance(one, PATHS) for one in paths):
        raise ValueError(f"paths must be a list of one file or more, got {paths or given!r}; save lookups to list them")
    settings, needed, largest = _checked(paths)
    cap = max(largest, int(ROOM * needed)) if max_bytes is None else max_bytes
    BlendedLookup(max_bytes=cap)  # refuses a cap that no lookup may have
    merged = reduce(_merged, (_Contexts(read_blended_lookup(one, num_odds=NUM_ODDS)[1]) for one in paths))
    parameters = settings | {"max_bytes": cap}
    with tempfile.TemporaryDirectory(dir=Path(path).absolute().parent) as folder:  # what does not fit: `path` stays
        write_blended_lookup(Path(folder) / "merged", parameters, merged.arrays)
        result = BlendedLookup.load(Path(folder) / "merged", max_bytes=cap)
    if len(result) < len(merged):
        raise LookupFileError(
            f"all {len(merged)} contexts must fit into max_bytes={cap}, got room for {len(result)}; pass a larger "
            "max_bytes"
        )
    write_blended_lookup(path, parameters, merged.arrays)
    return result


def _checked(paths: Sequence[str | os.PathLike]) -> tuple[dict[str, Any], int, int]:
    """(settings, bytes of all, largest cap): files are loaded, which refuses what is unsound."""
    settings: dict[str, Any] = {}
    needed = largest = 0
    for one in paths:
        lookup = BlendedLookup.load(one)
        found = {name: getattr(lookup, name) for name in SETTINGS}
        settings = settings or found
        if found != settings:
            raise ValueError(
                f"files must have one vocabulary and equal settings, got {settings} in {paths[0]} and {found} in "
                f"{one}; merge those that are alike"
            )
        needed, largest = needed + lookup.nbytes, max(largest, lookup.max_bytes)
    return settings, needed, largest


class _Contexts:
    """A lookup's contexts as its file lists them: each one before those one token longer.

    `tops`: the empty context and the roots, by their places.
    """

    def __init__(self, arrays: dict[str, np.ndarray]):
        self.arrays = arrays
        self._starts = np.concatenate([[0], np.cumsum(arrays["sizes"], dtype=np.int64)])  # [C + 1] of their entries
        num_children = np.concatenate([[0], np.cumsum(arrays["has_child"], dtype=np.int64)])[self._starts]
        self._ends = _ends(np.diff(num_children).tolist())
        self.tops: dict[int, int] = {}
        context = 0
        for place in [EMPTY_CONTEXT, *arrays["roots"].tolist()] if len(self) else []:
            self.tops[place], context = context, int(self._ends[context])

    def __len__(self) -> int:
        return len(self._ends)

    def visits(self, context: int) -> int:
        return int(self.arrays["visits"][context])

    def entries(self, context: int) -> Iterator[Entry]:
        """The latest first."""
        entries, child = slice(*self._starts[context : context + 2].tolist()), context + 1
        columns = (self.arrays[name][entries].tolist() for name in OF_ENTRIES)
        for token, weight, has_child in zip(*columns, strict=True):
            yield token, weight, child if has_child else None
            child = int(self._ends[child]) if has_child else child

    def all_from(self, context: int) -> dict[str, np.ndarray]:
        """The arrays of a context and of all below it."""
        contexts = slice(context, int(self._ends[context]))
        entries = slice(int(self._starts[contexts.start]), int(self._starts[contexts.stop]))
        parts = {name: self.arrays[name][contexts] for name in OF_CONTEXTS}
        return parts | {name: self.arrays[name][entries] for name in OF_ENTRIES}


def _ends(num_children: list[int]) -> np.ndarray:
    """[C] int64: by context the first one behind it that is not below it. num_children [C]: those one token longer."""
    ends = np.arange(1, len(num_children) + 1)
    open_ends: list[int] = []  # of contexts whose parents are still to come, the nearest last
    for context in range(len(num_children) - 1, -1, -1):
        end = context + 1
        for _ in range(num_children[context]):
            end = open_ends.pop()
        open_ends.append(end)
        ends[context] = end
    return ends


def _merged(first: _Contexts, second: _Contexts) -> _Contexts:
    parts: dict[str, list] = {name: [] for name in (*OF_CONTEXTS, *OF_ENTRIES)}

    def add(arrays: dict) -> None:
        for name, values in arrays.items():
            parts[name].append(values)

    def merge(order: int, one: int | None, other: int | None) -> None:
        """Add a context of either side, or of both, and what is below it."""
        if one is None or other is None:
            add(first.all_from(one) if other is None else second.all_from(other))
            return
        entries = _joined(list(first.entries(one)), list(second.entries(other)), most=MOST_ENTRIES[order])
        tokens, weights, *children = zip(*entries, strict=True) if entries else ((), (), (), ())
        add({"sizes": [len(entries)], "visits": [min(MOST_VISITS, first.visits(one) + second.visits(other))]})
        has_child = [pair != (None, None) for pair in zip(*children, strict=True)]
        add({"tokens": tokens, "weights": weights, "has_child": has_child})
        for is_there, below, beside in zip(has_child, *children, strict=True):
            if is_there:
                merge(order + 1, below, beside)

    places = sorted(first.tops.keys() | second.tops.keys())
    for place in places:
        order = 0 if place == EMPTY_CONTEXT else len(MOST_ENTRIES) - 1 if place % 2 else 1
        merge(order, first.tops.get(place), second.tops.get(place))
    arrays = {name: _whole(values, first.arrays[name].dtype) for name, values in parts.items()}
    arrays["roots"] = np.array(places[1:], dtype=first.arrays["roots"].dtype)
    arrays["odds"] = _average(first, second)
    return _Contexts(arrays)


def _joined(first: list[Entry], second: list[Entry], *, most: int) -> list[tuple[int, int, int | None, int | None]]:
    """(token, weight, longer context of the first, of the second) of at most so many tokens: those of most weight, in
    the order of their better rank."""
    weights: dict[int, int] = {}
    ranks: dict[int, tuple[int, int]] = {}
    children: dict[int, list[int | None]] = {}
    for side, entries in enumerate((first, second)):
        for rank, (token, weight, child) in enumerate(entries):
            weights[token] = min(weights.get(token, 0) + weight, LARGEST_WEIGHT)
            ranks[token] = min(ranks.get(token, (rank, side)), (rank, side))
            children.setdefault(token, [None, None])[side] = child
    kept = sorted(weights, key=lambda token: (-weights[token], ranks[token]))[:most]
    return [(token, weights[token], *children[token]) for token in sorted(kept, key=ranks.__getitem__)]


def _whole(parts: list, dtype: np.dtype) -> np.ndarray:
    return np.concatenate([np.asarray(part, dtype=dtype) for part in parts]) if parts else np.empty(0, dtype=dtype)


def _average(first: _Contexts, second: _Contexts) -> np.ndarray:
    """Learned odds, geometric means by the numbers of contexts: who learned more knows them better."""
    shares = np.array([len(first), len(second)]) / max(1, len(first) + len(second))
    logs = np.log([one.arrays["odds"].astype(np.float64) for one in (first, second)])
    return np.exp(shares @ logs).astype(np.float32)
