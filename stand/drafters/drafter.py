"""Who guesses: what a drafter is asked, what it is told afterwards, and the base class of all drafters."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from threading import Lock

import numpy as np
from transformers import PreTrainedModel

from stand.trees import BlendedLookup, DraftBatch, LookupTree

_COUNTING = Lock()


@dataclass(frozen=True, slots=True, eq=False)
class DraftRequest:
    """One step's question: what may come next in each of B rows?"""

    histories: Sequence[np.ndarray]  # per row: int32 committed tokens, the pending one last
    seed: int  # of this call's own random streams; never that of an earlier call which the drafter learned from
    target_seed: int  # of the noise that `match` and `coupled` draw the target's tokens with
    rows: np.ndarray  # [B] int64: names the rows' random streams
    steps: np.ndarray  # [B] int64: steps each row has made
    problems: np.ndarray  # [B] int64: samples of one prompt share a number, which no other prompt has
    max_depths: np.ndarray  # [B] int64: drafts deeper than this are of no use
    is_greedy: bool  # the target's laws are one-hots


@dataclass(frozen=True, slots=True, eq=False)
class Lesson:
    """What a step showed: which drafted tokens were kept, and what the target held likely at every node.

    Every scored node is a true observation of its context, rejected ones too.
    """

    request: DraftRequest
    batch: DraftBatch
    accepted: Sequence[np.ndarray]  # B arrays int32: row-local nodes of the kept path in order, root excluded
    next_tokens: np.ndarray  # [B] int64: the token after the kept path
    top_ids: np.ndarray  # [M, K] int32: the target's best tokens after each node, K = num_candidates
    top_probs: np.ndarray  # [M, K] float32


class Drafter(ABC):
    """Proposes drafts and may learn from what the target said. Only `draft` must be written.

    Drafts must keep the promise of `DraftBatch.adapted`; docs/verifiers.md says what each rule asks of a draft. A
    drafter that learns makes the drafts of a call depend on other calls: see `start_call`.
    """

    num_candidates: int = 0  # top entries per scored node that `learn` wants; 0: it never learns
    _num_taught: int = 0  # calls that began to teach

    def attach(self, model: PreTrainedModel, fingerprint: bytes) -> None:  # noqa: B027
        """`stand.wrap` shows the model and names its vocabulary, before anything else.

        Raises ValueError where they do not fit.
        """

    def start_call(self, *, learns: bool) -> int:
        """A number in [0, 2**64) that the engine mixes into the seed of a call that starts now.

        learns: whether the call will teach. Two calls must get different numbers wherever one of them may draft from
        what the other one teaches: with the same noise the law of the one that drafts so would be wrong. This one
        counts the calls that teach. That is safe unless the drafter is saved and loaded, or several drafters share a
        memory: then the number must come from the memory.
        """
        if self.num_candidates == 0:
            return 0
        with _COUNTING:
            number = 2 * self._num_taught
            if learns:
                self._num_taught += 1
        return number if learns else number + 1

    def typical_draft(self) -> DraftBatch | None:
        """A draft typical of this drafter, by which `wrap` sees early that a rule takes its drafts; None: unknown."""
        return None

    @abstractmethod
    def draft(self, request: DraftRequest) -> DraftBatch:
        """One draft per row; its root is the row's pending token."""

    def learn_prompt(self, token_ids: np.ndarray, *, problem: int) -> None:  # noqa: B027
        """A prompt, int32 [L], before its rows start."""

    def learn(self, lesson: Lesson) -> None:  # noqa: B027
        """What a step showed; asked once per step where `num_candidates` is above 0."""


class LookupDrafter(Drafter):
    """A drafter whose memory is a lookup; `lookup` is None until `attach` where none was given."""

    lookup: BlendedLookup | LookupTree | None

    @property
    def num_candidates(self) -> int:
        return 0 if self.lookup is None else self.lookup.num_candidates

    def start_call(self, *, learns: bool) -> int:
        return 0 if self.lookup is None else self.lookup.start_call(learns=learns)


def check_kind(kind: str, offered: tuple[str, ...], drafter: str) -> None:
    """Raise ValueError where `drafter` does not offer this kind of draft."""
    if kind not in offered:
        raise ValueError(f"{drafter} drafts one of {', '.join(offered)}, got {kind!r}; choose another kind")


def teach_two_ways(lookup: object) -> np.ndarray:
    """Teach an empty lookup a context that goes on in two ways; the context, int32, to draft from."""
    context = np.full(5, 3, dtype=np.int32)
    for token in (1, 2):
        lookup.learn(context[:1], np.append(context[1:], np.int32(token)))
    return context


def check_fingerprint(lookup: object, fingerprint: bytes) -> None:
    """Raise ValueError where a lookup was trained with another vocabulary."""
    if lookup.fingerprint and lookup.fingerprint != fingerprint:
        raise ValueError(
            f"a lookup must have been trained with this tokenizer (vocabulary {fingerprint.hex()[:12]}), got one "
            f"for vocabulary {lookup.fingerprint.hex()[:12]}; train or load the lookup that belongs to this model"
        )
