"""Lookup files that were damaged: bits flipped, ends cut off, and contents changed under a checksum that is right."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np

from abuse_parts.trial import EITHER, REFUSED_ONLY, Trial, Unsound
from stand.trees import BlendedLookup, LookupTree, TreeShape
from stand.trees.checked_file import CHECKSUM_BYTES

KEYS = {"seed": 1, "rows": [0], "steps": [0]}
Damage = Callable[[bytes, np.random.Generator], bytes]
Lookup = BlendedLookup | LookupTree


def flip(data: bytes, rng: np.random.Generator) -> bytes:
    """One to eight bits of the file."""
    changed = np.frombuffer(data, np.uint8).copy()
    for place in rng.choice(8 * len(changed), size=int(rng.integers(1, 9)), replace=False):
        changed[place // 8] ^= 1 << int(place % 8)
    return changed.tobytes()


def cut(data: bytes, rng: np.random.Generator) -> bytes:
    return data[: int(rng.integers(len(data)))]


def reseal(data: bytes, rng: np.random.Generator) -> bytes:
    """Bits flipped, often in the header, and the checksum made again: what only the contents can betray."""
    body = data[:-CHECKSUM_BYTES]
    head = int(rng.choice([len(body), min(len(body), 400)]))
    body = flip(body[:head], rng) + body[head:]
    return body + hashlib.blake2b(body, digest_size=CHECKSUM_BYTES).digest()


DAMAGES: dict[str, tuple[Damage, frozenset[str]]] = {
    "bits flipped": (flip, REFUSED_ONLY),
    "cut short": (cut, REFUSED_ONLY),
    "flipped and resealed": (reseal, EITHER),
}


def taught() -> dict[str, Lookup]:
    """One lookup of each format, small, with contexts of all lengths."""
    rng = np.random.default_rng(0)
    text = np.concatenate([np.tile(rng.integers(0, 90, 40), 2), rng.integers(0, 600, 160)]).astype(np.int32)
    lookups: dict[str, Lookup] = {"blended": BlendedLookup(max_bytes=1 << 20), "longest match": LookupTree()}
    for lookup in lookups.values():
        lookup.learn([], text)
    return lookups


def must_work(lookup: Lookup) -> None:
    """Raise Unsound unless a lookup drafts and learns soundly."""
    history = np.array([3, 5, 3], np.int32)
    for _ in range(2):
        try:
            if isinstance(lookup, BlendedLookup):
                lookup.check()
                draft = lookup.draft([history], 12, **KEYS)
                lookup.predict(history)
            else:
                draft = lookup.draft([history], TreeShape.chain(3), **KEYS)
            draft.check()
            lookup.learn(history, np.arange(40, dtype=np.int32))
        except (ValueError, TypeError, RuntimeError) as error:
            raise Unsound(f"what was loaded does not work: {error}") from error


def damaged_files(
    number: int, folder: Path, *, seed: int, load: Callable[[str, Path], Lookup] | None = None
) -> Iterator[Trial]:
    """So many damaged files, formats and damages in turn. load(format, path): what is tried; the library's own."""
    load = load or (lambda name, path: {"blended": BlendedLookup, "longest match": LookupTree}[name].load(path))
    originals = {}
    for name, lookup in taught().items():
        lookup.save(folder / "whole")
        originals[name] = (folder / "whole").read_bytes()
    choices = [(name, damage) for name in originals for damage in DAMAGES]

    def trial(place: int) -> Trial:
        name, damage = choices[place % len(choices)]
        change, allowed = DAMAGES[damage]

        def run() -> None:
            path = folder / "damaged"
            path.write_bytes(change(originals[name], np.random.default_rng([seed, place])))
            must_work(load(name, path))

        return Trial(f"{name} file, {damage}", f"number {place}", run, allowed)

    return (trial(place) for place in range(number))
