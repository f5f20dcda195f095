"""Calls of the compiled core with arguments that do not fit: one or two of a sound call's are replaced at random."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np

from abuse_parts.damaged_files import KEYS, must_work, taught
from abuse_parts.trial import EITHER, Trial
from stand.trees import BlendedLookup, DraftBatch, DraftTree, LookupTree, TreeShape, noise, vocabulary_fingerprint
from stand.trees.sampling import draw_children

HISTORY = np.array([3, 5, 3], np.int32)


class Refuses:
    """Raises where it is asked for anything."""

    def __getattr__(self, name: str) -> object:
        raise ValueError(f"nothing must be asked of this, got {name}; leave it alone")


WRONG_VALUES: tuple[object, ...] = (
    None, True, -1, 0, 1, 2**20 + 1, 2**31, 2**32 + 5, 2**63, -(2**63) - 1, 10**40, 1.5, -0.0, np.nan, np.inf, 1j,
    "", "8", "mixed", b"x", [], [[]], [0], [-1], [1.5], [None], ["a"], [2**40], [[1, 2], [3]], (), {}, {"a": 1}, {3},
    np.int64(2**40), np.float32(0.5), np.array([]), np.array(3), np.array([-5]), np.array([2**40]), np.zeros((2, 3)),
    np.zeros(4, np.float32), np.full(3, np.nan, np.float32), np.array(["a"]), np.array([None]), np.array([1, 2], "i4"),
    np.zeros((0, 4), "i4"), np.array([True, False]), np.arange(9, dtype="i4")[::2], np.array([7], ">i4"),
    TreeShape.chain(3), DraftTree.chain([3, 1]), DraftBatch.concatenate([DraftTree.chain([3, 1])]), object(), Refuses(),
    [HISTORY], [HISTORY, HISTORY], [[2**33]], range(5), memoryview(b"abc"), ..., int, lambda: 3, NotImplemented,
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Call:
    """A verb that works with these arguments."""

    name: str
    verb: Callable[..., object]
    arguments: dict[str, object]


def sound_calls(blended: BlendedLookup, tree: LookupTree) -> list[Call]:
    """Every public verb of the core, on these lookups."""
    keys = KEYS | {"histories": [HISTORY]}
    drafted = blended.draft([HISTORY], 6, **KEYS)
    laws = {"top_ids": np.array([[4, 7]] * 2, "i4"), "top_probs": np.array([[0.5, 0.4]] * 2, "f4")}
    ids = np.tile(np.array([4, 7], "i4"), (drafted.num_nodes, 1))
    step = {"batch": drafted, "histories": [HISTORY[:-1]], "top_ids": ids, "top_probs": (ids > 0) * np.float32(0.4)}
    return [
        Call("BlendedLookup", BlendedLookup, {"depth": 4, "max_bytes": 1 << 20, "fade": 0.9, "rate": 0.1,
                                              "num_candidates": 3, "fingerprint": b"f"}),
        Call("LookupTree", LookupTree, {"orders": (1, 2), "num_candidates": 3, "min_rate": 0.1, "fingerprint": b"f"}),
        Call("blended.draft", blended.draft, keys | {"budget": 6, "kind": "mixed", "floor": 0.0, "rises": None,
                                                     "max_depths": [4], "scopes": [0]}),
        Call("tree.draft", tree.draft, keys | {"shape": TreeShape.chain(3), "positions": [3], "kind": "sampled",
                                               "floor_order": 1}),
        Call("blended.learn", blended.learn, {"context": HISTORY, "token_ids": [4, 7], "scope": 0} | laws),
        Call("tree.learn", tree.learn, {"context": HISTORY, "token_ids": [4, 7]} | laws),
        Call("blended.learn_batch", blended.learn_batch, step | {"nodes": None, "scopes": [0]}),
        Call("tree.learn_batch", tree.learn_batch, step | {"nodes": None}),
        Call("predict", blended.predict, {"context": HISTORY, "limit": 5, "scope": 0}),
        Call("lookup", tree.lookup, {"context": HISTORY, "floor_order": 1}),
        Call("record_outcome", blended.record_outcome, {"batch": drafted, "accepted": [np.array([1])],
                                                        "next_tokens": [7], "kind": "deterministic"}),
        Call("draw_children", draw_children, {"kind": "mixed", "probabilities": np.array([0.5, 0.3], "f4"),
                                              "uniforms": np.array([0.2, 0.9]), "num_children": 2}),
        Call("uniforms", noise.uniforms, {"seed": 1, "stream": 0, "rows": [0], "steps": [0], "nodes": [1]}),
        Call("vocabulary_fingerprint", vocabulary_fingerprint, {"token_to_id": {"a": 0}}),
    ]  # fmt: skip


def core_calls(number: int, *, seed: int) -> Iterator[Trial]:
    """So many calls, verbs in turn, with lookups of their own in every batch. They must refuse what they get or take
    it, and work afterwards."""
    lookups = taught()
    blended, tree = lookups["blended"], lookups["longest match"]
    calls = sound_calls(blended, tree)

    def trial(place: int) -> Trial:
        call, rng = calls[place % len(calls)], np.random.default_rng([seed, place])
        names = list(call.arguments)
        chosen = {names[i]: int(rng.integers(len(WRONG_VALUES))) for i in rng.integers(0, len(names), 2)}
        arguments = call.arguments | {name: WRONG_VALUES[value] for name, value in chosen.items()}

        def run() -> None:
            try:
                call.verb(**arguments)
            finally:
                if place % 10 == 0:
                    must_work(blended)
                    must_work(tree)

        values = ", ".join(f"{name}={WRONG_VALUES[value]!r}" for name, value in chosen.items())
        return Trial("core, wrong arguments", f"{call.name}({values})", run, EITHER)

    return (trial(place) for place in range(number))
