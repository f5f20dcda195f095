"""Nearest neighbours of the target's hidden states as a source of laws."""

from __future__ import annotations

from dataclasses import dataclass
from hashlib import blake2b

import numpy as np
import torch
from transformers import PreTrainedModel

from stand.drafters.drafter import DraftRequest, Lesson
from stand.drafters.law_source import LawSource, Planner
from stand.drafters.law_trees import LawTrees, Place, roots
from stand.drafters.neighbours.memory import Entries, NeighbourMemory
from stand.drafters.paying_runs import PayingRuns, laws_of_runs
from stand.drafters.settings import check_count
from stand.forward.devices import input_device
from stand.forward.model import text_config
from stand.trees import ROOT, DraftBatch, OutsideLaws

MOST_RUNS = 4  # as many as pay, of these
RUN_SECONDS = 0.4e-3  # of one run, one row
BYTES_PER_SECOND = {"cpu": 15e9, "cuda": 2e12}  # of weights that are read, roughly
MOST_ROWS = 4096  # whose last states are kept
WIDTH = 10  # tokens of a law that are remembered
TAIL = 32  # tokens by which a row is known, beside its length and its numbers
Key = tuple[int, int, int, bytes]


@dataclass(frozen=True, slots=True, eq=False)
class _Shown:
    """The nodes of a step whose states are known, and the states before and at them."""

    lesson: Lesson
    nodes: np.ndarray  # [n]
    befores: np.ndarray  # [n, dim] float32
    afters: np.ndarray  # [n, dim] float32


