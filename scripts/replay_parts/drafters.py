"""The drafters that replay compares, behind one small interface. None of them sees a model: all count tokens."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import numpy as np

from stand.extra import missing_package
from stand.trees import NO_TOKEN, ROOT, BlendedLookup, DraftBatch, DraftTree, LookupTree, TreeShape

if TYPE_CHECKING:
    import torch
    from arctic_inference.suffix_decoding import SuffixDecodingCache, SuffixDecodingDraft

Guess = tuple[np.ndarray, np.ndarray, np.ndarray | None]  # tokens, parents (-1: the pending token), path probabilities
NOTHING: Guess = (np.empty(0, np.int32), np.empty(0, np.int32), None)
SCOPES = 255


class ReplayDrafter(Protocol):
    """Verbs in the order of a replay: forget, (start, learn prompt, (draft, learn) ..., finish) ..."""

    def forget(self) -> None:
        """Everything learned."""

    def start(self, problem: int, prompt: np.ndarray) -> None:
        """A sample with this prompt begins."""

    def draft(self, history: np.ndarray, budget: int) -> object:
        """A draft of what follows the history, at most `budget` tokens, as the drafter hands it to its users."""

    def guess(self, draft: object) -> Guess:
        """The same as arrays, which is no part of drafting."""

    def learn(self, history: np.ndarray, num_new: int) -> None:
        """The last tokens of the history are committed."""

    def finish(self) -> None:
        """The sample ends."""

    @property
    def nbytes(self) -> int | None:
        """Memory that grows with what is learned; None where it cannot be asked for."""


def grown_guess(draft: DraftTree | DraftBatch) -> Guess:
    """The nodes of one row's grown draft without its root."""
    return draft.token_ids[1:], draft.parents[1:] - 1, draft.path_probabilities[1:]


def followed(draft: DraftTree, run: np.ndarray) -> tuple[list[int], int]:
    """(path, next token) of a grown draft where this run of tokens came: NO_TOKEN where it ends on the path."""
    path: list[int] = []
    node, parents, tokens = ROOT, draft.parents.tolist(), draft.token_ids.tolist()
    for token in run.tolist():
        node = next((c for c in range(node + 1, len(tokens)) if parents[c] == node and tokens[c] == token), ROOT)
        if node == ROOT:
            return path, token
        path.append(node)
    return path, NO_TOKEN


def accepted_path(guess: Guess, truth: np.ndarray) -> list[int]:
    """The accepted path: nodes of the longest path from the root that equals the beginning of `truth`."""
    tokens, parents, _ = guess
    path: list[int] = []
    while len(path) < len(truth):
        above = path[-1] if path else -1
        found = np.flatnonzero((parents == above) & (tokens == truth[len(path)]))
        if len(found) == 0:
            break
        path.append(int(found[0]))
    return path


class BlendedReplay:
    """`lookup`: the blended lookup, best-first growth."""

    def __init__(self, path: Path | None = None, *, floor: float = 0.0, kind: str = "deterministic", **parameters):
        self.path, self.parameters = path, parameters
        self.settings = {"floor": floor, "kind": kind}  # of drafts
        self.forget()

    def forget(self) -> None:
        self.lookup = BlendedLookup(**self.parameters) if self.path is None else BlendedLookup.load(self.path)
        self.num_steps = 0
        self.last_draft: DraftBatch | None = None  # not yet followed

    def start(self, problem: int, prompt: np.ndarray) -> None:
        self.scope = problem % SCOPES

    def draft(self, history: np.ndarray, budget: int) -> DraftBatch:
        self.num_steps += 1
        self.last_draft = self.lookup.draft(
            [history], budget, seed=0, rows=[0], steps=[self.num_steps], scopes=[self.scope], **self.settings
        )
        return self.last_draft

    def guess(self, draft: DraftBatch) -> Guess:
        return grown_guess(draft)

    def learn(self, history: np.ndarray, num_new: int) -> None:
        first = len(history) - num_new
        if self.last_draft is not None:
            path, next_token = followed(self.last_draft[0], history[first:])
            self.lookup.record_outcome(self.last_draft, [path], [next_token], kind=self.settings["kind"])
            self.last_draft = None
        self.lookup.learn(history[:first], history[first:], scope=self.scope)

    def finish(self) -> None:
        pass

    @property
    def nbytes(self) -> int:
        return self.lookup.nbytes


class StandReplay:
    """`stand`: the longest match of 1-4 tokens, plain averages, the paper's shape (a shallow part of it if fewer)."""

    def __init__(self):
        self.shapes: dict[int, TreeShape] = {}
        self.forget()

    def forget(self) -> None:
        self.lookup = LookupTree(min_rate=0.0)

    def start(self, problem: int, prompt: np.ndarray) -> None:
        pass

    def draft(self, history: np.ndarray, budget: int) -> DraftBatch:
        if budget not in self.shapes:
            self.shapes[budget] = shallow_first(TreeShape.paper(), budget)
        return self.lookup.draft([history], self.shapes[budget], seed=0, rows=[0], steps=[0], kind="deterministic")

    def guess(self, draft: DraftBatch) -> Guess:
        return draft.token_ids[1:], draft.parents[1:] - 1, None

    def learn(self, history: np.ndarray, num_new: int) -> None:
        first = len(history) - num_new
        self.lookup.learn(history[max(0, first - self.lookup.orders[-1]) : first], history[first:])

    def finish(self) -> None:
        pass

    @property
    def nbytes(self) -> int:
        return self.lookup.nbytes


def shallow_first(shape: TreeShape, budget: int) -> TreeShape:
    """The `budget` slots with the smallest sum of ranks and depths on their path: a part of the shape that hangs
    together. The root comes on top."""
    costs = np.zeros(shape.num_nodes)
    for slot in range(1, shape.num_nodes):
        costs[slot] = costs[shape.parents[slot]] + 1.0 + 2.0 * shape.ranks[slot]
    kept = np.sort(np.argsort(costs, kind="stable")[: budget + 1])
    places = {int(slot): place for place, slot in enumerate(kept)}
    return TreeShape(np.array([places.get(int(shape.parents[slot]), -1) for slot in kept], dtype=np.int32))


class PromptLookupReplay:
    """`prompt-lookup`: transformers' candidate generator, chains copied from the row's own past."""

    nbytes = None

    def __init__(self):
        import torch
        from transformers.generation.candidate_generator import PromptLookupCandidateGenerator

        self.torch = torch
        self.make = PromptLookupCandidateGenerator

    def forget(self) -> None:
        pass

    def start(self, problem: int, prompt: np.ndarray) -> None:
        pass

    def draft(self, history: np.ndarray, budget: int) -> torch.Tensor:
        generator = self.make(num_output_tokens=budget, max_matching_ngram_size=2, max_length=len(history) + budget + 1)
        ids, _ = generator.get_candidates(self.torch.from_numpy(history.astype(np.int64))[None])
        return ids[0, len(history) :]

    def guess(self, draft: torch.Tensor) -> Guess:
        return draft.numpy().astype(np.int32), np.arange(-1, len(draft) - 1, dtype=np.int32), None

    def learn(self, history: np.ndarray, num_new: int) -> None:
        pass

    def finish(self) -> None:
        pass


def suffix_decoding_cache() -> type[SuffixDecodingCache]:
    """Arctic's class. Raises ImportError where it is not installed."""
    try:
        from arctic_inference.suffix_decoding import SuffixDecodingCache
    except ModuleNotFoundError as error:
        install = "arctic-inference"
        raise missing_package(error, "arctic_inference", asker="suffix decoding", install=install) from error
    return SuffixDecodingCache


class ArcticReplay:
    """`arctic`: suffix decoding of arctic-inference in tree mode, depth 64, factor 4, no probability floor.

    `arctic-gated`: tree mode with the library's own bounds, as many tokens as the match is long and none with an
    estimate below 0.1.
    """

    nbytes = None
    DEPTH = 64

    def __init__(self, *, is_gated: bool = False):
        self.is_gated = is_gated
        self.make = suffix_decoding_cache()
        self.forget()

    def forget(self) -> None:
        self.cache = self.make(max_tree_depth=self.DEPTH)
        self.request = 0

    def start(self, problem: int, prompt: np.ndarray) -> None:
        self.request += 1
        self.cache.start_request(self.request, np.ascontiguousarray(prompt))
        self.prompt_size = len(prompt)

    def draft(self, history: np.ndarray, budget: int) -> SuffixDecodingDraft:
        return self.cache.speculate(
            self.request,
            np.ascontiguousarray(history[-self.DEPTH :]),
            max_spec_tokens=budget,
            max_spec_factor=1.0 if self.is_gated else 4.0,
            max_spec_offset=0.0 if self.is_gated else float(budget),
            min_token_prob=0.1 if self.is_gated else 0.0,
            use_tree_spec=True,
        )

    def guess(self, draft: SuffixDecodingDraft) -> Guess:
        return np.array(draft.token_ids, np.int32), np.array(draft.parents, np.int32), None

    def learn(self, history: np.ndarray, num_new: int) -> None:
        first = max(len(history) - num_new, self.prompt_size)  # start() already took the prompt
        self.cache.add_active_response(self.request, history[first:].tolist())

    def finish(self) -> None:
        self.cache.stop_request(self.request)


def make_drafter(name: str, *, lookup: Path | None, floor: float, max_bytes: int | None) -> ReplayDrafter:
    """A drafter by name. Raises ValueError for an unknown one, ImportError where its package is missing."""
    if name == "lookup":
        bound = {} if max_bytes is None else {"max_bytes": max_bytes}
        return BlendedReplay(lookup, floor=floor, **bound)
    if name == "stand":
        return StandReplay()
    if name == "prompt-lookup":
        return PromptLookupReplay()
    if name in ("arctic", "arctic-gated"):
        return ArcticReplay(is_gated=name == "arctic-gated")
    raise ValueError(f"drafter must be one of lookup, stand, prompt-lookup, arctic, arctic-gated, got {name!r}")