class NeighbourLaws(LawSource):
    """What followed the pending token where the target's hidden state was most like it is now, for
    `BlendedDrafter(source=...)`. Nothing is trained.

    A hidden state tells apart what equal tokens hide. Every scored token, rejected ones too, is remembered with the
    state before it, the state at it and the target's law after it. The pending token is looked for by its own
    state (nearest neighbours as in kNN-LM, arXiv 1911.00172, and in DReSD, arXiv 2502.15572); tokens below it by the
    mean state of the neighbours found there, which stands for a state that the target has not computed yet.

    runs: how many levels are asked for, the pending tokens first, then planned nodes. None: as many of 4 as pay
    (`PayingRuns`), or none; by measured time, or in calls with a seed by how long the weights take to read.
    dim: numbers of a state that are kept, by a fixed random projection, which leaves cosines as they are within
    1 / sqrt(dim) or so.
    most_entries: tokens that are remembered, the newest ones, 8 * dim + 80 bytes each (39 MB).
    source: 0..3; a lookup learns apart what each source is worth.

    The memory is of this object alone: no file holds it. One object serves one engine at a time. Raises ValueError for
    settings out of range.
    """

    requires_features = True

    def __init__(self, *, runs: int | None = None, dim: int = 64, most_entries: int = 1 << 16, source: int = 0) -> None:
        if runs is not None:
            check_count("runs", runs, 1, usual="None asks as often as pays")
        check_count("dim", dim, 1, 1 << 16, usual="64 is usual")
        check_count("most_entries", most_entries, 1, usual="65536 is usual")
        check_count("source", source, 0, 3, usual="0 for the only source")
        self.runs = runs
        self.dim = dim
        self.most_entries = most_entries
        self.source = source
        self.memory: NeighbourMemory | None = None  # from the first lesson on
        self._sizes: tuple[int, int] | None = None  # hidden, vocabulary: of the model that was wrapped last
        self._projection: torch.Tensor | None = None  # [D, dim]
        self._paying: PayingRuns | None = None  # from `attach` on
        self._states: dict[Key, np.ndarray] = {}  # by row: [dim], at the token before the pending one
        self._prompts: dict[bytes, np.ndarray] = {}  # the same by `_digest` of the tokens up to it
        self._taught: set[bytes] = set()  # `_digest` of prompts to be learned, until their states are known
        self._shown: _Shown | None = None  # what the newest step showed, until it is learned

    def attach(self, model: PreTrainedModel) -> None:
        config = text_config(model)
        sizes = config.hidden_size, config.vocab_size
        if sizes != self._sizes:
            self.memory = None  # states of another size, or tokens that this model does not have
        drawn = np.random.default_rng(0).standard_normal((sizes[0], self.dim), dtype=np.float32)
        self._projection = torch.from_numpy(drawn / np.sqrt(self.dim, dtype=np.float32)).to(input_device(model))
        self._sizes = sizes
        self._paying = PayingRuns(_share_of_step(model), most=MOST_RUNS)
        self._states, self._prompts, self._taught, self._shown = {}, {}, set(), None

    def start_call(self, *, learns: bool) -> int:
        """See `LawSource.start_call`; prompts that a call before left without states are not learned by this one."""
        if not learns:
            self._taught.clear()
        return super().start_call(learns=learns)

    def record_time(self, request: DraftRequest, num_tokens: int, seconds: float) -> None:
        if request.is_learning:
            self._paying.record_step(seconds)

    def follow_prompt(self, token_ids: np.ndarray, features: torch.Tensor) -> None:
        states = self._projected(features)
        if len(states):
            _keep(self._prompts, _digest(token_ids[:-1]), states[-1])
        if _digest(token_ids) in self._taught:
            self._taught.remove(_digest(token_ids))
            self._remember_prompt(token_ids, states)

    def learn_prompt(self, token_ids: np.ndarray) -> None:
        """Its states come later, with `follow_prompt`."""
        self._taught.add(_digest(token_ids))

    def follow(self, lesson: Lesson) -> None:
        """Note the states of the rows' new tokens, and what is to be learned of them."""
        batch, request, states = lesson.batch, lesson.request, self._projected(lesson.features)
        starts = batch.offsets[:-1]
        befores = states[batch.parents + np.repeat(starts, batch.sizes)]
        is_known = np.ones(len(states), dtype=bool)
        for row, (start, history, path) in enumerate(zip(starts, request.histories, lesson.accepted, strict=True)):
            before = self._state_of(request, row)
            is_known[start] = before is not None
            befores[start] = 0.0 if before is None else before
            kept = np.append(history[-TAIL:], batch.token_ids[start + path])
            end = start + (path[-1] if len(path) else ROOT)
            self._states.pop(_key(request, row, history[:-1], len(history) - 1), None)
            _keep(self._states, _key(request, row, kept, len(history) + len(path)), states[end])
        nodes = np.flatnonzero(is_known)
        self._shown = _Shown(lesson, nodes, befores[nodes], states[nodes])

    def learn(self, lesson: Lesson) -> None:
        """Remember every scored node, rejected ones too."""
        shown, self._shown = self._shown, None
        if shown is None or shown.lesson is not lesson:
            return
        nodes = shown.nodes
        tokens, ids, probs = lesson.batch.token_ids[nodes], lesson.top_ids[nodes], lesson.top_probs[nodes]
        self._remember(Entries(tokens, shown.befores, shown.afters, ids, probs))

    def _remember_prompt(self, token_ids: np.ndarray, states: np.ndarray) -> None:
        """Its tokens but the first one and the last one, each with the token after it."""
        tokens, after = token_ids[1:-1], token_ids[2:, None]
        self._remember(Entries(tokens, states[:-1], states[1:], after, np.ones(after.shape, dtype=np.float32)))

    def _remember(self, entries: Entries) -> None:
        if self.memory is None:
            self.memory = NeighbourMemory(dim=self.dim, width=WIDTH, most_entries=self.most_entries)
        self.memory.add(entries)

    def laws(self, request: DraftRequest, plan: Planner) -> OutsideLaws | None:
        """See `LawSource.laws`; a row whose state or pending token is not known gets no law."""
        if self.memory is None:
            return None
        trees: LawTrees[np.ndarray] = LawTrees(len(request.histories))

        def ask(run: int, planned: DraftBatch | None) -> OutsideLaws | None:
            if run == 0:
                places = roots(range(len(request.histories)), request.histories)
                states = [self._state_of(request, row) for row, _, _ in places]
            else:
                places = trees.frontier(planned, request.max_depths)
                states = trees.estimates_at(places)
            return trees.laws(self.source) if self._ask(trees, places, states) else None

        return laws_of_runs(self.runs, plan, ask) if self.runs else self._paying.laws(request, plan, ask)

    def _ask(self, trees: LawTrees[np.ndarray], places: list[Place], states: list[np.ndarray | None]) -> bool:
        """Add the places that the memory knows; whether there is one."""
        known = [(place, state) for place, state in zip(places, states, strict=True) if state is not None]
        if not known:
            return False
        places, states = zip(*known, strict=True)
        answers = self.memory.nearest([token for _, _, token in places], np.stack(states))
        if answers is not None:
            trees.add([places[place] for place in answers.places], answers.states, answers.ids, answers.probs)
        return answers is not None

    def _state_of(self, request: DraftRequest, row: int) -> np.ndarray | None:
        """[dim] at the token before the pending one."""
        before = request.histories[row][:-1]
        state = self._states.get(_key(request, row, before, len(before)))
        return state if state is not None or request.steps[row] else self._prompts.get(_digest(before))

    def _projected(self, features: torch.Tensor) -> np.ndarray:
        """[n, dim] float32 of [n, D], finite: one overflow must not spoil the mean of all states."""
        if features.shape[1] != len(self._projection):
            raise ValueError(
                f"a NeighbourLaws object serves one engine at a time, got a model of hidden size {features.shape[1]} "
                f"after one of {len(self._projection)} was wrapped; wrap this one again, or give each its own"
            )
        states = features.float() @ self._projection.to(features.device)
        return states.float().nan_to_num(0.0, 0.0, 0.0).cpu().numpy()


def _share_of_step(model: PreTrainedModel) -> float:
    """What a run costs of a forward of `model` that reads its weights once."""
    num_bytes = sum(weight.numel() * weight.element_size() for weight in model.parameters())
    return RUN_SECONDS * BYTES_PER_SECOND.get(input_device(model).type, BYTES_PER_SECOND["cpu"]) / num_bytes


def _key(request: DraftRequest, row: int, tokens: np.ndarray, length: int) -> Key:
    """A row that has computed `length` tokens, `tokens` the last of them. Rows where all of this is equal may take each
    other's states, which costs acceptance and nothing else."""
    return int(request.rows[row]), int(request.noise_keys[row]), length, tokens[-TAIL:].tobytes()


def _digest(tokens: np.ndarray) -> bytes:
    """Prompts may be long, and many are kept."""
    return blake2b(tokens.tobytes(), digest_size=16).digest()


def _keep(states: dict, key: object, state: np.ndarray) -> None:
    states[key] = state
    if len(states) > MOST_ROWS:
        del states[next(iter(states))]  # the oldest
